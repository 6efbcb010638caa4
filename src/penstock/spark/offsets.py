"""Offsets as Spark logs them, and how the range between two of them is split into tasks. Pure.

An offset is the last sequence handed out, with what identifies the stream it belongs to. It also says into how many
tasks the range that ends there is split: so a re-run after a crash, on whatever cluster, has the same tasks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import ConfigError

VERSION = 1
ROWS_PER_TASK, START_BYTES = 100_000, 16 * 1024 * 1024
"""A task with less than either is not worth starting. A row can be a pack, so bytes count too."""
BYTES_PER_TASK = 128 * 1024 * 1024
"""A task of more bytes than this would run for long, and lose much when it fails."""


class CheckpointMismatch(ConfigError):
    """A checkpoint does not fit the query that is started from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """Everything up to `sequence` was handed out."""

    stream: str
    created: str
    """When the stream was created, in the server's words: another time is another stream of the same name."""
    sequence: int
    tasks: int = 1
    """Into how many tasks the range that ends here is split."""
    backlog_end: int = 0
    """The stream's last sequence when the query began."""
    backlog_missing: int = 0
    """Sequences behind `sequence`, up to `backlog_end`, that were already gone when the query began."""
    stored_at: str = ""
    """When the message at `sequence` was stored; empty when it is not known. Another time is another message."""
    owner: str = ""
    """The query, as its durable names it; empty without a durable, and in offsets of before there were owners."""
    open_start: bool = False
    """The query started here because it was the oldest message: if that expires before it is read, it is no loss."""

    def json(self) -> dict[str, Any]:
        """What Spark logs. Only numbers, strings and booleans."""
        return {
            "version": VERSION,
            "stream": self.stream,
            "created": self.created,
            "sequence": self.sequence,
            "tasks": self.tasks,
            "backlogEnd": self.backlog_end,
            "backlogMissing": self.backlog_missing,
            "storedAt": self.stored_at,
            "owner": self.owner,
            "openStart": self.open_start,
        }

    @classmethod
    def parse(cls, raw: dict[str, Any], stream: str) -> Self:
        """An offset of this stream. Raises `CheckpointMismatch` for another stream's, or a newer version's."""
        version = raw.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise CheckpointMismatch(
                f"the checkpoint has offsets of version {version}, this Penstock knows up to {VERSION}; "
                "use the version that wrote them, or a new checkpoint"
            )
        if "streams" in raw:
            raise CheckpointMismatch(
                f"the checkpoint belongs to a query over several streams ({', '.join(raw['streams'])}), this one reads "
                f"{stream!r}; give each query a checkpointLocation of its own"
            )
        if raw.get("stream") != stream:
            raise CheckpointMismatch(
                f"the checkpoint belongs to stream {raw.get('stream')!r}, the query reads {stream!r}; "
                "give each query a checkpointLocation of its own"
            )
        return cls(
            stream=stream,
            created=str(raw["created"]),
            sequence=int(raw["sequence"]),
            tasks=int(raw.get("tasks", 1)),
            backlog_end=int(raw.get("backlogEnd", 0)),
            backlog_missing=int(raw.get("backlogMissing", 0)),
            stored_at=str(raw.get("storedAt", "")),
            owner=str(raw.get("owner", "")),
            open_start=bool(raw.get("openStart", False)),
        )


def span(start: Offset, end: Offset) -> tuple[int, int]:
    """First and last sequence between two offsets. After a stream was recreated, from its beginning."""
    return (start.sequence if start.created == end.created else 0) + 1, end.sequence


def split(first: int, last: int, tasks: int) -> list[tuple[int, int]]:
    """The range in that many parts of nearly equal length, in order; fewer when it is shorter than that."""
    count = last - first + 1
    parts = max(min(tasks, count), 0)
    bounds = [first + count * part // parts for part in range(parts + 1)] if parts else []
    return [(low, high - 1) for low, high in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """How many tasks a user wants, as far as that is said."""

    exactly: int | None = None
    at_least: int = 1
    rows_each: int | None = None
    """Most rows of one task."""


def task_count(rows: int, size: float, limits: TaskLimits, cores: int) -> int:
    """Into how many tasks to split a range of that many rows and bytes: enough work for each, and not too much.

    Neither many rows nor a few bytes are worth more tasks than there are cores; many bytes are, wherever executors are.
    """
    if limits.exactly:
        return limits.exactly
    worth = min(math.ceil(max(rows / ROWS_PER_TASK, size / START_BYTES)), cores)
    needed = math.ceil(rows / limits.rows_each) if limits.rows_each else 1
    return max(1, limits.at_least, worth, math.ceil(size / BYTES_PER_TASK), needed)
