"""From one consumer a partition to one a worker, step by step, with a way back before the last.

    shadow    write down the partitions, one for each old consumer; workers of the group may start, and get nothing yet
    compare   count what each old consumer has before it, and what its partition would have: nothing may be missing
    drain     pause the old consumers, and wait until everything they delivered is acknowledged
    switch    each partition's claim gets its old consumer's ack floor as handoff sequence; then the group may begin
    clean_up  delete the old consumers, once every partition has a settled owner
    roll_back the old consumers go on behind what the group has done; its workers must have stopped

The flag is the key `migration.state` of the group's bucket: while it says anything but `unified`, nothing is assigned.
A step may be repeated. On a WorkQueue stream `switch` has to delete the old consumers, since filters must not overlap;
their configurations are kept under the key, and `roll_back` makes them again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from penstock.broker.model import ConsumerInfo, Json
from penstock.errors import ConfigError, ConsumerNotFound
from penstock.workers import claims as claim_store
from penstock.workers import lag
from penstock.workers.claims import Claim, claims_in
from penstock.workers.group_options import bucket_name
from penstock.workers.handoff import Retention
from penstock.workers.kv import Bucket, Control
from penstock.workers.partitions import Partition
from penstock.workers.sources import InBucket

KEY = "migration.state"
SHADOW, DRAINED, UNIFIED, LEGACY = "shadow", "drained", "unified", "legacy"
PAUSE = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Parity:
    """One partition as its old consumer and as the group would see it."""

    partition: str
    consumer: str
    unprocessed: int
    """What the old consumer has not acknowledged."""
    in_flight: int
    counted: int
    """Messages behind its ack floor that the group would begin with; -1 when the stream cannot count them."""

    @property
    def missing(self) -> bool:
        """Whether the group would see less than is left to do."""
        return 0 <= self.counted < self.unprocessed


def partition_of(consumer: ConsumerInfo, prefix: str) -> Partition:
    """The partition of an old consumer: the rest of its name, with its filters."""
    if not consumer.filters:
        raise ConfigError(
            f"consumer {consumer.name!r} reads all of its stream, and so is not the consumer of a partition"
        )
    return Partition(consumer.name.removeprefix(prefix), consumer.filters)


def handoffs(consumers: Mapping[str, ConsumerInfo], claims: Mapping[str, Claim]) -> list[Claim]:
    """The free claims to write, by partition. Pure. A partition that the group has had already keeps its claim."""
    made = []
    for partition, consumer in consumers.items():
        known = claims.get(partition)
        if known is None or (known.owner is None and known.handoff < consumer.ack_floor_stream_seq):
            made.append(replace(known or Claim(partition, 0), handoff=consumer.ack_floor_stream_seq))
    return made


class Migration:
    """The migration of one stream's old consumers to one group."""

    def __init__(self, control: Control, bucket: Bucket, stream: str, prefix: str) -> None:
        self._control = control
        self._jetstream = control.jetstream
        self._bucket = bucket
        self._stream = stream
        self._prefix = prefix

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def shadow(self) -> list[Partition]:
        """Write down partitions and flag. Nothing about the old consumers changes."""
        found = await self._legacy()
        if not found:
            raise ConfigError(f"stream {self._stream!r} has no consumers whose names begin with {self._prefix!r}")
        partitions = [partition_of(consumer, self._prefix) for consumer in found]
        await self._bucket.ensure()
        if await self._phase() == UNIFIED:
            raise ConfigError("the group works already; `rollback` first to begin anew")
        await InBucket(self._bucket).write(partitions)
        await self._flag(SHADOW, found)
        return partitions

    async def compare(self) -> list[Parity]:
        """What both sides have before them now."""
        found = await self._legacy()
        partitions = {c.name: partition_of(c, self._prefix) for c in found}
        floors = {partitions[c.name].id: c.ack_floor_stream_seq for c in found}
        await self._control.ready()
        measured = await lag.measure(
            self._control.connection, self._jetstream, self._stream, partitions.values(), floors
        )
        return [
            Parity(p.id, c.name, c.unprocessed, c.ack_pending, measured[p.id].messages)
            for c in found
            if (p := partitions[c.name])
        ]

    async def drain(self) -> int:
        """Pause the old consumers; returns how many messages they have delivered that are not acknowledged yet."""
        await self._require(SHADOW, DRAINED)
        for consumer in await self._legacy():
            await self._jetstream.pause_consumer(self._stream, consumer.name, PAUSE)
        left = sum(consumer.ack_pending for consumer in await self._legacy())
        if not left:
            await self._flag(DRAINED)
        return left

    async def switch(self) -> int:
        """Hand the partitions over to the group; returns how many. From here on the group assigns them."""
        await self._require(DRAINED, UNIFIED)
        found = await self._legacy()
        by_partition = {partition_of(c, self._prefix).id: c for c in found}
        known = claims_in(await self._bucket.entries(claim_store.FAMILY))
        await claim_store.store(self._bucket, handoffs(by_partition, known))
        if await self._retention() is Retention.WORKQUEUE:
            await self._delete(found)
        await self._flag(UNIFIED)
        return len(by_partition)

    async def clean_up(self) -> int:
        """Delete the old consumers; returns how many there were. Refused while a partition has no settled owner."""
        await self._require(UNIFIED)
        claims = claims_in(await self._bucket.entries(claim_store.FAMILY))
        if open_ := sorted(claim.partition for claim in claims.values() if not claim.settled):
            raise ConfigError(
                f"partitions without a settled owner: {', '.join(open_[:5])}; start workers, then try again"
            )
        found = await self._legacy()
        await self._delete(found)
        return len(found)

    async def roll_back(self) -> int:
        """Let the old consumers go on behind what the group has done; returns how many."""
        state = await self._state()
        claims = claims_in(await self._bucket.entries(claim_store.FAMILY))
        if owned := sorted({claim.owner for claim in claims.values() if claim.owner}):
            raise ConfigError(f"{', '.join(owned[:5])} still work for the group; stop them, then try again")
        await self._flag(LEGACY)
        retention = await self._retention()
        if retention is not Retention.INTEREST:
            await self._delete(await self._of_group())
        present = {consumer.name for consumer in await self._legacy()}
        for name, config in state["legacy"].items():
            await self._restore(name, config, claims.get(name.removeprefix(self._prefix)), retention, name in present)
        if retention is Retention.INTEREST:
            await self._delete(await self._of_group())
        return len(state["legacy"])

    async def _restore(self, name: str, config: Json, claim: Claim | None, retention: Retention, present: bool) -> None:
        if not present:
            await self._jetstream.create_consumer(self._stream, config)
        current = await self._jetstream.consumer_info(self._stream, name)
        if claim and claim.handoff > current.ack_floor_stream_seq and retention is not Retention.WORKQUEUE:
            await self._jetstream.reset_consumer(self._stream, name, claim.handoff + 1)
        if claim and retention is Retention.INTEREST:  # a reset leaves behind what it passes over
            for subject in current.filters:
                await self._jetstream.purge_stream(self._stream, subject=subject, before_seq=claim.handoff + 1)
        await self._jetstream.resume_consumer(self._stream, name)

    # -- what there is -------------------------------------------------------------------------------------------------

    async def _legacy(self) -> list[ConsumerInfo]:
        consumers = await self._jetstream.consumers(self._stream)
        return [c for c in consumers if c.name.startswith(self._prefix) and not _group_of(c)]

    async def _of_group(self) -> list[ConsumerInfo]:
        consumers = await self._jetstream.consumers(self._stream)
        return [c for c in consumers if bucket_name(_group_of(c)) == self._bucket.name]

    async def _delete(self, consumers: Collection[ConsumerInfo]) -> None:
        for consumer in consumers:
            with suppress(ConsumerNotFound):
                await self._jetstream.delete_consumer(self._stream, consumer.name)

    async def _retention(self) -> Retention:
        return Retention((await self._jetstream.stream_info(self._stream)).config.get("retention", "limits"))

    # -- the flag ------------------------------------------------------------------------------------------------------

    async def _state(self) -> Json:
        entry = await self._bucket.get(KEY) if await self._bucket.exists() else None
        if entry is None:
            raise ConfigError("no migration is under way; begin with `shadow`")
        return entry.value

    async def _phase(self) -> str | None:
        return await phase(self._bucket)

    async def _require(self, *phases: str) -> None:
        now = (await self._state())["phase"]
        if now not in phases:
            raise ConfigError(f"the migration is at {now!r}, and this step comes after {phases[0]!r}")

    async def _flag(self, to: str, consumers: Collection[ConsumerInfo] | None = None) -> None:
        if consumers is None:
            legacy = (await self._state())["legacy"]
        else:
            legacy = {c.name: {k: v for k, v in c.config.items() if k != "pause_until"} for c in consumers}
        await self._bucket.put(KEY, {"v": 1, "phase": to, "stream": self._stream, "legacy": legacy})


async def phase(bucket: Bucket) -> str | None:
    """How far a migration to the group has come; None when there is none."""
    entry = await bucket.get(KEY)
    return str(entry.value["phase"]) if entry else None


def _group_of(consumer: ConsumerInfo) -> str:
    return str((consumer.config.get("metadata") or {}).get("penstock.group", ""))
