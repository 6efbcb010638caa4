"""What a bridged message looks like, and how many go into a batch."""

from __future__ import annotations

import pytest

from penstock.sourcing.copies import Backlog, Copier, mark_of
from penstock.wire import headers
from penstock.wire.scanning import Rows

MARK = b"Penstock-Origin: b S %d i\r\n"
BATCH = b"Nats-Batch-Id: x\r\nNats-Batch-Sequence: 7\r\n"


def rows(*blocks: bytes) -> Rows:
    count = len(blocks)
    return Rows([b"s"] * count, list(blocks), [b"data"] * count, list(range(1, count + 1)))


def lines(*blocks: bytes, **choices: bool) -> list[bytes]:
    return Copier("b", "S", "i", **choices).lines(rows(*blocks))


@pytest.mark.parametrize(
    "others",
    [[], [b""], [b"A: \0\n\r\n"], [b"A: 1"]],
    ids=["alone", "beside none", "beside a zero byte", "beside one cut short"],
)
def test_instructions_to_the_server_go_and_everything_else_stays(others: list[bytes]) -> None:
    kept = b"A: 1\r\nA: 2\r\nX-Nats-Batch-Id: mine\r\n"
    blocks = [
        BATCH + kept,
        kept + b"nats-expected-stream: S\r\nNats-Rollup: all\r\n",
        b"Nats-Schedule-Target: t\r\n" + kept,
        b"Penstock-Origin: other O 4 j\r\n" + kept,
        BATCH,
        *others,
    ]
    made = lines(*blocks)
    assert made[:4] == [kept + MARK % number for number in range(1, 5)]
    assert made[4] == MARK % 5
    for number, other in enumerate(others, 6):
        ended = other if not other or other.endswith(b"\r\n") else other + b"\r\n"
        assert made[number - 1] == ended + MARK % number


@pytest.mark.parametrize("half", [b"\r", b"\n", b"\0\n", b"\n\0"])
@pytest.mark.parametrize("line", [b"A: x%bPenstock-Origin: b S 99 j", b"Penstock-Origin: b S 99 j%bx"])
def test_no_publisher_hides_or_forges_the_mark(line: bytes, half: bytes) -> None:
    """Half a line end in a value begins no line, and ends none."""
    hostile = line % half + b"\r\n"
    for blocks in ([hostile], [b"B: 1\r\n", hostile], [hostile, b"\0: 1\r\n"]):
        for number, made in enumerate(lines(*blocks), 1):
            found = headers.parse(headers.block(made))
            assert found["Penstock-Origin"] == [f"b S {number} i"]
            assert mark_of(found) == ("b", "S", number, "i")


def test_a_time_to_live_stays_where_the_destination_takes_it() -> None:
    assert lines(b"Nats-TTL: 5s\r\n") == [MARK % 1]
    assert lines(b"Nats-TTL: 5s\r\n", keep_ttl=True) == [b"Nats-TTL: 5s\r\n" + MARK % 1]


def test_message_ids_are_renamed_only_as_far_as_they_must() -> None:
    copier = Copier("b", "S", "i")
    copier.rename_ids_until = 1
    made = copier.lines(rows(b"Nats-Msg-Id: 4\r\n", b"Nats-Msg-Id: 5\r\n"))
    assert made == [b"Penstock-Origin-Msg-Id: 4\r\n" + MARK % 1, b"Nats-Msg-Id: 5\r\n" + MARK % 2]


def test_a_mark_reads_back_and_others_are_none() -> None:
    mark = mark_of(headers.parse(b"NATS/1.0\r\n" + MARK % 12 + b"\r\n"))
    assert mark is not None
    assert tuple(mark) == ("b", "S", 12, "i")
    assert mark_of({}) is None
    assert mark_of({"Penstock-Origin": ["b S twelve i"]}) is None


def test_parts_keep_the_order_and_both_limits() -> None:
    backlog = Backlog(most=4, most_bytes=30)
    given = rows(*[b""] * 10)
    backlog.add(given.subjects, [b"%d" % n for n in range(10)], given)
    taken = []
    while backlog:
        part = backlog.take()
        assert len(part.data) <= 4
        assert sum(map(len, part.data)) + sum(map(len, part.lines)) <= 30
        assert part.last_sequence == int(part.lines[-1]) + 1
        taken += part.lines
    assert taken == [b"%d" % n for n in range(10)]
    backlog.add([b"s"], [b""], Rows([b"s"], [b""], [b"x" * 100], [11]))
    assert len(backlog.take().data) == 1, "a message that is too large goes alone"
