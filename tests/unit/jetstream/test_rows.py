"""The scanner without Arrow finds what the one with Arrow finds, however the bytes are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from tests.unit.wire.test_scan import NOON, SID, block, consumed, cut_lists, got, messages, pieces, read

from penstock.errors import ProtocolError
from penstock.jetstream.model import StoredMessage
from penstock.jetstream.rows import RowScanner
from penstock.wire import compiled
from penstock.wire.scanning import Stop


def scanned(data: bytes, cuts: Sequence[int] = (), **options: Any) -> tuple[list[StoredMessage], list[Any]]:
    """All messages of `data`, received in pieces, and everything else that came, errors included."""
    scanner, found, others = RowScanner("S", SID, **options), list[StoredMessage](), list[Any]()
    for piece in pieces(data, cuts):
        scanner.feed(piece)
        while True:
            try:
                seen = scanner.next()
            except ProtocolError:
                return [*found, *scanner.take()], [*others, ProtocolError]
            if seen is Stop.MORE:
                break
            if seen is Stop.FULL:
                found += scanner.take()
                continue
            others.append(seen)
            if isinstance(seen, Stop):
                return [*found, *scanner.take()], others
    return [*found, *scanner.take()], others


def as_row(message: StoredMessage) -> dict[str, Any]:
    return {
        "stream": message.stream, "subject": message.subject, "sequence": message.sequence,
        "timestamp": message.time, "headers": list(message.headers.items()), "data": message.data,
    }  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(messages=messages, cuts=cut_lists)
@pytest.mark.parametrize("direct", [False, True])
def test_it_finds_the_rows_that_arrow_has(
    messages: list[tuple[bytes, list[tuple[str, str]], bool]], cuts: list[int], direct: bool
) -> None:
    make = got if direct else consumed
    data = b"".join(
        make(n, body, headers) + (b"PING\r\n" if ping else b"") for n, (body, headers, ping) in enumerate(messages, 1)
    )
    rows, others = read(data, kernels=compiled.PLAIN, direct=direct)
    found, also = scanned(data, cuts, direct=direct, batch_rows=3)
    assert [as_row(one) for one in found] == rows
    assert also == others


def test_a_lost_message_stops_the_scan_until_another_number_is_expected() -> None:
    scanner = RowScanner("S", SID)
    scanner.feed(consumed(1) + consumed(3, delivery=7) + consumed(4, delivery=8))
    assert (scanner.next(), scanner.sequences(), scanner.next_delivery()) == (Stop.GAP, [1], 7)
    scanner.expect(7)
    assert (scanner.next(), scanner.sequences()) == (Stop.MORE, [1, 3, 4])
    assert (scanner.last_sequence, scanner.last_pending, scanner.total_rows) == (4, 3, 3)
    assert [reply.split(b".")[6] for reply in scanner.replies()] == [b"1", b"7", b"8"]


@pytest.mark.parametrize(("last", "expected"), [(2, [1, 2]), (4, [1, 2, 3]), (0, [])])
def test_nothing_beyond_the_last_sequence_is_read(last: int, expected: list[int]) -> None:
    data = b"".join(consumed(n, delivery=d) for d, n in enumerate([1, 2, 3, 5, 6], 1))
    found, others = scanned(data, last_wanted=last)
    assert ([one.sequence for one in found], others) == (expected, [Stop.DONE])


def test_rows_are_given_as_pieces_of_bytes_too() -> None:
    scanner = RowScanner("S", SID)
    scanner.feed(consumed(1, b"a", [("A", "1"), ("B", "2")]) + consumed(2, b"b"))
    scanner.next()
    rows = scanner.pieces(0, 2)
    assert rows.header_lines == [b"A: 1\r\nB: 2\r\n", b""]
    assert (rows.subjects, rows.data, rows.sequences) == ([b"orders.new"] * 2, [b"a", b"b"], [1, 2])
    scanner.drop()
    assert scanner.rows == 0


def test_what_is_no_row_is_handed_out() -> None:
    status = block([])[:8] + b" 404 No Messages\r\n\r\n"
    data = f"HMSG _INBOX.1 {SID} {len(status)} {len(status)}\r\n".encode() + status + b"\r\n" + consumed(1)
    found, others = scanned(data)
    assert ([one.time for one in found], [one.status for one in others]) == ([NOON], [(404, "No Messages")])


def test_several_filters_are_applied_when_rows_are_taken() -> None:
    scanner = RowScanner("S", SID)
    scanner.feed(b"".join(consumed(n, subject=f"s.{n % 3}") for n in range(1, 7)))
    scanner.next()
    assert [one.sequence for one in scanner.take(("s.0", "s.1"))] == [1, 3, 4, 6]
