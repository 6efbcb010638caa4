"""Reading ranges from real servers: every row once and in order, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.streams import make_stream
from tests.unit.wire.test_scan import all_kernels

from penstock import errors
from penstock.jetstream import JetStream, pull
from penstock.jetstream.model import StoredMessage
from penstock.jetstream.reader import ReadStalled, read_messages, read_range
from penstock.jetstream.rows import Range
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import eventually
from penstock.wire import frames, headers
from penstock.wire.blocking import BlockingConnection, connect, run
from penstock.wire.scan import Scanner

MODES = pytest.mark.parametrize("direct", [False, True], ids=["consumer", "direct get"])
Message = tuple[str, bytes, dict[str, Any] | None]


def publish(connection: BlockingConnection, messages: list[Message]) -> None:
    """Publish in order, waiting now and then for the last acknowledgement: a cluster drops what comes too fast."""
    for start in range(0, len(messages), 500):
        *most, (subject, data, names) = messages[start : start + 500]
        connection.send(b"".join(frames.publish(s, d, headers=headers.encode(n)) for s, d, n in most))
        connection.request(subject, data, names)


def fill(settings: Settings, messages: list[Message], **config: Any) -> None:
    """Make stream S with these messages."""
    with connect(replace(settings, timeout=30)) as connection:
        jetstream = JetStream(connection.requester())
        run(make_stream(jetstream, allow_direct=True, **config))
        publish(connection, messages)
        assert run(jetstream.stream_info("S")).state.last_seq == len(messages)


def numbered(count: int, size: int = 20) -> list[Message]:
    return [(f"s.{n % 10}", str(n).encode().ljust(size, b"."), None) for n in range(1, count + 1)]


def rows(settings: Settings, first: int, last: int, **options: Any) -> list[dict[str, Any]]:
    wanted = Range(stream="S", first=first, last=last, **options)
    batches = list(read_range(settings, wanted, patience=60))
    assert all(batch.num_rows for batch in batches)
    found = pa.Table.from_batches(batches).to_pylist() if batches else []
    without_arrow = [row_of(one) for one in read_messages(settings, wanted, patience=60)]
    assert without_arrow == found
    return found


def row_of(message: StoredMessage) -> dict[str, Any]:
    """A message as Arrow has it."""
    assert message.time
    return {
        "stream": message.stream,
        "subject": message.subject,
        "sequence": message.sequence,
        "timestamp": message.time,
        "headers": list(message.headers.items()),
        "data": message.data,
    }


def sequences(settings: Settings, first: int, last: int, **options: Any) -> list[int]:
    return [row["sequence"] for row in rows(settings, first, last, **options)]


def consumers(settings: Settings) -> list[str]:
    with connect(settings) as connection:
        return [consumer.name for consumer in run(JetStream(connection.requester()).consumers("S"))]


@MODES
def test_rows_are_what_the_server_stores(nats_server: EmbeddedServer, direct: bool) -> None:
    messages: list[Message] = [
        ("s.plain", b"one", None),
        ("s.empty", b"", None),
        ("s.lines", b"\r\nMSG s 1 1\r\n\r\n", {"A": ["1", "2"], "B": "x"}),
        ("s.headers", b"", {"Nats-Msg-Id": "id-1"}),
        ("s.binary", bytes(range(256)), {"Nats-Subject": "from.elsewhere"}),
    ]
    fill(nats_server.settings, messages)
    found = rows(nats_server.settings, 1, 5, direct=direct)
    with connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        stored = [run(jetstream.get_message("S", n)) for n in range(1, 6)]
    assert found == [
        {
            "stream": "S",
            "subject": message.subject,
            "sequence": message.sequence,
            "timestamp": message.time,
            "headers": list(message.headers.items()),
            "data": message.data,
        }
        for message in stored
    ]


@MODES
def test_a_range_is_read_to_its_end_and_not_beyond(nats_server: EmbeddedServer, direct: bool) -> None:
    fill(nats_server.settings, numbered(30_000))
    assert sequences(nats_server.settings, 1, 30_000, direct=direct) == list(range(1, 30_001))
    assert sequences(nats_server.settings, 29_000, 29_500, direct=direct) == list(range(29_000, 29_501))
    assert sequences(nats_server.settings, 7, 7, direct=direct) == [7]
    assert sequences(nats_server.settings, 7, 6, direct=direct) == []


@MODES
def test_what_was_deleted_is_left_out_also_at_the_ends(nats_server: EmbeddedServer, direct: bool) -> None:
    settings = nats_server.settings
    fill(settings, numbered(100))
    gone = {1, 2, 40, 41, 42, 77, 99, 100}
    with connect(settings) as connection:
        jetstream = JetStream(connection.requester())
        for n in gone:
            run(jetstream.delete_message("S", n))
        publish(connection, numbered(5))
    assert sequences(settings, 1, 100, direct=direct) == [n for n in range(1, 101) if n not in gone]
    assert sequences(settings, 40, 42, direct=direct) == []


@MODES
@pytest.mark.parametrize("subjects", [("s.3",), ("s.3", "s.5"), ("s.*",), ("s.none",)])
def test_only_the_wanted_subjects_are_read(
    nats_server: EmbeddedServer, direct: bool, subjects: tuple[str, ...]
) -> None:
    fill(nats_server.settings, numbered(5000))
    digits = {int(subject[2:]) for subject in subjects if subject[2:].isdigit()} or (
        set(range(10)) if subjects == ("s.*",) else set()
    )
    expected = [n for n in range(101, 4901) if n % 10 in digits]
    assert sequences(nats_server.settings, 101, 4900, subjects=subjects, direct=direct) == expected


@MODES
def test_messages_of_eight_mebibytes_are_read(tmp_path: Path, direct: bool) -> None:
    with EmbeddedServer(data=tmp_path / "nats", max_payload=16 * 1024 * 1024) as server:
        large: list[Message] = [("s.l", bytes([n]) * (8 * 1024 * 1024), {"N": str(n)}) for n in range(6)]
        fill(server.settings, [*numbered(3), *large, *numbered(3)])
        found = rows(server.settings, 1, 12, direct=direct)
    assert [len(row["data"]) for row in found] == [20] * 3 + [8 * 1024 * 1024] * 6 + [20] * 3
    assert [row["data"][-1] for row in found[3:9]] == list(range(6))


def test_no_consumer_is_left_behind(nats_server: EmbeddedServer) -> None:
    settings = nats_server.settings
    fill(settings, numbered(50_000))
    assert len(sequences(settings, 1, 50_000, subjects=("s.1",))) == 5000
    reading = read_range(settings, Range(stream="S", first=1, last=50_000))
    next(reading)
    assert consumers(settings)
    reading.close()  # type: ignore[attr-defined]  # a generator: abandoning it is what is tested
    eventually(lambda: not consumers(settings), what="no consumers", state=lambda: consumers(settings))


@pytest.mark.kills
@pytest.mark.short
@MODES
def test_a_killed_server_in_the_middle_costs_no_row(tmp_path: Path, direct: bool) -> None:
    with EmbeddedServer(data=tmp_path / "nats") as server:
        fill(server.settings, numbered(60_000, size=500))
        found: list[int] = []
        kills = iter((10_000, 30_000, 50_000))
        at = next(kills)
        for batch in read_range(server.settings, Range(stream="S", first=1, last=60_000, direct=direct)):
            found += batch.column("sequence").to_pylist()
            if found[-1] >= at:
                server.kill()
                server.start()
                at = next(kills, 10**9)
        assert next(kills, None) is None
        assert found == list(range(1, 60_001))


def test_a_deleted_consumer_is_replaced(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that is quicker than its reader would have sent most of the range before a consumer is deleted.
    monkeypatch.setattr(pull, "PULL_MESSAGES", 2_000)
    settings = nats_server.settings
    fill(settings, numbered(60_000, size=500))
    found: list[int] = []
    removed: set[str] = set()
    for batch in read_range(settings, Range(stream="S", first=1, last=60_000)):
        found += batch.column("sequence").to_pylist()
        if len(removed) < 3:
            with connect(settings) as connection:
                for name in consumers(settings):
                    run(JetStream(connection.requester()).delete_consumer("S", name))
                    removed.add(name)
    assert found == list(range(1, 60_001))
    assert len(removed) == 3


@pytest.mark.kills
@MODES
def test_the_death_of_any_node_of_a_cluster_costs_no_row(nats_cluster: EmbeddedCluster, direct: bool) -> None:
    settings = nats_cluster.settings
    fill(settings, numbered(40_000, size=500), num_replicas=3)
    found: list[int] = []
    turns = iter(nats_cluster.nodes)
    for batch in read_range(settings, Range(stream="S", first=1, last=40_000, direct=direct)):
        found += batch.column("sequence").to_pylist()
        if (node := next(turns, None)) is not None:
            node.kill()
            node.start()
    assert found == list(range(1, 40_001))


def test_what_no_retry_heals_is_raised_at_once(nats_server: EmbeddedServer) -> None:
    with pytest.raises(errors.StreamNotFound):
        list(read_range(nats_server.settings, Range(stream="NONE", first=1, last=5)))


@MODES
def test_a_range_beyond_the_stream_stalls_with_a_reason(nats_server: EmbeddedServer, direct: bool) -> None:
    fill(nats_server.settings, numbered(3))
    with pytest.raises(ReadStalled, match=r"no progress reading 'S' \(sequences 4 to 9\)"):
        list(read_range(nats_server.settings, Range(stream="S", first=1, last=9, direct=direct), patience=3))


def test_pull_requests_ask_for_no_more_than_the_range_has(nats_server: EmbeddedServer) -> None:
    fill(nats_server.settings, numbered(10))
    with connect(nats_server.settings) as connection:
        read = pull.PullRead(connection, Range(stream="S", first=1, last=4), Scanner)
        assert [row for batch in read.batches() for row in batch.column("sequence").to_pylist()] == [1, 2, 3, 4]
        assert read._requests.asked == 0


ODD_BLOCKS = [
    (b"x", []),
    (b"NATS/1.0", []),
    (b"NATS/1.0\r\n", []),
    (b"\r\n\r\n", []),
    (b"garbage\r\n\r\n", []),
    (b"garbage\r\nA: b\r\n\r\n", [("A", ["b"])]),
    (b"NATS/1.0\r\nA: b\r\nX: y", [("A", ["b"])]),
    (b"NATS/1.0\nA: b\n\n", []),
    (b"NATS/1.0\n503 No Responders\n\n", []),
    (b"NATS/1.0 503 No Responders\r\nA: b\r\n\r\n", [("A", ["b"])]),
    (b"NATS/1.0\r\n\r\nA: b\r\n\r\n", [("A", ["b"])]),
    (b"NATS/1.0\r\nNats-Subject: s.forged\r\nNats-Sequence: 99\r\n\r\n",
     [("Nats-Subject", ["s.forged"]), ("Nats-Sequence", ["99"])]),
]  # fmt: skip
"""What a server stores as a header block, and the headers in it."""


@pytest.mark.parametrize("kernels", ["machine code", "plain"])
@MODES
def test_whatever_a_publisher_calls_headers_is_read(
    nats_server: EmbeddedServer, direct: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = all_kernels()[kernels]
    monkeypatch.setattr("penstock.wire.compiled.current", lambda: chosen)
    fill(nats_server.settings, [("s.first", b"0", None)])
    with connect(nats_server.settings) as connection:
        for block, _ in ODD_BLOCKS:
            connection.send(b"HPUB s.odd %d %d\r\n%bx\r\n" % (len(block), len(block) + 1, block))
        connection.request("s.last", b"")
    found = rows(nats_server.settings, 1, len(ODD_BLOCKS) + 2, direct=direct)
    assert [row["sequence"] for row in found] == list(range(1, len(ODD_BLOCKS) + 3))
    for row, (block, expected) in zip(found[1:-1], ODD_BLOCKS, strict=True):
        assert (block, row["subject"], row["data"], row["headers"]) == (block, "s.odd", b"x", expected)


@MODES
def test_subjects_with_control_characters_are_rows_like_any_other(nats_server: EmbeddedServer, direct: bool) -> None:
    stored = ["s.a\x1bb", "s.\x01", "s.a\x0bb", "s.a\x0cb", "s.\x7f", "s.plain"]
    fill(nats_server.settings, [("s.first", b"0", None)])
    with connect(nats_server.settings) as connection:
        for subject in stored:  # as another client would: Penstock itself does not publish there
            connection.send(f"PUB {subject} 1\r\nx\r\n".encode())
        connection.request("s.last", b"")
    found = rows(nats_server.settings, 1, len(stored) + 2, direct=direct)
    assert [row["subject"] for row in found] == ["s.first", *stored, "s.last"]
