"""The frame codec: any cut of the bytes gives the same frames, and garbage an error."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ProtocolError
from penstock.wire import frames, headers

tokens = st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C"), exclude_characters="."), min_size=1)
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join).filter(lambda s: not re.search(r"\s", s))
bodies = st.binary(max_size=200)
names = st.text(st.sampled_from("abcXYZ-019_"), min_size=1, max_size=10)
values = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)
header_maps = st.dictionaries(names, st.lists(values, min_size=1, max_size=3), min_size=1, max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> frames.Message:
    block = headers.encode(draw(header_maps)) if draw(st.booleans()) else b""
    reply = draw(subjects) if draw(st.booleans()) else ""
    return frames.Message(draw(subjects), draw(st.integers(0, 10**9)), reply, block, draw(bodies))


others = st.sampled_from([frames.Ping(), frames.Pong(), frames.Ok(), frames.Err("Stale Connection")])
infos = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3).map(frames.Info)
everything = st.lists(st.one_of(messages(), others, infos), max_size=12)


def as_server(frame: frames.Frame) -> bytes:
    """The bytes with which a server says this."""
    match frame:
        case frames.Message(subject, sid, reply, block, data):
            fields = [subject, sid, *([reply] if reply else []), *([len(block)] if block else []), len(block + data)]
            verb = "HMSG" if block else "MSG"
            return f"{verb} {' '.join(map(str, fields))}\r\n".encode() + block + data + b"\r\n"
        case frames.Info(fields):
            return b"INFO " + json.dumps(fields).encode() + b"\r\n"
        case frames.Err(text):
            return f"-ERR '{text}'\r\n".encode()
        case frames.Ok():
            return b"+OK\r\n"
        case _:
            return type(frame).__name__.upper().encode() + b"\r\n"


def parsed(chunks: list[bytes], parser: frames.Parser | None = None) -> tuple[list[frames.Frame], bool]:
    """All frames, and whether the bytes ended in an error."""
    parser = parser or frames.Parser()
    found: list[frames.Frame] = []
    try:
        for chunk in chunks:
            parser.feed(chunk)
            while (frame := parser.next()) is not None:
                found.append(frame)
    except ProtocolError:
        return found, True
    return found, False


def cut(data: bytes, places: list[int]) -> list[bytes]:
    points = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *points], [*points, len(data)], strict=True)]


@given(everything, st.lists(st.integers(0, 10**6), max_size=20))
def test_any_cut_of_the_stream_gives_the_same_frames(sent: list[frames.Frame], places: list[int]) -> None:
    data = b"".join(map(as_server, sent))
    assert parsed(cut(data, places)) == (sent, False)
    assert parsed([bytes([byte]) for byte in data]) == (sent, False)


@given(everything, st.binary(max_size=60), st.lists(st.integers(0, 10**6), max_size=8))
@example([], b"HTTP/1.1 400 Bad Request\r\n", [])
@example([], b"MSG a 1 99999999999999999999999\r\n", [])
@example([], b"HMSG a 1 9 3\r\n", [])
@example([], b"MSG a 1 1\r\nabc", [])
def test_frames_before_garbage_are_the_same_however_it_is_cut(
    sent: list[frames.Frame], garbage: bytes, places: list[int]
) -> None:
    data = b"".join(map(as_server, sent)) + garbage
    whole = parsed([data])
    assert whole[0][: len(sent)] == sent
    assert parsed(cut(data, places)) == whole


@given(st.binary(min_size=1, max_size=300), st.integers(1, 50))
def test_arbitrary_bytes_end_in_frames_or_an_error_and_keep_no_more_than_was_fed(data: bytes, size: int) -> None:
    parser = frames.Parser(max_message=1000)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    parsed(chunks, parser)
    assert parser.buffered <= len(data)


@pytest.mark.parametrize("start", [b"MSG ", b"-ERR ", b"PING", b"m"])
def test_a_line_without_end_is_an_error_at_the_limit(start: bytes) -> None:
    parser = frames.Parser()
    parser.feed(start)
    assert parser.next() is None
    parser.feed(b"x" * (frames.MAX_LINE - len(start)))
    assert parser.next() is None
    parser.feed(b"xx")
    with pytest.raises(ProtocolError, match="longer than"):
        parser.next()


def test_an_info_may_be_long_but_not_endless() -> None:
    urls = {"connect_urls": ["10.0.0.1:4222"] * 10_000}
    assert parsed([as_server(frames.Info(urls))]) == ([frames.Info(urls)], False)
    assert parsed([b"INFO ".ljust(frames.MAX_INFO)]) == ([], False)
    assert parsed([b"INFO ".ljust(frames.MAX_INFO + 2)]) == ([], True)


def test_a_message_larger_than_allowed_is_refused_before_its_bytes_come() -> None:
    parser = frames.Parser(max_message=10)
    parser.feed(b"MSG a 1 11\r\n")
    with pytest.raises(ProtocolError, match="11 bytes"):
        parser.next()
    with pytest.raises(ProtocolError):
        parser.next()


def test_bytes_not_parsed_yet_can_be_handed_over() -> None:
    parser = frames.Parser()
    parser.feed(b"PING\r\nMSG a 1 2\r")
    assert parser.next() == frames.Ping()
    assert parser.next() is None
    assert parser.take_buffered() == b"MSG a 1 2\r"
    assert parser.buffered == 0


@given(subjects, bodies, header_maps)
def test_what_we_publish_is_what_the_protocol_says(
    subject: str, data: bytes, given_headers: dict[str, list[str]]
) -> None:
    block = headers.encode(given_headers)
    assert headers.parse(block) == given_headers
    assert frames.publish(subject, data) == f"PUB {subject} {len(data)}\r\n".encode() + data + b"\r\n"
    expected = f"HPUB {subject} re.ply {len(block)} {len(block) + len(data)}\r\n".encode() + block + data + b"\r\n"
    assert frames.publish(subject, data, "re.ply", block) == expected


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0", "a..b", ".a", "a.", "a\tb", "a\0b"])
def test_a_subject_cannot_smuggle_a_command(subject: str) -> None:
    with pytest.raises(ConfigError):
        frames.publish(subject, b"")
    with pytest.raises(ConfigError):
        frames.publish("a", b"", subject or " ")
    with pytest.raises(ConfigError):
        frames.subscribe(subject, 1)


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("a b", "x"), ("a:b", "x"), ("a", "x\r\ny: z"), ("ä", "x")])
def test_a_header_cannot_smuggle_another(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        headers.encode({name: value})


def test_a_status_line_is_read() -> None:
    assert headers.status(b"NATS/1.0 503\r\n\r\n") == (503, "")
    assert headers.status(b"NATS/1.0 100 FlowControl Request\r\n\r\n") == (100, "FlowControl Request")
    assert headers.status(b"NATS/1.0\r\nA: b\r\n\r\n") is None
    assert headers.status(b"") is None
