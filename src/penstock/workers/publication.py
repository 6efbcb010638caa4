"""The assignment in KV: a head with the version, and one key a worker, written as one atomic batch.

A leader that was replaced without noticing cannot publish: the head has a revision that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.broker.model import Json
from penstock.errors import ConfigError
from penstock.publish.model import MAX_MESSAGES
from penstock.workers.assignment import Assignment
from penstock.workers.kv import Bucket, Entry, Write
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
    revisions: Mapping[str, int] = field(default_factory=dict)
    """Of all keys, for the next one."""

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
    }
    return [*made, _write(before, HEAD, version, head)]


def _share(partitions: tuple[Partition, ...]) -> Json:
    return {"partitions": [partition_json(partition) for partition in partitions]}


def _write(before: Published, key: str, version: int, value: Json) -> Write:
    return Write(key, {"v": VERSION, "version": version, **value}, before.revisions.get(key, 0))


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

    async def share(self, worker_id: str) -> tuple[int, tuple[Partition, ...]] | None:
        """The version and the partitions of one worker; None when there is no assignment."""
        head = await self._bucket.get(HEAD)
        if head is None:
            return None
        seen, partitions = self._shares.get(worker_id, (0, ()))
        if seen != head.revision:
            own = await self._bucket.get(OF + worker_id)
            partitions = parse_partitions(own.value["partitions"]) if own else ()
            self._shares[worker_id] = head.revision, partitions
        return int(head.value["version"]), partitions
