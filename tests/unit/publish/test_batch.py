"""An atomic batch without I/O: the bytes it sends, and what it makes of the answers."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import publish
from penstock.errors import ApiError, ServerBusy
from penstock.publish import Batch, BatchAck
from penstock.publish.batch import PIECE, drop, probe, probed
from penstock.wire import frames, headers


class Sent(NamedTuple):
    """One message as the server reads it."""

    subject: str
    reply: str
    headers: dict[str, list[str]]
    data: bytes

    @property
    def number(self) -> int:
        return int(self.headers["Nats-Batch-Sequence"][0])


def server_reads(data: bytes) -> list[Sent]:
    """Read HPUB frames by their sizes, as a server does; every byte must belong to one."""
    found = []
    while data:
        line, data = data.split(b"\r\n", 1)
        verb, subject, *reply, header_size, size = line.decode().split(" ")
        assert verb == "HPUB"
        block, payload, end = data[: int(header_size)], data[int(header_size) : int(size)], data[int(size) :][:2]
        assert end == b"\r\n"
        assert block.endswith(b"\r\n\r\n")
        data = data[int(size) + 2 :]
        found.append(Sent(subject, "".join(reply), headers.parse(block), payload))
    return found


members = st.lists(
    st.tuples(
        st.sampled_from(["s.a", "s.b", "ü.c"]),
        st.binary(max_size=30),
        st.one_of(st.none(), st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["", "x", "ä"]))),
    ),
    min_size=1,
    max_size=30,
)


@given(members, st.booleans(), st.booleans(), st.lists(st.integers(1, 30), max_size=3))
def test_the_server_reads_the_members_in_order_however_they_are_sent(
    rows: list[tuple[str, bytes, dict[str, str] | None]], eob: bool, at_once: bool, flushes: list[int]
) -> None:
    batch = Batch("S", "id", eob)
    sent = b""
    if at_once:
        subjects, payloads, own = (list(column) for column in zip(*rows, strict=True))
        batch.extend(subjects, payloads, own, message_id="mid")
    else:
        for number, (subject, data, more) in enumerate(rows, 1):
            batch.add(subject, data, more, "mid" if number == len(rows) else None)
            if number in flushes:
                sent += batch.ahead("first")
    two_answers = batch.first_answers
    sent += b"".join(batch.commit("first", "last"))
    found = server_reads(sent)
    end = found.pop() if eob else None
    assert [(one.subject, one.data) for one in found] == [(subject, data) for subject, data, _ in rows]
    assert [one.number for one in found] == list(range(1, len(rows) + 1))
    assert {one.headers["Nats-Batch-Id"][0] for one in found} == {"id"}
    assert [{k: v for k, v in one.headers.items() if k in "AB"} for one in found] == [
        {k: [v] for k, v in (more or {}).items()} for _, _, more in rows
    ]
    assert found[0].headers["Nats-Expected-Stream"] == ["S"]
    assert found[-1].headers["Nats-Msg-Id"] == ["mid"]
    commits = [one for one in [*found, end] if one and "Nats-Batch-Commit" in one.headers]
    assert commits == [end or found[-1]]
    assert commits[0].headers["Nats-Batch-Commit"] == ["eob" if eob else "1"]
    assert commits[0].reply == "last"
    single = len(rows) == 1 and not eob
    assert [one.reply for one in found[:1]] == ["last" if single else "first"]
    assert not any(one.reply for one in found[1:-1])
    if not flushes or at_once:
        assert two_answers is not single
    assert b"".join(batch.commit("first", "last")) == b"" or eob


@pytest.mark.parametrize("eob", [False, True])
@pytest.mark.parametrize("count", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 1_000])
def test_a_large_batch_is_sent_in_pieces_and_committed_by_the_last(count: int, eob: bool) -> None:
    batch = Batch("S", end_of_batch=eob)
    batch.extend("orders", [b"%d" % number for number in range(count)])
    pieces = list(batch.commit("first", "last"))
    assert len(pieces) == -(-count // PIECE)
    assert not any(b"Nats-Batch-Commit" in piece for piece in pieces[:-1])
    found = server_reads(b"".join(pieces))
    assert [one.number for one in found] == list(range(1, count + 1 + eob))
    assert [one.data for one in found[:count]] == [b"%d" % number for number in range(count)]
    assert "Nats-Batch-Commit" in found[-1].headers


@given(members)
def test_a_batch_can_be_sent_again_from_the_start(rows: list[tuple[str, bytes, dict[str, str] | None]]) -> None:
    batch = Batch("S")
    for subject, data, own in rows:
        batch.add(subject, data, own)
    once = b"".join(batch.commit("first", "last"))
    batch.rewind()
    assert b"".join(batch.commit("first", "last")) == once


def answer(error: dict[str, object] | None = None, **ack: object) -> frames.Message:
    body = {"stream": "S", "seq": 0} | ({"error": error} if error else {}) | ack
    return frames.Message("reply", 1, "", b"", json.dumps(body).encode())


def refusal(err_code: int, description: str = "no", code: int = 400) -> frames.Message:
    return answer({"code": code, "err_code": err_code, "description": description})


ACCEPTED = frames.Message("reply", 1, "", b"", b"")
UNHEARD = frames.Message("reply", 1, "", b"NATS/1.0 503\r\n\r\n", b"")


def three() -> Batch:
    batch = Batch("S", "id")
    batch.add("s.a", b"", message_id="m", expected_last_sequence=7)
    batch.add("other.b", b"")
    batch.add("s.a", b"")
    return batch


def test_an_ack_gives_the_sequence_of_every_member() -> None:
    ack = three().verdict(ACCEPTED, answer(seq=12, batch="id", count=3), 0)
    assert ack == BatchAck("S", 12, "id", 3)
    assert [ack.sequence_of(number) for number in range(3)] == [10, 11, 12]
    with pytest.raises(IndexError):
        ack.sequence_of(3)


@pytest.mark.parametrize(
    ("first", "last", "idle", "expected"),
    [
        (ACCEPTED, refusal(10176), 0, publish.Gap),
        (ACCEPTED, refusal(10176), 11, publish.TimedOut),
        (refusal(10210, code=429), refusal(10176), 0, publish.TooManyInFlight),
        (refusal(10174), refusal(10174), 0, publish.NotEnabled),
        (refusal(10179), refusal(10179), 0, publish.BadId),
        (ACCEPTED, refusal(10199), 0, publish.TooLarge),
        (ACCEPTED, refusal(10201), 0, publish.DuplicateId),
        (ACCEPTED, refusal(10177, "Nats-X"), 0, publish.UnsupportedHeader),
        (ACCEPTED, refusal(10071, "wrong last sequence: 9"), 0, publish.WrongSequence),
        (ACCEPTED, refusal(10164, "wrong last sequence"), 0, publish.WrongSequence),
        (ACCEPTED, refusal(10158, code=409), 0, publish.TooManyInFlight),
        (ACCEPTED, refusal(10008, code=503), 0, ServerBusy),
        (UNHEARD, UNHEARD, 0, publish.NobodyListens),
        (None, refusal(10176), 0, publish.Gap),
        (ACCEPTED, refusal(10999), 0, ApiError),
    ],
)
def test_each_refusal_has_its_error(
    first: frames.Message | None, last: frames.Message, idle: float, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as caught:
        three().verdict(first, last, idle, ["s.>"])
    assert type(caught.value) is expected or expected is ApiError


def test_errors_carry_what_the_batch_knows() -> None:
    with pytest.raises(publish.WrongSequence) as wrong:
        three().verdict(ACCEPTED, refusal(10071, "wrong last sequence: 9"), 0)
    assert (wrong.value.expected, wrong.value.actual) == ((7,), 9)
    with pytest.raises(publish.DuplicateId) as duplicate:
        three().verdict(ACCEPTED, refusal(10201), 0)
    assert duplicate.value.message_id == "m"
    with pytest.raises(publish.Gap) as gap:
        three().verdict(ACCEPTED, refusal(10176), 0, ["s.>"])
    assert gap.value.strangers == ("other.b",)
    with pytest.raises(publish.TimedOut, match=re.escape("open for 12.0 s")):
        three().verdict(ACCEPTED, refusal(10176), 12)


def test_what_drops_a_batch_or_asks_for_the_end_can_never_be_stored() -> None:
    (dropping,) = server_reads(drop("id", b"s.a", "r"))
    assert dropping.number > 10**9
    (asking,) = server_reads(probe(b"s.a", "r"))
    assert int(asking.headers["Nats-Expected-Last-Sequence"][0]) > 10**9
    assert probed(refusal(10071, "wrong last sequence: 42")) == 42
    assert probed(refusal(10077, "maximum 3 messages")) == 0
    assert probed(UNHEARD) == 0
