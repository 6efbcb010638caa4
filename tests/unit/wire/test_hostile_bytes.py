"""Bytes that a publisher or a server chooses: carried as they are, or refused, and never a way out of a buffer."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from tests.unit.wire.test_scan import SID, all_kernels, block, got, read

from penstock import subjects
from penstock.errors import ConfigError, ProtocolError
from penstock.wire import compiled, frames, login
from penstock.wire.scan import MAX_GROUPED_LINES, Scanner

STORED = [b"work.a\x1bb", b"work.\x01", b"work.a\x0bb", b"work.a\x0cb", b"work.\x00", b"work.\x7f", b"\xff"]
"""Subjects that the server stores."""
SEED = 20_261_117


@pytest.fixture(scope="module", params=["machine code", "plain"])
def kernels(request: pytest.FixtureRequest) -> compiled.Kernels:
    return all_kernels()[request.param]


@pytest.mark.parametrize("subject", STORED)
def test_a_stored_subject_is_carried_by_the_parser(subject: bytes) -> None:
    parser = frames.Parser()
    parser.feed(b"MSG %b 9 r.e 1\r\nx\r\nHMSG %b 9 12 13\r\nNATS/1.0\r\n\r\nx\r\n" % (subject, subject))
    for _ in range(2):
        found = parser.next()
        assert isinstance(found, frames.Message)
        assert (found.subject.encode("utf-8", "surrogateescape"), found.sid, found.data) == (subject, 9, b"x")


@pytest.mark.parametrize("subject", STORED[:-1])  # a column of text takes no more than UTF-8
def test_a_stored_subject_is_a_row(kernels: compiled.Kernels, subject: bytes) -> None:
    data = b"MSG %b %d $JS.ACK.S.c.1.1.1.1700000000000000000.0 1\r\nx\r\n" % (subject, SID)
    (row,), others = read(data, kernels=kernels)
    assert (row["subject"].encode(), row["data"], others) == (subject, b"x", [])


def test_a_publisher_cannot_choose_the_subscription(kernels: compiled.Kernels) -> None:
    """`a<form feed>7` published to subscription 9."""
    line = b"MSG a\x0c%d 9 5\r\nhello\r\n" % SID
    parser = frames.Parser()
    parser.feed(line)
    assert parser.next() == frames.Message(f"a\x0c{SID}", 9, "", b"", b"hello")
    found, others = read(line, kernels=kernels)
    assert (found, others) == ([], [frames.Message(f"a\x0c{SID}", 9, "", b"", b"hello")])


@pytest.mark.parametrize("line", [b"MSG a\rb 7 1\r\nx\r\n", b"MSG a\nb 7 1\r\nx\r\n", b"MSG a\n 7 1\r\nx\r\n"])
def test_half_a_line_end_in_a_control_line_is_refused(kernels: compiled.Kernels, line: bytes) -> None:
    parser = frames.Parser()
    parser.feed(line)
    with pytest.raises(ProtocolError):
        parser.next()
    assert read(line, kernels=kernels) == ([], [ProtocolError])


@pytest.mark.parametrize("byte", [*range(0x21), 0x7F])
def test_we_publish_no_control_characters(byte: int) -> None:
    subject = f"work.a{chr(byte)}b"
    assert subjects.problem(subject)
    with pytest.raises(ConfigError):
        frames.publish(subject, b"")
    with pytest.raises(ConfigError):
        frames.subscribe(subject, 1)


def test_a_subject_that_would_break_the_connection_is_refused() -> None:
    for subject in ("a" * 5_000, "ä" * 2_500):
        with pytest.raises(ConfigError, match="bytes"):
            frames.publish(subject, b"")
    frames.publish("a" * 3_000, b"")


# -- direct get --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"", b"\r", b"\n\n"])
def test_a_direct_get_with_half_line_ends_is_no_row(kernels: compiled.Kernels, end: bytes) -> None:
    """A subject line of `Nats-Subject: <line feed>` had a length of -1, and machine code wrote before its buffer."""
    lines = block([]).removesuffix(b"\r\n") + b"Nats-Stream: S\r\nNats-Subject: " + end
    lines += b"Nats-Sequence: 1\r\nNats-Time-Stamp: 2026-03-01T12:00:00Z\r\nNats-Num-Pending: 3\r\n"
    lines += b"Nats-Last-Sequence: 0\r\n\r\n"
    scanner = Scanner("S", SID, direct=True, kernels=kernels)
    scanner.feed(b"HMSG _INBOX.1 %d %d %d\r\n%b\r\n" % (SID, len(lines), len(lines), lines))
    assert isinstance(scanner.next(), frames.Message)
    assert scanner.rows == 0


def test_pieces_outside_of_the_buffer_are_refused(kernels: compiled.Kernels) -> None:
    buffer, out = np.zeros(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    for start, size in ((0, -1), (-1, 2), (7, 2), (0, 9)):
        wrong = np.array([start]), np.array([size])
        assert kernels.gather(buffer, *wrong, out[: max(size, 0)]) < 0
    assert kernels.gather(buffer, np.array([0, 4]), np.array([4, 4]), out) == 0
    assert kernels.gather(buffer, np.array([0, 4]), np.array([4, 4]), out[:7]) < 0


def test_whatever_is_sent_machine_code_stays_within_its_buffers_and_agrees_with_plain() -> None:
    script = Path(__file__).with_name("guarded.py")
    done = subprocess.run([sys.executable, script, str(SEED), "1500"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert int(done.stdout) > 1_200, "most messages were to be rows"


# -- header blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "parsed"),
    [
        (b"garbage", {}),
        (b"NATS/1.0\r\nA: b", {}),
        (b"x\r\nA: b\r\nC: d", {"A": ["b"]}),
        (b"NATS/1.0\n503 No Responders\n\n", {}),
        (b"NATS/1.0\r\nA\r\n: b\r\nC:\xff\r\n\r\n", {"": ["b"], "C": ["\udcff"]}),
    ],
)
def test_a_block_that_is_none_refuses_no_message(raw: bytes, parsed: dict[str, list[str]]) -> None:
    message = frames.Message("a", 1, "", raw, b"x")
    assert (message.header_values(), message.status) == (parsed, None)


def test_a_delivery_is_no_status() -> None:
    """Not every server takes a status out of what publishers store."""
    raw = b"NATS/1.0 409 Consumer Deleted\r\n\r\n"
    assert frames.Message("a", 1, "$JS.ACK.S.c.1.1.1.1.0", raw, b"x").status is None
    assert frames.Message("a", 1, "", raw, b"x").status == (409, "Consumer Deleted")


def test_servers_that_cannot_be_used_are_not_discovered() -> None:
    through = login.Endpoint("known", 4222, True, "known")
    named = ["ws://x:1", "[::1", "a:99999999", "", "x:abc", "known:4222", "other:4222"]
    assert login.discovered([through], through, named) == (login.Endpoint("other", 4222, True, "known"),)
    assert len(login.discovered([], through, [f"h{n}" for n in range(100_000)])) == login.MAX_DISCOVERED


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("day", ["1969-12-31", "1901-02-03", "0001-01-01"])
def test_times_before_1970_are_read_as_they_are(kernels: compiled.Kernels, day: str) -> None:
    (row,), others = read(got(1, time=f"{day}T23:59:58.5Z"), kernels=kernels, direct=True)
    assert (row["timestamp"], others) == (datetime.fromisoformat(f"{day}T23:59:58.500+00:00"), [])


def test_a_consumer_tells_times_before_1970_with_a_sign(kernels: compiled.Kernels) -> None:
    data = b"MSG a %d $JS.ACK.S.c.1.1.1.-1500000001.0 1\r\nx\r\n" % SID
    (row,), others = read(data, kernels=kernels)
    assert (row["timestamp"], others) == (datetime(1969, 12, 31, 23, 59, 58, 499999, tzinfo=UTC), [])


# -- headers -----------------------------------------------------------------------------------------------------------


def test_very_many_headers_are_grouped_by_a_table() -> None:
    """The kernel compares each line with all before it: 40,000 headers took it 50 times as long as the table."""
    machine, lines = all_kernels()["machine code"], list[int]()

    class Watched:
        scan, gather, header_lines = machine.scan, machine.gather, machine.header_lines

        def group_names(self, buf: np.ndarray, rows: np.ndarray, parts: np.ndarray, order: np.ndarray) -> int:
            lines.append(len(rows))
            return machine.group_names(buf, rows, parts, order)

    for count in (MAX_GROUPED_LINES, 100_000):
        names = [(f"H{number}", "x") for number in range(count - 1)] + [("H0", "y")]
        body = block(names)
        data = b"HMSG a %d $JS.ACK.S.c.1.1.1.1.0 %d %d\r\n%b\r\n" % (SID, len(body), len(body), body)
        (row,), _ = read(data, kernels=Watched())
        assert (len(row["headers"]), row["headers"][0]) == (count - 1, ("H0", ["x", "y"]))
    assert lines == [MAX_GROUPED_LINES]
