"""How a group stands, seen from outside: workers, partitions, owners, lag, and what is on the move.

Whoever looks again and again (`GroupWatch`) reads only what has changed: a group of 10,000 partitions has as many keys,
of which its workers write a few every second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.consume.metrics import Lag
from penstock.errors import ConfigError, StreamNotFound
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import ConsumerInfo
from penstock.publish.control import Control
from penstock.workers.group import assignment, identity, migration
from penstock.workers.group import claims as claim_store
from penstock.workers.group.assignment import Published, Windows
from penstock.workers.group.claims import Claim, claims_in, progress_key, records_in
from penstock.workers.group.identity import ACTIVE, WorkerRecord, workers_in
from penstock.workers.group.leader import PROBLEMS, problems_in
from penstock.workers.options import bucket_name
from penstock.workers.partitions import Partition
from penstock.workers.pull import stored
from penstock.workers.pull.consumer import group_consumers

FAMILIES = (identity.WORKERS, claim_store.CLAIMS, assignment.ASSIGNMENT, "leader", "migration")


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """One worker."""

    id: str
    state: str
    """`active`, `leaving` or `retired`."""
    mode: str
    host: str
    pid: int
    labels: tuple[str, ...]
    leads: bool
    partitions: int
    """That it owns."""
    applied: int
    """Version of the assignment it works by."""
    lag: int | None
    """Messages that its consumers have before them or out; None when it has no consumer."""
    redelivered: int
    failures: int = 0
    """Updates of its consumer that failed in a row."""
    troubles: tuple[str, ...] = ()
    """What somebody should look at."""


@dataclass(frozen=True, slots=True)
class PartitionOverview:
    """One partition."""

    id: str
    subjects: tuple[str, ...]
    assigned: str | None
    """Whose it should be; None when nobody may have it."""
    owner: str | None
    handoff: int
    token: int | None
    """Of its owner."""
    move: str | None
    """What it waits for, while it changes hands."""


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A group at one moment."""

    group: str
    stream: str
    version: int
    leader: str | None
    workers: tuple[WorkerOverview, ...]
    partitions: tuple[PartitionOverview, ...]
    waits_for: str | None = None
    """What must happen before anything is assigned; None when it is."""
    problems: tuple[str, ...] = ()
    """What the leader finds wrong with the partitions."""
    paused: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    """Partitions that `group move` put where they are."""

    @property
    def moves(self) -> tuple[PartitionOverview, ...]:
        """Partitions that are not settled where they should be."""
        return tuple(partition for partition in self.partitions if partition.move)


async def group_exists(control: Control, group: str) -> bool:
    """Whether there is a group of that name. Other buckets may have names like those of groups."""
    bucket = Bucket(control, bucket_name(group))
    return await bucket.exists() and bool(await bucket.entries(*FAMILIES, "partitions"))


async def look(control: Control, group: str) -> GroupOverview:
    """Read all of a group. Raises `ConfigError` when there is none of that name."""
    bucket = Bucket(control, bucket_name(group))
    if not await bucket.exists():
        raise ConfigError(f"there is no group {group!r} on this server: no worker of that name has ever joined")
    entries = await bucket.entries(*FAMILIES)
    stream = Published.parse(_family(entries, assignment.ASSIGNMENT)).stream
    return overview(group, entries, await group_consumers(control.jetstream, stream, group) if stream else {})


@dataclass(frozen=True, slots=True)
class Ownership:
    """What is assigned and what is claimed: most of a large group, and what changes least."""

    published: Published
    claims: Mapping[str, Claim]
    partitions: tuple[PartitionOverview, ...]
    owned: Mapping[str | None, int]
    """Partitions by owner."""

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Self:
        published, claims = Published.parse(_family(entries, assignment.ASSIGNMENT)), claims_in(entries)
        owned = Counter(claim.owner for claim in claims.values())
        return cls(published, claims, _partitions(published, claims), owned)


def overview(
    group: str,
    entries: Mapping[str, Entry],
    consumers: Mapping[str, Collection[ConsumerInfo]],
    ownership: Ownership | None = None,
) -> GroupOverview:
    """The group that these keys and consumers, by worker id, make up. Pure.

    `ownership` of the same entries, where it is known already.
    """
    known = ownership or Ownership.of(entries)
    published = known.published
    lease = entries.get(identity.LEADER_KEY)
    leader = str(lease.value["worker"]) if lease else None
    workers = sorted(workers_in(entries).items(), key=lambda item: _natural(item[0]))
    return GroupOverview(
        group=group,
        stream=published.stream,
        version=published.version,
        leader=leader,
        workers=tuple(_worker(w, r, leader, known.owned.get(w, 0), consumers.get(w, ())) for w, r in workers),
        partitions=known.partitions,
        waits_for=_waits_for(group, published.version, dict(workers), leader, entries.get(migration.MIGRATION_KEY)),
        problems=problems_in(entries.get(PROBLEMS)),
        paused=published.paused,
        pins=published.pins,
    )


def _waits_for(
    group: str, version: int, workers: Mapping[str, WorkerRecord], leader: str | None, migrating: Entry | None
) -> str | None:
    """What must happen before the group has an assignment. Pure."""
    phase = str(migrating.value["phase"]) if migrating else None
    if phase == migration.LEGACY:
        return f"`penstock group migrate {group} shadow`: its migration was rolled back"
    if phase not in migration.AT_WORK:
        return f"`penstock group migrate {group} switch`, or overlap: its migration is at {phase!r}"
    if version:
        return None
    if not any(record.state == ACTIVE for record in workers.values()):
        return "its first worker: start one with `penstock work`"
    if leader is None:
        return "its workers to choose a leader, which takes a few seconds"
    return (
        f"its first assignment: {leader} makes it once workers and partitions have stayed the same for a while "
        f"({Windows().cold_start:g} s, unless its workers were told otherwise) and it knows what the partitions are"
    )


def _worker(
    worker_id: str, record: WorkerRecord, leader: str | None, owned: int, consumers: Collection[ConsumerInfo]
) -> WorkerOverview:
    return WorkerOverview(
        id=worker_id,
        state=record.state,
        mode=record.mode,
        host=record.host,
        pid=record.pid,
        labels=tuple(sorted(record.labels)),
        leads=worker_id == leader,
        partitions=owned,
        applied=record.applied,
        lag=sum(consumer.unprocessed for consumer in consumers) if consumers else None,
        redelivered=sum(consumer.redelivered for consumer in consumers),
        failures=record.failures,
        troubles=record.troubles,
    )


def _partitions(published: Published, claims: Mapping[str, Claim]) -> tuple[PartitionOverview, ...]:
    owners = published.owners
    subjects = {p.id: p.subjects for some in published.partitions.values() for p in some}
    names = sorted(owners.keys() | set(published.parked), key=_natural)
    return tuple(_partition(name, subjects.get(name, ()), owners.get(name), claims.get(name)) for name in names)


def _partition(name: str, subjects: tuple[str, ...], assigned: str | None, claim: Claim | None) -> PartitionOverview:
    owner = claim.owner if claim else None
    return PartitionOverview(
        id=name,
        subjects=subjects,
        assigned=assigned,
        owner=owner,
        handoff=claim.handoff if claim else 0,
        token=claim.token if claim and owner else None,
        move=movement(assigned, claim),
    )


def movement(assigned: str | None, claim: Claim | None) -> str | None:
    """What a partition waits for; None when it is where it should be. Pure."""
    if assigned is None:
        return "parked: no worker has its labels"
    if claim is None or claim.owner is None:
        return f"free: waits for {assigned} to take it"
    if claim.owner != assigned:
        return f"{claim.owner} hands over to {assigned}"
    return None if claim.settled else f"{assigned} catches up from {claim.handoff}"


def _family(entries: Mapping[str, Entry], family: str) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if key.startswith(f"{family}.")}


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """`worker-2` before `worker-10`."""
    parts = name.replace(".", "-").split("-")
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


READ_ALL_EVERY = 300.0
"""Seconds after which all keys are read again: some may have expired without a trace."""
MEASURED = 100
"""Partitions whose lag is asked for in one look; the others follow in turns."""


class GroupWatch:
    """One group."""

    def __init__(self, control: Control, group: str) -> None:
        self._control = control
        self._group = group
        self._bucket = Bucket(control, bucket_name(group))
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._created = ""
        self._read_all = 0.0
        self._ownership: Ownership | None = None
        self._consumers: Mapping[str, Collection[ConsumerInfo]] = {}
        self._lags: dict[str, Lag] = {}
        """Of partitions, the one measured longest ago first."""

    async def look(self) -> GroupOverview:
        """The group now. Raises `ConfigError` when there is none of that name."""
        try:
            info = await self._control.jetstream.stream_info(self._bucket.stream)
        except StreamNotFound as exc:
            raise ConfigError(f"there is no group {self._group!r} on this server") from exc
        created, now = str(info.raw.get("created", "")), time.monotonic()
        if created != self._created or now - self._read_all > READ_ALL_EVERY:
            self._entries, self._revision, self._created, self._read_all = {}, 0, created, now
            self._ownership = None
        if info.state.last_seq > self._revision:
            self._apply(*await self._bucket.since(self._revision))
        if self._ownership is None:
            self._ownership = Ownership.of(self._entries)
        stream = self._ownership.published.stream
        self._consumers = await group_consumers(self._control.jetstream, stream, self._group) if stream else {}
        return overview(self._group, self._entries, self._consumers, self._ownership)

    def _apply(self, changed: Mapping[str, Entry | None], revision: int) -> None:
        self._revision = revision
        for key, entry in changed.items():
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = entry
            if key.startswith((f"{claim_store.CLAIMS}.", f"{assignment.ASSIGNMENT}.")):
                self._ownership = None

    async def lags(self, group: GroupOverview) -> dict[str, Lag]:
        """How far partitions are behind, as far as that is known: each look asks for some of them.

        Partitions of a worker that has nothing before it are not asked for.
        """
        idle = {worker.id for worker in group.workers if worker.lag == 0}
        there = {one.id: one for one in group.partitions}
        known = {name: found for name, found in self._lags.items() if name in there and there[name].owner not in idle}
        wanted = [one for one in group.partitions if one.owner not in idle and one.id not in known]
        wanted += [there[name] for name in known]
        chosen = wanted[:MEASURED]
        if chosen and group.stream:
            partitions = [Partition(one.id, one.subjects) for one in chosen]
            measured = await stored.measure(
                self._control.connection, self._control.jetstream, group.stream, partitions, self._done(chosen)
            )
            for name, found in measured.items():
                known.pop(name, None)
                known[name] = found
        self._lags = known
        return {**{one.id: Lag(0, 0.0) for one in group.partitions if one.owner in idle}, **known}

    def _done(self, partitions: Collection[PartitionOverview]) -> dict[str, int]:
        """The sequence up to which everything is done, for certain, by partition."""
        assert self._ownership is not None
        claims, workers = self._ownership.claims, workers_in(self._entries)
        names = {one.owner for one in partitions if one.owner in workers}
        keys = {name: progress_key(name, workers[name].incarnation) for name in names if name}
        records = records_in({key: self._entries[key] for key in keys.values() if key in self._entries})
        found = {}
        for one in partitions:
            claim, done = claims.get(one.id), one.handoff
            if claim and claim.owner in keys:
                record = records.get(keys[claim.owner])
                reached = record.of(one.id, claim.token, claim.stream) if record else None
                done = max(done, reached.done if reached else 0)
                floors = [info.ack_floor_stream_seq for info in self._consumers.get(claim.owner, ())]
                done = max(done, min(floors, default=0) if claim.settled else 0)
            found[one.id] = done
        return found


class GroupWatches:
    """All groups of a server."""

    def __init__(self) -> None:
        self.denied: set[str] = set()
        """Groups that nobody lets us read: they are not asked for again."""
        self._groups: dict[str, GroupWatch] = {}

    def of(self, control: Control, group: str) -> GroupWatch:
        if group not in self._groups:
            self._groups[group] = GroupWatch(control, group)
        return self._groups[group]

    def keep_only(self, groups: Collection[str]) -> None:
        """Forget groups that are gone."""
        for gone in self._groups.keys() - set(groups):
            del self._groups[gone]
