"""Catching up with a partition: what its consumer has passed over, in order, before anything that it delivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from penstock.consume.messages import Message
from penstock.errors import PenstockError, Unavailable
from penstock.retry import Backoff, is_retryable
from penstock.workers.dispatch.dispatcher import Dispatcher
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.partitions import Partition
from penstock.workers.pull.consumer import WORK_QUEUE, WorkerConsumer
from penstock.workers.pull.puller import Puller
from penstock.workers.pull.stored import Place, stored


class NotOwned(Unavailable):
    """The partition belongs to somebody else now."""


class CatchUp:
    """How the worker reads what was passed over: itself, or on a work queue by its consumer."""

    def __init__(
        self, place: Callable[[], Place], consumer: WorkerConsumer, dispatcher: Dispatcher, puller: Puller
    ) -> None:
        self._place = place
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._puller = puller

    async def run(self, partition: Partition, lane: Lane, first: int, last: int) -> None:
        """Handle what the partition has in this range. The lane must be held, and at rest.

        On a work queue it is not handled when this returns: it comes now, in order, before whatever comes later.
        """
        if self._consumer.retention == WORK_QUEUE:
            if first <= last:
                await self._rewind(lane)
        else:
            await self._read(partition, lane, first, last)
            self._dispatcher.advance(lane, last)

    async def _read(self, partition: Partition, lane: Lane, first: int, last: int) -> None:
        delays, position = Backoff().delays(), first
        while position <= last:
            try:
                async with aclosing(stored(self._place(), partition.subjects, position, last)) as messages:
                    async for message in messages:
                        await self._handle(lane, message)
                        position = message.sequence + 1
                return
            except PenstockError as exc:
                if isinstance(exc, NotOwned) or not is_retryable(exc):
                    raise
                await asyncio.sleep(next(delays))

    async def _handle(self, lane: Lane, message: Message) -> None:
        done = message.sequence in self._dispatcher.finished  # by us, when the partition was ours before
        if not done and not await self._dispatcher.handle_stored(lane, message):
            raise NotOwned(f"partition {lane.id!r} is no longer ours; {message.sequence} is not done")
        self._dispatcher.advance(lane, message.sequence)

    async def _rewind(self, lane: Lane) -> None:
        """Have the consumer of a work queue deliver all there is: what is done is gone, so nothing comes twice.

        What came of the partition before is forgotten, for it comes again, in its order.
        """
        async with self._puller.settling:
            for name in self._consumer.names:
                await self._consumer.reset(name, 1)
            self._puller.begin_anew(f"all there is of {lane.id} is to come")
            self._dispatcher.forget(lane)
