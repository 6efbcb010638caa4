"""An operator's actions on a group: list, pause, move a partition, seek, delete.

Pauses and moves are written into the current assignment, and every later one keeps them: workers and leader see them at
their next check. Seek and delete need a group without workers: a running worker would continue with the state it has in
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import ConfigError, ConsumerNotFound, StreamNotFound
from penstock.jetstream.api import refuse_beyond_end
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket, stream_of
from penstock.jetstream.model import Retention
from penstock.publish.control import Control
from penstock.workers.group import claims as claim_store
from penstock.workers.group import identity
from penstock.workers.group.assignment import Assignments, Published
from penstock.workers.group.claims import NO_TRIES, Claim, Reached, claims_in
from penstock.workers.group.identity import RETIRED, workers_in
from penstock.workers.group.leader import holder_name
from penstock.workers.group.overview import GroupOverview, group_exists, look
from penstock.workers.options import RESERVED, bucket_name, overlap_bucket
from penstock.workers.pull.consumer import group_consumers, stream_identity

TRIES = 5
"""Attempts to write a setting while leaders publish new assignments at the same time."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A partition whose position was changed."""

    partition: str
    before: int
    """Everything up to this sequence was done."""
    after: int
    """Everything up to this sequence counts as done now."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted with a group."""

    consumers: tuple[str, ...]
    bucket: str


def group_names(streams: Iterable[str]) -> list[str]:
    """Return the names of possible groups, by the names of all streams."""
    prefix = stream_of(bucket_name(""))
    return sorted({name.removeprefix(prefix) for name in streams if name.startswith(prefix)} - RESERVED)


class Groups:
    """An operator's access to the groups of a server."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._jetstream = control.jetstream

    async def names(self) -> list[str]:
        """Return the names of possible groups, by the names of their buckets."""
        return group_names(await self._jetstream.stream_names())

    async def all(self) -> list[GroupOverview]:
        """Return every group, by name."""
        return [
            await look(self._control, name) for name in await self.names() if await group_exists(self._control, name)
        ]

    async def pause(self, group: str) -> None:
        """Stop its workers from starting handlers until `resume`; they keep their partitions."""
        await self._wish(group, paused=True)

    async def resume(self, group: str) -> None:
        await self._wish(group, paused=False)

    async def move(self, group: str, partition: str, worker: str | None) -> None:
        """Pin a partition to a worker for as long as that worker is present; None: the strategy chooses."""
        found = await self._published(group)
        if partition not in found.owners and partition not in found.parked:
            raise ConfigError(f"group {group!r} has no partition {partition!r}; `group show --partitions` lists them")
        if worker is not None and worker not in found.members:
            there = ", ".join(found.members[:10]) or "none"
            raise ConfigError(f"group {group!r} has no worker {worker!r} now; there are: {there}")
        if worker is not None and partition in found.parked:
            raise ConfigError(f"partition {partition!r} is parked: no worker has its labels")
        pins = {p: w for p, w in found.pins.items() if p != partition} | ({partition: worker} if worker else {})
        await self._wish(group, pins=pins)

    async def seek(
        self, group: str, first: int, partitions: Collection[str] = (), *, force: bool = False
    ) -> list[Sought]:
        """Move partitions (none named: all) to the first message at or above a sequence.

        Raises `ConfigError` while the group has workers, unless `force` says that they are dead; and on a work queue,
        where finished messages are deleted, and skipped ones would stay.
        """
        bucket = await self._without_workers(group, force)
        published = await self._published(group)
        stream = await self._jetstream.stream_info(published.stream)
        if stream.config.get("retention") == Retention.WORKQUEUE:
            raise ConfigError(
                f"stream {stream.name!r} is a work queue: what is done is gone, and there is nothing to go back to. To "
                "skip messages, purge their subjects"
            )
        refuse_beyond_end(stream, first)
        claims = claims_in(await bucket.entries(claim_store.CLAIMS))
        if unknown := sorted(set(partitions) - claims.keys()):
            raise ConfigError(f"group {group!r} has no partition {', '.join(map(repr, unknown[:5]))}")
        chosen = [claims[p] for p in sorted(partitions or claims)]
        made = [_sought(claim, first - 1, stream_identity(stream)) for claim in chosen]
        written = {claim.partition for claim in await claim_store.store(bucket, made)}
        if missed := sorted({claim.partition for claim in made} - written):
            raise ConfigError(f"{', '.join(missed[:5])} changed meanwhile: does a worker run after all?")
        await claim_store.clear(bucket, await bucket.entries(claim_store.PROGRESS))  # they tell of before
        if stream.config.get("retention") != Retention.INTEREST:  # there the consumers keep messages
            await self._forget_consumers(group, published.stream)
        return [Sought(claim.partition, claim.handoff, first - 1) for claim in chosen]

    async def delete(self, group: str, *, force: bool = False) -> Deleted:
        """Delete its consumers and its buckets; messages stay, except what an Interest stream kept for this group only.
        Raises `ConfigError` while it has workers, unless `force` says that they are dead."""
        bucket = await self._without_workers(group, force)
        stream = (await self._published(group)).stream
        names = await self._forget_consumers(group, stream) if stream else []
        if stream:
            with suppress(StreamNotFound, ConsumerNotFound):
                await self._jetstream.delete_consumer(stream, holder_name(group))
        for one in (overlap_bucket(group), bucket.name):  # the group's own last: until then this can be repeated
            with suppress(StreamNotFound):
                await self._jetstream.delete_stream(stream_of(one))
        return Deleted(tuple(names), bucket.name)

    async def _forget_consumers(self, group: str, stream: str) -> list[str]:
        """Delete the consumers of a stopped group: they only hold its progress, which its claims hold too."""
        try:
            found = await group_consumers(self._jetstream, stream, group)
        except StreamNotFound:
            return []
        names = sorted(consumer.name for some in found.values() for consumer in some)
        for name in names:
            with suppress(ConsumerNotFound):
                await self._jetstream.delete_consumer(stream, name)
        return names

    async def _bucket(self, group: str) -> Bucket:
        if not await group_exists(self._control, group):
            raise ConfigError(f"there is no group {group!r} on this server: no worker of that name has ever joined")
        return Bucket(self._control, bucket_name(group))

    async def _published(self, group: str) -> Published:
        return await Assignments(await self._bucket(group)).current()

    async def _without_workers(self, group: str, force: bool) -> Bucket:
        bucket = await self._bucket(group)
        workers = workers_in(await bucket.entries(identity.WORKERS))
        there = sorted(worker for worker, record in workers.items() if record.state != RETIRED)
        if there and not force:
            raise ConfigError(
                f"group {group!r} has workers: {', '.join(there[:10])}. Stop them first; if they are dead, say so "
                "with force"
            )
        return bucket

    async def _wish(self, group: str, **wishes: object) -> None:
        assignments = Assignments(await self._bucket(group))
        for left in reversed(range(TRIES)):
            try:
                await assignments.wish(**wishes)
                return
            except WrongRevision:
                if not left:
                    raise


def _sought(claim: Claim, done: int, stream: str) -> Claim:
    """Return the claim, free, with the sequence that counts as done. Pure."""
    return replace(claim.freed(Reached(done)), handoff=done, tries=NO_TRIES, stream=stream)
