"""Whether messages that a query should have read are gone, and how many. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataLoss
from penstock.spark.offsets import Offset, span

MANY = 200_000
"""With more holes than this a stream is sparse by nature: they are not listed, and not taken for a loss."""
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


class StreamReplaced(DataLoss):
    """The stream was deleted and made anew since the checkpoint was written."""

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

    def inside(self, first: int, last: int) -> int:
        """How many of the range were taken out of the middle of the stream."""
        return max(0, bisect_right(self.deleted, last) - bisect_left(self.deleted, first))

    def gone(self, first: int, last: int) -> int:
        """How many of the range are not there."""
        return max(0, min(self.first - 1, last) - first + 1) + self.inside(first, last)


def is_sparse(config: dict[str, Any]) -> bool:
    """Whether messages vanish from this stream as a matter of course, so that a hole says nothing.

    They do where new values replace old ones, and where messages have a time to live of their own.
    """
    return (
        config.get("max_msgs_per_subject", -1) > 0
        or bool(config.get("allow_rollup_hdrs"))
        or bool(config.get("allow_msg_ttl"))
    )


def missing(start: Offset, end: Offset, holes: Holes) -> MessagesGone | None:
    """What is gone of the range between two offsets, beyond what was gone when the query began."""
    first, last = span(start, end)
    if start.open_start:
        first = max(first, holes.first)
    backlog = holes.gone(first, start.backlog_end) - start.backlog_missing if start.created == end.created else 0
    count = max(backlog, 0) + holes.gone(max(first, start.backlog_end + 1), last)
    why = "expired, purged or discarded" if holes.first > first else "deleted"
    return MessagesGone(end.stream, count, first, max(last, start.backlog_end), why) if count else None
