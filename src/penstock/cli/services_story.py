"""The quickstart's chapter on workers: the example's services, each a group of two workers, until all is handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from penstock.cli.work import nothing_left
from penstock.errors import DeadlineExceeded
from penstock.settings import Settings
from penstock.workers.assignment import RoundRobin
from penstock.workers.group import WorkerGroup
from penstock.workers.group_options import GroupOptions
from penstock.workers.options import WorkerOptions
from penstock.workers.sources import Listed
from penstock.workers.stabilization import Windows

WORKERS = 2
WITHIN = 120.0
LOOK_EVERY = 0.1
SOON = Windows(cold_start=0.3, planned=0.2, min_interval=0.1)
"""Nobody else joins here: there is nothing to wait for."""

Say = Callable[[str, str], None]


async def run_services(settings: Settings, services: ModuleType, say: Say) -> None:
    """Run every service until it has handled what is there, and tell what they did."""
    handled = await asyncio.gather(*(_run(settings, service) for service in services.SERVICES))
    told = ", ".join(f"{service.name} {count:,}" for service, count in zip(services.SERVICES, handled, strict=True))
    say("services", f"{WORKERS} workers each handled {told} events, one consumer a worker")


async def _run(settings: Settings, service: Any) -> int:
    async with AsyncExitStack() as open_:
        group = [await open_.enter_async_context(_member(settings, service)) for _ in range(WORKERS)]
        try:
            async with asyncio.timeout(WITHIN):
                await _until_done(group, service)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"service {service.name!r} to handle what is there", WITHIN) from exc
        return sum(one.worker.metrics.done for one in group if one.worker)


def _member(settings: Settings, service: Any) -> WorkerGroup:
    options = GroupOptions(
        group=service.name,
        stream=service.stream,
        source=lambda *_: Listed(service.partitions),
        strategy=RoundRobin(),
        windows=SOON,
        look_every=0.2,
        look_soon=0.05,
    )
    consumer = {"window": 0.02, "min_interval": 0.05}
    return WorkerGroup(settings, options, service.handle, consumer=consumer, worker=WorkerOptions(dlq=service.dlq))


async def _until_done(group: list[WorkerGroup], service: Any) -> None:
    while True:
        if await _done(group, service):
            return
        await asyncio.sleep(LOOK_EVERY)


async def _done(group: list[WorkerGroup], service: Any) -> bool:
    """Whether every partition has its worker, and no worker has anything left."""
    workers = [one.worker for one in group if one.worker and one.worker.partitions]
    owned = {id_ for worker in workers for id_ in worker.partitions}
    if owned != set(service.subjects):
        return False
    return all([await nothing_left(worker) for worker in workers])
