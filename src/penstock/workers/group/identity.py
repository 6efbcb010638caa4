"""Worker ids and leader election: both are KV keys that their holders renew.

Leases use the local clock: clocks of two machines are never compared. The holder writes its key regularly. It trusts
its lease for `ttl` seconds from when it *asked* for the last successful renewal; every other process leaves the key
alone for `ttl` seconds from when it *saw* the key change last. The second period always ends later.

The key `workers.<id>` goes through these states:

    active    renewed by its worker, each time with the last revision: a second holder is noticed at once
    leaving   its worker hands over its partitions and stops
    retired   the leader declared the worker dead: it cannot renew the key any more
    (absent)  free to be claimed, once the leader has handed over what it left behind

A worker that restarts with the same `instance` name takes its id back at once, and stops the previous process. The
holder of the key `leader.lease` leads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.errors import ConfigError, PenstockError
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import Json
from penstock.workers.group.assignment import Candidate

log = logging.getLogger(__name__)


Clock = Callable[[], float]
clock: Clock = time.monotonic


class Lease:
    """The lease as its holder sees it. Not valid before the first renewal."""

    def __init__(self, ttl: float, now: Clock = clock) -> None:
        self.ttl = ttl
        self._now = now
        self._until = float("-inf")

    @property
    def valid(self) -> bool:
        return self._now() < self._until

    def renewed(self, asked_at: float) -> None:
        """Note that a renewal sent at that time succeeded."""
        self._until = max(self._until, asked_at + self.ttl)

    def unanswered(self, asked_at: float) -> None:
        """Extend the lease when no server is reachable: no other process could take over either, so a lease that was
        valid then stays valid.

        A process that was suspended for longer than its lease sent its request before that, and gains nothing by this.
        """
        if asked_at < self._until:
            self._until = max(self._until, asked_at + self.ttl)

    def end(self) -> None:
        self._until = float("-inf")


class Sightings:
    """Leases as other processes see them: when each key was last seen to change."""

    def __init__(self, ttl: float, now: Clock = clock) -> None:
        self.ttl = ttl
        self._now = now
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, revisions: Mapping[str, int]) -> None:
        """Record the existing keys with their revisions; others are forgotten."""
        now = self._now()
        self._seen = {
            key: seen if (seen := self._seen.get(key)) and seen[0] == revision else (revision, now)
            for key, revision in revisions.items()
        }

    def quiet(self, key: str) -> float:
        """Return the seconds since a key was first seen with its revision; 0 for an unknown key."""
        return self._now() - self._seen[key][1] if key in self._seen else 0.0

    def learn(self, other: Sightings) -> None:
        """Add what another component of this process has seen and we have not."""
        self._seen = {**other._seen, **self._seen}

    def silent(self, key: str) -> bool:
        """Whether a key has not changed for longer than a lease lasts."""
        return self.quiet(key) > self.ttl

    def forget_heartbeats(self) -> None:
        """Discard heartbeat history after a pause of our own, so that no worker is declared dead because *we* were not
        watching: every worker gets a whole lease from now on."""
        now = self._now()
        self._seen = {key: (revision, now) for key, (revision, _) in self._seen.items()}


WORKERS = "workers"
VERSION = 1
ACTIVE, LEAVING, RETIRED = "active", "leaving", "retired"
CONTENDED_IDS = 32
"""Number of free ids to choose from at random after another process claimed the first choice."""
LOOKS_PER_LEASE = 5
"""Reads of the pool during one lease while all of its ids are taken."""


class ClaimLost(PenstockError):
    """The worker lost its id: it must stop, since another worker may do its work already."""

    def __init__(self, worker_id: str, why: str, replaced: bool = False) -> None:
        """`replaced`: another process of the same instance has taken over."""
        super().__init__(worker_id, why)
        self.worker_id = worker_id
        self.why = why
        self.replaced = replaced

    def __str__(self) -> str:
        return f"this worker is no longer {self.worker_id!r} ({self.why}); it stops, and another goes on with its work"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker reports about itself with every heartbeat."""

    instance: str
    """A name that stays over restarts."""
    incarnation: str = ""
    """Identifies one process of that name."""
    state: str = ACTIVE
    labels: frozenset[str] = frozenset()
    capacity: int = 1
    host: str = ""
    pid: int = 0
    beat: int = 0
    applied: int = 0
    """Version of the assignment it has applied."""
    mode: str = "starting"
    """`working`, `moving` while partitions change hands, or `degraded`."""
    failures: int = 0
    """Consumer updates that failed in a row, for the leader and for operators."""
    troubles: tuple[str, ...] = ()
    """Problems for an operator: updates that fail, partitions that do not fit, handlers that do not end."""

    def to_json(self) -> Json:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"v": VERSION, **fields, "labels": sorted(self.labels), "troubles": list(self.troubles)}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        known = {name: raw[name] for name in cls.__slots__ if name in raw}
        sets = {"labels": frozenset(raw.get("labels", ())), "troubles": tuple(map(str, raw.get("troubles", ())))}
        return cls(**{**known, **sets})

    def member(self, worker_id: str) -> Candidate:
        return Candidate(worker_id, self.capacity, self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdPool:
    """The possible ids: `<prefix>-0` and so on."""

    prefix: str = "worker"
    size: int = 1000
    ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.prefix.replace("-", "").replace("_", "").isalnum() or self.size < 1:
            raise ConfigError(f"a pool of worker ids needs a prefix of letters and digits, and a size, got {self}")
        object.__setattr__(self, "ids", tuple(f"{self.prefix}-{n}" for n in range(self.size)))


def worker_key(worker_id: str) -> str:
    return f"{WORKERS}.{worker_id}"


def workers_in(entries: Mapping[str, Entry]) -> dict[str, WorkerRecord]:
    """Return the records by worker id, from all keys of the family."""
    prefix, found = f"{WORKERS}.", {}
    for key, entry in entries.items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = WorkerRecord.parse(entry.value)
            except (KeyError, TypeError, AttributeError) as exc:
                log.warning("what %s says cannot be read (%r), and is passed over", key, exc)
    return found


def candidates(pool: IdPool, taken: Mapping[str, WorkerRecord], instance: str, silent: frozenset[str]) -> list[str]:
    """Return the ids to try, best first: our previous one, free ones, then those that are no longer renewed."""
    own = [i for i, record in taken.items() if record.instance == instance and record.state != RETIRED]
    free = [i for i in pool.ids if i not in taken]
    stale = [i for i in pool.ids if i in silent and taken[i].state != RETIRED]
    return own + free + stale


class Identity:
    """One worker's claim to an id. `claim` first, then `renew` before each third of the lease is over."""

    def __init__(self, bucket: Bucket, pool: IdPool, record: WorkerRecord, ttl: float) -> None:
        self._bucket = bucket
        self._pool = pool
        incarnation = secrets.token_hex(6)
        self.record = replace(record, incarnation=incarnation, host=socket.gethostname(), pid=os.getpid())
        self.lease = Lease(ttl)
        self.id = ""
        self.lost: ClaimLost | None = None
        self.made_again = 0
        """How often our key was lost with the whole bucket, and was created again."""
        self._revision = 0
        self._writing = asyncio.Lock()

    @property
    def incarnation(self) -> str:
        """Distinguishes this process from another that had, or has, the same id."""
        return self.record.incarnation

    async def claim(self) -> str:
        """Claim an id; waits until one is free."""
        sightings, crowd = Sightings(self.lease.ttl), 1
        while True:
            entries = await self._bucket.entries(WORKERS)
            taken = workers_in(entries)
            sightings.look({key.removeprefix(f"{WORKERS}."): e.revision for key, e in entries.items()})
            silent = frozenset(i for i in taken if sightings.silent(i))
            if found := candidates(self._pool, taken, self.record.instance, silent)[:crowd]:
                worker_id = random.choice(found)
                if await self._try(worker_id, entries.get(worker_key(worker_id))):
                    return worker_id
                crowd = CONTENDED_IDS  # contended: a hundred that start together would try a hundred ids each
            else:
                await asyncio.sleep(self.lease.ttl / LOOKS_PER_LEASE)

    async def _try(self, worker_id: str, found: Entry | None) -> bool:
        asked, key, value = clock(), worker_key(worker_id), self._next()
        try:
            if found:
                self._revision = await self._bucket.put(key, value, found.revision)
            else:
                self._revision = await self._bucket.create(key, value)
        except WrongRevision:
            return False
        self.id = worker_id
        self.lease.renewed(asked)
        return True

    async def renew(self, **changes: Any) -> None:
        """Renew the claim, with what has changed in our record. Raises `ClaimLost` when another process owns the id."""
        async with self._writing:
            if self.lost:
                raise self.lost
            self.record = replace(self.record, **changes)
            asked, key, value = clock(), worker_key(self.id), self._next()
            try:
                self._revision = await self._bucket.put(key, value, self._revision)
            except WrongRevision as exc:
                await self._once_more(key, value, exc)
            self.lease.renewed(asked)

    async def _once_more(self, key: str, value: Json, conflict: WrongRevision) -> None:
        """Handle a refused renewal. If the key does not exist, the bucket was lost with it, and we keep our id."""
        found = await self._bucket.get(key)
        try:
            if found or not self.lease.valid:
                raise conflict
            self._revision = await self._bucket.put(key, value, 0)  # refused if the leader deleted the key
            self.made_again += 1
        except WrongRevision:
            self.lease.end()
            self.lost = self._lost(found)
            raise self.lost from conflict

    def _lost(self, found: Entry | None) -> ClaimLost:
        other = workers_in({worker_key(self.id): found}).get(self.id) if found else None
        if other and other.instance == self.record.instance and other.incarnation != self.incarnation:
            who = f"process {other.pid} on {other.host}"
            return ClaimLost(self.id, f"{who} was started as instance {other.instance!r} too, and replaces it", True)
        return ClaimLost(self.id, "its lease ran out")

    async def retire(self) -> None:
        """Give up the id. It is free again once the leader has deleted what belongs to it."""
        async with self._writing:
            self.lease.end()
            if not self.lost:
                self.record = replace(self.record, state=RETIRED)
                self._revision = await self._bucket.put(worker_key(self.id), self._next(), self._revision)

    def _next(self) -> Json:
        self.record = replace(self.record, beat=self.record.beat + 1)
        return self.record.to_json()


LEADER_KEY = "leader.lease"


class Election:
    """One worker's part in the leader election. Call `step` once every third of the lease, or sooner."""

    def __init__(self, bucket: Bucket, worker_id: str, incarnation: str, ttl: float) -> None:
        self._bucket = bucket
        self._me = {"worker": worker_id, "incarnation": incarnation}
        self._lease = Lease(ttl)
        self.sightings = Sightings(ttl)
        """The leader's key, and the worker key of a silent leader."""
        self._revision = 0
        self._beat = 0
        self._writing = asyncio.Lock()
        self._resigned = False
        self.changes = 0
        """How often a new leader was seen."""
        self.leader: str | None = None
        """The last leader seen."""

    @property
    def leading(self) -> bool:
        """Whether we lead, by our own clock: a leader that was suspended for too long knows that it no longer leads."""
        return self._lease.valid

    async def step(self) -> bool:
        """Renew our leadership, or take it when it is free; returns whether we lead."""
        async with self._writing:
            if not self._resigned:
                await self._step()
        return self.leading

    async def _step(self) -> None:
        entry = await self._bucket.get(LEADER_KEY)
        await self._look(entry)
        if entry is None:
            await self._take(0)
        elif self._is_mine(entry.value) or self.sightings.silent(LEADER_KEY):
            await self._take(entry.revision)
        else:
            self._lease.end()
            self._see(str(entry.value.get("worker")))

    async def _look(self, entry: Entry | None) -> None:
        """Also watch the worker key of a silent leader: so the next leader knows since when it is silent, and does not
        give it another whole lease."""
        seen = {LEADER_KEY: entry.revision} if entry else {}
        if entry and not self._is_mine(entry.value) and self.sightings.quiet(LEADER_KEY) > self.sightings.ttl / 2:
            key = worker_key(str(entry.value.get("worker")))
            if worker := await self._bucket.get(key):
                seen[key] = worker.revision
        self.sightings.look(seen)

    async def resign(self) -> None:
        """Release leadership at once, and never lead again."""
        async with self._writing:
            self._resigned = True
            if self._lease.valid:
                self._lease.end()
                await self._bucket.delete(LEADER_KEY, self._revision)

    def forget_heartbeats(self) -> None:
        """Discard heartbeat history after a pause of our own: the leader gets a whole lease from now on."""
        self.sightings.forget_heartbeats()

    async def _take(self, revision: int) -> None:
        asked = clock()
        self._beat += 1
        value: Json = {**self._me, "beat": self._beat}
        try:
            put = self._bucket.put(LEADER_KEY, value, revision) if revision else self._bucket.create(LEADER_KEY, value)
            self._revision = await put
        except WrongRevision:
            self._lease.end()  # another worker took it first; the next step sees which
            return
        self._lease.renewed(asked)
        self._see(self._me["worker"])

    def _is_mine(self, value: Json) -> bool:
        return all(value.get(key) == text for key, text in self._me.items())

    def _see(self, leader: str) -> None:
        self.changes += leader != self.leader
        self.leader = leader
