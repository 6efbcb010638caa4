"""The same data in a single-node Kafka with spark-sql-kafka and in a NATS server with our format, on the same Spark."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import kafka_peer
import rawnats
import read_load
from harness import Bench, Timed
from pyspark.sql import SparkSession
from read_load import DATA, STREAM
from spark_load import Jetstream, drained, finished, rows, spark_running

from penstock.publish import IngestOptions
from penstock.server.embedded import EmbeddedServer
from penstock.wire import compiled

OUTPUT, PACKED = "OUTPUT", "PACKED"
PACKS = {"pack": "rows", "packRows": "500"}
"""Neither they nor Kafka's batches are compressed: the bodies are of one letter, and would vanish."""


def run(bench: Bench) -> None:
    bench.about = (
        "200-byte messages in a single-node Kafka (KRaft, topics of two partitions, the producer's default "
        "acknowledgement) and in a NATS server (file storage); Spark local[2] on the same machine. Raw atomic and raw "
        "fast: prebuilt frames without Spark, what the server itself takes. Packed: 500 rows "
        "in one message, not compressed."
    )
    compiled.warm()
    connector = ",".join(map(str, kafka_peer.jars("spark")))
    address = bench.enter(kafka_peer.kafka(bench.scratch / "kafka"))
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    spark = bench.enter(spark_running({"spark.jars": connector}))
    ours, theirs = Jetstream(spark, server.url, bench.scratch), Kafka(spark, address, bench.scratch)
    count = bench.size(1_000_000, quick=200_000)

    def fresh() -> None:
        rawnats.fresh_stream(server.port, OUTPUT, ["out.>"], allow_atomic=True, allow_batched=True)

    read_load.fill(server.url, server.port, count)
    rawnats.fresh_stream(server.port, PACKED, ["packed.>"], allow_atomic=True)
    ours.write(PACKED, "packed.a", count, len(DATA), **PACKS)
    theirs.create(STREAM, OUTPUT)
    theirs.write(STREAM, count)
    for _ in range(2):  # Spark's first jobs start workers and compile
        theirs.batch(STREAM, count)
        theirs.streaming(STREAM, count)
        theirs.write(OUTPUT, count)
        ours.batch(STREAM, count)
        ours.streaming(STREAM, count)
        ours.batch(PACKED, count)
        ours.streaming(PACKED, count)
        for more in ({}, PACKS):
            fresh()
            ours.write(OUTPUT, "out.a", count, len(DATA), **more)

    bench.add("Kafka, batch read", lambda: theirs.batch(STREAM, count))
    bench.add("ours, batch read", lambda: ours.batch(STREAM, count), limit="Kafka, batch read")
    bench.add("ours, batch read, packed", lambda: ours.batch(PACKED, count), limit="Kafka, batch read")
    bench.add("Kafka, streaming read", lambda: theirs.streaming(STREAM, count))
    bench.add("ours, streaming read", lambda: ours.streaming(STREAM, count), limit="Kafka, streaming read")
    bench.add("ours, streaming read, packed", lambda: ours.streaming(PACKED, count), limit="Kafka, streaming read")
    bench.add("raw atomic", lambda: rawnats.atomic(server.port, "out.a", DATA, count), before=fresh)
    flow, outstanding = IngestOptions().flow, IngestOptions().max_outstanding_acks
    bench.add("raw fast", lambda: rawnats.fast(server.port, "out.a", DATA, count, flow, outstanding), before=fresh)
    bench.add("Kafka, write", lambda: theirs.write(OUTPUT, count))
    for delivery in ("atomic", "fast"):
        work = partial(ours.write, OUTPUT, "out.a", count, len(DATA), delivery)
        bench.add(f"ours, write, {delivery}", work, before=fresh, limit="Kafka, write")
    work = partial(ours.write, OUTPUT, "out.a", count, len(DATA), **PACKS)
    bench.add("ours, write, atomic, packed", work, before=fresh, limit="Kafka, write")
    bench.goal("ours, batch read", of="Kafka, batch read", at_least=1)
    bench.goal("ours, streaming read", of="Kafka, streaming read", at_least=1)
    bench.goal("ours, batch read, packed", of="Kafka, batch read", at_least=2)
    bench.goal("ours, streaming read, packed", of="Kafka, streaming read", at_least=2)
    bench.goal("ours, write, atomic, packed", of="Kafka, write", at_least=1.5)


class Kafka:
    """What spark-sql-kafka does with the topics of one broker."""

    def __init__(self, spark: SparkSession, address: str, scratch: Path) -> None:
        self._spark = spark
        self._address = address
        self._scratch = scratch

    def create(self, *topics: str) -> None:
        """Make topics of two partitions, with the client that the connector brings."""
        jvm: Any = self._spark._jvm
        admin = jvm.org.apache.kafka.clients.admin
        client = admin.AdminClient.create({"bootstrap.servers": self._address})
        try:
            made = client.createTopics([admin.NewTopic(topic, 2, jvm.Short.parseShort("1")) for topic in topics])
            made.all().get()
        finally:
            client.close()

    def batch(self, topic: str, count: int) -> Timed:
        return Timed(count, drained(self._spark.read.format("kafka").options(**self._options(topic)).load()))

    def streaming(self, topic: str, count: int) -> Timed:
        frame = self._spark.readStream.format("kafka").options(**self._options(topic)).load()
        seconds, found = finished(frame, self._scratch / "kafka-checkpoint")
        if found != count:
            raise AssertionError(f"{found} of {count} rows were read")
        return Timed(count, seconds)

    def write(self, topic: str, count: int) -> Timed:
        frame = rows(self._spark, count, len(DATA)).withColumnRenamed("data", "value")
        begin = time.perf_counter()
        options = {"kafka.bootstrap.servers": self._address, "topic": topic}
        frame.write.format("kafka").options(**options).save()
        return Timed(count, time.perf_counter() - begin)

    def _options(self, topic: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self._address, "subscribe": topic, "startingOffsets": "earliest"}
