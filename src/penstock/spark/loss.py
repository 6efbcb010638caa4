"""Detects messages that a query should have read and that are gone. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataLoss
from penstock.spark.offsets import Offset, span

MANY = 200_000
"""A stream with more holes than this counts as sparse: its holes are not listed, and not taken for a loss."""
ONE_GONE = ("message", "is gone before it was", "it")
MANY_GONE = ("messages", "are gone before they were", "them")


class MessagesGone(DataLoss):
    """Messages that a query should have read are no longer in the stream."""

    def __init__(self, stream: str, count: int, first: int, last: int, why: str) -> None:
        super().__init__(stream, count, first, last, why)
        self.stream = stream
        self.count = count
        self.first = first
        self.last = last
        self.why = why

    def __str__(self) -> str:
        messages, was, them = ONE_GONE if self.count == 1 else MANY_GONE
        return (
            f"{self.count} {messages} of stream {self.stream!r} {was} read ({self.why}, between sequence {self.first} "
            f"and {self.last}); to go on without {them} set failOnDataLoss=false"
        )


class HistoryChanged(DataLoss):
    """The stream was restored to an older state, and has grown beyond what the query read last."""

    def __init__(self, stream: str, sequence: int, time: str, before: str) -> None:
        super().__init__(stream, sequence, time, before)
        self.stream = stream
        self.sequence = sequence
        self.time = time
        self.before = before

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} was restored to an older state: message {self.sequence}, which the query read "
            f"last, was stored at {self.before}, and the one that has this sequence now at {self.time}; there are "
            "messages before it that were never read. Use a new checkpoint, or set failOnDataLoss=false to go on"
        )


class StreamReplaced(DataLoss):
    """The stream was deleted and recreated since the checkpoint was written."""

    def __init__(self, stream: str, created: str, before: str, sequence: int) -> None:
        super().__init__(stream, created, before, sequence)
        self.stream = stream
        self.created = created
        self.before = before
        self.sequence = sequence

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} was deleted and recreated: the checkpoint is at sequence {self.sequence} of the "
            f"stream created at {self.before}, this one was created at {self.created}; what the old one held behind it "
            "is gone. Use a new checkpoint, or set failOnDataLoss=false to read the new stream from its start"
        )


@dataclass(frozen=True, slots=True)
class Holes:
    """What a stream has lost at its old end and in between."""

    first: int
    """The first sequence that is still there; one behind the last when the stream is empty."""
    last: int
    deleted: Sequence[int] = ()
    """Missing sequences between them, in order."""
    complete: bool = True
    """Whether `deleted` has all of them; if not, the number of messages in a range is unknown."""

    def inside(self, first: int, last: int) -> int:
        """How many of the range were taken out of the middle of the stream."""
        return max(0, bisect_right(self.deleted, last) - bisect_left(self.deleted, first))

    def gone(self, first: int, last: int) -> int:
        """How many of the range are not there."""
        return max(0, min(self.first - 1, last) - first + 1) + self.inside(first, last)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a range held when it was planned. The task that reads it compares: it may be gone by then."""

    stream: str
    first: int
    last: int
    rows: int | None = None
    """How many messages; None: not known."""
    first_row: int = 0
    """The sequence of the first message; 0: not known."""
    old_end_may_go: bool = False
    """The read started with the oldest message, and the stream's limits remove it: its expiry is no loss."""
    inside_may_go: bool = False
    """Publishers remove messages anywhere in the stream: only messages below its first sequence count as missing."""

    def short(self, rows: int, first_row: int) -> bool:
        """Whether a task that read so many rows, the first with that sequence (0: none), missed some."""
        return (self.rows is not None and rows < self.rows) or (0 < self.first_row != first_row)

    def missed(self, rows: int, first_row: int, stream_first: int) -> MessagesGone | None:
        """The loss of a task that is `short`. `stream_first`: the stream's first sequence after the read."""
        expired = max(0, min(stream_first - 1, self.last) - self.first + 1)
        if self.old_end_may_go and (self.rows is None or rows + expired >= self.rows):
            return None
        if self.inside_may_go and stream_first <= self.first_row:
            return None
        count = max(1, self.rows - rows) if self.rows is not None else 1
        why = "removed between planning and reading"
        return MessagesGone(self.stream, count, self.first, self.last, why)


def is_sparse(config: dict[str, Any]) -> bool:
    """Whether this stream normally has missing messages, so that nothing missing is a loss.

    They are where new values replace old ones, and in a mirror that takes only some subjects: it keeps the sequences of
    its origin.
    """
    mirror = config.get("mirror") or {}
    partial = bool(mirror.get("filter_subject") or mirror.get("subject_transforms"))
    return partial or config.get("max_msgs_per_subject", -1) > 0


def removes_inside(config: dict[str, Any]) -> bool:
    """Whether publishers remove messages anywhere in the stream, so that only its old end tells of losses.

    They do by messages with a time to live of their own, and by roll-ups.
    """
    return bool(config.get("allow_rollup_hdrs") or config.get("allow_msg_ttl"))


def removes_oldest(config: dict[str, Any]) -> bool:
    """Whether the stream's limits remove its oldest messages."""
    full = config.get("max_msgs", -1) > 0 or config.get("max_bytes", -1) > 0
    return bool(config.get("max_age", 0) > 0) or (full and config.get("discard", "old") == "old")


def missing(start: Offset, end: Offset, holes: Holes) -> MessagesGone | None:
    """What is gone of the range between two offsets, beyond what was gone when the query began."""
    first, last = span(start, end)
    if start.open_start:
        first = max(first, holes.first)
    backlog = holes.gone(first, start.backlog_end) - start.backlog_missing if start.created == end.created else 0
    count = max(backlog, 0) + holes.gone(max(first, start.backlog_end + 1), last)
    why = "expired, purged or discarded" if holes.first > first else "deleted"
    return MessagesGone(end.stream, count, first, max(last, start.backlog_end), why) if count else None
