"""Parses received bytes into the messages of a range of a stream, with only the standard library.

`wire.scan` builds Arrow columns of millions of messages, and needs NumPy and Arrow. This scanner is used when a reader
processes each message anyway, and when those are not installed. Both find the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import NamedTuple

from penstock import subjects
from penstock.errors import ProtocolError
from penstock.jetstream.consumer import ACK_PREFIX, AckSubject
from penstock.jetstream.model import StoredMessage
from penstock.wire import frames
from penstock.wire.layout import DIGITS, DIRECT_LINES
from penstock.wire.scanning import (
    ANY_SEQUENCE,
    BATCH_ROWS,
    BUFFER_BYTES,
    REPLACE,
    Rows,
    Scanning,
    Stop,
)

SPACE_BYTES = 256 * 1024
_TIME = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]+))?Z")

ScannerMaker = Callable[..., Scanning]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Messages of a stream from `first` to `last`, both included, that match one of the subjects."""

    stream: str
    first: int
    last: int
    subjects: tuple[str, ...] = ()
    """Filters; none: every subject."""
    direct: bool = False
    """Read by direct get, which leaves nothing on the server, instead of by a consumer, which WorkQueue and Interest
    streams would count."""
    invalid_text: str = REPLACE
    """How bytes of subjects and headers that are no UTF-8 are shown: `scan.REPLACE` or `scan.ESCAPE`."""
    headers_only: bool = False
    """Whether a consumer leaves out bodies. Direct get has no such option, and returns them."""

    def scanned_by(self, scanner: ScannerMaker, sid: int) -> Scanning:
        """Return a scanner for the messages of this range on a subscription."""
        return scanner(self.stream, sid, direct=self.direct, last_wanted=self.last, invalid_text=self.invalid_text)


def fastest_scanner() -> ScannerMaker:
    """Return the scanner with machine code if NumPy and Arrow are installed, otherwise the one that needs neither."""
    if find_spec("numpy") and find_spec("pyarrow"):
        from penstock.wire.scan import Scanner

        return Scanner
    return RowScanner


class _Row(NamedTuple):
    subject: bytes
    reply: bytes
    header_lines: bytes
    data: bytes
    sequence: int
    delivery: int
    microseconds: int
    pending: int


class RowScanner:
    """Collects the messages of one subscription. `direct`: they come from direct get, not from a consumer."""

    def __init__(
        self,
        stream: str,
        sid: int,
        *,
        direct: bool = False,
        last_wanted: int = ANY_SEQUENCE,
        invalid_text: str = REPLACE,
        buffer_bytes: int = BUFFER_BYTES,
        batch_rows: int = BATCH_ROWS,
        max_message: int = frames.MAX_MESSAGE,
    ) -> None:
        self._stream = stream
        self._sid = sid
        self._direct = direct
        self._last_wanted = last_wanted
        self._invalid_text = invalid_text
        self._most_bytes = buffer_bytes
        self._most_rows = batch_rows
        self._parser = frames.Parser(max_message)
        self._space = bytearray(SPACE_BYTES)
        self._rows: list[_Row] = []
        self._bytes = 0
        self._next = 0 if direct else 1
        """The delivery number that the next row must have; 0: any."""
        self._held: _Row | None = None
        """A row at which the scan stopped."""
        self.total_rows = 0
        self.last_sequence = 0
        self.last_pending = 0

    # -- bytes in --------------------------------------------------------------------------------------------------

    def space(self) -> memoryview:
        return memoryview(self._space)

    def received(self, count: int) -> None:
        self._parser.feed(memoryview(self._space)[:count])

    def feed(self, data: bytes | memoryview) -> None:
        self._parser.feed(data)

    # -- received frames -------------------------------------------------------------------------------------------

    def next(self) -> frames.Frame | Stop:
        while True:
            if len(self._rows) >= self._most_rows or self._bytes >= self._most_bytes:
                return Stop.FULL
            row = self._held
            if row is None:
                frame = self._parser.next()
                if frame is None:
                    return Stop.MORE
                row = self._row(frame) if isinstance(frame, frames.Message) else None
                if row is None:
                    return frame
            self._held = row
            if self._next and row.delivery != self._next:
                return Stop.GAP
            if row.sequence > self._last_wanted:
                return Stop.DONE
            self._add(row)
            if row.sequence == self._last_wanted:
                return Stop.DONE

    def _add(self, row: _Row) -> None:
        self._held = None
        self._rows.append(row)
        self._bytes += len(row.data) + len(row.header_lines) + len(row.subject)
        self._next += 1 if self._next else 0
        self.total_rows += 1
        self.last_sequence, self.last_pending = row.sequence, row.pending

    def _row(self, message: frames.Message) -> _Row | None:
        """Return the row of a message; None for one that is not of the stream, such as a status."""
        if message.sid != self._sid:
            return None
        return self._direct_row(message) if self._direct else self._delivered_row(message)

    def _delivered_row(self, message: frames.Message) -> _Row | None:
        if not message.reply.startswith(ACK_PREFIX):
            return None
        try:
            ack = AckSubject.parse(message.reply)
        except ProtocolError:
            return None
        lines = _lines(message.headers)
        subject, reply = _bytes(message.subject), _bytes(message.reply)
        microseconds = ack.stored_ns // 1000
        return _Row(subject, reply, lines, message.data, ack.sequence, ack.consumer_sequence, microseconds, ack.pending)

    def _direct_row(self, message: frames.Message) -> _Row | None:
        """Parse a direct-get message. The last six header lines were appended by direct get; the remains of an
        incomplete block may precede `Nats-Stream`, the first of them."""
        lines = _lines(message.headers).split(b"\r\n")[:-1]
        tail = list(zip(reversed(lines), DIRECT_LINES, strict=False))
        if len(tail) < len(DIRECT_LINES) or not all(line.startswith(name) for line, name in tail):
            return None
        _, pending, moment, sequence, subject = (line.removeprefix(name) for line, name in tail)
        microseconds = _microseconds(moment)
        if microseconds is None or not (_is_number(pending) and _is_number(sequence)):
            return None
        own = b"".join(one + b"\r\n" for one in lines[:-6])
        return _Row(subject, b"", own, message.data, int(sequence), 0, microseconds, int(pending))

    def rest(self) -> bytes:
        """Return nothing: a reader with this scanner does not share its connection."""
        return b""

    # -- rows out --------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self._rows)

    def replies(self) -> list[bytes]:
        return [row.reply for row in self._rows]

    def sequences(self) -> list[int]:
        return [row.sequence for row in self._rows]

    def take(self, filters: tuple[str, ...] = ()) -> list[StoredMessage]:
        taken = [self._message(row) for row in self._rows]
        self.drop()
        if len(filters) > 1:
            return [one for one in taken if any(subjects.matches(each, one.subject) for each in filters)]
        return taken

    def _message(self, row: _Row) -> StoredMessage:
        found: dict[str, list[str]] = {}
        for line in row.header_lines.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            if colon:
                found.setdefault(self._text(name), []).append(self._text(value.strip()))
        return StoredMessage(
            stream=self._stream,
            subject=self._text(row.subject),
            sequence=row.sequence,
            time=datetime.fromtimestamp(row.microseconds // 1_000_000, UTC).replace(
                microsecond=row.microseconds % 1_000_000
            ),
            data=row.data,
            headers=found,
        )

    def _text(self, raw: bytes) -> str:
        return raw.decode("utf-8", self._invalid_text)

    def pieces(self, first: int, stop: int) -> Rows:
        some = self._rows[first:stop]
        return Rows(
            [row.subject for row in some],
            [row.header_lines for row in some],
            [row.data for row in some],
            [row.sequence for row in some],
        )

    def expect(self, delivery: int | None) -> None:
        self._next = delivery or 0

    def next_delivery(self) -> int:
        assert self._held is not None, "the scan has stopped at a row"
        return self._held.delivery

    def forget_order(self) -> None:
        self._next, self._last_wanted = 0, ANY_SEQUENCE

    def drop(self) -> None:
        self._rows.clear()
        self._bytes = 0


def _lines(block: bytes) -> bytes:
    """Return the header lines of a block: without its first line, its closing empty line, and an incomplete line."""
    lines = block.partition(b"\r\n")[2]
    stop = lines.rfind(b"\r\n") + 2 if b"\r\n" in lines else 0
    if stop == len(lines) and (lines == b"\r\n" or lines.endswith(b"\r\n\r\n")):
        stop -= 2
    return lines[:stop]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= DIGITS


def _microseconds(text: bytes) -> int | None:
    """Return the microseconds since 1970 of a time as direct get writes it; None for anything else."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000 + int((found[2] or b"")[:6].ljust(6, b"0"))
