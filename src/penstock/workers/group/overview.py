"""The state of a group, read from outside: workers, partitions, owners, lag, and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import ConsumerInfo
from penstock.publish.control import Control
from penstock.workers.group import assignment, identity, migration
from penstock.workers.group import claims as claim_store
from penstock.workers.group.assignment import Published, Windows
from penstock.workers.group.claims import Claim, claims_in
from penstock.workers.group.identity import ACTIVE, WorkerRecord, workers_in
from penstock.workers.group.leader import PROBLEMS, problems_in
from penstock.workers.options import bucket_name
from penstock.workers.pull.consumer import group_consumers

FAMILIES = (identity.WORKERS, claim_store.CLAIMS, assignment.ASSIGNMENT, "leader", "migration")


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """The state of one worker."""

    id: str
    state: str
    """`active`, `leaving` or `retired`."""
    mode: str
    host: str
    pid: int
    labels: tuple[str, ...]
    leads: bool
    partitions: int
    """Number of partitions that it owns."""
    applied: int
    """Version of the assignment it works by."""
    lag: int | None
    """Messages that its consumers have not delivered or not acknowledged; None when it has no consumer."""
    redelivered: int
    failures: int = 0
    """Updates of its consumer that failed in a row."""
    troubles: tuple[str, ...] = ()
    """Problems for an operator."""


@dataclass(frozen=True, slots=True)
class PartitionOverview:
    """The state of one partition."""

    id: str
    subjects: tuple[str, ...]
    assigned: str | None
    """The worker it is assigned to; None when no worker may own it."""
    owner: str | None
    handoff: int
    token: int | None
    """Fencing token of its owner."""
    move: str | None
    """What it waits for while its owner changes."""


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A snapshot of a group."""

    group: str
    stream: str
    version: int
    leader: str | None
    workers: tuple[WorkerOverview, ...]
    partitions: tuple[PartitionOverview, ...]
    waits_for: str | None = None
    """What must happen before anything is assigned; None when it is."""
    problems: tuple[str, ...] = ()
    """Problems that the leader finds in the partitions."""
    paused: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    """Partitions pinned by `group move`."""
    lag: int = 0
    """Messages that its consumers have not delivered or not acknowledged, also those of workers that are gone."""

    @property
    def active(self) -> int:
        """Number of workers that take part."""
        return sum(worker.state == ACTIVE for worker in self.workers)

    @property
    def state(self) -> str:
        """How it gets on, in a word or two."""
        unpaused = ("waits" if self.waits_for else "at work") if self.active else "no workers"
        return "paused" if self.paused else unpaused

    @property
    def moves(self) -> tuple[PartitionOverview, ...]:
        """Partitions that are not settled where they should be."""
        return tuple(partition for partition in self.partitions if partition.move)


async def group_exists(control: Control, group: str) -> bool:
    """Whether a group of that name exists. Other buckets may have names like those of groups."""
    bucket = Bucket(control, bucket_name(group))
    return await bucket.exists() and bool(await bucket.entries(*FAMILIES, "partitions"))


async def look(control: Control, group: str) -> GroupOverview:
    """Read the state of a group. Raises `ConfigError` when there is none of that name."""
    bucket = Bucket(control, bucket_name(group))
    if not await bucket.exists():
        raise ConfigError(f"there is no group {group!r} on this server: no worker of that name has ever joined")
    entries = await bucket.entries(*FAMILIES)
    stream = Published.parse(_family(entries, assignment.ASSIGNMENT)).stream
    return overview(group, entries, await group_consumers(control.jetstream, stream, group) if stream else {})


@dataclass(frozen=True, slots=True)
class GroupShares:
    """The assignment and the claims: most of a large group, and what changes least."""

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
    ownership: GroupShares | None = None,
) -> GroupOverview:
    """Build the overview of a group from its keys, and its consumers by worker id. Pure.

    `ownership`: computed from the same entries, if already known.
    """
    known = ownership or GroupShares.of(entries)
    published = known.published
    lease = entries.get(identity.LEADER_KEY)
    leader = str(lease.value.get("worker")) if lease else None
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
        lag=sum(consumer.unprocessed for some in consumers.values() for consumer in some),
    )


def _waits_for(
    group: str, version: int, workers: Mapping[str, WorkerRecord], leader: str | None, migrating: Entry | None
) -> str | None:
    """Return what must happen before the group has an assignment. Pure."""
    phase = str(migrating.value.get("phase")) if migrating else None
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
    owner, handoff = (claim.owner, claim.handoff) if claim else (None, 0)
    token = claim.token if claim and owner else None
    return PartitionOverview(name, subjects, assigned, owner, handoff, token, movement(assigned, claim))


def movement(assigned: str | None, claim: Claim | None) -> str | None:
    """Return what a partition waits for; None when its assigned worker has settled. Pure."""
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
    """Sort key that puts `worker-2` before `worker-10`."""
    parts = name.replace(".", "-").split("-")
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)
