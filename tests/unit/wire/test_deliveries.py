"""Deliveries taken many at a time: the same as the parser finds, however the bytes are cut."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from penstock.consume.messages import Message, delivered
from penstock.wire import frames
from penstock.wire.deliveries import take

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SUBJECTS = st.sampled_from(["w.a", "w.ü.b", "dc.tool1.c2.completion"])
BODIES = st.binary(max_size=40)


def frame(subject: str, sid: int, reply: str, data: bytes, headers: bytes = b"") -> bytes:
    if headers:
        head = f"HMSG {subject} {sid} {reply} {len(headers)} {len(headers) + len(data)}\r\n"
        return head.encode() + headers + data + b"\r\n"
    return f"MSG {subject} {sid} {reply} {len(data)}\r\n".encode() + data + b"\r\n"


@st.composite
def wires(draw: st.DrawFn) -> list[bytes]:
    made = []
    for number in range(draw(st.integers(1, 8))):
        reply = f"$JS.ACK.S.c-1.{draw(st.integers(1, 3))}.{number * 3 + 1}.{number + 1}.1767225600000000000.0"
        headers = draw(st.sampled_from([b"", b"NATS/1.0\r\na: b\r\n\r\n"]))
        made.append(frame(draw(SUBJECTS), draw(st.sampled_from([7, 7, 7, 8])), reply, draw(BODIES), headers))
        made += draw(st.sampled_from([[], [], [b"PING\r\n"], [b"MSG w.a 7 inbox.x 2\r\nhi\r\n"]]))
    return made


@given(wires(), st.integers(1, 200))
def test_skimming_and_parsing_find_what_parsing_alone_finds(wire: list[bytes], step: int) -> None:
    raw = b"".join(wire)
    plain = frames.Parser()
    plain.feed(raw)
    expected = []
    while (one := plain.next()) is not None:
        if isinstance(one, frames.Message):
            expected.append((one.subject, one.sid, one.reply, one.headers, one.data))
    parser = frames.Parser()
    found: list[tuple[str, int, str, bytes, bytes]] = []

    def look(buffer: bytearray, at: int) -> int:
        taken, end = take(buffer, at, 7, Message, NOW)
        found.extend((one.subject, 7, one.reply, one.raw_headers, one.data) for one in taken)
        return end

    for start in range(0, len(raw), step):
        parser.feed(raw[start : start + step])
        parser.skim(look)
        while (one := parser.next()) is not None:
            if isinstance(one, frames.Message):
                found.append((one.subject, one.sid, one.reply, one.headers, one.data))
            parser.skim(look)
    assert found == expected


def test_numbers_are_those_of_the_reply_subject() -> None:
    reply = "$JS.ACK.S.c-1.2.345.678.1767225600000000000.9"
    buffer = bytearray(frame("w.a", 7, reply, b"data"))
    (found,), end = take(buffer, 0, 7, Message, NOW)
    assert found == Message("w.a", b"data", 345, 2, reply, NOW, b"", 678)
    assert found.pending == 9
    assert end == len(buffer)


def test_a_reply_with_domain_and_account_is_read_too() -> None:
    reply = "$JS.ACK.hub.ACCHASH.S.c-1.2.345.678.1767225600000000000.9.rnd"
    message = delivered(frames.Message("w.a", 7, reply, b"", b"x"), datetime.now(UTC))
    assert message is not None
    assert (message.delivery_count, message.sequence, message.delivery, message.pending) == (2, 345, 678, 9)
    assert message.timestamp == datetime(2026, 1, 1, tzinfo=UTC)


def test_an_unfinished_or_broken_frame_is_left_to_the_parser() -> None:
    whole = frame("w.a", 7, "$JS.ACK.S.c-1.1.1.1.1.0", b"data")
    for cut in (whole[:-1], whole[:10], whole.replace(b"data\r\n", b"datax\n"), b"", b"PING\r\n"):
        assert take(bytearray(cut), 0, 7, Message, NOW) == ([], 0)
