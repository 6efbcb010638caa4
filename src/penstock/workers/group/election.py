"""Who leads a group: the holder of the key `leader.lease`, for as long as it renews it."""

from __future__ import annotations

import asyncio

from penstock.jetstream.kv import Bucket, Conflict, Entry
from penstock.jetstream.model import Json
from penstock.workers.group.identity import worker_key
from penstock.workers.group.lease import Lease, Sightings, clock

KEY = "leader.lease"


class Election:
    """One worker's candidature. `step` once every third of the lease, or sooner."""

    def __init__(self, bucket: Bucket, worker_id: str, incarnation: str, ttl: float) -> None:
        self._bucket = bucket
        self._me = {"worker": worker_id, "incarnation": incarnation}
        self._lease = Lease(ttl)
        self._sightings = Sightings(ttl)
        self._revision = 0
        self._beat = 0
        self._writing = asyncio.Lock()
        self._resigned = False
        self.changes = 0
        """How often a new leader was seen."""
        self.leader: str | None = None
        """The last one seen."""

    @property
    def leading(self) -> bool:
        """Whether we lead, by our own clock: a leader that was stopped for too long knows that it is none."""
        return self._lease.valid

    async def step(self) -> bool:
        """Renew our lead, or take it when nobody has it; returns whether we lead."""
        async with self._writing:
            if not self._resigned:
                await self._step()
        return self.leading

    async def _step(self) -> None:
        entry = await self._bucket.get(KEY)
        await self._look(entry)
        if entry is None:
            await self._take(0)
        elif self._is_mine(entry.value) or self._sightings.silent(KEY):
            await self._take(entry.revision)
        else:
            self._lease.end()
            self._see(str(entry.value["worker"]))

    async def _look(self, entry: Entry | None) -> None:
        """Whoever follows a leader that is silent watches its worker, too: so the next leader knows since when it is
        silent, and does not give it a whole lease once more."""
        seen = {KEY: entry.revision} if entry else {}
        if entry and not self._is_mine(entry.value) and self._sightings.quiet(KEY) > self._sightings.ttl / 2:
            key = worker_key(str(entry.value.get("worker")))
            if worker := await self._bucket.get(key):
                seen[key] = worker.revision
        self._sightings.look(seen)

    def silent_since(self) -> dict[str, tuple[int, float]]:
        """The keys of workers that were watched: their revision, and when it was first seen."""
        return self._sightings.seen()

    async def resign(self) -> None:
        """Let another lead at once, and never lead again."""
        async with self._writing:
            self._resigned = True
            if self._lease.valid:
                self._lease.end()
                await self._bucket.delete(KEY, self._revision)

    def blink(self) -> None:
        """We could not look for a while: the leader gets a whole lease from now on."""
        self._sightings.blink()

    async def _take(self, revision: int) -> None:
        asked = clock()
        self._beat += 1
        value: Json = {**self._me, "beat": self._beat}
        try:
            put = self._bucket.put(KEY, value, revision) if revision else self._bucket.create(KEY, value)
            self._revision = await put
        except Conflict:
            self._lease.end()  # another was quicker; the next step sees who
            return
        self._lease.renewed(asked)
        self._see(self._me["worker"])

    def _is_mine(self, value: Json) -> bool:
        return all(value.get(key) == text for key, text in self._me.items())

    def _see(self, leader: str) -> None:
        self.changes += leader != self.leader
        self.leader = leader
