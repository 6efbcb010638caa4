"""How long a group takes to share its partitions, and what it writes to KV for that. All workers in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import rawnats

from penstock.broker.embedded import EmbeddedServer
from penstock.workers.group import WorkerGroup
from penstock.workers.group_options import GroupOptions
from penstock.workers.identity import new_instance
from penstock.workers.messages import Message, MessageContext
from penstock.workers.options import WorkerOptions
from penstock.workers.partitions import Partition
from penstock.workers.sources import Listed
from penstock.workers.stabilization import Windows

STREAM = "SHARED"
WITHIN = 600.0
LOOK = 0.05


@dataclass(frozen=True, slots=True)
class Shared:
    """Seconds and KV writes until everything is shared at first, and again after one worker has left."""

    first_seconds: float
    first_writes: int
    again_seconds: float
    again_writes: int


async def _nothing(message: Message, context: MessageContext) -> None:
    return None


def share(server: EmbeddedServer, partitions: int, workers: int) -> Shared:
    rawnats.fresh_stream(server.port, STREAM, ["shared.>"])
    return asyncio.run(_share(server, partitions, workers))


async def _share(server: EmbeddedServer, partitions: int, workers: int) -> Shared:
    listed = tuple(Partition(str(n), (f"shared.{n}",)) for n in range(partitions))
    options = GroupOptions(
        group=f"g{partitions}x{workers}",
        stream=STREAM,
        source=lambda *_: Listed(listed),
        windows=Windows(cold_start=1.0, planned=0.5, min_interval=0.2),
    )
    consumer = {"max_subjects": max(500, 2 * partitions // workers + 1)}
    quiet = WorkerOptions(measure_every=0)
    each = [replace(options, instance=new_instance()) for _ in range(workers)]
    crew = [WorkerGroup(server.settings, one, _nothing, consumer=consumer, worker=quiet) for one in each]
    writes: Callable[[], int] = lambda: sum(one.statistics().kv_writes for one in crew)  # noqa: E731 -- asked four times
    try:
        started = time.monotonic()
        await asyncio.gather(*(one.start() for one in crew))
        await _until_shared(crew, partitions)
        first_seconds, first_writes = time.monotonic() - started, writes()
        started = time.monotonic()
        leaving = asyncio.create_task(crew[-1].stop())
        await _until_shared(crew[:-1], partitions)
        again = Shared(first_seconds, first_writes, time.monotonic() - started, writes() - first_writes)
        await leaving
        return again
    finally:
        await asyncio.gather(*(one.stop() for one in crew), return_exceptions=True)


async def _until_shared(crew: list[WorkerGroup], partitions: int) -> None:
    async with asyncio.timeout(WITHIN):
        while True:
            claimed = sum(len(one.statistics().partitions) for one in crew)
            if claimed == partitions and not any(one.statistics().catching_up for one in crew):
                return
            await asyncio.sleep(LOOK)
