"""`penstock ui` over a large server: the first page, and what an open page costs beside the same without it."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench_plan import CONSUMERS_A_STREAM, applied, platform_file
from harness import Bench, Figure

from penstock.jetstream.kv import BATCH, Bucket, Write
from penstock.observe.snapshot import Observer
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.topology.load import load
from penstock.workers.group.assignment import HEAD, OF
from penstock.workers.group.claims import Claim
from penstock.workers.group.identity import WorkerRecord, worker_key
from penstock.workers.partitions import Partition, partition_json

FIRST_PAGE = 1.0
"""Seconds."""
UI_SHARE = 5.0
SERVER_SHARE = 2.0
"""Percent of a core."""
PERSON = 5.0
"""Seconds after the start that somebody opens the first page; nothing is looked at until then but once."""
MOVING = 25
BEATS_EVERY = 5.0
"""Seconds between two heartbeats of a worker."""
FIRST_LOOK, NEXT_LOOK = "first look", "look again"


def run(bench: Bench) -> None:
    streams, workers = bench.size(500, quick=50), bench.size(100, quick=10)
    partitions, seconds = bench.size(10_000, quick=500), bench.size(60, quick=6)
    bench.about = (
        f"{streams:,} streams, {streams * CONSUMERS_A_STREAM:,} consumers, a group of {workers:,} workers with "
        f"{partitions:,} partitions whose heartbeats go on, and one page open."
    )
    bench.unit = "looks/s"
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    file = platform_file(bench.scratch, server.url, streams)
    asyncio.run(_prepared(server, file, workers, partitions))
    bench.add(FIRST_LOOK, lambda: asyncio.run(_looks(server, again=False)))
    bench.add(NEXT_LOOK, lambda: asyncio.run(_looks(server, again=True)), limit=FIRST_LOOK)
    bench.probe(lambda: _figures(server, file, workers, seconds))


async def _prepared(server: EmbeddedServer, file: Path, workers: int, partitions: int) -> None:
    await applied(server, load(file))
    control = await Control.connect(server.settings)
    await control.jetstream.create_stream({"name": "WORK", "subjects": ["work.>"], "allow_direct": True})
    bucket = Bucket(control, "penstock_large")
    await bucket.ensure()
    names = [f"worker-{n}" for n in range(workers)]
    shares = {name: [Partition(f"p{n}", (f"work.p{n}",)) for n in range(at, partitions, workers)]
              for at, name in enumerate(names)}  # fmt: skip
    head = {"v": 1, "version": 1, "members": names, "parked": [], "stream": "WORK", "leader": names[0]}
    writes = [Write(HEAD, head, 0)]
    for name, share in shares.items():
        writes.append(Write(worker_key(name), _record(name, 0).to_json(), 0))
        value = {"v": 1, "version": 1, "partitions": [partition_json(one) for one in share]}
        writes.append(Write(OF + name, value, 0))
        writes += [Claim(one.id, 0, owner=name, incarnation="i", settled=True).write() for one in share]
        config = {"durable_name": f"large-{name}", "ack_policy": "explicit", "mem_storage": True,
                  "filter_subjects": [one.subjects[0] for one in share],
                  "metadata": {"penstock.group": "large", "penstock.worker": name}}  # fmt: skip
        await control.jetstream.create_consumer("WORK", config)
    for start in range(0, len(writes), BATCH):
        await bucket.commit(writes[start : start + BATCH])
    await control.close()


def _record(name: str, beat: int) -> WorkerRecord:
    return WorkerRecord(instance=name, incarnation="i", host="bench", pid=1, beat=beat, applied=1, mode="working")


async def _looks(server: EmbeddedServer, again: bool) -> int:
    """Looks at everything, as the pages do; returns how many."""
    control = await Control.connect(server.settings)
    observer = Observer(control)
    if again:
        await observer.look()
    count = 5 if again else 1
    for _ in range(count):
        await observer.look()
    await control.close()
    return count


def _figures(server: EmbeddedServer, file: Path, workers: int, seconds: int) -> Sequence[Figure]:
    with _beating(server, workers):
        (alone,) = _shares(seconds, server.pid)
        command = [sys.executable, "-m", "penstock", "ui", str(file), "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout
                place = process.stdout.readline().strip().removeprefix("http://")
                at_once = _seconds(place)
                time.sleep(PERSON)
                first = _seconds(place)
                with _open_page(place):
                    time.sleep(min(10.0, seconds))  # the first looks read everything
                    own, theirs = _shares(seconds, process.pid, server.pid)
                    with _moving(server):
                        time.sleep(min(5.0, seconds))
                        moving, _ = _shares(seconds // 2, process.pid, server.pid)
            finally:
                process.terminate()
    return [
        Figure(name="a page that is asked for when the process has just started", value=at_once, unit="s"),
        Figure(name="the first page of a person", value=first, unit="s", at_most=FIRST_PAGE),
        Figure(name="CPU of the pages", value=100 * own, unit="% of a core", at_most=UI_SHARE),
        Figure(name="CPU of the server without them", value=100 * alone, unit="% of a core"),
        Figure(
            name="CPU that the server needs more",
            value=100 * (theirs - alone),
            unit="% of a core",
            at_most=SERVER_SHARE,
        ),
        Figure(
            name=f"CPU of the pages while {MOVING} streams get a message a second that nobody reads",
            value=100 * moving,
            unit="% of a core",
        ),
    ]


def _ticks(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _shares(seconds: float, *pids: int) -> list[float]:
    """How much of a core processes use in the next seconds."""
    before, began = [_ticks(pid) for pid in pids], time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - began
    return [(_ticks(pid) - ticks) / took for pid, ticks in zip(pids, before, strict=True)]


def _seconds(place: str) -> float:
    began = time.perf_counter()
    _got(place, "/")
    return time.perf_counter() - began


def _got(place: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("GET", path)
    data = connection.getresponse().read()
    connection.close()
    return data


@contextmanager
def _open_page(place: str) -> Iterator[None]:
    """A page that is open in a browser: it hears of every look, and fetches itself."""
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("GET", "/events")
    events = connection.getresponse()

    def follow() -> None:
        with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            while line := events.readline():
                if line.startswith(b"data:"):
                    _got(place, "/")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        connection.close()
        events.close()


@contextmanager
def _beating(server: EmbeddedServer, workers: int) -> Iterator[None]:
    """Heartbeats of the group's workers, as they write them."""

    async def beat(control: Control, count: int) -> None:
        name = f"worker-{count % workers}"
        await Bucket(control, "penstock_large").put(worker_key(name), _record(name, count).to_json())
        await asyncio.sleep(BEATS_EVERY / workers)

    with _repeating(server, beat):
        yield


@contextmanager
def _moving(server: EmbeddedServer) -> Iterator[None]:
    """Messages in some of the streams."""

    async def publish(control: Control, count: int) -> None:
        await control.publish(f"s{count % MOVING}.e0", b"x" * 100)
        await asyncio.sleep(1 / MOVING)

    with _repeating(server, publish):
        yield


@contextmanager
def _repeating(server: EmbeddedServer, do: Callable[[Control, int], Awaitable[None]]) -> Iterator[None]:
    """Does something again and again, in a thread of its own."""
    stop = threading.Event()

    async def repeat() -> None:
        control = await Control.connect(server.settings)
        for count in itertools.count():
            if stop.is_set():
                break
            await do(control, count)
        await control.close()

    thread = threading.Thread(target=lambda: asyncio.run(repeat()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
