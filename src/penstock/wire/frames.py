"""The NATS client protocol as values: encode what a client sends, parse what a server sends. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import ConfigError, ProtocolError
from penstock.subjects import UNPRINTABLE
from penstock.wire import headers as header_block

PING = b"PING\r\n"
PONG = b"PONG\r\n"

MAX_LINE = 16 * 1024
"""Bytes of a control line. The server allows clients 4 KiB; subjects it delivers may be longer after a mapping."""
MAX_INFO = 1024 * 1024
"""Bytes of an INFO line, which lists the servers of a cluster."""
MAX_MESSAGE = 64 * 1024 * 1024 + 64 * 1024
"""Bytes of headers and payload together: the most a server can be configured for, and room for headers it adds."""

DELIVERED = "$JS.ACK."
"""What the reply subjects of a consumer's deliveries begin with."""
MAX_SUBJECT_BYTES = 3_500
"""Bytes of a subject that we send. Servers close a connection at a control line of more than 4,096 bytes."""

_BAD_SUBJECT = re.compile(rf"{UNPRINTABLE.pattern}|^\.|\.\.|\.$|^$")
_BLANKS = re.compile(rb"[ \t]+")
_HALF_LINE_END = re.compile(rb"[\r\n]").search


class Info(NamedTuple):
    """What the server says about itself, first and whenever the cluster changes."""

    fields: dict[str, Any]


class Message(NamedTuple):
    """A message delivered to a subscription (`MSG` or `HMSG`)."""

    subject: str
    sid: int
    reply: str
    """Where an answer goes; empty when none is wanted."""
    headers: bytes
    """The header block as it came; empty when there is none."""
    data: bytes

    @property
    def status(self) -> tuple[int, str] | None:
        """Code and text of a status message, such as 503 for no responders. None for a delivery of a consumer."""
        return None if self.reply.startswith(DELIVERED) else header_block.status(self.headers)

    def header_values(self) -> dict[str, list[str]]:
        """The headers, parsed."""
        return header_block.parse(self.headers)


class Ping(NamedTuple):
    """The server asks whether we are there."""


class Pong(NamedTuple):
    """The server is there, and has processed everything sent before our ping."""


class Ok(NamedTuple):
    """Only sent when `verbose` was asked for."""


class Err(NamedTuple):
    """The server complains; often it closes the connection next."""

    text: str


Frame = Info | Message | Ping | Pong | Ok | Err


# -- client frames -----------------------------------------------------------------------------------------------------


def checked_subject(subject: str) -> str:
    """The subject, if it can stand in a control line: nothing unprintable, no empty token, not too long."""
    if _BAD_SUBJECT.search(subject):
        raise ConfigError(
            f"{subject!r} is not a subject: tokens separated by dots, without white space and control characters"
        )
    if len(subject) > MAX_SUBJECT_BYTES // 4 and len(subject.encode("utf-8", "surrogatepass")) > MAX_SUBJECT_BYTES:
        raise ConfigError(f"a subject has at most {MAX_SUBJECT_BYTES} bytes; this one starts with {subject[:60]!r}")
    return subject


def connect(options: dict[str, Any]) -> bytes:
    """`CONNECT`: who we are and what we understand."""
    return b"CONNECT " + json.dumps(options, separators=(",", ":")).encode() + b"\r\n"


def publish(subject: str, data: bytes, reply: str = "", headers: bytes = b"") -> bytes:
    """`PUB`, or `HPUB` when there is a header block."""
    target = f"{checked_subject(subject)} {checked_subject(reply)}" if reply else checked_subject(subject)
    if headers:
        size = len(headers)
        return b"".join((f"HPUB {target} {size} {size + len(data)}\r\n".encode(), headers, data, b"\r\n"))
    return b"".join((f"PUB {target} {len(data)}\r\n".encode(), data, b"\r\n"))


def subscribe(subject: str, sid: int, queue: str = "") -> bytes:
    """`SUB`, optionally as one of a queue group."""
    group = f" {checked_subject(queue)}" if queue else ""
    return f"SUB {checked_subject(subject)}{group} {sid}\r\n".encode()


def unsubscribe(sid: int, after: int | None = None) -> bytes:
    """`UNSUB`, at once or after that many messages since the subscription."""
    return f"UNSUB {sid}\r\n".encode() if after is None else f"UNSUB {sid} {after}\r\n".encode()


# -- server frames -----------------------------------------------------------------------------------------------------


class Parser:
    """Turns the server's bytes into frames, however they are cut.

    `feed` takes bytes, `next` gives the frames they complete, one a call, then None. Bytes that no server sends raise
    `ProtocolError` once all frames before them were given, and from then on. At most one unfinished frame is kept, and
    a frame that announces more than the limits is refused before its bytes are waited for.
    """

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self.max_message = max_message
        self._buffer = bytearray()
        self._at = 0
        self._head: _Head | None = None
        self._failed: str | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes as they came from the connection."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> Frame | None:
        """The next complete frame, or None until more bytes are fed."""
        if self._failed:
            raise ProtocolError(self._failed)
        try:
            return self._body() if self._head else self._control()
        except ProtocolError as exc:
            self._failed = str(exc)
            raise

    def skim(self, look: Callable[[bytearray, int], int]) -> None:
        """Call a function that takes whole frames off the front of the buffer.

        `look` gets the buffer and where its unread bytes begin, and returns where they begin afterwards.
        """
        if self._head is None and not self._failed:
            self._at = look(self._buffer, self._at)

    def take_buffered(self) -> bytes:
        """Hand over the bytes that are fed and not yet parsed; only between frames."""
        if self._head:
            raise ValueError("the parser is inside a message: take all of its frames first, or feed the rest")
        rest = bytes(self._buffer[self._at :])
        self._buffer.clear()
        self._at = 0
        return rest

    @property
    def buffered(self) -> int:
        """Bytes fed and not yet given back as frames."""
        return len(self._buffer) - self._at

    def _control(self) -> Frame | None:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            self._check_unfinished()
            return None
        self._check_length(end - self._at)
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        operation, _, rest = line.partition(b" ")
        operation = operation.upper()
        if head := _HEADS.get(operation):
            self._head = self._allowed(head(rest))
            return self._body()
        if frame := _FRAMES.get(operation):
            return frame(rest.strip())
        raise ProtocolError(f"this is not the NATS protocol: {line[:60]!r}")

    def _check_unfinished(self) -> None:
        if self.buffered and self._buffer[self._at] not in _FIRST_BYTES:
            raise ProtocolError(f"this is not the NATS protocol: {bytes(self._buffer[self._at : self._at + 60])!r}")
        # The last byte may be the CR of the line's end.
        self._check_length(self.buffered - 1)

    def _check_length(self, length: int) -> None:
        start = bytes(self._buffer[self._at : self._at + 60])
        limit = MAX_INFO if start[:4].upper() == b"INFO" else MAX_LINE
        if length > limit:
            raise ProtocolError(f"a control line longer than {limit} bytes: {start!r}")

    def _allowed(self, head: _Head) -> _Head:
        if head.size > self.max_message:
            raise ProtocolError(f"a message of {head.size} bytes is announced; at most {self.max_message} are allowed")
        return head

    def _body(self) -> Message | None:
        assert self._head
        subject, sid, reply, header_size, size = self._head
        end = self._at + size
        if len(self._buffer) < end + 2:
            return None
        if self._buffer[end : end + 2] != b"\r\n":
            raise ProtocolError(f"a message on {subject!r} does not end where its size says")
        split = self._at + header_size
        message = Message(subject, sid, reply, bytes(self._buffer[self._at : split]), bytes(self._buffer[split:end]))
        self._at, self._head = end + 2, None
        return message


class _Head(NamedTuple):
    """The control line of a message whose body follows."""

    subject: str
    sid: int
    reply: str
    header_size: int
    size: int


def _info(rest: bytes) -> Info:
    try:
        fields = json.loads(rest)
    except (ValueError, RecursionError):
        raise ProtocolError(f"an INFO that is no JSON: {rest[:60]!r}") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"an INFO that is no JSON object: {rest[:60]!r}")
    return Info(fields)


def _msg(rest: bytes) -> _Head:
    fields = _fields(rest)
    if len(fields) not in (3, 4):
        raise ProtocolError(f"a MSG with {len(fields)} fields: {rest[:60]!r}")
    reply = _text(fields[2]) if len(fields) == 4 else ""
    return _Head(_text(fields[0]), _number(fields[1]), reply, 0, _number(fields[-1]))


def _hmsg(rest: bytes) -> _Head:
    fields = _fields(rest)
    if len(fields) not in (4, 5):
        raise ProtocolError(f"an HMSG with {len(fields)} fields: {rest[:60]!r}")
    reply = _text(fields[2]) if len(fields) == 5 else ""
    header_size, size = _number(fields[-2]), _number(fields[-1])
    if header_size > size:
        raise ProtocolError(f"an HMSG with more headers ({header_size} bytes) than message ({size} bytes)")
    return _Head(_text(fields[0]), _number(fields[1]), reply, header_size, size)


def _fields(rest: bytes) -> list[bytes]:
    """The fields of a control line, between spaces and tabs: a subject may hold any other byte, such as a form feed."""
    fields = rest.split()
    if b" ".join(fields) == rest:  # nearly always: single spaces, and no other white space anywhere
        return fields
    if _HALF_LINE_END(rest):
        raise ProtocolError(f"half a line end within a control line: {rest[:60]!r}")
    return _BLANKS.split(rest.strip(b" \t"))


def _number(field: bytes) -> int:
    # At most 18 digits: whatever is longer is no size, and int() of thousands of digits is slow.
    if not field.isdigit() or len(field) > 18:
        raise ProtocolError(f"a number was expected, not {field[:40]!r}")
    return int(field)


def _text(field: bytes) -> str:
    return field.decode("utf-8", "surrogateescape")


def _err(rest: bytes) -> Err:
    return Err(_text(rest.strip(b"'")))


_HEADS: dict[bytes, Callable[[bytes], _Head]] = {b"MSG": _msg, b"HMSG": _hmsg}
_FRAMES: dict[bytes, Callable[[bytes], Frame]] = {
    b"PING": lambda _: Ping(),
    b"PONG": lambda _: Pong(),
    b"INFO": _info,
    b"+OK": lambda _: Ok(),
    b"-ERR": _err,
}
_FIRST_BYTES = frozenset(b"MmHhPpIi+-")
