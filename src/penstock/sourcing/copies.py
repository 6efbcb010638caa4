"""Builds the copy of a message in the destination of a bridge. Pure.

A copy is the message with one header more, `Penstock-Origin: <bridge> <stream> <sequence> <instance>`. The last copy
in the destination therefore says where its bridge must go on, and which running instance of the bridge wrote it.
Headers that told the origin's server how to store the message are left out, as nats-server leaves them out when it
sources: the destination would act on them a second time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.wire import headers
from penstock.wire.scanning import Rows

ORIGIN = "Penstock-Origin"
MESSAGE_ID = b"Nats-Msg-Id"
RENAMED_ID = b"Penstock-Origin-Msg-Id"
_START = rb"(?is)(?:\A|(?<=\r\n)|(?<=\0\n))"
"""A line begins behind CR LF: a publisher may write either of them alone into a value."""
_INSTRUCTIONS = rb"(?:Penstock-Origin|Nats-(?:Batch-|Expected-|Schedule)[^:\r\n]*|Nats-Rollup"
_DROPPED, _DROPPED_WITH_TTL = _INSTRUCTIONS + rb"):", _INSTRUCTIONS + rb"|Nats-TTL):"
_ID = re.compile(_START + rb"Nats-Msg-Id(?=:)")
_BETWEEN = b"\0\n"
"""Between header blocks: ends a line, so that the next block begins with one."""


class Mark(NamedTuple):
    """What the origin header of a copy says."""

    bridge: str
    stream: str
    sequence: int
    instance: str


def mark_of(values: dict[str, list[str]]) -> Mark | None:
    """The mark in the headers of a stored message; None when no bridge wrote it."""
    parts = values.get(ORIGIN, [""])[-1].split(" ")
    if len(parts) != 4 or not parts[2].isdecimal():
        return None
    return Mark(parts[0], parts[1], int(parts[2]), parts[3])


class Copier:
    """Makes the header lines of copies, for one instance of a bridge."""

    def __init__(self, bridge: str, stream: str, instance: str, *, keep_ttl: bool = False) -> None:
        self._head = headers.line(ORIGIN, f"{bridge} {stream} ")[:-2]
        self._tail = f" {instance}\r\n".encode()
        dropped = _DROPPED if keep_ttl else _DROPPED_WITH_TTL
        self._dropped_lines = re.compile(_START + dropped + rb".*?\r\n")
        self._is_dropped = re.compile(dropped, re.IGNORECASE).match
        self.rename_ids_until = 0
        """Origin sequence up to which message ids are renamed: the destination takes an id only once in its window,
        the origin may have had it twice further apart."""

    def lines(self, rows: Rows) -> list[bytes]:
        """The header lines of all copies."""
        head, tail, sequences = self._head, self._tail, rows.sequences
        own = self._kept(rows.header_lines) if any(rows.header_lines) else rows.header_lines
        if sequences[0] <= self.rename_ids_until:
            own = [self._renamed(one, sequence) for one, sequence in zip(own, sequences, strict=True)]
        return [b"%b%b%d%b" % (one, head, sequence, tail) for one, sequence in zip(own, sequences, strict=True)]

    def _kept(self, blocks: list[bytes]) -> list[bytes]:
        """The blocks without the lines that are dropped: one search through all of them, which is far cheaper."""
        joined = _BETWEEN.join(blocks)
        whole = joined.endswith(b"\r\n") and joined.count(b"\r\n" + _BETWEEN) == joined.count(b"\0") == len(blocks) - 1
        if whole:
            return self._dropped_lines.sub(b"", joined).split(_BETWEEN)
        return [self._kept_of(one) for one in blocks]

    def _kept_of(self, lines: bytes) -> bytes:
        kept = (line for line in _ended(lines).split(b"\r\n")[:-1] if not self._is_dropped(line))
        return b"".join(line + b"\r\n" for line in kept)

    def _renamed(self, lines: bytes, sequence: int) -> bytes:
        return _ID.sub(RENAMED_ID, lines) if sequence <= self.rename_ids_until else lines


def _ended(lines: bytes) -> bytes:
    return lines if not lines or lines.endswith(b"\r\n") else lines + b"\r\n"


class BatchPart(NamedTuple):
    """Messages for one atomic batch."""

    subjects: list[bytes]
    lines: list[bytes]
    data: list[bytes]
    last_sequence: int


class Backlog:
    """Copies that wait to be sent, in order, from however many chunks."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """A part has at most `most` messages, and about `most_bytes` bytes."""
        self._most = most
        self._most_bytes = most_bytes
        self._subjects: list[bytes] = []
        self._lines: list[bytes] = []
        self._data: list[bytes] = []
        self._sequences: list[int] = []

    def __len__(self) -> int:
        return len(self._data)

    def add(self, subjects: list[bytes], lines: list[bytes], rows: Rows) -> None:
        self._subjects += subjects
        self._lines += lines
        self._data += rows.data
        self._sequences += rows.sequences

    def take(self) -> BatchPart:
        """The oldest of them, as many as fit one batch."""
        stop = min(self._most, len(self))
        while stop > 1 and self._size(stop) > self._most_bytes:
            stop = (stop + 1) // 2
        part = BatchPart(self._subjects[:stop], self._lines[:stop], self._data[:stop], self._sequences[stop - 1])
        for one in (self._subjects, self._lines, self._data, self._sequences):
            del one[:stop]
        return part

    def _size(self, stop: int) -> int:
        return sum(map(len, self._data[:stop])) + sum(map(len, self._lines[:stop]))
