"""The assignment in KV: a head with the version, and one key a worker, written as one atomic batch.

A leader that was replaced without noticing cannot publish: the head has a revision that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket, Entry, Write
from penstock.jetstream.model import Json
from penstock.publish.model import MAX_MESSAGES
from penstock.workers.group.assignment import Assignment
from penstock.workers.partitions import Partition
from penstock.workers.sources import parse_partitions, partition_json

FAMILY = "assignment"
HEAD = f"{FAMILY}.head"
OF = f"{FAMILY}.of."
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
    """Who made it."""
    paused: bool = False
    """Nothing is handled: an operator wants it so."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """By partition: the worker that an operator wants to have it, as long as that worker is there."""
    revisions: Mapping[str, int] = field(default_factory=dict)
    """Of all keys, for the next one."""

    @property
    def by_id(self) -> dict[str, Partition]:
        return {partition.id: partition for some in self.partitions.values() for partition in some}

    @property
    def owners(self) -> dict[str, str]:
        return {partition.id: worker for worker, some in self.partitions.items() for partition in some}

    @classmethod
    def parse(cls, entries: Mapping[str, Entry]) -> Self:
        revisions = {key: entry.revision for key, entry in entries.items()}
        if HEAD not in entries:
            return cls(revisions=revisions)
        head = entries[HEAD].value
        shares = {key.removeprefix(OF): entry.value for key, entry in entries.items() if key.startswith(OF)}
        partitions = {worker: parse_partitions(share["partitions"]) for worker, share in shares.items()}
        return cls(
            version=head["version"],
            members=tuple(head["members"]),
            partitions=partitions,
            parked=tuple(head["parked"]),
            stream=head["stream"],
            leader=head["leader"],
            paused=bool(head.get("paused")),
            pins=dict(head.get("pins") or {}),
            revisions=revisions,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """An assignment that is to be published."""

    assignment: Assignment
    partitions: Mapping[str, Partition]
    members: tuple[str, ...]
    stream: str
    leader: str


def writes(before: Published, draft: Draft) -> list[Write]:
    """The next version. Workers whose share has not changed are left out; the head is always written."""
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
    """What one worker has to know of an assignment."""

    version: int
    partitions: tuple[Partition, ...] = ()
    paused: bool = False


class Assignments:
    """The assignment of a group, read and written. Every version has a new head: until then, what was read holds."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._current = Published()
        self._shares: dict[str, tuple[int, tuple[Partition, ...]]] = {}
        """By worker id: the revision of the head, and the partitions then."""

    async def current(self) -> Published:
        """All of it."""
        head = await self._bucket.get(HEAD)
        if head is None or head.revision != self._current.revisions.get(HEAD):
            self._current = Published.parse(await self._bucket.entries(FAMILY))
        return self._current

    async def stream(self) -> str | None:
        """The stream that it is about; None when there is no assignment."""
        head = await self._bucket.get(HEAD)
        return head.value.get("stream") if head else None

    async def wish(self, **wishes: Any) -> None:
        """What an operator wants, written into the assignment that is in force, and kept in all that follow. Raises
        `ConfigError` when there is none, and `Conflict` when another was made meanwhile."""
        head = await self._bucket.get(HEAD)
        if head is None:
            raise ConfigError("nothing is assigned yet: wait until the group's workers have their first partitions")
        await self._bucket.put(HEAD, {**head.value, **wishes}, head.revision)

    async def share(self, worker_id: str) -> Share | None:
        """What concerns one worker; None when there is no assignment."""
        head = await self._bucket.get(HEAD)
        if head is None:
            return None
        seen, partitions = self._shares.get(worker_id, (0, ()))
        if seen != head.revision:
            own = await self._bucket.get(OF + worker_id)
            partitions = parse_partitions(own.value["partitions"]) if own else ()
            self._shares[worker_id] = head.revision, partitions
        return Share(int(head.value["version"]), partitions, bool(head.value.get("paused")))
