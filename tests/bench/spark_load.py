"""Reads and writes of one server by one Spark."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness import Timed
from pyspark.sql import DataFrame, SparkSession

from penstock.spark import register
from penstock.spark.session import running


@contextmanager
def spark_running(settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Spark with two threads, and with our format."""
    with running("penstock-bench", "local[2]", {"spark.sql.shuffle.partitions": "2", **(settings or {})}) as spark:
        register(spark)
        yield spark


def finished(frame: DataFrame, checkpoint: Path) -> tuple[float, int]:
    """Seconds and rows of the micro-batches of a query that reads all there is; its start is not counted."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    seconds = sum(progress.durationMs["triggerExecution"] for progress in batches) / 1000
    return seconds, sum(progress.numInputRows for progress in batches)


def drained(frame: DataFrame) -> float:
    """Seconds from the call to the last row in a sink that does nothing with them."""
    begin = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begin


def rows(spark: SparkSession, count: int, size: int) -> DataFrame:
    """Rows to write, in two partitions, with a body of `size` bytes, made on the fly."""
    return spark.range(0, count, numPartitions=2).selectExpr(f"cast(repeat('x', {size}) AS binary) AS data")


class Jetstream:
    """What our format does with the streams of one server."""

    def __init__(self, spark: SparkSession, url: str, scratch: Path) -> None:
        self._spark = spark
        self._url = url
        self._scratch = scratch

    def batch(self, stream: str, count: int, partitions: int = 0) -> Timed:
        frame = self._spark.read.format("jetstream").options(**self._options(stream, partitions)).load()
        return Timed(count, drained(frame))

    def streaming(self, stream: str, count: int) -> Timed:
        frame = self._spark.readStream.format("jetstream").options(**self._options(stream)).load()
        seconds, found = finished(frame, self._scratch / "checkpoint")
        if found != count:
            raise AssertionError(f"{found} of {count} rows were read")
        return Timed(count, seconds)

    def write(self, stream: str, subject: str, count: int, size: int, delivery: str = "atomic", **more: str) -> Timed:
        frame = rows(self._spark, count, size)
        begin = time.perf_counter()
        options = self._options(stream) | {"subject": subject, "delivery": delivery} | more
        frame.write.format("jetstream").options(**options).mode("append").save()
        return Timed(count, time.perf_counter() - begin)

    def _options(self, stream: str, partitions: int = 0) -> dict[str, str]:
        options = {"servers": self._url, "stream": stream}
        return options | ({"partitions": str(partitions)} if partitions else {})
