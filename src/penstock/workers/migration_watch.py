"""A migration under watch: parity as metrics, and a way back by rule when the group does badly for long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.errors import ConfigError
from penstock.workers.migration import Migration, Parity

LABELS = ("group", "partition")
METRICS = {
    "parti_migration_unprocessed": "Messages that the old consumer has not acknowledged.",
    "parti_migration_in_flight": "Messages that the old consumer has out.",
    "parti_migration_counted": "Messages behind the old ack floor that the group would begin with.",
    "parti_migration_missing": "1 when the group would see less than is left to do.",
    "parti_migration_left_to_group": "During an overlap: messages that the group has not passed.",
}
"""By partition."""
TOTALS = {
    "parti_migration_lag": "Messages that the group has before it.",
    "parti_migration_redelivered_ratio": "Share of what the group has out that is not out for the first time.",
    "parti_migration_breaches": "Windows in a row in which the rule was broken.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When a migration is to be rolled back."""

    max_lag: int
    """Messages that the group may have before it."""
    max_redelivered: float = 0.03
    windows: int = 3
    """Looks in a row that must be bad."""

    def __post_init__(self) -> None:
        if self.windows < 1 or self.max_lag < 0 or not 0 <= self.max_redelivered <= 1:
            raise ConfigError(f"a rule needs windows, a lag from 0 on and a ratio from 0 to 1, got {self}")

    def broken_by(self, lag: int, redelivered: float) -> str:
        """Why this is too bad; empty when it is not. Pure."""
        if lag > self.max_lag:
            return f"the group is {lag} messages behind, and {self.max_lag} is the most"
        if redelivered > self.max_redelivered:
            return f"{redelivered:.1%} of the messages are out again, and {self.max_redelivered:.1%} is the most"
        return ""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look."""

    lag: int
    redelivered: float
    breaches: int
    why: str
    """What is too bad now; empty when nothing is."""
    parity: tuple[Parity, ...] = ()


class Watch(Collector):
    """Looks at a migration, once a window, and counts the bad ones in a row."""

    def __init__(self, migration: Migration, group: str, rule: Rule) -> None:
        self._migration = migration
        self._group = group
        self._rule = rule
        self.last = Reading(0, 0.0, 0, "")

    async def look(self) -> Reading:
        """How both sides stand now."""
        parity = await self._migration.compare()
        lag, redelivered = await self._migration.load()
        why = self._rule.broken_by(lag, redelivered)
        self.last = Reading(lag, redelivered, self.last.breaches + 1 if why else 0, why, tuple(parity))
        return self.last

    @property
    def is_over(self) -> bool:
        """Whether the rule says to go back."""
        return self.last.breaches >= self._rule.windows

    def collect(self) -> Iterator[Metric]:
        now = self.last
        for name, told in METRICS.items():
            yield _gauge(name, told, [(self._group, one.partition) for one in now.parity], _values(name, now.parity))
        for (name, told), value in zip(TOTALS.items(), (now.lag, now.redelivered, now.breaches), strict=True):
            yield _gauge(name, told, [(self._group,)], [value])


def _values(name: str, parity: Sequence[Parity]) -> list[float]:
    return [float(getattr(one, name.removeprefix("parti_migration_")) or 0) for one in parity]


def _gauge(name: str, told: str, labels: Sequence[tuple[str, ...]], values: Sequence[float]) -> Metric:
    made = GaugeMetricFamily(name, told, labels=LABELS[: len(labels[0])] if labels else LABELS)
    for one, value in zip(labels, values, strict=True):
        made.add_metric(one, value)
    return made
