"""One worker process of the benchmark: ours, or nats-py in one of two ways.

python worker_load.py URL WAY INDEX SUBJECTS COUNTS

It says `ready` on stdout once it pulls, and counts what it uses from the first line on stdin. COUNTS is a file of
64-bit numbers, one a process: how many messages it has handled. When stdin ends it stops, and tells what it used as one
line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import resource
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

STREAM = "WORK"
PATTERN = "work.{partition}.done"
PREFIX = "bench"
BATCH = 400
MAX_ACK_PENDING = 500
SAMPLE = 16
"""Every so many messages one has its latency taken."""
LATENCIES = 20_000
"""Of these the last are kept: a long run must not grow by what it notes."""


def subject(partition: int) -> str:
    return PATTERN.replace("{partition}", str(partition))


class Tally:
    """What a process has handled; shared with the benchmark through a file."""

    def __init__(self, path: str, index: int) -> None:
        with Path(path).open("r+b") as file:
            self._shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._index = index
        self.count = 0
        self.redelivered = 0
        self.latencies: deque[float] = deque(maxlen=LATENCIES)

    def add(self, delivery_count: int, stored_at: Callable[[], float]) -> None:
        self.count += 1
        self.redelivered += delivery_count > 1
        if self.count % SAMPLE == 0:
            self.latencies.append(time.time() - stored_at())
        self._shared[self._index] = self.count


async def ours(url: str, index: int, subjects: int, tally: Tally, ready: Callable[[], Awaitable[None]]) -> None:
    """One consumer for all of the worker's subjects, on our pull loop."""
    from penstock.settings import Settings
    from penstock.workers.options import ConsumerOptions, WorkerOptions
    from penstock.workers.partitions import SubjectPattern
    from penstock.workers.worker import Worker

    async def handle(message: Any, context: Any) -> None:
        tally.add(message.delivery_count, lambda: message.timestamp.timestamp())

    pattern = SubjectPattern(PATTERN)
    mine = [pattern.partition(str(n)) for n in range(index * subjects, (index + 1) * subjects)]
    options = ConsumerOptions(stream=STREAM, worker_id=str(index), prefix=PREFIX, max_ack_pending=MAX_ACK_PENDING)
    quiet = WorkerOptions(measure_every=0)
    async with Worker(Settings(servers=(url,), timeout=60), options, handle, options=quiet) as worker:
        await worker.update(mine)
        await ready()


async def nats_py(url: str, index: int, subjects: int, tally: Tally, ready: Callable[[], Awaitable[None]]) -> None:
    """One consumer for all of the worker's subjects, on nats-py's fetch."""
    filters = [subject(n) for n in range(index * subjects, (index + 1) * subjects)]
    await _pulling(url, [(f"{PREFIX}-{index}", filters)], BATCH, tally, ready)


async def nats_py_each(url: str, index: int, subjects: int, tally: Tally, ready: Callable[[], Awaitable[None]]) -> None:
    """A consumer for every subject, on nats-py's fetch."""
    mine = range(index * subjects, (index + 1) * subjects)
    await _pulling(url, [(f"{PREFIX}-p{n}", [subject(n)]) for n in mine], BATCH // subjects + 5, tally, ready)


async def _pulling(
    url: str,
    consumers: list[tuple[str, list[str]]],
    batch: int,
    tally: Tally,
    ready: Callable[[], Awaitable[None]],
) -> None:
    import nats
    from nats.js.api import ConsumerConfig

    async def loop(subscription: Any) -> None:
        while True:
            with suppress(Exception):  # nothing there in time, or a server too busy for it: ask again
                for message in await subscription.fetch(batch, timeout=5):
                    tally.add(message.metadata.num_delivered, lambda: message.metadata.timestamp.timestamp())  # noqa: B023
                    await message.ack()

    async with await nats.connect(url, connect_timeout=60) as client:
        stream = client.jetstream(timeout=60)
        loops = []
        for name, filters in consumers:
            config = ConsumerConfig(filter_subjects=filters, max_ack_pending=MAX_ACK_PENDING, ack_wait=30)
            subscription = await stream.pull_subscribe("", durable=name, stream=STREAM, config=config)
            loops.append(asyncio.create_task(loop(subscription)))
        await ready()
        for one in loops:
            one.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


WAYS = {"ours": ours, "nats-py": nats_py, "nats-py-each": nats_py_each}


def used_so_far() -> dict[str, float]:
    """CPU seconds, and how often we slept and were woken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu": used.ru_utime + used.ru_stime, "wakeups": used.ru_nvcsw}


def peak_kib() -> int:
    """Our memory at its highest. What `getrusage` says is at least that of the process that started us."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    _, url, way, index, subjects, counts = sys.argv
    tally = Tally(counts, int(index))
    used: dict[str, Any] = {}

    async def ready() -> None:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        # Messages may be there already: what was handled before this moment is told, to be left out.
        before, used["early"] = used_so_far(), tally.count
        await asyncio.to_thread(sys.stdin.read)
        used.update({name: now - before[name] for name, now in used_so_far().items()})

    asyncio.run(WAYS[way](url, int(index), int(subjects), tally, ready))
    used |= {"count": tally.count, "redelivered": tally.redelivered, "latencies": list(tally.latencies)}
    used["peak_kib"] = peak_kib()
    print(json.dumps(used), flush=True)


if __name__ == "__main__":
    main()
