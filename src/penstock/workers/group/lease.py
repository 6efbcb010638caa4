"""Leases by one's own clock: no clock of another machine is ever compared with ours. Pure.

Whoever holds a key writes it again and again. The holder trusts its lease for `ttl` seconds from when it *asked* for
the last renewal that worked; everybody else lets the key be for `ttl` seconds from when they *saw* it change last.
The second always ends later than the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Clock = Callable[[], float]
clock: Clock = time.monotonic


class Lease:
    """What the holder knows. It is not valid before the first renewal."""

    def __init__(self, ttl: float, now: Clock = clock) -> None:
        self.ttl = ttl
        self._now = now
        self._until = float("-inf")

    @property
    def valid(self) -> bool:
        return self._now() < self._until

    def renewed(self, asked_at: float) -> None:
        """A renewal that was sent at that time has worked."""
        self._until = max(self._until, asked_at + self.ttl)

    def unanswered(self, asked_at: float) -> None:
        """No server is there at all: nobody else could take over either, so what was valid then lasts.

        A process that was stopped for longer than its lease asked before it was stopped, and gets nothing by this.
        """
        if asked_at < self._until:
            self._until = max(self._until, asked_at + self.ttl)

    def end(self) -> None:
        self._until = float("-inf")


class Sightings:
    """What everybody else knows: when each key was last seen to change."""

    def __init__(self, ttl: float, now: Clock = clock) -> None:
        self.ttl = ttl
        self._now = now
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, revisions: Mapping[str, int]) -> None:
        """These are the keys there are, with their revisions; others are forgotten."""
        now = self._now()
        self._seen = {
            key: seen if (seen := self._seen.get(key)) and seen[0] == revision else (revision, now)
            for key, revision in revisions.items()
        }

    def quiet(self, key: str) -> float:
        """Seconds since a key was first seen with its revision; 0 for one that was not."""
        return self._now() - self._seen[key][1] if key in self._seen else 0.0

    def seen(self) -> dict[str, tuple[int, float]]:
        """The keys with their revisions, and since when they have had them."""
        return dict(self._seen)

    def learn(self, seen: Mapping[str, tuple[int, float]]) -> None:
        """What somebody else in this process has seen, and we have not."""
        self._seen = {**seen, **self._seen}

    def silent(self, key: str) -> bool:
        """Whether a key has not changed for longer than a lease lasts."""
        return key in self._seen and self._now() - self._seen[key][1] > self.ttl

    def blink(self) -> None:
        """We could not look for a while: everybody gets a whole lease from now on."""
        now = self._now()
        self._seen = {key: (revision, now) for key, (revision, _) in self._seen.items()}
