"""What people know from Spark's Kafka source: several streams, minimum sizes, tasks by size, tables, time travel."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.integration.spark.test_source_spark import batch, finish, numbers, options, stream, to_parquet
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.wire.blocking import run


def several(read: Callable[..., DataFrame], spark: SparkSession, server: EmbeddedServer, **others: str) -> DataFrame:
    return read(spark, server.settings, stream="", **others)


def by_stream(frame: DataFrame) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in frame.select("stream", "sequence", "data").orderBy("stream", "sequence").collect():
        found.setdefault(row.stream, []).append(int(row.data))
    return found


# -- several streams ---------------------------------------------------------------------------------------------------


def test_several_streams_are_read_in_one_batch_with_offsets_by_stream(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams
) -> None:
    for name in ("ORDERS_1", "ORDERS_2", "OTHER"):
        streams.make(name)
        streams.number(f"{name.lower()}.a", 1, 10)
    offsets = {"startingOffsets": json.dumps({"ORDERS_2": 8}), "endingOffsets": json.dumps({"ORDERS_1": 3})}
    expected = {"ORDERS_1": [1, 2, 3], "ORDERS_2": [8, 9, 10]}
    named = several(batch, jetstream, nats_server, streams="ORDERS_1, ORDERS_2", **offsets)
    assert by_stream(named) == expected
    assert by_stream(several(batch, jetstream, nats_server, streamPattern="ORDERS_.*", **offsets)) == expected
    for wrong, says in [
        ({"streams": "ORDERS_1", "streamPattern": "x"}, "each say what is read"),
        ({"streamPattern": "NONE.*"}, "no stream matches"),
        ({"streams": "ORDERS_1", "startingOffsets": '{"ORDERS_9": 1}'}, "'ORDERS_9', which is not read"),
        ({"streams": "ORDERS_1,NONE"}, "there is no stream 'NONE'"),
    ]:
        with pytest.raises(PySparkException, match=says):
            several(batch, jetstream, nats_server, **wrong).count()


@pytest.mark.parametrize("retention", [pytest.param("limits", marks=pytest.mark.kills), "workqueue"])
def test_a_query_over_a_pattern_finds_streams_that_come_later_and_reads_each_message_once(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path, retention: str
) -> None:
    def begun(name: str, count: int) -> None:
        streams.make(name, retention=retention)
        streams.number(f"{name.lower()}.a", 1, count)

    def query() -> list[int]:
        given = {"streamPattern": "P_.*", "consumer": "d", "maxRowsPerTrigger": "30"}
        return finish(to_parquet(several(stream, jetstream, nats_server, **given), tmp_path))

    begun("P_A", 50)
    begun("P_B", 10)
    assert sum(query()) == 60
    begun("P_C", 20)
    streams.number("p_a.a", 51, 60)
    found = to_parquet_until(jetstream, nats_server, tmp_path, rows=90)
    assert found == {"P_A": list(range(1, 61)), "P_B": list(range(1, 11)), "P_C": list(range(1, 21))}
    assert query() == []
    begun("P_D", 40)  # a query that ends takes those that are there when it starts
    assert sum(query()) == 40
    names = ("P_A", "P_B", "P_C", "P_D")
    assert [streams.consumer(name, "d").ack_floor_stream_seq for name in names] == [60, 10, 20, 40]
    if retention == "workqueue":
        assert [streams.info(name).state.messages for name in names] == [0, 0, 0, 0]
    with pytest.raises(StreamingQueryException, match="belongs to a query over several streams"):
        finish(to_parquet(stream(jetstream, nats_server.settings, stream="P_A", consumer="d"), tmp_path))


def to_parquet_until(spark: SparkSession, server: EmbeddedServer, home: Path, rows: int) -> dict[str, list[int]]:
    """Run on and on, until the table has that many rows."""
    given = {"streamPattern": "P_.*", "consumer": "d", "maxRowsPerTrigger": "30"}
    frame = several(stream, spark, server, **given)
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(home / "checkpoint"))
    query = writer.start(str(home / "lake"))

    def lake() -> DataFrame:
        return spark.read.parquet(str(home / "lake"))

    try:
        eventually(lambda: not query.isActive or lake().count() >= rows, 120, f"{rows} rows", lambda: query.status)
        query.processAllAvailable()
    finally:
        query.stop()
    return by_stream(lake())


# -- when and how large ------------------------------------------------------------------------------------------------


def waited(query: StreamingQuery) -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def test_a_micro_batch_waits_for_enough_messages_or_long_enough(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)

    def start(**others: str) -> StreamingQuery:
        frame = stream(jetstream, nats_server.settings, minOffsetsPerTrigger="50", **others)
        return frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()

    query = start()
    try:
        eventually(lambda: query.recentProgress, 60, "a look at the stream", lambda: query.status)
        assert waited(query) == []
        streams.number("s.a", 11, 60)
        eventually(lambda: waited(query), 60, "a batch", lambda: query.status)
        assert waited(query) == [60]
    finally:
        query.stop()
    streams.number("s.a", 61, 70)
    query = start(maxTriggerDelay="1s")
    try:
        eventually(lambda: waited(query) == [10], 60, "a batch after a second", lambda: query.status)
    finally:
        query.stop()
    streams.number("s.a", 71, 75)
    frame = stream(jetstream, nats_server.settings, minOffsetsPerTrigger="50")
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    assert finish(writer.trigger(availableNow=True).start()) == [5]


@pytest.mark.parametrize(
    ("given", "tasks"),
    [({}, 1), ({"minPartitions": "3"}, 3), ({"maxRecordsPerPartition": "10"}, 10), ({"partitions": "2"}, 2)],
)
def test_the_number_of_tasks_is_the_users_to_say(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, given: dict[str, str], tasks: int
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 100)
    frame = batch(jetstream, nats_server.settings, **given)
    assert frame.rdd.getNumPartitions() == tasks
    assert numbers(frame) == list(range(1, 101))


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_read_as_of_a_time_or_a_sequence_sees_nothing_later(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    moment = run(streams.api.get_message("S", 10)).time
    assert moment
    eventually(lambda: datetime.now(UTC) > moment, 5, "another moment")
    between = datetime.now(UTC)
    streams.number("s.a", 11, 20)
    for given, last in [("7", 7), (between.isoformat(), 10)]:
        assert numbers(batch(jetstream, nats_server.settings, asOf=given)) == list(range(1, last + 1))
    for rows in ([7], []):  # and a second run has nothing to read
        assert finish(to_parquet(stream(jetstream, nats_server.settings, asOf="7"), tmp_path)) == rows
    assert numbers(jetstream.read.parquet(str(tmp_path / "lake"))) == list(range(1, 8))
    with pytest.raises(PySparkException, match="give one of them"):
        batch(jetstream, nats_server.settings, asOf="7", endingOffsets="8").count()


def test_bodies_are_decompressed_by_their_header(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.make("S")
    text = b"text " * 100

    def packed(codec: str) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as out:
            out.write(text)
        body: bytes = sink.getvalue().to_pybytes()
        return body

    encodings = [("gzip", gzip.compress(text)), ("GZIP", gzip.compress(text)), ("deflate", zlib.compress(text))]
    encodings += [("zstd", packed("zstd")), ("br", packed("brotli")), ("lz4", packed("lz4"))]
    for name, body in encodings:
        streams.publish("s.a", [body], **{"Content-Encoding": name})
    as_they_are = [("gzip", b"not gzip"), ("rot13", b"grkg")]
    for name, body in as_they_are:
        streams.publish("s.a", [body], **{"Content-Encoding": name})
    streams.publish("s.a", [b"plain"])
    rows = batch(jetstream, nats_server.settings, decompress="header").orderBy("sequence").collect()
    assert [bytes(row.data) for row in rows] == [text] * len(encodings) + [b"not gzip", b"grkg", b"plain"]
    assert rows[0].headers == {"Content-Encoding": ["gzip"]}
    raw = batch(jetstream, nats_server.settings).orderBy("sequence").collect()
    assert bytes(raw[0].data) == encodings[0][1]


def test_a_stream_is_loaded_by_its_name_and_is_a_view_in_sql(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    given = options(nats_server.settings)
    given.pop("stream")
    assert numbers(jetstream.read.format("jetstream").options(**given).load("S")) == list(range(1, 11))
    pairs = ", ".join(f"{name} '{value}'" for name, value in {**given, "stream": "S"}.items())
    jetstream.sql(f"CREATE TEMPORARY VIEW orders_of_s USING jetstream OPTIONS ({pairs})")
    try:
        assert numbers(jetstream.table("orders_of_s")) == list(range(1, 11))
        assert jetstream.sql("SELECT count(*) AS n FROM orders_of_s WHERE sequence > 7").first() == (3,)
    finally:
        jetstream.catalog.dropTempView("orders_of_s")
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        jetstream.sql(f"CREATE TABLE orders_of_s USING jetstream OPTIONS ({pairs})")


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_tasks_of_one_worker_share_a_connection(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, retention: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
    streams.number("s.a", 1, 4000)

    def read() -> None:
        frame = batch(jetstream, nats_server.settings, partitions="8", consumer="d")
        assert numbers(frame) == list(range(1, 4001))

    def connections() -> int:
        """How many there have been."""
        return int(nats_server.monitor("/varz")["total_connections"])

    read()
    before = connections()
    for _ in range(2):
        read()
    assert connections() - before < 10  # 16 tasks, and the driver connects too
    nats_server.kill()
    nats_server.start()
    streams.connection.reconnect()
    read()  # what was kept is gone, and that does no harm


def test_what_the_table_of_options_says_is_known(jetstream: SparkSession) -> None:
    """Every option of the source stands in the documentation, and nothing else does."""
    from penstock.spark.options import CONNECTION, SOURCE

    page = (Path(__file__).parents[3] / "docs" / "spark-source.md").read_text()
    table: Any = page.partition("## Options")[2].partition("\n## ")[0]
    for name in (*SOURCE, *CONNECTION):
        assert f"`{name}`" in table, name
