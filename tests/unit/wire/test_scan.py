"""From received bytes to record batches: whatever the split, compiled or plain, the rows are the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ProtocolError
from penstock.wire import compiled, frames
from penstock.wire.scan import SCHEMA, Scanner
from penstock.wire.scanning import ANY_SEQUENCE, Stop

SID = 7
NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture(scope="session", params=["machine code", "plain"])
def kernels(request: pytest.FixtureRequest) -> compiled.Kernels:
    return all_kernels()[request.param]


def all_kernels() -> dict[str, compiled.Kernels]:
    compiled.warm()
    return {"machine code": compiled.current(), "plain": compiled.PLAIN}


def block(headers: Sequence[tuple[str, str]]) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(f"{name}: {value}\r\n".encode() for name, value in headers) + b"\r\n"


def consumed(
    sequence: int, body: bytes = b"x", headers: Sequence[tuple[str, str]] = (), *, delivery: int | None = None,
    sid: int = SID, subject: str = "orders.new", before_stream: str = "",
) -> bytes:  # fmt: skip
    """A message as a pull consumer delivers it."""
    nanoseconds = int(NOON.timestamp()) * 10**9 + 123_456_789 + sequence
    reply = f"$JS.ACK.{before_stream}S.c.1.{sequence}.{delivery or sequence}.{nanoseconds}.3"
    if not headers:
        return f"MSG {subject} {sid} {reply} {len(body)}\r\n".encode() + body + b"\r\n"
    lines = block(headers)
    return f"HMSG {subject} {sid} {reply} {len(lines)} {len(lines) + len(body)}\r\n".encode() + lines + body + b"\r\n"


def got(sequence: int, body: bytes = b"x", headers: Sequence[tuple[str, str]] = (), time: str = "") -> bytes:
    """A message as a batched direct get answers it."""
    added = [
        ("Nats-Stream", "S"),
        ("Nats-Subject", "orders.new"),
        ("Nats-Sequence", str(sequence)),
        ("Nats-Time-Stamp", time or "2026-03-01T12:00:00.123456789Z"),
        ("Nats-Num-Pending", "3"),
        ("Nats-Last-Sequence", str(sequence - 1)),
    ]
    lines = block([*headers, *added])
    return f"HMSG _INBOX.a.1 {SID} {len(lines)} {len(lines) + len(body)}\r\n".encode() + lines + body + b"\r\n"


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    for start, stop in itertools.pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
        yield data[start:stop]


def read(data: bytes, cuts: Sequence[int] = (), **options: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """All rows of `data`, received in pieces, and everything else that came, errors included."""
    scanner = Scanner("S", SID, **options)
    batches: list[pa.RecordBatch] = []
    others: list[Any] = []
    for piece in pieces(data, cuts):
        while piece:
            space = scanner.space()
            if not space:
                batches.append(scanner.take())
                space = scanner.space()
            part, piece = piece[: len(space)], piece[len(space) :]
            scanner.feed(part)
            if not drain(scanner, batches, others):
                return rows(batches, scanner), others
    return rows(batches, scanner), others


def drain(scanner: Scanner, batches: list[pa.RecordBatch], others: list[Any]) -> bool:
    """Take what is complete. False when nothing can follow."""
    while True:
        try:
            found = scanner.next()
        except ProtocolError:
            others.append(ProtocolError)
            return False
        if found is Stop.MORE:
            return True
        if found is Stop.FULL:
            batches.append(scanner.take())
            continue
        others.append(found)
        if isinstance(found, Stop):
            return False


def rows(batches: list[pa.RecordBatch], scanner: Scanner) -> list[dict[str, Any]]:
    batches.append(scanner.take())
    for batch in batches:
        batch.validate(full=True)
    found: list[dict[str, Any]] = pa.Table.from_batches(batches, SCHEMA).to_pylist()
    return found


def test_a_message_becomes_a_row_with_all_columns(kernels: compiled.Kernels) -> None:
    data = consumed(1, b"body", [("A", "1"), ("B", "2"), ("A", "3")])
    (row,), others = read(data, kernels=kernels)
    assert row == {
        "stream": "S",
        "subject": "orders.new",
        "sequence": 1,
        "timestamp": NOON,
        "headers": [("A", ["1", "3"]), ("B", ["2"])],
        "data": b"body",
    }
    assert others == []


@pytest.mark.parametrize("before_stream", ["", "_.hash.", "hub.hash."])
def test_both_forms_of_the_acknowledgement_subject_are_read(kernels: compiled.Kernels, before_stream: str) -> None:
    found, _ = read(consumed(41, delivery=1, before_stream=before_stream), kernels=kernels)
    assert [row["sequence"] for row in found] == [41]


def test_bodies_may_be_empty_and_contain_frames_and_line_ends(kernels: compiled.Kernels) -> None:
    bodies = [b"", b"\r\n", b"\r\nMSG a 7 1\r\nx\r\n", consumed(9), b"PING\r\n", bytes(range(256))]
    data = b"".join(consumed(n, body) for n, body in enumerate(bodies, 1))
    found, others = read(data, kernels=kernels)
    assert [row["data"] for row in found] == bodies
    assert others == []


def test_a_message_larger_than_the_buffer_makes_the_buffer_grow(kernels: compiled.Kernels) -> None:
    large = b"\r\n" * (4 * 1024 * 1024)
    data = consumed(1) + consumed(2, large, [("A", "1")]) + consumed(3)
    found, _ = read(data, cuts=[10_000, 5_000_000], kernels=kernels, buffer_bytes=64 * 1024)
    assert [(row["sequence"], len(row["data"])) for row in found] == [(1, 1), (2, len(large)), (3, 1)]


def test_other_frames_come_out_between_the_rows(kernels: compiled.Kernels) -> None:
    status = block([])[:8] + b" 409 Consumer Deleted\r\n\r\n"
    data = b"".join(
        (
            b"PING\r\n+OK\r\n",
            consumed(1),
            b'PONG\r\n-ERR \'Slow Consumer\'\r\nINFO {"version":"2"}\r\n',
            f"HMSG _INBOX.1 {SID} {len(status)} {len(status)}\r\n".encode() + status + b"\r\n",
            b"MSG _INBOX.2 9 2\r\n{}\r\n",
            consumed(2),
        )
    )
    found, others = read(data, kernels=kernels)
    assert [row["sequence"] for row in found] == [1, 2]
    assert [type(other).__name__ for other in others] == ["Ping", "Ok", "Pong", "Err", "Info", "Message", "Message"]
    assert isinstance(others[5], frames.Message)
    assert others[5].status == (409, "Consumer Deleted")
    assert others[6].data == b"{}"


def test_a_stored_message_with_a_status_line_is_still_a_row(kernels: compiled.Kernels) -> None:
    lines = b"NATS/1.0 503 odd\r\nA: 1\r\n\r\n"
    head = f"HMSG a {SID} $JS.ACK.S.c.1.1.1.1700000000000000000.0 {len(lines)} {len(lines)}\r\n".encode()
    found, others = read(head + lines + b"\r\n", kernels=kernels)
    assert ([row["headers"] for row in found], others) == ([[("A", ["1"])]], [])


def test_a_lost_message_stops_the_scan(kernels: compiled.Kernels) -> None:
    found, others = read(consumed(1) + consumed(3), kernels=kernels)
    assert ([row["sequence"] for row in found], others) == ([1], [Stop.GAP])


@pytest.mark.parametrize(("last", "expected"), [(2, [1, 2]), (4, [1, 2, 3]), (0, [])])
def test_nothing_beyond_the_last_sequence_is_read(kernels: compiled.Kernels, last: int, expected: list[int]) -> None:
    data = b"".join(consumed(n, delivery=d) for d, n in enumerate([1, 2, 3, 5, 6], 1))
    found, others = read(data, kernels=kernels, last_wanted=last)
    assert ([row["sequence"] for row in found], others) == (expected, [Stop.DONE])


def test_direct_get_rows_lose_only_what_direct_get_added(kernels: compiled.Kernels) -> None:
    own = [("Nats-Sequence", "99"), ("Nats-Subject", "from.elsewhere"), ("A", "1")]
    (row,), others = read(got(5, b"body", own), kernels=kernels, direct=True)
    assert others == []
    assert (row["subject"], row["sequence"], row["timestamp"]) == ("orders.new", 5, NOON)
    assert row["headers"] == [("Nats-Sequence", ["99"]), ("Nats-Subject", ["from.elsewhere"]), ("A", ["1"])]


@pytest.mark.parametrize("decimals", ["", ".5", ".123456", ".123456789", ".000001"])
@pytest.mark.parametrize("day", ["1970-01-01", "2000-02-29", "2026-12-31", "2100-03-01"])
def test_direct_get_times_are_read_to_the_microsecond(kernels: compiled.Kernels, day: str, decimals: str) -> None:
    (row,), _ = read(got(1, time=f"{day}T23:59:58{decimals}Z"), kernels=kernels, direct=True)
    expected = datetime.fromisoformat(f"{day}T23:59:58+00:00") + timedelta(
        microseconds=int((decimals[1:] + "000000")[:6])
    )
    assert row["timestamp"] == expected


def test_the_end_of_a_direct_get_is_no_row(kernels: compiled.Kernels) -> None:
    end = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 5\r\n\r\n"
    data = got(5) + f"HMSG _INBOX.a.1 {SID} {len(end)} {len(end)}\r\n".encode() + end + b"\r\n"
    found, others = read(data, kernels=kernels, direct=True)
    assert len(found) == 1
    assert [other.status for other in others] == [(204, "EOB")]


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a b c d e f\r\n",
        b"MSG a 7 x\r\n",
        b"MSG a  7 1\r\nx\r\n",
        b"MSG a 7 2\r\nxyz\r\n",
        b"HMSG a 7 20 10\r\n" + b"x" * 40,
        b"MSG a 7 99999999999\r\n",
        b"MSG a" + b"a" * 20_000,
        b"\x00",
        b"msg a 7 0\r\n\r\n",
    ],
)
def test_bytes_that_no_server_sends_are_refused(kernels: compiled.Kernels, garbage: bytes) -> None:
    found, others = read(consumed(1) + garbage, kernels=kernels)
    assert ([row["sequence"] for row in found], others) == ([1], [ProtocolError])


texts = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF, blacklist_characters=":"), min_size=1, max_size=8)
header_lists = st.lists(st.tuples(texts, texts), max_size=4)
bodies = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\r\n", b"MSG a 7 1\r\nx\r\n"]))
messages = st.lists(st.tuples(bodies, header_lists, st.booleans()), min_size=1, max_size=8)
cut_lists = st.lists(st.integers(0, 10_000), max_size=6)


@settings(max_examples=150, deadline=None)
@given(messages=messages, cuts=cut_lists, direct=st.booleans())
def test_any_split_gives_the_same_rows_compiled_and_plain(
    messages: list[tuple[bytes, list[tuple[str, str]], bool]], cuts: list[int], direct: bool
) -> None:
    make = got if direct else consumed
    parts = [
        make(n, body, headers) + (b"PING\r\n" if ping else b"") for n, (body, headers, ping) in enumerate(messages, 1)
    ]
    data = b"".join(parts)
    whole = read(data, kernels=compiled.PLAIN, direct=direct)
    assert len(whole[0]) == len(messages)
    for kernels in all_kernels().values():
        assert read(data, cuts, kernels=kernels, direct=direct, buffer_bytes=256, batch_rows=3) == whole


SCRAPS = [b"MSG ", b"HMSG ", b"a ", b"7 ", b"1 ", b"12 ", b"16", b" ", b"\r\n", b"\r", b"x", b"NATS/1.0", b"PING\r\n"]
SCRAPS += [b"A: b\r\n", b"Nats-Sequence: 1\r\n", b"$JS.ACK.S.c.1.1.1.9.0 ", b"$JS.ACK.S.c.1.1.1.9999999999999999999.0 "]


@settings(max_examples=300, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=80), st.lists(st.sampled_from(SCRAPS), max_size=14).map(b"".join)),
    direct=st.booleans(),
    last=st.sampled_from([ANY_SEQUENCE, 1]),
)
def test_whatever_comes_both_kernels_agree(data: bytes, direct: bool, last: int) -> None:
    first, second = (read(data, kernels=k, direct=direct, last_wanted=last) for k in all_kernels().values())
    assert first == second


def test_rows_can_be_acknowledged_by_their_reply_subjects(kernels: compiled.Kernels) -> None:
    scanner = Scanner("S", SID, kernels=kernels)
    scanner.feed(consumed(1) + consumed(2))
    assert scanner.next() is Stop.MORE
    assert [reply.split(b".")[5] for reply in scanner.replies()] == [b"1", b"2"]
    assert scanner.sequences() == [1, 2]
    assert (scanner.last_sequence, scanner.last_pending, scanner.total_rows) == (2, 3, 2)


def test_machine_code_of_another_source_version_is_not_taken() -> None:
    compiled.offer("kernels-0000-linux-x86_64.o", b"this would not load")
    assert isinstance(compiled.current(), compiled.MachineKernels)


def test_a_cold_cache_does_not_hold_up_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiled, "cache_directories", lambda: [tmp_path])
    monkeypatch.setattr(compiled, "_machine", None)
    monkeypatch.setattr(compiled, "_compiling", None)
    assert compiled.current() is compiled.PLAIN
    started = compiled._compiling
    assert started is not None
    assert compiled.current() is compiled.PLAIN
    assert compiled._compiling is started
    started.kill()
    started.communicate()


def test_code_that_somebody_else_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "cache_directories", lambda: [tmp_path])
    (tmp_path / compiled.file_name()).write_bytes(compiled.sealed(b"code"))
    tmp_path.chmod(0o755)
    assert compiled.machine_code() == b"code"
    tmp_path.chmod(0o777)
    assert compiled.machine_code() is None


def test_a_damaged_file_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "cache_directories", lambda: [tmp_path])
    file = tmp_path / compiled.file_name()
    file.write_bytes(compiled.sealed(b"code")[:-1])
    assert compiled.machine_code() is None
    file.write_bytes(b"")
    assert compiled.machine_code() is None
