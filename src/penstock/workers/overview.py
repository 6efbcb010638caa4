"""How a group stands, seen from outside: workers, partitions, owners, lag, and what is on the move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.broker.model import ConsumerInfo
from penstock.errors import ConfigError
from penstock.workers import claims as claim_store
from penstock.workers import election, identity, publication
from penstock.workers.claims import Claim, claims_in
from penstock.workers.group_options import bucket_name
from penstock.workers.identity import WorkerRecord, workers_in
from penstock.workers.kv import Bucket, Control, Entry
from penstock.workers.publication import Published

FAMILIES = (identity.FAMILY, claim_store.FAMILY, publication.FAMILY, "leader")


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
    """Messages that its consumer has before it or out; None when it has no consumer."""
    redelivered: int


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

    @property
    def moves(self) -> tuple[PartitionOverview, ...]:
        """Partitions that are not settled where they should be."""
        return tuple(partition for partition in self.partitions if partition.move)


async def look(control: Control, group: str) -> GroupOverview:
    """Read all of a group. Raises `ConfigError` when there is none of that name."""
    bucket = Bucket(control, bucket_name(group))
    if not await bucket.exists():
        raise ConfigError(f"there is no group {group!r} on this server: no worker of that name has ever joined")
    entries = await bucket.entries(*FAMILIES)
    stream = Published.parse(_family(entries, publication.FAMILY)).stream
    consumers = await control.jetstream.consumers(stream) if stream else []
    return overview(group, entries, {c.config["metadata"]["penstock.worker"]: c for c in consumers if _of(c, group)})


def overview(group: str, entries: Mapping[str, Entry], consumers: Mapping[str, ConsumerInfo]) -> GroupOverview:
    """The group that these keys and consumers, by worker id, make up. Pure."""
    published = Published.parse(_family(entries, publication.FAMILY))
    claims = claims_in(entries)
    lease = entries.get(election.KEY)
    leader = str(lease.value["worker"]) if lease else None
    workers = sorted(workers_in(entries).items(), key=lambda item: _natural(item[0]))
    owned = [claim.owner for claim in claims.values()]
    return GroupOverview(
        group=group,
        stream=published.stream,
        version=published.version,
        leader=leader,
        workers=tuple(_worker(w, r, leader, owned.count(w), consumers.get(w)) for w, r in workers),
        partitions=_partitions(published, claims),
    )


def _worker(
    worker_id: str, record: WorkerRecord, leader: str | None, owned: int, consumer: ConsumerInfo | None
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
        lag=consumer.unprocessed if consumer else None,
        redelivered=consumer.redelivered if consumer else 0,
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


def _of(consumer: ConsumerInfo, group: str) -> bool:
    return (consumer.config.get("metadata") or {}).get("penstock.group") == group


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """`worker-2` before `worker-10`."""
    parts = name.replace(".", "-").split("-")
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)
