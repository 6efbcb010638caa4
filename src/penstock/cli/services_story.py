"""The quickstart's chapters on handlers: services on their declared consumers, and a group that shares partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType

from penstock.app import App
from penstock.app.app import Running
from penstock.cli.work import nothing_left
from penstock.errors import DeadlineExceeded
from penstock.publish import Publisher
from penstock.settings import Settings
from penstock.workers.group.assignment import RoundRobin, Windows
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions, WorkerOptions
from penstock.workers.partitions import Listed, Partition

INSTANCES = 2
WITHIN = 120.0
LOOK_EVERY = 0.1
READINGS = 3_000
SOON = Windows(cold_start=0.3, planned=0.2, min_interval=0.1)
"""Nobody else joins here: there is nothing to wait for."""

Say = Callable[[str, str], None]


async def run_services(app: App, services: Collection[str]) -> list[Running]:
    """Run services, two instances of each, until their consumers have nothing left; what each of them has handled."""
    stop = asyncio.Event()
    handlers: list[Running] = []
    running = [asyncio.create_task(app.serve(stop, services, handlers.extend)) for _ in range(INSTANCES)]

    async def done() -> bool:
        for one in running:
            if one.done():
                one.result()
        return bool(handlers) and all([await one.done() for one in handlers])

    try:
        await _until(done, "the services to handle what is there")
    finally:
        stop.set()
        await asyncio.gather(*running, return_exceptions=True)
    return handlers


async def run_group(settings: Settings, telemetry: ModuleType, say: Say) -> None:
    """Two workers share the nodes; one leaves halfway, and its share goes over."""
    async with await Publisher.connect(settings) as publisher:
        made = list(telemetry.readings(READINGS))
        for start in range(0, READINGS, 1000):
            subjects, bodies = zip(*made[start : start + 1000], strict=True)
            await publisher.publish_batch("TELEMETRY", list(subjects), list(bodies))
    handled: dict[str, list[int]] = telemetry.handled

    async with AsyncExitStack() as stays, _member(settings, telemetry) as leaves:
        stayed = await stays.enter_async_context(_member(settings, telemetry))

        async def shared() -> bool:
            return all(one.worker and one.worker.partitions for one in (leaves, stayed))

        async def over() -> bool:
            worker = stayed.worker
            return bool(worker and len(worker.partitions) == len(telemetry.NODES)) and await nothing_left(worker)

        await _until(shared, "both workers to have partitions")
        share = len(leaves.worker.partitions) if leaves.worker else 0
        await leaves.stop()
        await _until(over, "the readings to be handled")
    total = sum(map(len, handled.values()))
    well = all(sorted(set(one)) == one for one in handled.values()) and total == READINGS
    result = "each once and in order" if well else f"NOT each once and in order: {total:,} were handled"
    shares = f"2 workers shared {len(telemetry.NODES)} nodes; one left, and its {share} went over"
    say("group", f"{shares}; {READINGS:,} readings, {result}")


@asynccontextmanager
async def _member(settings: Settings, telemetry: ModuleType) -> AsyncIterator[WorkerGroup]:
    partitions: Sequence[Partition] = tuple(Partition(node, (f"telemetry.{node}",)) for node in telemetry.NODES)
    options = GroupOptions(
        group="telemetry",
        stream="TELEMETRY",
        source=lambda *_: Listed(tuple(partitions)),
        strategy=RoundRobin(),
        windows=SOON,
        look_every=0.2,
        look_soon=0.05,
    )
    consumer = {"window": 0.02, "min_interval": 0.05}
    worker = WorkerOptions(dlq="dlq.telemetry.reading")
    async with WorkerGroup(settings, options, telemetry.read, consumer=consumer, worker=worker) as member:
        yield member


async def _until(done: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(WITHIN):
            while True:
                if await done():
                    return
                await asyncio.sleep(LOOK_EVERY)
    except TimeoutError as exc:
        raise DeadlineExceeded(what, WITHIN) from exc
