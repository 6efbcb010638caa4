"""A migration under watch: parity as metrics, and a way back by rule when the group does badly for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.metrics.families import Family, Numbers, Sample
from penstock.workers.group.migration import Migration, Parity

PARTITION = ("group", "partition")
METRICS = {
    "parti_migration_unprocessed": Family("gauge", "Messages that the old consumer has not acknowledged.", PARTITION),
    "parti_migration_in_flight": Family("gauge", "Messages that the old consumer has out.", PARTITION),
    "parti_migration_counted": Family(
        "gauge", "Messages behind the old ack floor that the group would begin with.", PARTITION
    ),
    "parti_migration_missing": Family("gauge", "1 when the group would see less than is left to do.", PARTITION),
    "parti_migration_left_to_group": Family(
        "gauge", "During an overlap: messages that the group has not passed.", PARTITION
    ),
    "parti_migration_lag": Family("gauge", "Messages that the group has before it.", ("group",)),
    "parti_migration_redelivered_ratio": Family(
        "gauge", "Share of what the group has out that is not out for the first time.", ("group",)
    ),
    "parti_migration_breaches": Family("gauge", "Windows in a row in which the rule was broken.", ("group",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackRule:
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
class MigrationReading:
    """One look."""

    lag: int
    redelivered: float
    breaches: int
    why: str
    """What is too bad now; empty when nothing is."""
    parity: tuple[Parity, ...] = ()


class MigrationWatch:
    """Looks at a migration, once a window, and counts the bad ones in a row."""

    def __init__(self, migration: Migration, group: str, rule: RollbackRule) -> None:
        self._migration = migration
        self._group = group
        self._rule = rule
        self.last = MigrationReading(0, 0.0, 0, "")

    async def look(self) -> MigrationReading:
        """How both sides stand now."""
        parity = await self._migration.compare()
        lag, redelivered = await self._migration.load()
        why = self._rule.broken_by(lag, redelivered)
        self.last = MigrationReading(lag, redelivered, self.last.breaches + 1 if why else 0, why, tuple(parity))
        return self.last

    @property
    def is_over(self) -> bool:
        """Whether the rule says to go back."""
        return self.last.breaches >= self._rule.windows

    def numbers(self) -> Numbers:
        """The last look, for Prometheus."""
        return Numbers(METRICS, self._samples)

    def _samples(self) -> Iterator[Sample]:
        now = self.last
        for one in now.parity:
            for name in [name for name, family in METRICS.items() if family.labels == PARTITION]:
                value = getattr(one, name.removeprefix("parti_migration_"))
                yield Sample(name, (self._group, one.partition), float(value or 0))
        yield Sample("parti_migration_lag", (self._group,), now.lag)
        yield Sample("parti_migration_redelivered_ratio", (self._group,), now.redelivered)
        yield Sample("parti_migration_breaches", (self._group,), now.breaches)
