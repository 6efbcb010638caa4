"""Publishes many messages with our publishers; also a process of its own, whose memory the benchmark watches.

python publish_load.py URL fast|atomic COUNT
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import repeat

from harness import Timed

from penstock.publish import Publisher
from penstock.settings import Settings

STREAM = "BENCH"
SUBJECT = "bench.event"
DATA = b"x" * 200
BATCH = 1000


async def atomic_one_by_one(url: str, count: int) -> Timed:
    """`batch.add` for every message."""
    async with await Publisher.connect(Settings(servers=(url,))) as publisher:
        started = time.perf_counter()
        for _ in range(count // BATCH):
            async with publisher.atomic(STREAM) as batch:
                for _ in range(BATCH):
                    await batch.add(SUBJECT, DATA)
        return Timed(count, time.perf_counter() - started)


async def atomic_in_bulk(url: str, count: int) -> Timed:
    """A whole batch with one call."""
    async with await Publisher.connect(Settings(servers=(url,))) as publisher:
        started = time.perf_counter()
        for _ in range(count // BATCH):
            await publisher.publish_batch(STREAM, SUBJECT, [DATA] * BATCH)
        return Timed(count, time.perf_counter() - started)


async def fast_one_by_one(url: str, count: int) -> Timed:
    """`ingest.add` for every message."""
    async with await Publisher.connect(Settings(servers=(url,))) as publisher, publisher.fast(STREAM) as ingest:
        started = time.perf_counter()
        for _ in range(count):
            await ingest.add(SUBJECT, DATA)
        await ingest.commit()
        return Timed(count, time.perf_counter() - started)


async def fast_in_bulk(url: str, count: int) -> Timed:
    """`ingest.add_many` with subject and data of every message."""
    async with await Publisher.connect(Settings(servers=(url,))) as publisher, publisher.fast(STREAM) as ingest:
        started = time.perf_counter()
        await ingest.add_many(repeat((SUBJECT, DATA), count))
        await ingest.commit()
        return Timed(count, time.perf_counter() - started)


if __name__ == "__main__":
    _, server, mode, number = sys.argv
    work = {"fast": fast_one_by_one, "atomic": atomic_one_by_one}[mode]
    asyncio.run(work(server, int(number)))
