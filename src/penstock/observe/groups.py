"""Groups that are looked at again and again: after the first look only what has changed is read.

A group of 10,000 partitions has as many keys. Its workers write a few of them every second, and the rest stands still.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from penstock.consume.metrics import Lag
from penstock.errors import AccessDenied, PenstockError
from penstock.jetstream.kv import Bucket, Entry, stream_of
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.publish.control import Control
from penstock.workers.group import assignment
from penstock.workers.group import claims as claim_store
from penstock.workers.group.claims import progress_key, records_in
from penstock.workers.group.identity import workers_in
from penstock.workers.group.operations import group_names
from penstock.workers.group.overview import GroupOverview, GroupShares, PartitionOverview, overview
from penstock.workers.options import bucket_name
from penstock.workers.partitions import Partition
from penstock.workers.pull import stored
from penstock.workers.pull.consumer import by_worker

log = logging.getLogger(__name__)

READ_ALL_EVERY = 300.0
"""Seconds after which all keys are read again: some may have expired without a trace."""
SHARES = (f"{claim_store.CLAIMS}.", f"{assignment.ASSIGNMENT}.")
"""Keys of a group that say who has which partition: most of them, and those that change least."""
ConsumersOf = Callable[[str], Sequence[ConsumerInfo]]
"""The consumers of a stream."""
MEASURED = 100
"""Partitions whose lag is asked for in one look; the others follow in turns."""


class GroupWatch:
    """Follows the state of one group; reads only the keys that changed."""

    def __init__(self, control: Control, group: str) -> None:
        self._control = control
        self._group = group
        self.bucket = bucket_name(group)
        self._bucket = Bucket(control, self.bucket)
        self._shares: dict[str, Entry] = {}
        """Keys that say who has which partition."""
        self._others: dict[str, Entry] = {}
        self._revision = 0
        self._created = ""
        self._read_all = 0.0
        self._ownership: GroupShares | None = None
        self._consumers: Mapping[str, Collection[ConsumerInfo]] = {}
        self._lags: dict[str, Lag] = {}
        """Of partitions, the one measured longest ago first."""

    async def read(self, bucket: StreamInfo) -> str | None:
        """Read what has changed in the bucket. Returns the stream of the group if partitions have moved.

        Raises `AccessDenied` when we may not read it.
        """
        if not self._created:
            await self._control.jetstream.stream_info(bucket.name)  # refused at once, where reading goes unanswered
        created, now = str(bucket.raw.get("created", "")), time.monotonic()
        if created != self._created or now - self._read_all > READ_ALL_EVERY:
            self._shares, self._others, self._ownership = {}, {}, None
            self._revision, self._created, self._read_all = 0, created, now
        if bucket.state.last_seq > self._revision:
            self._apply(*await self._bucket.since(self._revision, bucket))
        if self._ownership is not None:
            return None
        self._ownership = GroupShares.of(self._shares)
        return self._ownership.published.stream

    def overview(self, consumers_of: ConsumersOf) -> GroupOverview | None:
        """The group as it was read, with its consumers; None when the bucket is none of a group."""
        if self._ownership is None:
            return None
        stream = self._ownership.published.stream
        self._consumers = by_worker(consumers_of(stream), self._group) if stream else {}
        found = overview(self._group, self._others, self._consumers, self._ownership)
        return found if found.stream or found.workers else None

    def _apply(self, changed: Mapping[str, Entry | None], revision: int) -> None:
        self._revision = revision
        for key, entry in changed.items():
            is_share = key.startswith(SHARES)
            entries = self._shares if is_share else self._others
            if entry is None:
                entries.pop(key, None)
            else:
                entries[key] = entry
            if is_share:
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
        claims, workers = self._ownership.claims, workers_in(self._others)
        names = {one.owner for one in partitions if one.owner in workers}
        keys = {name: progress_key(name, workers[name].incarnation) for name in names if name}
        records = records_in({key: self._others[key] for key in keys.values() if key in self._others})
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

    def __init__(self, control: Control) -> None:
        self._control = control
        self._denied: set[str] = set()
        """Groups that nobody lets us read: they are not asked for again."""
        self._groups: dict[str, GroupWatch] = {}
        self._read: list[GroupWatch] = []
        """Those that could be read in the last look."""

    async def read(self, streams: Sequence[StreamInfo]) -> list[str]:
        """Read what has changed in the buckets of groups. Returns the streams where partitions have moved."""
        buckets = {one.name: one for one in streams}
        names = [name for name in group_names(buckets) if name not in self._denied]
        self._groups = {name: self._groups.get(name) or GroupWatch(self._control, name) for name in names}
        self._read, stirred = [], list[str]()
        for name, watch in self._groups.items():
            try:
                moved = await watch.read(buckets[stream_of(bucket_name(name))])
            except AccessDenied:
                self._denied.add(name)
            except PenstockError:
                continue  # it is being deleted
            except assignment.UNREADABLE as exc:
                log.info("what bucket %s holds is no group: %r", watch.bucket, exc)
            else:
                self._read.append(watch)
                stirred += [moved] if moved else []
        return stirred

    def overviews(self, consumers_of: ConsumersOf) -> Iterator[GroupOverview]:
        """The groups that could be read."""
        for watch in self._read:
            try:
                found = watch.overview(consumers_of)
            except assignment.UNREADABLE as exc:
                log.info("what bucket %s holds is no group: %r", watch.bucket, exc)
                continue
            if found:
                yield found

    async def lags(self, group: GroupOverview) -> dict[str, Lag]:
        """How far the partitions of a group are behind, as far as that is known."""
        watch = self._groups.get(group.group)
        return await watch.lags(group) if watch else {}
