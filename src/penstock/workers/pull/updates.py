"""What becomes of an update of a worker's consumer, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.errors import PenstockError, Unavailable


class UpdateFailed(Unavailable):
    """A consumer could not be updated; it goes on with its last good filters, and the change is tried again."""


class Status(Enum):
    """What became of an update."""

    CREATED = "created"
    """At least one consumer had to be made."""
    UPDATED = "updated"
    SKIPPED = "skipped"
    """The filters are as they should be already."""


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The filters are now those of the partitions given, or of those given to a later call."""

    status: Status
    subjects: int
    """Filter subjects now."""
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()
    """Subjects that must be caught up with: what they had in the stream up to `cursor` will not be delivered.

    They were added to a consumer that existed, now or by an earlier update, and `all_caught_up` was not called since.
    """
    cursor: int = 0
    """Stream sequence: whatever lies above it is delivered, whichever consumer has the subject."""


SHOWN = 5
"""Subjects of a change that a line has room for."""


def difference(before: Set[str], after: Set[str]) -> str:
    """What an update changes, in a line. Pure."""
    signed = (
        [f"+{subject}" for subject in sorted(after - before)],
        [f"-{subject}" for subject in sorted(before - after)],
    )
    more = sum(max(len(some) - SHOWN, 0) for some in signed)
    shown = [one for some in signed for one in some[:SHOWN]]
    return " ".join([*shown, f"and {more} more"] if more else shown) or "no other subjects"


class Events(Protocol):
    """What a consumer tells about its updates; `consume.metrics` counts it."""

    def update_applied(self, seconds: float, subjects: int) -> None: ...
    def update_failed(self) -> None: ...
    def update_skipped(self) -> None: ...
    def duplicate_subjects(self, count: int) -> None: ...


class NoEvents:
    """Nobody listens."""

    def update_applied(self, seconds: float, subjects: int) -> None: ...
    def update_failed(self) -> None: ...
    def update_skipped(self) -> None: ...
    def duplicate_subjects(self, count: int) -> None: ...


Permission = Callable[[], bool]


def always() -> bool:
    """For a worker whose names nobody else can have."""
    return True


Trouble = Callable[[PenstockError, int], None]
"""Called after several updates have failed in a row, with the last error and their number."""
