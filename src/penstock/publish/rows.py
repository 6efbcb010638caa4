"""Encodes the messages of a fast ingest as rows and frames. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from penstock.errors import ConfigError
from penstock.publish import replies
from penstock.publish.batch import EXPECTED_STREAM, MESSAGE_ID, check_message_id, is_increment, literal_subject
from penstock.wire import headers as header_block

MAX_LEADS = 10_000
_DATA_TYPES: set[type] = {bytes, bytearray}
_ID_LINE = f"\r\n{MESSAGE_ID}: ".encode()
_EXPECTED_STREAM_LINE = f"\r\n{EXPECTED_STREAM}: ".encode()

Row = tuple[bytes, bytes, bytes]
"""A message as it waits to be sent: subject and a space, header block, data. The reply subject is another one in every
segment. A plain tuple, since millions of them are made."""

Publication = (
    tuple[str, bytes]
    | tuple[str, bytes, header_block.Headers | None]
    | tuple[str, bytes, header_block.Headers | None, str | None]
)
"""What bulk calls take: subject and data, then optionally headers and a message id."""


def subject_of(row: Row) -> str:
    return row[0][:-1].decode()


def has_id(row: Row) -> bool:
    """Whether the message has an id, so that the server can detect a duplicate."""
    return _ID_LINE in row[1]


class RowEncoder:
    """Makes rows: subjects are checked once each, sizes always."""

    def __init__(self, max_payload: int) -> None:
        self.max_payload = max_payload
        self._leads = _Leads()

    def one(
        self, subject: str, data: bytes, headers: header_block.Headers | None = None, message_id: str | None = None
    ) -> Row:
        block = b"" if headers is None and message_id is None else headers_of(headers, message_id)
        row = (self._leads[subject], block, data)
        if type(data) is not bytes or len(data) + len(block) > self.max_payload:
            self._check([row])
        return row

    def of_subject(self, subject: str, chunk: Iterable[bytes]) -> list[Row]:
        """Rows of one subject without headers: no Python code runs for the single message."""
        rows = list(zip(repeat(self._leads[subject]), repeat(b""), chunk))  # two of them never end
        self._check(rows)
        return rows

    def many(self, chunk: Sequence[Publication]) -> list[Row]:
        leads = self._leads
        try:  # the usual case first: subject and data only
            rows = [(leads[subject], b"", data) for subject, data in chunk]  # type: ignore[misc] # else it raises
        except ValueError:
            rows = [self._row(*message) for message in chunk]
        self._check(rows)
        return rows

    def prepared(self, messages: Iterable[tuple[str, bytes, bytes]]) -> list[Row]:
        """Rows from subject, header block and data."""
        leads = self._leads
        rows = [(leads[subject], block, data) for subject, block, data in messages]
        self._check(rows)
        return rows

    def _row(self, subject: str, data: bytes, headers: Any = None, message_id: str | None = None) -> Row:
        return self._leads[subject], headers_of(headers, message_id), data

    def _check(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        _, blocks, data = zip(*rows, strict=True)
        if wrong := set(map(type, data)) - _DATA_TYPES:
            raise ConfigError(f"data must be bytes, not {wrong.pop().__name__}: encode it first")
        if max(map(len, blocks)) + max(map(len, data)) <= self.max_payload:
            return
        largest = max(len(block) + len(body) for _, block, body in rows)
        if largest > self.max_payload:
            raise ConfigError(
                f"a message of {largest} bytes is larger than this server takes ({self.max_payload} bytes); "
                "make it smaller, or raise the server's max_payload"
            )


class _Leads(dict[str, bytes]):
    """The start of each subject's frames: checked once a subject, and forgotten when there are very many."""

    def __missing__(self, subject: str) -> bytes:
        if len(self) >= MAX_LEADS:
            self.clear()
        lead = literal_subject(subject) + b" "
        if type(subject) is str:  # a `LetterSubject` must not permit later plain strings
            self[subject] = lead
        return lead


def headers_of(headers: header_block.Headers | None, message_id: str | None) -> bytes:
    """The header block of a message, with its id; empty when there is neither."""
    if not headers and message_id is None:
        return b""
    lines = header_block.lines(headers)
    if message_id is not None:
        check_message_id(message_id)
        lines += header_block.line(MESSAGE_ID, message_id)
    return header_block.block(lines)


def bound_to(stream: str, row: Row, max_payload: int) -> Row:
    """The row with a header that makes every other stream refuse it; as it is when the header does not fit."""
    lead, block, data = row
    if _EXPECTED_STREAM_LINE in block or is_increment(block):  # the server refuses it beside an increment
        return row
    line = header_block.line(EXPECTED_STREAM, stream)
    bound = block[:-2] + line + b"\r\n" if block else header_block.block(line)
    return (lead, bound, data) if len(bound) + len(data) <= max_payload else row


def frames(rows: Sequence[Row], prefix: bytes, first: int, operation: int = replies.APPEND) -> bytes:
    """The rows as `PUB` and `HPUB` frames; `prefix` is the batch's reply subject up to the sequence.

    This runs once a message and sets the speed of a fast ingest: one format each, no call, no copy in between.
    """
    return b"".join(
        [
            b"HPUB %b%b%d.%d.$FI %d %d\r\n%b%b\r\n"
            % (lead, prefix, seq, operation, len(headers), len(headers) + len(data), headers, data)
            if headers
            else b"PUB %b%b%d.%d.$FI %d\r\n%b\r\n" % (lead, prefix, seq, operation, len(data), data)
            for seq, (lead, headers, data) in enumerate(rows, first)
        ]
    )


def control(lead: bytes, prefix: bytes, seq: int, operation: int) -> bytes:
    """A message of the batch that is not stored: a ping, or the end."""
    return b"PUB %b%b%d.%d.$FI 0\r\n\r\n" % (lead, prefix, seq, operation)
