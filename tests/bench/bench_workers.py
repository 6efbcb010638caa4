"""Partitioned workers: one consumer a worker on our pull loop, beside nats-py with one a worker and one a partition.

Compared is the CPU time of the worker processes: messages a CPU-second, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import group_load
import rawnats
import worker_load
from harness import Bench, Figure, Timed, rss
from worker_load import PATTERN, STREAM

from penstock.broker import connect
from penstock.broker.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.wire import blocking, frames

DATA = b"x" * 200
SUBJECTS = 80
RATE = 10_000
"""Messages a second that are offered while contestants are compared."""
BACKLOG_RATE = 100_000
READY_WITHIN = 120.0
SLICE = 0.02
"""Seconds between two bursts of the publisher."""
OURS, ONE, EACH = "ours, a consumer a worker", "nats-py, a consumer a worker", "nats-py, a consumer a partition"
WAYS = {OURS: "ours", ONE: "nats-py", EACH: "nats-py-each"}
DRAINING = {"ours, backlog": "ours", "nats-py, backlog": "nats-py"}
MIB = 1024 * 1024


def run(bench: Bench) -> None:
    workers = bench.size(25, quick=4)
    count = bench.size(200_000, quick=20_000)
    bench.unit = "messages/CPU-s"
    bench.about = (
        f"{workers} worker processes × {SUBJECTS} subjects, 200-byte messages offered at {RATE:,}/s, explicit "
        "acknowledgement; CPU time of the worker processes only. "
        "Backlog: everything is there before one worker begins."
    )
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    crew = Crew(server, workers, bench.scratch)
    for name, way in WAYS.items():
        bench.add(name, lambda way=way: crew.compare(way, count), limit=None if name == OURS else OURS)
    for name, way in DRAINING.items():
        bench.add(name, lambda way=way: crew.drain(way, count), limit=None if way == "ours" else "ours, backlog")
    bench.goal(OURS, of=ONE, at_least=5)
    bench.goal("ours, backlog", of="nats-py, backlog", at_least=5)
    for rate in (10_000,) if bench.quick else (10_000, 20_000, 50_000):
        bench.probe(lambda rate=rate: crew.figures(rate, count))
    for partitions, members in ((100, 3),) if bench.quick else ((100, 5), (1_000, 5), (1_000, 100), (10_000, 25)):
        bench.probe(lambda partitions=partitions, members=members: sharing(server, partitions, members))
    bench.probe(lambda: crew.soak(bench.size(600, quick=10)))


def sharing(server: EmbeddedServer, partitions: int, workers: int) -> list[Figure]:
    """How a group grows: time and KV traffic of a first assignment, and of one worker that leaves."""
    found, of = group_load.share(server, partitions, workers), f"{partitions:,} partitions, {workers} workers"
    return [
        Figure(name=f"{of}: shared after", value=found.first_seconds, unit="s"),
        Figure(name=f"{of}: KV writes", value=found.first_writes, unit=""),
        Figure(name=f"{of}: one leaves, shared after", value=found.again_seconds, unit="s"),
        Figure(name=f"{of}: one leaves, KV writes", value=found.again_writes, unit=""),
    ]


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

    def latency(self, percent: int) -> float:
        """Seconds from stored to handled, of which so many percent took less."""
        found = [value for one in self.told for value in one["latencies"]]
        return statistics.quantiles(found, n=100)[percent - 1]


class Crew:
    """Worker processes on one server."""

    def __init__(self, server: EmbeddedServer, workers: int, scratch: Path) -> None:
        self._server = server
        self._workers = workers
        self._counts = scratch / "counts"
        self.samples: list[tuple[int, int]] = []

    def compare(self, way: str, count: int) -> Timed:
        outcome = self.work(way, count, RATE)
        return Timed(count, outcome.cpu)

    def drain(self, way: str, count: int) -> Timed:
        """One worker, and everything is there before it begins: as fast as it goes."""
        outcome = self._one.work(way, count, rate=0)
        early = sum(one["early"] for one in outcome.told)
        return Timed(count - early, outcome.cpu)

    @property
    def _one(self) -> Crew:
        return Crew(self._server, 1, self._counts.parent)

    def work(self, way: str, count: int, rate: int, watch: bool = False) -> Outcome:
        """Publish so many messages at this rate (0: before the workers begin), and let them handle all."""
        rawnats.fresh_stream(self._server.port, STREAM, ["work.>"])
        self._counts.write_bytes(bytes(8 * self._workers))
        if not rate:
            self._publish(count, BACKLOG_RATE, ())
        with ExitStack() as open_:
            crew = [open_.enter_context(self._start(way, index)) for index in range(self._workers)]
            for worker in crew:
                _await_ready(worker)
            consumers = asyncio.run(_consumers(self._server.settings))
            before, started = _cpu(self._server.pid), time.monotonic()
            if rate:
                self._publish(count, rate, crew if watch else ())
            self._until_handled(count)
            seconds = time.monotonic() - started
            used = _cpu(self._server.pid) - before
            told = [json.loads(worker.communicate(timeout=60)[0]) for worker in crew]
        handled = sum(one["count"] for one in told)
        if handled < count:
            raise AssertionError(f"{way}: {handled} of {count} messages were handled")
        return Outcome(count, seconds, told, consumers, used)

    def _start(self, way: str, index: int) -> subprocess.Popen[str]:
        script = Path(worker_load.__file__)
        command = [sys.executable, str(script), self._server.url, way, str(index), str(SUBJECTS), str(self._counts)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _publish(self, count: int, rate: int, watched: Sequence[subprocess.Popen[str]]) -> None:
        """Evenly over all subjects, in bursts, at the rate, as far as the machine allows."""
        partitions, sent = self._workers * SUBJECTS, 0
        burst = max(1, int(rate * SLICE))
        frames_of = [frames.publish(PATTERN.replace("{partition}", str(n)), DATA) for n in range(partitions)]
        started = time.monotonic()
        with blocking.connect(Settings(servers=(self._server.url,), timeout=60)) as connection:
            while sent < count:
                size = min(burst, count - sent)
                connection.send(b"".join(frames_of[(sent + n) % partitions] for n in range(size)))
                sent += size
                if watched and (sent // burst) % 50 == 0:
                    self.samples.append((sum(rss(one.pid) for one in watched), sum(_files(one.pid) for one in watched)))
                time.sleep(max(0.0, started + sent / rate - time.monotonic()))
            connection.flush()

    def _until_handled(self, count: int) -> None:
        deadline = time.monotonic() + READY_WITHIN + count / 500
        with self._counts.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            while sum(struct.unpack(f"{self._workers}q", memory[:])) < count:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{sum(struct.unpack(f'{self._workers}q', memory[:]))} of {count} handled")
                time.sleep(0.01)

    # -- figures -------------------------------------------------------------------------------------------------------

    def figures(self, rate: int, count: int) -> list[Figure]:
        """How ours does at an offered rate."""
        outcome = self.work("ours", count, rate)
        at = f"at {rate // 1000}k/s offered"
        redelivered = 100 * sum(one["redelivered"] for one in outcome.told) / count
        peaks = [one["peak_kib"] / 1024 for one in outcome.told]
        return [
            Figure(name=f"{at}: handled", value=count / outcome.seconds, unit="messages/s"),
            Figure(name=f"{at}: worker CPU", value=1e6 * outcome.cpu / count, unit="µs a message"),
            Figure(name=f"{at}: server CPU", value=1e6 * outcome.server_cpu / count, unit="µs a message"),
            *(
                Figure(name=f"{at}: stored to handled, p{p}", value=1000 * outcome.latency(p), unit="ms")
                for p in (50, 95, 99)
            ),
            Figure(name=f"{at}: redelivered", value=redelivered, unit="%", at_most=3.0),
            Figure(name=f"{at}: memory of a worker, highest", value=max(peaks), unit="MiB"),
            Figure(name=f"{at}: consumers", value=outcome.consumers, unit="", at_most=self._workers),
        ]

    def soak(self, seconds: int) -> list[Figure]:
        """A long run: memory and open files stay as they are."""
        self.samples.clear()
        self.work("ours", RATE // 2 * seconds, RATE // 2, watch=True)
        memory, files = zip(*self.samples, strict=True)
        third = max(1, len(memory) // 3)
        growth = (statistics.median(memory[-third:]) - statistics.median(memory[third : 2 * third])) / MIB
        soak, more_files = f"soak of {seconds} s", max(files[third:]) - min(files[third:])
        return [
            Figure(name=f"{soak}: growth of a worker", value=growth / self._workers, unit="MiB", at_most=4),
            Figure(name=f"{soak}: more open files", value=more_files, unit="", at_most=self._workers),
        ]


def _await_ready(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout
    if worker.stdout.readline().strip() != "ready":
        raise AssertionError(f"a worker ended with {worker.wait()} before it was ready")


async def _consumers(settings: Settings) -> int:
    async with connect(settings) as broker:
        return (await broker.jetstream.stream_info(STREAM)).state.consumers


def _cpu(pid: int) -> float:
    """CPU seconds of a process so far. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
