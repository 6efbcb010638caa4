"""Worker processes on one server, a publisher that offers them messages at a rate, and what they used for them."""

from __future__ import annotations

import asyncio
import json
import mmap
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import rawnats
import worker_load
from harness import rss
from worker_load import PATTERN, STREAM

from penstock.jetstream import connect
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings

DATA = b"x" * 200
SUBJECTS = 80
BACKLOG_RATE = 100_000
READY_WITHIN = 120.0
SLICE = 0.02
"""Seconds between two bursts of the publisher."""
SAMPLE_EVERY = 1.0
"""Seconds between two looks at memory and open files."""
KEPT = 2_000_000
"""Messages that the stream keeps: a long run must not fill the disk."""
CONSUMERS = 5_000
"""What the stream allows: without a limit of its own a server stops at 1,000; a consumer a partition takes 2,000."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of all workers."""

    count: int
    seconds: float
    """From the first message published to the last one handled."""
    told: Sequence[dict[str, Any]]
    """What each worker used."""
    consumers: int
    server_cpu: float

    @property
    def cpu(self) -> float:
        return float(sum(one["cpu"] for one in self.told))

    @property
    def wakeups(self) -> float:
        """How often a worker slept and was woken, for a thousand messages."""
        return 1000.0 * float(sum(one["wakeups"] for one in self.told)) / self.count

    @property
    def redelivered(self) -> float:
        """Percent of the messages."""
        return 100.0 * float(sum(one["redelivered"] for one in self.told)) / self.count

    @property
    def peak_mib(self) -> float:
        """Memory of the worker that had most, at its highest."""
        return float(max(one["peak_kib"] for one in self.told)) / 1024

    def latency(self, percent: int) -> float:
        """Seconds from stored to handled, of which so many percent took less."""
        found: list[float] = [value for one in self.told for value in one["latencies"]]
        return statistics.quantiles(found, n=100)[percent - 1]


class Sample(NamedTuple):
    """All workers at one moment."""

    memory: int
    files: int


class _Watch:
    """Looks at processes from time to time."""

    def __init__(self, pids: Sequence[int], samples: list[Sample] | None) -> None:
        self._pids = pids
        self._samples = samples
        self._next = time.monotonic()

    def look(self) -> None:
        if self._samples is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + SAMPLE_EVERY
            self._samples.append(Sample(sum(map(rss, self._pids)), sum(map(_files, self._pids))))


class Crew:
    """Worker processes on one server."""

    def __init__(self, server: EmbeddedServer, workers: int, scratch: Path) -> None:
        self._server = server
        self.workers = workers
        self._counts = scratch / "counts"

    def alone(self) -> Crew:
        """The same with one worker."""
        return Crew(self._server, 1, self._counts.parent)

    def work(self, way: str, count: int, rate: int, samples: list[Sample] | None = None) -> Outcome:
        """Publish so many messages at this rate (0: before the workers begin), and let them handle all.

        With `samples`, memory and open files of all workers are looked at from time to time, and noted there.
        """
        rawnats.fresh_stream(
            self._server.port, STREAM, ["work.>"], max_msgs=KEPT, max_consumers=CONSUMERS, allow_batched=True
        )
        self._counts.write_bytes(bytes(8 * self.workers))
        if not rate:
            self._publish(count, BACKLOG_RATE, lambda: None)
        with ExitStack() as open_:
            crew = [open_.enter_context(self._start(way, index)) for index in range(self.workers)]
            for worker in crew:
                _await_ready(worker)
            for worker in crew:
                _begin(worker)
            consumers = asyncio.run(_consumers(self._server.settings))
            before, started = cpu_seconds(self._server.pid), time.monotonic()
            if rate:
                watch = _Watch([worker.pid for worker in crew], samples)
                self._publish(count, rate, watch.look)
            self._until_handled(count)
            seconds = time.monotonic() - started
            used = cpu_seconds(self._server.pid) - before
            told = [json.loads(worker.communicate(timeout=60)[0]) for worker in crew]
        handled = sum(one["count"] for one in told)
        if handled < count:
            raise AssertionError(f"{way}: {handled} of {count} messages were handled")
        return Outcome(count, seconds, told, consumers, used)

    def _start(self, way: str, index: int) -> subprocess.Popen[str]:
        script = Path(worker_load.__file__)
        command = [sys.executable, str(script), self._server.url, way, str(index), str(SUBJECTS), str(self._counts)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _publish(self, count: int, rate: int, look: Callable[[], None]) -> None:
        """Evenly over all subjects, in bursts, at the rate, as far as the machine allows.

        By fast ingest: what is published without asking for an answer, a busy server drops.
        """
        partitions, sent = self.workers * SUBJECTS, 0
        burst = max(1, int(rate * SLICE))
        subjects = [PATTERN.replace("{partition}", str(n)) for n in range(partitions)]
        settings, started = Settings(servers=(self._server.url,), timeout=60), time.monotonic()
        with BlockingPublisher.connect(settings) as publisher, publisher.fast(STREAM) as ingest:
            while sent < count:
                size = min(burst, count - sent)
                ingest.add_many((subjects[(sent + n) % partitions], DATA) for n in range(size))
                sent += size
                look()
                time.sleep(max(0.0, started + sent / rate - time.monotonic()))

    def _until_handled(self, count: int) -> None:
        deadline = time.monotonic() + READY_WITHIN + count / 500
        with self._counts.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            while sum(struct.unpack(f"{self.workers}q", memory[:])) < count:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{sum(struct.unpack(f'{self.workers}q', memory[:]))} of {count} handled")
                time.sleep(0.01)


def _await_ready(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout
    if worker.stdout.readline().strip() != "ready":
        raise AssertionError(f"a worker ended with {worker.wait()} before it was ready")


def _begin(worker: subprocess.Popen[str]) -> None:
    """Have it count what it uses: not what it did while others were still starting."""
    assert worker.stdin
    worker.stdin.write("go\n")
    worker.stdin.flush()


async def _consumers(settings: Settings) -> int:
    async with connect(settings) as broker:
        return (await broker.jetstream.stream_info(STREAM)).state.consumers


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
