"""When to make a new assignment: not with every change, but once things have settled. Pure.

    cold start   nobody has been assigned anything yet: wait until the workers that start together are there
    planned      workers join or leave, partitions change: wait for the rest of the change
    emergency    a worker is dead: its partitions are not worked on, so do not wait

A change that goes on and on is not waited for longer than `patience` windows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ConfigError
from penstock.workers.group.lease import Clock, clock


class Situation(StrEnum):
    """Why there should be a new assignment."""

    NONE = "none"
    COLD_START = "cold start"
    PLANNED = "planned"
    EMERGENCY = "emergency"


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Seconds without a further change, by situation."""

    cold_start: float = 10.0
    planned: float = 3.0
    emergency: float = 0.0
    min_interval: float = 1.0
    """Between two assignments, at least; an emergency does not wait for it."""
    patience: float = 3.0
    """Windows after which a change that does not end is acted on."""

    def __post_init__(self) -> None:
        if not 0 <= self.emergency <= self.planned <= self.cold_start or self.min_interval < 0 or self.patience < 1:
            raise ConfigError(f"windows must be ordered emergency <= planned <= cold_start, got {self}")

    def of(self, situation: Situation) -> float:
        match situation:
            case Situation.COLD_START:
                return self.cold_start
            case Situation.PLANNED:
                return self.planned
            case _:
                return self.emergency


class Stabilizer:
    """One leader's patience."""

    def __init__(self, windows: Windows, now: Clock = clock) -> None:
        self._windows = windows
        self._now = now
        self._shape: Hashable = None
        self._since = self._changed = now()
        self._acted = float("-inf")
        self._waiting = False

    def due(self, situation: Situation, shape: Hashable) -> bool:
        """Whether to act now; `shape` is what the next assignment depends on: members and partitions."""
        if situation is Situation.NONE:
            self._waiting = False
            return False
        now = self._now()
        if not self._waiting:
            self._waiting, self._since, self._changed = True, now, now
        elif shape != self._shape:
            self._changed = now
        self._shape = shape
        window = self._windows.of(situation)
        calm = now - self._changed >= window or now - self._since >= window * self._windows.patience
        rested = situation is Situation.EMERGENCY or now - self._acted >= self._windows.min_interval
        return calm and rested

    def acted(self) -> None:
        """A new assignment was published."""
        self._acted, self._waiting = self._now(), False
