"""Which lane a subject belongs to. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock import subjects
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.partitions import Partition

REMEMBERED = 100_000
"""Subjects below wildcards that are remembered with their lane."""


class Routes:
    """Finds the lane of a message by its subject."""

    def __init__(self) -> None:
        self.literal: dict[str, Lane] = {}
        """Lanes of subjects without wildcards: most are found here."""
        self._wild: list[tuple[str, Lane]] = []
        self._found: dict[str, Lane | None] = {}

    def add(self, partition: Partition, lane: Lane) -> None:
        """Messages of the partition's subjects go to this lane."""
        for subject in partition.subjects:
            if subjects.is_literal(subject):
                self.literal[subject] = lane
            else:
                self._wild.append((subject, lane))
        self._found.clear()

    def remove(self, partition: Partition) -> None:
        """Its subjects lead nowhere."""
        for subject in partition.subjects:
            self.literal.pop(subject, None)
        self._wild = [(filter_, lane) for filter_, lane in self._wild if filter_ not in partition.subjects]
        self._found.clear()

    def lane(self, subject: str) -> Lane | None:
        """The lane of a subject; None when it belongs to nobody here."""
        if (lane := self.literal.get(subject)) or not self._wild:
            return lane
        if subject not in self._found:
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            self._found[subject] = _first(self._wild, subject)
        return self._found[subject]


def _first(wild: Iterable[tuple[str, Lane]], subject: str) -> Lane | None:
    return next((lane for filter_, lane in wild if subjects.matches(filter_, subject)), None)
