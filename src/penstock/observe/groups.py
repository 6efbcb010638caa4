"""Groups that are looked at again and again: after the first look only what has changed is read.

A group of 10,000 partitions has as many keys. Its workers write a few of them every second, and the rest stands still.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from penstock.consume.metrics import Lag
from penstock.errors import ConfigError, StreamNotFound
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import ConsumerInfo
from penstock.publish.control import Control
from penstock.workers.group import assignment
from penstock.workers.group import claims as claim_store
from penstock.workers.group.claims import progress_key, records_in
from penstock.workers.group.identity import workers_in
from penstock.workers.group.overview import GroupOverview, GroupShares, PartitionOverview, overview
from penstock.workers.options import bucket_name
from penstock.workers.partitions import Partition
from penstock.workers.pull import stored
from penstock.workers.pull.consumer import group_consumers

READ_ALL_EVERY = 300.0
"""Seconds after which all keys are read again: some may have expired without a trace."""
MEASURED = 100
"""Partitions whose lag is asked for in one look; the others follow in turns."""


class GroupWatch:
    """Follows the state of one group; reads only the keys that changed."""

    def __init__(self, control: Control, group: str) -> None:
        self._control = control
        self._group = group
        self._bucket = Bucket(control, bucket_name(group))
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._created = ""
        self._read_all = 0.0
        self._ownership: GroupShares | None = None
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
            self._ownership = GroupShares.of(self._entries)
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
