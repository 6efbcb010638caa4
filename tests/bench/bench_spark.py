"""Spark's reads beside bytes that are only counted and nats-py, its writes beside prebuilt atomic batches."""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial

import rawnats
import read_load
from harness import Bench, Figure, Timed, peak_during
from read_load import DATA, STREAM
from spark_load import Jetstream, spark_running

from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.commit import commit
from penstock.spark.link import Link
from penstock.wire import compiled

LIMIT, WRITE_LIMIT = "raw read", "raw atomic"
OUTPUT, PACKED, QUEUE, SHORT = "OUTPUT", "PACKED", "QUEUE", "SHORT"
PACKS = {"pack": "rows", "packRows": "500"}
"""Not compressed: the bodies are of one letter, and would vanish."""
MIB = 1024 * 1024
LARGE = 10_000
"""Bytes of a body from which on its reading has a goal, and is measured on 1 GB."""
GROWTH_MIB = 16
"""Growth of a reading process that counts as flat; its buffers alone are larger."""


def run(bench: Bench) -> None:
    bench.about = "The same stream of 200-byte messages, file storage, Spark local[2] and the server on one machine."
    compiled.warm()
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    count = bench.size(1_000_000, quick=200_000)
    read_load.fill(server.url, server.port, count)
    ours = Jetstream(bench.enter(spark_running()), server.url, bench.scratch)
    written = bench.size(200_000, quick=40_000)
    short = count // 2
    read_load.fill(server.url, server.port, short, stream=SHORT, subject="short.events")

    def fresh() -> None:
        rawnats.fresh_stream(server.port, OUTPUT, ["out.>"], allow_atomic=True, allow_batched=True)

    rawnats.fresh_stream(server.port, PACKED, ["packed.>"], allow_atomic=True)
    ours.write(PACKED, "packed.a", count, len(DATA), **PACKS)
    for _ in range(2):  # Spark's first jobs start workers and compile
        ours.batch(STREAM, count)
        ours.streaming(STREAM, count)
        ours.batch(PACKED, count)
        fresh()
        ours.write(OUTPUT, "out.a", written, len(DATA))

    bench.add(LIMIT, lambda: read_load.raw(server.port, count))
    bench.add("reader to Arrow", lambda: read_load.ours(server.url, count), limit=LIMIT)
    bench.add("Spark batch", lambda: ours.batch(STREAM, count), limit=LIMIT)
    bench.add("Spark streaming", lambda: ours.streaming(STREAM, count), limit=LIMIT)
    bench.add("raw read, half", lambda: read_load.raw(server.port, short, stream=SHORT))
    bench.add("Spark batch, half", lambda: ours.batch(SHORT, short), limit="raw read, half")
    bench.add("Spark batch, packed", lambda: ours.batch(PACKED, count), limit=LIMIT)
    bench.add("Spark streaming, packed", lambda: ours.streaming(PACKED, count), limit=LIMIT)
    bench.add("direct get to Arrow", lambda: read_load.ours(server.url, count, direct=True), limit=LIMIT)
    bench.add("nats-py fetch", lambda: asyncio.run(read_load.nats_py(server.url, count // 20)), limit=LIMIT)
    bench.add(WRITE_LIMIT, lambda: rawnats.atomic(server.port, "out.a", DATA, written), before=fresh)
    for delivery in ("atomic", "fast"):
        work = partial(ours.write, OUTPUT, "out.a", written, len(DATA), delivery)
        bench.add(f"Spark sink, {delivery}", work, before=fresh, limit=WRITE_LIMIT)
        work = partial(ours.write, OUTPUT, "out.a", count, len(DATA), delivery, **PACKS)
        bench.add(f"Spark sink, {delivery}, packed", work, before=fresh, limit=WRITE_LIMIT)
    queue = WorkQueue(server, written)
    bench.add("WorkQueue, read", queue.read, before=queue.fill)
    bench.add("WorkQueue, commit", queue.commit, before=queue.fill, limit="WorkQueue, read")
    bench.goal("reader to Arrow", of=LIMIT, at_least=0.9)
    bench.goal("Spark batch", of=LIMIT, at_least=0.6)
    bench.goal("Spark streaming", of=LIMIT, at_least=0.5)
    bench.goal("reader to Arrow", of="nats-py fetch", at_least=20)
    bench.goal("Spark sink, atomic", of=WRITE_LIMIT, at_least=0.7)
    bench.goal("Spark batch, packed", of="Spark batch", at_least=2)
    bench.goal("Spark streaming, packed", of="Spark streaming", at_least=2)
    bench.goal("Spark sink, atomic, packed", of="Spark sink, atomic", at_least=4)
    bench.goal("Spark batch, half", of="raw read, half", at_least=0.7)
    bench.goal("WorkQueue, commit", of="WorkQueue, read", at_least=10)
    bench.probe(lambda: growth(server, ours, count, quick=bench.quick))
    bench.probe(lambda: memory(server, ours, count, bench.size(10_000_000, quick=1_000_000)))


class WorkQueue:
    """A WorkQueue stream with a durable, which one query reads and commits."""

    def __init__(self, server: EmbeddedServer, count: int) -> None:
        self._server = server
        self._count = count

    def fill(self) -> None:
        read_load.fill(
            self._server.url,
            self._server.port,
            self._count,
            stream=QUEUE,
            subject="queue.events",
            retention="workqueue",
        )
        config = {"durable_name": "query", "ack_policy": "explicit", "headers_only": True}
        with self._link() as link:
            link.call(lambda api: api.create_consumer(QUEUE, config))

    def read(self) -> Timed:
        return read_load.ours(self._server.url, self._count, direct=True, stream=QUEUE)

    def commit(self) -> Timed:
        """Commit all of it, as the source does after a micro-batch."""
        with self._link() as link:
            info, durable = link.stream_info(QUEUE), link.call(lambda api: api.consumer_info(QUEUE, "query"))
            started = time.perf_counter()
            commit(link, info, durable, self._count)
            seconds = time.perf_counter() - started
            left = link.stream_info(QUEUE).state.messages
        if left:
            raise AssertionError(f"{left} messages are left after the commit")
        return Timed(self._count, seconds)

    def _link(self) -> Link:
        return Link(Settings(servers=(self._server.url,)))


def growth(server: EmbeddedServer, ours: Jetstream, count: int, quick: bool) -> list[Figure]:
    """How a Spark batch read changes with its tasks, and with the size of the bodies."""
    figures = []
    for partitions in (1, 2, 4):
        timed = ours.batch(STREAM, count, partitions)
        figures.append(Figure(name=f"Spark batch, {partitions} tasks", value=timed.count / timed.seconds, unit="/s"))
    for size in (100, 1_000, 10_000, 100_000):
        stream, total = f"S{size}", 200_000_000 if size < LARGE else 1_000_000_000  # less would measure Spark's start
        number = max(2_000, (20_000_000 if quick else total) // size // 2_000 * 2_000)
        read_load.fill(server.url, server.port, number, b"x" * size, stream=stream, subject=f"s{size}")
        shares = []
        for _ in range(1 if quick else 5):
            limit = read_load.raw(server.port, number, size, stream=stream)
            shares.append(limit.seconds / ours.batch(stream, number).seconds)
        name, goal = f"Spark batch, bodies of {size:,} B, of the limit", 0.7 if size >= LARGE else None
        figures.append(Figure(name=name, value=statistics.median(shares), unit="×", at_least=goal))
        rawnats.fresh_stream(server.port, stream, [f"s{size}"])
    return figures


def memory(server: EmbeddedServer, ours: Jetstream, count: int, many: int) -> list[Figure]:
    """The memory of Spark's Python workers while they read few and many messages."""
    few_peak = peak_during("pyspark.worker", lambda: ours.batch(STREAM, count))
    read_load.fill(server.url, server.port, many, DATA)
    many_peak = peak_during("pyspark.worker", lambda: ours.batch(STREAM, many))
    name = f"a task's memory, {many:,} messages"
    return [
        Figure(name=f"a task's memory, {count:,} messages", value=few_peak / MIB, unit="MiB"),
        Figure(name=name, value=many_peak / MIB, unit="MiB"),
        Figure(name=f"{name}: growth", value=(many_peak - few_peak) / MIB, unit="MiB", at_most=GROWTH_MIB),
    ]
