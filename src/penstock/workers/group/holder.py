"""Keeps messages of partitions that nobody has seen yet, on a stream that keeps only what a consumer waits for.

Where partitions are found by a pattern, an Interest stream would drop the first messages of a new subject before
anybody could see them. So a durable consumer that nobody pulls from has the pattern's wildcard as its filter. Whoever
looks for partitions moves it on:

    1. ask for the stream's end
    2. look for partitions: whatever lies below that end is among them, since the holder keeps it
    3. reset the holder to behind what every partition has an owner for that has caught up: from there on the owner's
       consumer keeps what is not done. What nobody else waits for is deleted by the server with that

A crash at any point leaves a holder that is further behind: messages stay for longer, and none is lost. It is deleted
with the group only: a consumer that nobody pulls from is inactive all the time.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from penstock.errors import ConsumerNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json
from penstock.workers.group.handoff import Retention
from penstock.workers.pull.consumer import stream_identity
from penstock.workers.sources import PartitionSource, wildcard_of

HOLDS = "penstock.holds"
"""Metadata: the group or the worker that a holder is for."""


def holder_name(prefix: str) -> str:
    """The consumer that holds messages for a group, or for a worker that is alone."""
    return f"{prefix}-holder"


class Holder:
    """The holding consumer of a group, or of a worker that is alone; does nothing where none is needed."""

    def __init__(self, jetstream: JetStream, stream: str, prefix: str, source: PartitionSource) -> None:
        self.stream = ""
        """Which stream the last end was of: another one of its name has other messages."""
        self._jetstream = jetstream
        self._stream = stream
        self._prefix = prefix
        self._filter = wildcard_of(source)
        self._needed = self._filter is not None

    async def begin(self) -> None:
        """Make the consumer if it is needed; one that is there stays where it is, with the pattern's filter."""
        if self._filter is None:
            return
        info = await self._jetstream.stream_info(self._stream)
        self._needed = info.config.get("retention") == Retention.INTEREST
        if not self._needed:
            return
        try:
            await self._jetstream.update_consumer(self._stream, holder_name(self._prefix), self._changed)
        except ConsumerNotFound:
            await self._jetstream.create_consumer(self._stream, self._config())

    async def end(self) -> int:
        """The stream's end, to be asked for before partitions are looked for."""
        if not self._needed:
            return 0
        info = await self._jetstream.stream_info(self._stream)
        self.stream = stream_identity(info)
        return info.state.last_seq

    async def release(self, through: int) -> None:
        """Hold nothing up to there any more. Never moves back."""
        if not self._needed or not through:
            return
        name = holder_name(self._prefix)
        try:
            info = await self._jetstream.consumer_info(self._stream, name)
        except ConsumerNotFound:  # gone with its stream, or somebody deleted it
            await self.begin()
            return
        if info.ack_floor_stream_seq < through:
            await self._jetstream.reset_consumer(self._stream, name, through + 1)

    def _config(self) -> Json:
        name = holder_name(self._prefix)
        kept = {"ack_policy": "explicit", "deliver_policy": "all", "metadata": {HOLDS: self._prefix}}
        return {"name": name, "durable_name": name, "filter_subjects": [self._filter], **kept}

    def _changed(self, config: Json) -> Json:
        config.pop("filter_subject", None)
        return {**config, "filter_subjects": [self._filter]}


async def delete_holder(jetstream: JetStream, stream: str, prefix: str) -> None:
    """Hold nothing any more: the group is no more."""
    with suppress(ConsumerNotFound):
        await jetstream.delete_consumer(stream, holder_name(prefix))


def covered_through(end: int, handoffs: Collection[int | None]) -> int:
    """Up to where nothing needs to be held. `handoffs`: of the partitions without an owner that has caught up, how far
    each is done; None where that is not known. Pure."""
    return 0 if None in handoffs else min([end, *(handoff or 0 for handoff in handoffs)])
