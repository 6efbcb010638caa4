"""`penstock work --alone` takes up partitions as they come, and drops those that go."""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import PenstockError
from penstock.workers.group.leader import Holder
from penstock.workers.partitions import PartitionSource, usable
from penstock.workers.pull import filters
from penstock.workers.worker import Worker

log = logging.getLogger(__name__)

FOLLOW_EVERY = 5.0
"""Seconds between two looks at the partitions."""


class Following:
    """The partitions of one worker that belongs to no group."""

    def __init__(
        self, worker: Worker, source: PartitionSource, holder: Holder, look_every: float = FOLLOW_EVERY
    ) -> None:
        self._worker = worker
        self._source = source
        self._holder = holder
        self._look_every = look_every
        self._told: list[str] = []

    async def begin(self) -> None:
        """Have the worker handle the partitions that there are now. Raises what is wrong."""
        await self._holder.begin()
        await self.look()

    async def run(self) -> None:
        """Look again and again. Raises what ended the worker."""
        while True:
            await asyncio.sleep(self._look_every)
            if self._worker.failure:
                raise self._worker.failure
            try:
                await self.look()
            except PenstockError as exc:
                log.warning("the partitions stay as they are: %s", exc)

    async def look(self) -> None:
        """Serve those of the source's partitions that fit; the rest is told of, and counted."""
        end, had = await self._holder.end(), self._worker.partitions
        chosen, wrong = usable(await self._source.partitions(), had)
        served = self._worker.fitting(chosen, had.keys())
        self._tell(wrong + filters.left_out(len(chosen) - len(served)))
        await self._worker.update(served)
        if len(served) == len(chosen) and not self._worker.behind:
            await self._holder.release(end)

    def _tell(self, found: list[str]) -> None:
        for trouble in found if found != self._told else ():
            log.warning("%s", trouble)
        self._told = found
