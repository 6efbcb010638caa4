"""Assigns partitions to workers, decides when to do so, and publishes the assignment in KV.

Every strategy moves as little as possible: a partition stays with its owner unless the owner is gone, may not have it,
or has more than its share. Free partitions go where the strategy prefers; a member below its share is then filled up.

    ConsistentHash   a ring; shares may differ by `slack`, so that little moves when members come and go
    RoundRobin       partitions counted: shares differ by at most one
    Weighted         partitions weighed: shares follow the partitions' weights and the members' capacities

A new assignment is published not at every change, but once changes have settled (`Windows`). It is written as one
atomic batch: a head with the version, and one key per worker. A leader that was replaced without noticing cannot
publish: the head has a revision that it does not know.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple, Protocol, Self

from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket, Entry, Write
from penstock.jetstream.model import Json
from penstock.publish.model import MAX_MESSAGES
from penstock.workers.partitions import Partition, parse_partitions, partition_json

log = logging.getLogger(__name__)

VNODES = 100
"""Points of a member on the ring."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be assigned partitions."""

    id: str
    capacity: int = 1
    """Relative capacity; only `Weighted` uses it."""
    labels: frozenset[str] = frozenset()

    def may_have(self, partition: Partition) -> bool:
        return not partition.labels or bool(partition.labels & self.labels)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Owners by partition."""

    owners: Mapping[str, str] = field(default_factory=dict)
    parked: tuple[str, ...] = ()
    """Partitions that no member may own: none has one of their labels."""

    def of(self, member: str) -> tuple[str, ...]:
        """Return the partitions of a member, in order."""
        return tuple(sorted(p for p, owner in self.owners.items() if owner == member))


class Strategy(Protocol):
    """The parameters of a strategy; `assign` does the rest."""

    @property
    def slack(self) -> float:
        """How far above or below its share a member may be, as a fraction of the share."""
        ...

    def weight(self, partition: Partition) -> int: ...

    def capacity(self, member: Candidate) -> int: ...

    def preferences(self, members: Sequence[Candidate]) -> Preferences: ...


class Preferences(Protocol):
    """Returns the order in which members are considered for a partition; None: the member with the least load."""

    def __call__(self, partition: Partition) -> Iterator[str] | None: ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Every member has the same number of partitions, or one more."""

    slack: float = 0.0

    def weight(self, partition: Partition) -> int:
        return 1

    def capacity(self, member: Candidate) -> int:
        return 1

    def preferences(self, members: Sequence[Candidate]) -> Preferences:
        return lambda _: None


@dataclass(frozen=True, slots=True)
class ConsistentHash(RoundRobin):
    """Consistent hashing with bounded load: a member far above its share passes partitions on along the ring."""

    slack: float = 0.15
    vnodes: int = VNODES

    def __post_init__(self) -> None:
        if not 0 <= self.slack <= 1 or self.vnodes < 1:
            raise ConfigError(f"consistent hashing needs a slack from 0 to 1 and vnodes, got {self}")

    def preferences(self, members: Sequence[Candidate]) -> Preferences:
        ring = sorted((hash_of(f"{m.id}#{n}"), m.id) for m in members for n in range(self.vnodes))
        points = [point for point, _ in ring]

        def along_the_ring(partition: Partition) -> Iterator[str]:
            start = bisect_left(points, hash_of(partition.id))
            seen: set[str] = set()
            for step in range(len(ring)):
                owner = ring[(start + step) % len(ring)][1]
                if owner not in seen:
                    seen.add(owner)
                    yield owner

        return along_the_ring


@dataclass(frozen=True, slots=True)
class Weighted(RoundRobin):
    """By weight and capacity: a member of capacity 2 carries twice the weight of one of capacity 1."""

    slack: float = 0.1

    def weight(self, partition: Partition) -> int:
        return partition.weight

    def capacity(self, member: Candidate) -> int:
        return member.capacity


STRATEGIES: Mapping[str, Strategy] = {
    "consistent-hash": ConsistentHash(),
    "round-robin": RoundRobin(),
    "weighted": Weighted(),
}


def assign(
    partitions: Collection[Partition],
    members: Collection[Candidate],
    previous: Mapping[str, str] | None = None,
    strategy: Strategy | None = None,
    pins: Mapping[str, str] | None = None,
) -> Assignment:
    """Return the next assignment: every partition once, to a member that may own it, with as few moves as balance
    allows.

    The same input gives the same result, whatever its order. Partitions with labels form pools with the members that
    share one of them; the pool with the fewest members is assigned first, so that unrestricted partitions fill the
    gaps. `pins`: owners that override the strategy, as long as they are present and allowed.
    """
    rules = strategy or ConsistentHash()
    everyone = sorted(members, key=lambda m: m.id)
    loads = {member.id: 0 for member in everyone}
    owners: dict[str, str] = {}
    parked: list[str] = []
    for eligible, pool in _pools(partitions, everyone):
        if eligible:
            owners |= _Pool(rules, pool, eligible, loads, pins or {}).placed(previous or {})
        else:
            parked += [partition.id for partition in pool]
    return Assignment(dict(sorted(owners.items())), tuple(sorted(parked)))


def hash_of(text: str) -> int:
    """Return a hash that is the same in every process, unlike Python's own."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _pools(
    partitions: Collection[Partition], members: Sequence[Candidate]
) -> list[tuple[list[Candidate], list[Partition]]]:
    def labels(partition: Partition) -> tuple[str, ...]:
        return tuple(sorted(partition.labels))

    found = []
    for _, group in groupby(sorted(partitions, key=lambda p: (labels(p), p.id)), labels):
        pool = list(group)
        found.append(([m for m in members if m.may_have(pool[0])], pool))
    return sorted(found, key=lambda pool: len(pool[0]))


class _Pool:
    """Partitions that the same members may own. `loads` holds the load of these members from other pools."""

    def __init__(
        self,
        rules: Strategy,
        partitions: list[Partition],
        members: list[Candidate],
        loads: dict[str, int],
        pins: Mapping[str, str],
    ) -> None:
        self._weights = {p.id: rules.weight(p) for p in partitions}
        self._capacities = {m.id: rules.capacity(m) for m in members}
        self._partitions = {p.id: p for p in partitions}
        self._prefer = rules.preferences(members)
        self._loads = loads
        self._held: dict[str, list[str]] = {m.id: [] for m in members}
        """This pool's partitions by member, the ones to keep longest first."""
        self._pins = {p: pins[p] for p in self._weights if pins.get(p) in self._held}
        total = sum(loads[m] for m in self._capacities) + sum(self._weights.values())
        level = total / sum(self._capacities.values())
        shares = {m: c * level for m, c in self._capacities.items()}
        # No member is idle while another has two, whatever the slack.
        self._high = {m: math.ceil(s * (1 + rules.slack)) if s > 1 else 1 for m, s in shares.items()}
        self._low = {m: max(math.floor(s * (1 - rules.slack)), min(math.floor(s), 1)) for m, s in shares.items()}

    def placed(self, previous: Mapping[str, str]) -> dict[str, str]:
        """Return the owners by partition, and add their loads."""
        kept = {p: m for p, m in {**previous, **self._pins}.items() if p in self._weights and m in self._held}
        for partition in sorted(kept, key=lambda p: (p not in self._pins, -self._weights[p], hash_of(p))):
            self._give(partition, kept[partition])
        free = [p for m in self._held for p in self._shed(m)]
        free += [p for p in self._weights if p not in kept]
        for partition in sorted(free, key=lambda p: (-self._weights[p], hash_of(p))):
            self._give(partition, self._choose(partition))
        self._fill()
        return {p: member for member, held in self._held.items() for p in held}

    def _give(self, partition: str, member: str) -> None:
        self._held[member].append(partition)
        self._loads[member] += self._weights[partition]

    def _take(self, member: str, partition: str) -> str:
        self._held[member].remove(partition)
        self._loads[member] -= self._weights[partition]
        return partition

    def _shed(self, member: str) -> Iterator[str]:
        """Yield the partitions above a member's share, the last to be kept first; one heavier than a share stays."""
        for partition in reversed(list(self._held[member])):
            excess = self._loads[member] - self._high[member]
            if excess <= 0 or len(self._held[member]) == 1 or partition in self._pins:
                return
            if self._weights[partition] <= excess or self._weights[partition] == 1:
                yield self._take(member, partition)

    def _choose(self, partition: str) -> str:
        weight, order = self._weights[partition], self._prefer(self._partitions[partition])
        if order is not None:
            fitting = (m for m in order if self._loads[m] + weight <= self._high[m])
            if (found := next(fitting, None)) is not None:
                return found
        return min(self._held, key=lambda m: (self._level(m, weight), m))

    def _level(self, member: str, more: int = 0) -> float:
        return (self._loads[member] + more) / self._capacities[member]

    def _fill(self) -> None:
        """Move partitions to members below their share, from the member with the most that stays above its own."""
        for member in sorted(self._held, key=lambda m: (self._level(m), m)):
            while self._loads[member] < self._low[member]:
                found = self._spare(member)
                if found is None:
                    break
                self._give(self._take(*found), member)

    def _spare(self, receiver: str) -> tuple[str, str] | None:
        """Return the partition to move and its owner: the move leaves the owner no emptier than the receiver gets."""
        for donor in sorted(self._held, key=lambda m: (-self._level(m), m)):
            for partition in [p for p in reversed(self._held[donor]) if p not in self._pins]:
                weight = self._weights[partition]
                stays_fuller = self._level(donor, -weight) >= self._level(receiver, weight)
                if stays_fuller or (weight == 1 and self._loads[donor] > self._low[donor]):
                    return donor, partition
        return None


class Situation(StrEnum):
    """Why there should be a new assignment."""

    NONE = "none"
    COLD_START = "cold start"
    PLANNED = "planned"
    EMERGENCY = "emergency"


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Seconds without a further change before a new assignment, by situation."""

    cold_start: float = 10.0
    planned: float = 3.0
    emergency: float = 0.0
    min_interval: float = 1.0
    """Minimum seconds between two assignments; an emergency does not wait for it."""
    patience: float = 3.0
    """Number of windows after which ongoing changes are acted on."""

    def __post_init__(self) -> None:
        if not 0 <= self.emergency <= self.planned <= self.cold_start or self.min_interval < 0 or self.patience < 1:
            raise ConfigError(f"windows must be ordered emergency <= planned <= cold_start, got {self}")

    def of(self, situation: Situation) -> float:
        return {Situation.COLD_START: self.cold_start, Situation.PLANNED: self.planned}.get(situation, self.emergency)


class Stabilizer:
    """Decides when a leader publishes a new assignment."""

    def __init__(self, windows: Windows, now: Callable[[], float] = time.monotonic) -> None:
        self._windows = windows
        self._now = now
        self._shape: Hashable = None
        self._since = self._changed = now()
        self._acted = float("-inf")
        self._waiting = False

    def due(self, situation: Situation, shape: Hashable) -> bool:
        """Whether to publish now; `shape` is what the next assignment depends on: members and partitions."""
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
        """Note that a new assignment was published."""
        self._acted, self._waiting = self._now(), False


UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ConfigError)
"""What parsing raises for values that no worker has written: whoever may write to the bucket can write anything."""
ASSIGNMENT = "assignment"
HEAD = f"{ASSIGNMENT}.head"
OF = f"{ASSIGNMENT}.of."
VERSION = 1


@dataclass(frozen=True, slots=True)
class Published:
    """The assignment that is in force."""

    version: int = 0
    """0: there is none."""
    members: tuple[str, ...] = ()
    partitions: Mapping[str, tuple[Partition, ...]] = field(default_factory=dict)
    """By worker id."""
    parked: tuple[str, ...] = ()
    stream: str = ""
    leader: str = ""
    """The id of the leader that published it."""
    paused: bool = False
    """An operator paused the group: nothing is handled."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """By partition: the worker that an operator pinned it to, as long as that worker is present."""
    revisions: Mapping[str, int] = field(default_factory=dict)
    """The revisions of all keys, needed to publish the next version."""

    @property
    def by_id(self) -> dict[str, Partition]:
        return {partition.id: partition for some in self.partitions.values() for partition in some}

    @property
    def owners(self) -> dict[str, str]:
        return {partition.id: worker for worker, some in self.partitions.items() for partition in some}

    @classmethod
    def parse(cls, entries: Mapping[str, Entry]) -> Self:
        revisions = {key: entry.revision for key, entry in entries.items()}
        try:
            head = entries[HEAD].value
            shares = {key.removeprefix(OF): entry.value for key, entry in entries.items() if key.startswith(OF)}
            partitions = {worker: parse_partitions(share["partitions"]) for worker, share in shares.items()}
            about = int(head["version"]), tuple(head["members"]), partitions, tuple(head["parked"])
            wishes = bool(head.get("paused")), dict(head.get("pins") or {})
            return cls(*about, str(head["stream"]), str(head["leader"]), *wishes, revisions)
        except UNREADABLE as exc:
            if HEAD in entries:
                log.warning("the assignment cannot be read (%r): there will be a new one", exc)
            return cls(revisions=revisions)


@dataclass(frozen=True, slots=True)
class Draft:
    """An assignment to be published."""

    assignment: Assignment
    partitions: Mapping[str, Partition]
    members: tuple[str, ...]
    stream: str
    leader: str


def writes(before: Published, draft: Draft) -> list[Write]:
    """Return the writes of the next version: the head, and the workers whose share has changed."""
    version = before.version + 1
    shares: dict[str, list[Partition]] = {worker: [] for worker in (*before.partitions, *draft.members)}
    for partition, owner in draft.assignment.owners.items():
        shares[owner].append(draft.partitions[partition])
    changed = {w: tuple(some) for w, some in sorted(shares.items()) if before.partitions.get(w) != tuple(some)}
    if len(changed) >= MAX_MESSAGES:
        raise ConfigError(f"{len(changed)} workers change at once, and {MAX_MESSAGES - 1} is what one batch can tell")
    made = [_write(before, OF + worker, version, _share(some)) for worker, some in changed.items()]
    head = {
        "members": list(draft.members),
        "parked": list(draft.assignment.parked),
        "stream": draft.stream,
        "leader": draft.leader,
        "paused": before.paused,
        "pins": dict(before.pins),
    }
    return [*made, _write(before, HEAD, version, head)]


def _share(partitions: tuple[Partition, ...]) -> Json:
    return {"partitions": [partition_json(partition) for partition in partitions]}


def _write(before: Published, key: str, version: int, value: Json) -> Write:
    return Write(key, {"v": VERSION, "version": version, **value}, before.revisions.get(key, 0))


class Share(NamedTuple):
    """One worker's share of an assignment."""

    version: int
    partitions: tuple[Partition, ...] = ()
    paused: bool = False


class Assignments:
    """Reads and writes the assignment of a group. Every version has a new head: while the head is unchanged, cached
    shares are valid."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._current = Published()
        self._shares: dict[str, tuple[int, tuple[Partition, ...]]] = {}
        """By worker id: the revision of the head, and the partitions at that revision."""

    async def current(self) -> Published:
        """Read the whole assignment."""
        head = await self._bucket.get(HEAD)
        if head is None or head.revision != self._current.revisions.get(HEAD):
            self._current = Published.parse(await self._bucket.entries(ASSIGNMENT))
        return self._current

    async def stream(self) -> str | None:
        """Return the stream of the assignment; None when there is no assignment."""
        head = await self._bucket.get(HEAD)
        return head.value.get("stream") if head else None

    async def wish(self, **wishes: Any) -> None:
        """Write an operator's settings into the current assignment; all later ones keep them. Raises `ConfigError` when
        there is no assignment, and `WrongRevision` when another was published meanwhile."""
        head = await self._bucket.get(HEAD)
        if head is None:
            raise ConfigError("nothing is assigned yet: wait until the group's workers have their first partitions")
        await self._bucket.put(HEAD, {**head.value, **wishes}, head.revision)

    async def share(self, worker_id: str) -> Share | None:
        """Return one worker's share; None when there is no assignment."""
        head = await self._bucket.get(HEAD)
        if head is None:
            return None
        seen, partitions = self._shares.get(worker_id, (0, ()))
        try:
            if seen != head.revision:
                own = await self._bucket.get(OF + worker_id)
                partitions = parse_partitions(own.value["partitions"]) if own else ()
                self._shares[worker_id] = head.revision, partitions
            return Share(int(head.value["version"]), partitions, bool(head.value.get("paused")))
        except UNREADABLE:  # the leader publishes another
            return None
