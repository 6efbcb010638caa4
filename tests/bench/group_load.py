"""How long a group takes to share its partitions, and what it writes to KV for that. All workers in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import rawnats

from penstock.consume.instance import new_instance
from penstock.consume.messages import Message, MessageContext
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import Json
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.wire import aio, frames
from penstock.workers.group import assignment
from penstock.workers.group.assignment import Windows
from penstock.workers.group.member import Member
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions, WorkerOptions
from penstock.workers.partitions import Listed, Partition

STREAM = "SHARED"
WITHIN = 600.0
LOOK = 0.1
WINDOWS = Windows(cold_start=1.0, planned=0.5, min_interval=0.2)
TTL = 60.0
"""Long: with a hundred workers in one process on two cores a heartbeat may be late, and that is not to be measured."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was published to a bucket."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """One change: seconds until everything is shared, KV traffic, and partitions that moved."""

    seconds: float
    traffic: Traffic
    moved: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A first assignment, and the one after a worker has left."""

    first: Shared
    leaving: Shared
    updates: int
    """Of consumers, that worked."""
    failures: int


class Listener:
    """Counts whatever is published to a bucket, as the server sees it: subject, headers and data."""

    def __init__(self) -> None:
        self._messages = self._bytes = 0

    def heard(self, message: frames.Message) -> None:
        self._messages += 1
        self._bytes += len(message.subject) + len(message.headers) + len(message.data)

    def taken(self) -> Traffic:
        """What was counted since the last time."""
        found = Traffic(self._messages, self._bytes)
        self._messages = self._bytes = 0
        return found


@asynccontextmanager
async def _watching(settings: Settings, bucket: str) -> AsyncIterator[tuple[Listener, Bucket]]:
    listener, control = Listener(), await Control.connect(settings)
    async with await aio.connect(settings) as connection:
        await connection.subscribe(f"$KV.{bucket}.>", handler=listener.heard)
        await connection.flush()
        yield listener, Bucket(control, bucket)
    await control.close()


async def _nothing(message: Message, context: MessageContext) -> None:
    return None


def share(server: EmbeddedServer, partitions: int, workers: int) -> Growth:
    rawnats.fresh_stream(server.port, STREAM, ["shared.>"])
    return asyncio.run(_share(server, partitions, workers))


async def _share(server: EmbeddedServer, partitions: int, workers: int) -> Growth:
    listed = tuple(Partition(str(n), (f"shared.{n}",)) for n in range(partitions))
    options = GroupOptions(
        group=f"g{partitions}x{workers}", stream=STREAM, source=lambda *_: Listed(listed), windows=WINDOWS, ttl=TTL
    )
    consumer = {"max_subjects": max(500, 2 * partitions // workers + 1)}
    quiet = WorkerOptions(measure_every=0)
    each = [replace(options, instance=new_instance()) for _ in range(workers)]
    crew = [WorkerGroup(server.settings, one, _nothing, consumer=consumer, worker=quiet) for one in each]
    async with _watching(server.settings, options.bucket) as (listener, bucket):
        try:
            started = time.monotonic()
            await asyncio.gather(*(one.start() for one in crew))
            await _until_shared(bucket, crew, partitions)
            first = Shared(time.monotonic() - started, listener.taken(), partitions)
            *staying, last = sorted(crew, key=lambda one: len(one.statistics().partitions))
            moved, started = len(last.statistics().partitions), time.monotonic()
            leaving = asyncio.create_task(last.stop())
            await _until_shared(bucket, staying, partitions)
            again = Shared(time.monotonic() - started, listener.taken(), moved)
            await leaving
            return Growth(first, again, *_updates(crew))
        finally:
            await asyncio.gather(*(one.stop() for one in crew), return_exceptions=True)


def _updates(crew: list[WorkerGroup]) -> tuple[int, int]:
    metrics = [one.worker.metrics for one in crew if one.worker]
    return sum(one.updates.count for one in metrics), sum(one.update_failures for one in metrics)


async def _until_shared(bucket: Bucket, crew: list[WorkerGroup], partitions: int) -> None:
    """Until the last assignment is about all of the crew, and each of them has its share, caught up."""
    async with asyncio.timeout(WITHIN):
        while True:
            head = await bucket.get(assignment.HEAD)
            if head and _is_shared(head.value, [one.member for one in crew if one.member], partitions):
                return
            await asyncio.sleep(LOOK)


def _is_shared(head: Json, members: list[Member], partitions: int) -> bool:
    if set(head["members"]) != {one.identity.id for one in members}:
        return False
    if any(one.statistics().version != head["version"] for one in members):
        return False
    return sum(claim.settled for one in members for claim in one.claims.mine.values()) == partitions
