"""A worker's stable id: one of a pool, claimed in KV, renewed as a heartbeat, given back, or lost.

The key `workers.<id>` goes through these states:

    active    renewed by its worker, every time with the revision of the last: a second holder is noticed at once
    leaving   its worker hands over its partitions and goes
    retired   the leader has given it up: whoever it was cannot renew it any more
    (absent)  free to be claimed, once the leader has handed over what it left behind

A worker that starts again under the same `instance` name takes its id back at once, and stops the one before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.errors import ConfigError, PenstockError
from penstock.jetstream.kv import Bucket, Conflict, Entry
from penstock.jetstream.model import Json
from penstock.workers.group.assignment import Member
from penstock.workers.group.lease import Lease, Sightings, clock

log = logging.getLogger(__name__)

FAMILY = "workers"
VERSION = 1
ACTIVE, LEAVING, RETIRED = "active", "leaving", "retired"
CROWD = 32
"""Ids among which one is drawn, once another was quicker."""
LOOKS = 5
"""Looks at the pool during one lease, while all of its ids are taken."""


class ClaimLost(PenstockError):
    """The worker's id is no longer its own: it must stop, since another may do its work already."""

    def __init__(self, worker_id: str, why: str, replaced: bool = False) -> None:
        """`replaced`: by another process of the same instance, which goes on in its place."""
        super().__init__(worker_id, why)
        self.worker_id = worker_id
        self.why = why
        self.replaced = replaced

    def __str__(self) -> str:
        return f"this worker is no longer {self.worker_id!r} ({self.why}); it stops, and another goes on with its work"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says about itself with every heartbeat."""

    instance: str
    """A name that stays over restarts."""
    incarnation: str = ""
    """This one process of that name."""
    state: str = ACTIVE
    labels: frozenset[str] = frozenset()
    capacity: int = 1
    host: str = ""
    pid: int = 0
    beat: int = 0
    applied: int = 0
    """Version of the assignment it has carried out."""
    mode: str = "starting"
    """`working`, `moving` while partitions change hands, or `degraded`."""
    failures: int = 0
    """Consumer updates that failed in a row: a sign for whoever leads, and for whoever looks."""
    troubles: tuple[str, ...] = ()
    """What somebody should look at: updates that fail, partitions that do not fit, handlers that do not end."""

    def to_json(self) -> Json:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"v": VERSION, **fields, "labels": sorted(self.labels), "troubles": list(self.troubles)}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        known = {name: raw[name] for name in cls.__slots__ if name in raw}
        sets = {"labels": frozenset(raw.get("labels", ())), "troubles": tuple(map(str, raw.get("troubles", ())))}
        return cls(**{**known, **sets})

    def member(self, worker_id: str) -> Member:
        return Member(worker_id, self.capacity, self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The ids there are: `<prefix>-0` and so on."""

    prefix: str = "worker"
    size: int = 1000
    ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.prefix.replace("-", "").replace("_", "").isalnum() or self.size < 1:
            raise ConfigError(f"a pool of worker ids needs a prefix of letters and digits, and a size, got {self}")
        object.__setattr__(self, "ids", tuple(f"{self.prefix}-{n}" for n in range(self.size)))


def worker_key(worker_id: str) -> str:
    return f"{FAMILY}.{worker_id}"


def workers_in(entries: Mapping[str, Entry]) -> dict[str, WorkerRecord]:
    """The records by worker id, of all keys of the family."""
    prefix, found = f"{FAMILY}.", {}
    for key, entry in entries.items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = WorkerRecord.parse(entry.value)
            except (KeyError, TypeError, AttributeError) as exc:
                log.warning("what %s says cannot be read (%r), and is passed over", key, exc)
    return found


def candidates(pool: Pool, taken: Mapping[str, WorkerRecord], instance: str, silent: frozenset[str]) -> list[str]:
    """The ids worth a try, best first: our own from before, free ones, then those that nobody renews."""
    own = [i for i, record in taken.items() if record.instance == instance and record.state != RETIRED]
    free = [i for i in pool.ids if i not in taken]
    stale = [i for i in pool.ids if i in silent and taken[i].state != RETIRED]
    return own + free + stale


class Identity:
    """One worker's claim to an id. `claim` first, then `renew` before each third of the lease is over."""

    def __init__(self, bucket: Bucket, pool: Pool, record: WorkerRecord, ttl: float) -> None:
        self._bucket = bucket
        self._pool = pool
        incarnation = secrets.token_hex(6)
        self.record = replace(record, incarnation=incarnation, host=socket.gethostname(), pid=os.getpid())
        self.lease = Lease(ttl)
        self.id = ""
        self.lost: ClaimLost | None = None
        self.made_again = 0
        """How often our key was gone with the whole bucket, and had to be made again."""
        self._revision = 0
        self._writing = asyncio.Lock()

    @property
    def incarnation(self) -> str:
        """What tells this process from one that had, or has, the same id."""
        return self.record.incarnation

    async def claim(self) -> str:
        """Claim an id, however long it takes for one to be free."""
        sightings, crowd = Sightings(self.lease.ttl), 1
        while True:
            entries = await self._bucket.entries(FAMILY)
            taken = workers_in(entries)
            sightings.look({key.removeprefix(f"{FAMILY}."): e.revision for key, e in entries.items()})
            silent = frozenset(i for i in taken if sightings.silent(i))
            if found := candidates(self._pool, taken, self.record.instance, silent)[:crowd]:
                worker_id = random.choice(found)
                if await self._try(worker_id, entries.get(worker_key(worker_id))):
                    return worker_id
                crowd = CROWD  # others want the same: a hundred that start together would try a hundred ids each
            else:
                await asyncio.sleep(self.lease.ttl / LOOKS)

    async def _try(self, worker_id: str, found: Entry | None) -> bool:
        asked, key, value = clock(), worker_key(worker_id), self._next()
        try:
            if found:
                self._revision = await self._bucket.put(key, value, found.revision)
            else:
                self._revision = await self._bucket.create(key, value)
        except Conflict:
            return False
        self.id = worker_id
        self.lease.renewed(asked)
        return True

    async def renew(self, **changes: Any) -> None:
        """Renew the claim, with what has changed about us. Raises `ClaimLost` for good when it is another's."""
        async with self._writing:
            if self.lost:
                raise self.lost
            self.record = replace(self.record, **changes)
            asked, key, value = clock(), worker_key(self.id), self._next()
            try:
                self._revision = await self._bucket.put(key, value, self._revision)
            except Conflict as exc:
                await self._once_more(key, value, exc)
            self.lease.renewed(asked)

    async def _once_more(self, key: str, value: Json, conflict: Conflict) -> None:
        """The key has another revision. If it has none at all, the bucket was lost with it, and we are still we."""
        found = await self._bucket.get(key)
        try:
            if found or not self.lease.valid:
                raise conflict
            self._revision = await self._bucket.put(key, value, 0)  # refused where the leader has deleted the key
            self.made_again += 1
        except Conflict:
            self.lease.end()
            self.lost = self._lost(found)
            raise self.lost from conflict

    def _lost(self, found: Entry | None) -> ClaimLost:
        other = workers_in({worker_key(self.id): found}).get(self.id) if found else None
        if other and other.instance == self.record.instance and other.incarnation != self.incarnation:
            who = f"process {other.pid} on {other.host}"
            return ClaimLost(self.id, f"{who} was started as instance {other.instance!r} too, and replaces it", True)
        return ClaimLost(self.id, "its lease ran out")

    def unanswered(self, asked_at: float) -> None:
        """A renewal got no answer."""
        self.lease.unanswered(asked_at)

    async def retire(self) -> None:
        """Give the id up. It is free again once the leader has cleared away what bears its name."""
        async with self._writing:
            self.lease.end()
            if not self.lost:
                self.record = replace(self.record, state=RETIRED)
                self._revision = await self._bucket.put(worker_key(self.id), self._next(), self._revision)

    def _next(self) -> Json:
        self.record = replace(self.record, beat=self.record.beat + 1)
        return self.record.to_json()
