"""Migrates from one consumer per partition to one per worker, step by step; every step but the last can be undone.

    shadow    record the partitions, one for each old consumer; workers of the group may start, and get nothing yet
    compare   count what each old consumer has left, and what its partition would have: nothing may be missing
    drain     pause the old consumers, and wait until everything they delivered is acknowledged
    switch    each partition's claim gets its old consumer's ack floor as handoff sequence; then the group may begin
    overlap   the same without `drain` before it, while the old consumers run: the first side to handle a message leaves
              a mark, and the other side skips it (`workers.overlap`). Then `drain` and `switch` end it
    clean_up  delete the old consumers, once every partition has a settled owner
    roll_back the group releases its partitions, and the old consumers resume after what it has done; on an Interest
              stream the group's workers must have stopped

The flag is the key `migration.state` of the group's bucket: while it has any value but `unified`, nothing is assigned.
A step may be repeated. On a WorkQueue stream `switch` has to delete the old consumers, since filters must not overlap;
their configurations are stored under the key, and `roll_back` creates them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from penstock.errors import ConfigError, ConsumerNotFound
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import ConsumerInfo, Json, Retention
from penstock.publish.control import Control
from penstock.workers.group import claims as claim_store
from penstock.workers.group.claims import Claim, claims_in
from penstock.workers.group.identity import clock
from penstock.workers.options import bucket_name, overlap_bucket
from penstock.workers.partitions import InBucket, Partition
from penstock.workers.pull import stored
from penstock.workers.pull.consumer import group_consumers

MIGRATION_KEY = "migration.state"
SHADOW, DRAINED, OVERLAP, UNIFIED, LEGACY = "shadow", "drained", "overlap", "unified", "legacy"
AT_WORK = frozenset({None, OVERLAP, UNIFIED})
"""Phases in which the group assigns its partitions."""
PAUSE = timedelta(days=3650)
LOOK_EVERY = 0.2
"""Seconds between two checks whether the group has released its partitions."""
END = 1 << 63
"""Above every sequence."""


@dataclass(frozen=True, slots=True)
class Parity:
    """One partition as its old consumer and the group see it."""

    partition: str
    consumer: str
    unprocessed: int
    """Messages that the old consumer has not acknowledged."""
    in_flight: int
    counted: int
    """Messages above its ack floor that the group would start with."""
    left_to_group: int | None = None
    """During an overlap: messages that the group has not handled."""

    @property
    def missing(self) -> bool:
        """Whether the group would see fewer messages than are left."""
        return self.counted < self.unprocessed


def partition_of(consumer: ConsumerInfo, prefix: str) -> Partition:
    """Return the partition of an old consumer: the rest of its name, with its filters."""
    if not consumer.filters:
        raise ConfigError(
            f"consumer {consumer.name!r} reads all of its stream, and so is not the consumer of a partition"
        )
    return Partition(consumer.name.removeprefix(prefix), consumer.filters)


def handoffs(consumers: Mapping[str, ConsumerInfo], claims: Mapping[str, Claim]) -> list[Claim]:
    """Return the free claims to write. Pure. A partition that the group has owned already keeps its claim."""
    made = []
    for partition, consumer in consumers.items():
        known = claims.get(partition)
        if known is None or (known.owner is None and known.handoff < consumer.ack_floor_stream_seq):
            made.append(replace(known or Claim(partition, 0), handoff=consumer.ack_floor_stream_seq))
    return made


def unmarked(consumers: Collection[ConsumerInfo], delivered: Mapping[str, int], marks: int) -> str | None:
    """Return why an overlap may not start yet: messages that the old side has handled without leaving a mark. Pure.

    `delivered`: the position of each old consumer at `shadow`, by when the old side must have left its marks.
    """
    if late := sorted(consumer.name for consumer in consumers if consumer.name not in delivered):
        return f"{', '.join(late[:5])} came after `shadow`; repeat it, then try again"
    for consumer in consumers:
        if consumer.ack_pending and consumer.ack_floor_stream_seq < delivered[consumer.name]:
            return (
                f"{consumer.name} has not finished what it had at `shadow` (up to {delivered[consumer.name]}, and "
                f"acknowledged up to {consumer.ack_floor_stream_seq}); wait for that, then try again"
            )
    if not marks and any(consumer.ack_floor_stream_seq > delivered[consumer.name] for consumer in consumers):
        return "the old consumers have gone on and left no marks; put `Overlap` around their handlers, then `shadow`"
    return None


def not_passed(
    legacy: Mapping[str, ConsumerInfo], claims: Mapping[str, Claim], consumers: Collection[ConsumerInfo]
) -> list[str]:
    """Return the partitions where the group is behind the old consumer: there its marks still count. Pure."""
    busy = _floors(consumer for consumer in consumers if consumer.unprocessed)
    return sorted(
        partition
        for partition, consumer in legacy.items()
        if partition in claims and busy.get(claims[partition].owner or "", END) < consumer.delivered_stream_seq
    )


class Migration:
    """The migration of one stream's old consumers to one group."""

    def __init__(self, control: Control, bucket: Bucket, stream: str, prefix: str) -> None:
        self._control = control
        self._jetstream = control.jetstream
        self._bucket = bucket
        self._group = bucket.name.removeprefix(bucket_name(""))
        self._marks = Bucket(control, overlap_bucket(self._group))
        self._stream = stream
        self._prefix = prefix

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def shadow(self) -> list[Partition]:
        """Record the partitions and the flag. The old consumers do not change."""
        found = await self._legacy()
        if not found:
            raise ConfigError(f"stream {self._stream!r} has no consumers whose names begin with {self._prefix!r}")
        partitions = [partition_of(consumer, self._prefix) for consumer in found]
        await self._bucket.ensure()
        if await self._phase() in (OVERLAP, UNIFIED):
            raise ConfigError("the group works already; `rollback` first to begin anew")
        await InBucket(self._bucket).write(partitions)
        await self._write_down(found)
        return partitions

    async def compare(self) -> list[Parity]:
        """Count what both sides have left now."""
        found = await self._legacy()
        partitions = {c.name: partition_of(c, self._prefix) for c in found}
        floors = {partitions[c.name].id: c.ack_floor_stream_seq for c in found}
        counted = await self._behind(partitions.values(), floors)
        left = await self._left_to_group(partitions.values()) if await self._phase() == OVERLAP else {}
        return [
            Parity(p.id, c.name, c.unprocessed, c.ack_pending, counted[p.id], left.get(p.id))
            for c in found
            if (p := partitions[c.name])
        ]

    async def _left_to_group(self, partitions: Collection[Partition]) -> dict[str, int]:
        """Count each partition's messages above its owner's ack floor, or its handoff sequence without an owner."""
        claims = claims_in(await self._bucket.entries(claim_store.CLAIMS))
        floors = _floors(await self._of_group())
        done = {p: max(c.handoff, floors.get(c.owner or "", 0) if c.settled else 0) for p, c in claims.items()}
        return await self._behind(partitions, done)

    async def _behind(self, partitions: Collection[Partition], done: Mapping[str, int]) -> dict[str, int]:
        """Count the messages of each partition above what is done."""
        await self._control.ready()
        measured = await stored.measure(self._control.connection, self._jetstream, self._stream, partitions, done)
        return {
            p.id: measured[p.id].messages
            if measured[p.id].messages >= 0
            else await stored.count(self._jetstream, self._stream, p, done.get(p.id, 0))
            for p in partitions
        }

    async def drain(self, force: bool = False) -> int:
        """Pause the old consumers; returns how many messages they have delivered that are not acknowledged yet.

        `force`: they will never be acknowledged. The group handles them again, and everything that was acknowledged
        above the first of them.
        """
        now = await self._require(SHADOW, DRAINED, OVERLAP)
        for consumer in await self._legacy():
            await self._jetstream.pause_consumer(self._stream, consumer.name, PAUSE)
        left = sum(consumer.ack_pending for consumer in await self._legacy())
        if not left or force:
            await self._flag(now if now == OVERLAP else DRAINED, forced=force)  # in an overlap the group keeps running
        return left

    async def overlap(self) -> int:
        """Start the group while the old consumers run; returns the number of partitions.

        Both sides handle through `workers.overlap`, the old one since before `shadow`. Not for work queues.
        """
        await self._require(SHADOW, OVERLAP)
        if await self._retention() is Retention.WORKQUEUE:
            raise ConfigError(
                f"stream {self._stream!r} is a work queue, where no two consumers may have the same subject: "
                "`drain`, then `switch`"
            )
        found = await self._legacy()
        if why := unmarked(found, (await self._state()).get("delivered", {}), await self._count_of_marks()):
            raise ConfigError(why)
        count = await self._hand_over(found)
        await self._flag(OVERLAP)
        return count

    async def _count_of_marks(self) -> int:
        if not await self._marks.exists():
            raise ConfigError("no marks are left by the old side; put `Overlap` around its handlers, then `shadow`")
        return (await self._jetstream.stream_info(self._marks.stream)).state.messages

    async def _hand_over(self, legacy: Collection[ConsumerInfo]) -> int:
        by_partition = {partition_of(c, self._prefix).id: c for c in legacy}
        known = claims_in(await self._bucket.entries(claim_store.CLAIMS))
        await claim_store.store(self._bucket, handoffs(by_partition, known))
        return len(by_partition)

    async def switch(self) -> int:
        """Hand the partitions over to the group; returns how many. From then on the group assigns them."""
        now = await self._require(DRAINED, UNIFIED, OVERLAP)
        found = await self._legacy()
        forced = (await self._state()).get("forced", False)
        if now == OVERLAP and any((c.ack_pending and not forced) or not c.paused for c in found):
            raise ConfigError("the old consumers are still at work; `drain` first")
        count = await self._hand_over(found)
        if await self._retention() is Retention.WORKQUEUE:
            await self._delete(found)
        await self._flag(UNIFIED)
        return count

    async def clean_up(self) -> int:
        """Delete the old consumers; returns how many there were. Refused while a partition has no settled owner."""
        await self._require(UNIFIED)
        claims = claims_in(await self._bucket.entries(claim_store.CLAIMS))
        if open_ := sorted(claim.partition for claim in claims.values() if not claim.settled):
            raise ConfigError(
                f"partitions without a settled owner: {', '.join(open_[:5])}; start workers, then try again"
            )
        found = await self._legacy()
        if await self._marks.exists():
            await self._clear_marks({partition_of(c, self._prefix).id: c for c in found}, claims)
        await self._delete(found)
        return len(found)

    async def _clear_marks(self, legacy: Mapping[str, ConsumerInfo], claims: Mapping[str, Claim]) -> None:
        """Delete the marks once the group has passed everything that the old side can have done."""
        if open_ := not_passed(legacy, claims, await self._of_group()):
            raise ConfigError(f"the group has yet to pass what was done of {', '.join(open_[:5])}; try again later")
        await self._jetstream.delete_stream(self._marks.stream)

    async def roll_back(self, within: float = 0.0) -> int:
        """Resume the old consumers after what the group has done; returns how many. Workers of the group have `within`
        seconds to release their partitions; with 0, and on an Interest stream, they must have stopped."""
        state, retention = await self._state(), await self._retention()
        came_from = state.get("from") if state["phase"] == LEGACY else state["phase"]
        if retention is Retention.INTEREST or not within:
            claims = await self._given_back(0.0)
            await self._flag(LEGACY, **{"from": came_from})
        else:
            await self._flag(LEGACY, **{"from": came_from})  # on this flag the group's leader unassigns its partitions
            claims = await self._given_back(within)
        if retention is not Retention.INTEREST:
            await self._delete(await self._of_group())
        present = {consumer.name for consumer in await self._legacy()}
        if came_from == OVERLAP:  # then the old consumers get everything, and skip what is marked
            claims = {}
        for name, config in state["legacy"].items():
            await self._restore(name, config, claims.get(name.removeprefix(self._prefix)), retention, name in present)
        if retention is Retention.INTEREST:
            await self._delete(await self._of_group())
        return len(state["legacy"])

    async def _given_back(self, within: float) -> dict[str, Claim]:
        """Return the claims once none has an owner."""
        deadline = clock() + within
        while True:
            claims = claims_in(await self._bucket.entries(claim_store.CLAIMS))
            owned = sorted({claim.owner for claim in claims.values() if claim.owner})
            if not owned:
                return claims
            if clock() >= deadline:
                raise ConfigError(f"{', '.join(owned[:5])} still work for the group; stop them, then try again")
            await asyncio.sleep(LOOK_EVERY)

    async def _restore(self, name: str, config: Json, claim: Claim | None, retention: Retention, present: bool) -> None:
        if not present:
            await self._jetstream.create_consumer(self._stream, config)
        current = await self._jetstream.consumer_info(self._stream, name)
        if claim and claim.handoff > current.ack_floor_stream_seq and retention is not Retention.WORKQUEUE:
            await self._jetstream.reset_consumer(self._stream, name, claim.handoff + 1)
        if claim and retention is Retention.INTEREST:  # a reset leaves skipped messages unacknowledged
            for subject in current.filters:
                await self._jetstream.purge_stream(self._stream, subject=subject, before_seq=claim.handoff + 1)
        await self._jetstream.resume_consumer(self._stream, name)

    # -- current state -------------------------------------------------------------------------------------------------

    async def _legacy(self) -> list[ConsumerInfo]:
        consumers = await self._jetstream.consumers(self._stream)
        return [c for c in consumers if c.name.startswith(self._prefix) and not _noted(c, "group")]

    async def _of_group(self) -> list[ConsumerInfo]:
        found = await group_consumers(self._jetstream, self._stream, self._group)
        return [consumer for some in found.values() for consumer in some]

    async def load(self) -> tuple[int, float]:
        """Return how many messages the group has left, and the share of its unacknowledged messages that are
        redeliveries."""
        consumers = await self._of_group()
        out = sum(consumer.ack_pending for consumer in consumers)
        again = sum(consumer.redelivered for consumer in consumers)
        return sum(consumer.unprocessed for consumer in consumers), again / max(out, again, 1)

    async def _delete(self, consumers: Collection[ConsumerInfo]) -> None:
        for consumer in consumers:
            with suppress(ConsumerNotFound):
                await self._jetstream.delete_consumer(self._stream, consumer.name)

    async def _retention(self) -> Retention:
        return Retention((await self._jetstream.stream_info(self._stream)).config.get("retention", "limits"))

    # -- the flag ------------------------------------------------------------------------------------------------------

    async def _state(self) -> Json:
        entry = await self._bucket.get(MIGRATION_KEY) if await self._bucket.exists() else None
        if entry is None:
            raise ConfigError("no migration is under way; begin with `shadow`")
        return entry.value

    async def _phase(self) -> str | None:
        return await phase(self._bucket) if await self._bucket.exists() else None

    async def _require(self, *phases: str) -> str:
        now = str((await self._state())["phase"])
        if now not in phases:
            raise ConfigError(f"the migration is at {now!r}, and this step comes after {phases[0]!r}")
        return now

    async def _flag(self, to: str, **more: object) -> None:
        await self._bucket.put(MIGRATION_KEY, {**await self._state(), "phase": to, **more})

    async def _write_down(self, consumers: Collection[ConsumerInfo]) -> None:
        """Store the configurations of the old consumers, for `roll_back`, and their positions."""
        legacy = {c.name: {k: v for k, v in c.config.items() if k != "pause_until"} for c in consumers}
        delivered = {c.name: c.delivered_stream_seq for c in consumers}
        state = {"v": 1, "phase": SHADOW, "stream": self._stream, "legacy": legacy, "delivered": delivered}
        await self._bucket.put(MIGRATION_KEY, state)


async def phase(bucket: Bucket) -> str | None:
    """Return the phase of a migration to the group; None when there is none."""
    entry = await bucket.get(MIGRATION_KEY)
    return str(entry.value.get("phase")) if entry else None


def _floors(consumers: Iterable[ConsumerInfo]) -> dict[str, int]:
    """Return the progress of each worker of the group: the lowest of its consumers' ack floors."""
    found: dict[str, int] = {}
    for consumer in consumers:
        worker = _noted(consumer, "worker")
        found[worker] = min(found.get(worker, END), consumer.ack_floor_stream_seq)
    return found


def _noted(consumer: ConsumerInfo, what: str) -> str:
    return str((consumer.config.get("metadata") or {}).get(f"penstock.{what}", ""))
