"""Reading into Spark: bytes only counted (the limit), our reader to Arrow, Spark batch and streaming reads, nats-py."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path

import read_load
from harness import Bench, Figure, Timed, memory_of
from pyspark.sql import DataFrame, SparkSession
from read_load import DATA, STREAM

from penstock.broker.embedded import EmbeddedServer
from penstock.spark import register
from penstock.spark.session import session
from penstock.wire import compiled

LIMIT = "raw read"
GROWTH_MIB = 16
"""Growth of a reading process that counts as flat; its buffers alone are larger."""


def run(bench: Bench) -> None:
    bench.about = "The same stream of 200-byte messages, file storage, Spark local[2] and the server on one machine."
    compiled.warm()
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    count = bench.size(1_000_000, quick=200_000)
    read_load.fill(server.url, server.port, count)
    reading = Reading(started(), server.url, bench.scratch)
    bench.enter(closing(reading))
    for _ in range(2):  # Spark's first jobs start workers and compile
        reading.batch(STREAM, count)
        reading.streaming(STREAM, count)

    bench.add(LIMIT, lambda: read_load.raw(server.port, count))
    bench.add("reader to Arrow", lambda: read_load.ours(server.url, count), limit=LIMIT)
    bench.add("Spark batch", lambda: reading.batch(STREAM, count), limit=LIMIT)
    bench.add("Spark streaming", lambda: reading.streaming(STREAM, count), limit=LIMIT)
    bench.add("direct get to Arrow", lambda: read_load.ours(server.url, count, direct=True), limit=LIMIT)
    bench.add("nats-py fetch", lambda: asyncio.run(read_load.nats_py(server.url, count // 20)), limit=LIMIT)
    bench.goal("reader to Arrow", of=LIMIT, at_least=0.9)
    bench.goal("Spark batch", of=LIMIT, at_least=0.6)
    bench.goal("Spark streaming", of=LIMIT, at_least=0.5)
    bench.goal("reader to Arrow", of="nats-py fetch", at_least=20)
    bench.probe(lambda: growth(server, reading, count, quick=bench.quick))
    bench.probe(lambda: memory(server, bench.size(10_000_000, quick=1_000_000)))


def started() -> SparkSession:
    spark = session("penstock-bench", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    register(spark)
    return spark


class Reading:
    """Reads of one server by one Spark."""

    def __init__(self, spark: SparkSession, url: str, scratch: Path) -> None:
        self._spark = spark
        self._url = url
        self._scratch = scratch

    def batch(self, stream: str, count: int, partitions: int = 0) -> Timed:
        """From the call to the last row in a sink that does nothing with them."""
        frame = self._spark.read.format("jetstream").options(**self._options(stream, partitions)).load()
        started = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return Timed(count, time.perf_counter() - started)

    def streaming(self, stream: str, count: int) -> Timed:
        """The micro-batches of a query that reads all there is; its start is not counted."""
        frame = self._spark.readStream.format("jetstream").options(**self._options(stream)).load()
        seconds, rows = self._finished(frame)
        if rows != count:
            raise AssertionError(f"{rows} of {count} rows were read")
        return Timed(count, seconds)

    def _finished(self, frame: DataFrame) -> tuple[float, int]:
        checkpoint = self._scratch / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [progress for progress in query.recentProgress if progress.numInputRows]
        seconds = sum(progress.durationMs["triggerExecution"] for progress in batches) / 1000
        return seconds, sum(progress.numInputRows for progress in batches)

    def _options(self, stream: str, partitions: int = 0) -> dict[str, str]:
        options = {"servers": self._url, "stream": stream}
        return options | ({"partitions": str(partitions)} if partitions else {})

    def close(self) -> None:
        self._spark.stop()


def growth(server: EmbeddedServer, reading: Reading, count: int, quick: bool) -> list[Figure]:
    """How a Spark batch read changes with its tasks, and with the size of the bodies."""
    figures = []
    for partitions in (1, 2, 4):
        timed = reading.batch(STREAM, count, partitions)
        figures.append(Figure(name=f"Spark batch, {partitions} tasks", value=timed.count / timed.seconds, unit="/s"))
    for size in (100, 1_000, 10_000, 100_000):
        number = max(2_000, (20_000_000 if quick else 200_000_000) // size // 2_000 * 2_000)
        read_load.fill(server.url, server.port, number, b"x" * size, stream=f"S{size}", subject=f"s{size}")
        limit = read_load.raw(server.port, number, size, stream=f"S{size}")
        timed = reading.batch(f"S{size}", number)
        share = limit.seconds / timed.seconds
        figures.append(Figure(name=f"Spark batch, bodies of {size:,} B, of the limit", value=share, unit="×"))
    return figures


def memory(server: EmbeddedServer, count: int) -> list[Figure]:
    """The memory of a process of its own that reads `count` messages."""
    read_load.fill(server.url, server.port, count, DATA)
    found = memory_of([sys.executable, str(Path(read_load.__file__)), server.url, str(count)])
    mib = 1024 * 1024
    return [
        Figure(
            name=f"reader, {count:,} messages: memory growth",
            value=found.growth() / mib,
            unit="MiB",
            at_most=GROWTH_MIB,
        ),
        Figure(name="reader: memory at its peak", value=found.peak / mib, unit="MiB"),
    ]
