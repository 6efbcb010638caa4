"""Packs through a real Spark: written, read, mixed with messages, and read by columns."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from tests.support.streams import Streams

from penstock import packs
from penstock.packs import PackedRow
from penstock.server.embedded import EmbeddedServer
from penstock.spark.link import Link
from penstock.testing.contents import stream_messages
from penstock.wire.blocking import connect

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Packed:
    """A server with a stream that takes packs, and Spark's way to it."""

    def __init__(self, spark: SparkSession, server: EmbeddedServer) -> None:
        self.spark = spark
        self.server = server

    def given(self, options: dict[str, Any]) -> dict[str, str]:
        return {"servers": self.server.url, "stream": "S", **{name: str(one) for name, one in options.items()}}

    def write(self, frame: DataFrame, **options: Any) -> None:
        frame.write.format("jetstream").options(**self.given(options)).mode("append").save()

    def read(self, **options: Any) -> DataFrame:
        return self.spark.read.format("jetstream").options(**self.given(options)).load()

    def ids(self, **options: Any) -> list[int]:
        return sorted(int(row.data) for row in self.read(**options).select("data").collect())

    def messages(self) -> int:
        with Link(self.server.settings) as link:
            return link.stream_info("S").state.messages


@pytest.fixture
def packed(jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams) -> Packed:
    streams.make("S", subjects=["s.>"], allow_atomic=True, allow_batched=True, allow_direct=True)
    return Packed(jetstream, nats_server)


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, numPartitions=partitions).select(
        F.concat(F.lit("s."), F.col("id") % 3).alias("subject"), F.col("id").cast("string").alias("data")
    )


@pytest.mark.parametrize("delivery", ["atomic", "fast"])
def test_rows_are_written_as_packs_and_read_as_rows(packed: Packed, delivery: str) -> None:
    packed.write(numbers(packed.spark, 5000), pack="rows", packRows=100, packCodec="zstd", delivery=delivery)
    assert packed.messages() < 60
    assert packed.ids() == list(range(5000))
    found = packed.read(includeRow="true", subjects="s.1").collect()
    assert {row.subject for row in found} == {"s.1"}
    assert len({(row.sequence, row.row) for row in found}) == len(found) == 1667


def test_packs_and_messages_lie_in_one_stream(packed: Packed) -> None:
    packed.write(numbers(packed.spark, 10, partitions=1))
    packed.write(numbers(packed.spark, 1000).where("data >= 10"), pack="rows")
    assert packed.ids() == list(range(1000))
    assert packed.read(pack="none").count() == packed.messages() < 20


def test_headers_and_message_ids_of_rows_are_kept(packed: Packed) -> None:
    rows = [("s.a", "1", {"Kind": ["x", "y"]}, "id-1"), ("s.a", "2", None, None)]
    schema = "subject string, data string, headers map<string,array<string>>, message_id string"
    packed.write(packed.spark.createDataFrame(rows, schema).coalesce(1), pack="rows")
    one, two = packed.read().orderBy("data").collect()
    assert (one.headers, two.headers) == ({"Kind": ["x", "y"], "Nats-Msg-Id": ["id-1"]}, {})
    assert packed.messages() == 1


def test_a_write_that_is_repeated_on_other_partitions_writes_nothing(packed: Packed) -> None:
    once = {"txnAppId": "a", "txnVersion": 0, "pack": "rows", "packRows": 50}
    packed.write(numbers(packed.spark, 3000), **once)
    before = packed.messages()
    packed.write(numbers(packed.spark, 3000, partitions=5).orderBy(F.rand(7)), **{**once, "packRows": 70})
    assert (packed.messages(), packed.ids()) == (before, list(range(3000)))


EVENT = "id bigint, name string, at timestamp, tags array<string>, place struct<zone: int>"


def events(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, numPartitions=2).select(
        F.lit("s.u").alias("subject"),
        F.struct(
            "id",
            F.concat(F.lit("n"), F.col("id")).alias("name"),
            F.timestamp_seconds(F.col("id") + 1_700_000_000).alias("at"),
            F.array(F.lit("a"), F.lit(None).cast("string")).alias("tags"),
            F.struct((F.col("id") % 5).cast("int").alias("zone")).alias("place"),
        ).alias("event"),
    )


def test_events_are_written_and_read_by_their_columns(packed: Packed) -> None:
    packed.write(events(packed.spark, 2000), pack="typed", packRows=300)
    packed.write(packed.spark.createDataFrame([("s.p", "plain")], "subject string, data string"))
    found = packed.read(pack="typed", eventSchema=EVENT, includeRow="true")
    assert found.where("event is null").select(F.col("data").cast("string")).collect() == [("plain",)]
    there = found.where("event is not null").select("event.*")
    assert there.exceptAll(events(packed.spark, 2000).select("event.*")).count() == 0
    assert there.count() == 2000
    assert packed.messages() < 12


def test_events_are_json_for_whoever_does_not_ask_for_columns(packed: Packed) -> None:
    packed.write(events(packed.spark, 20), pack="typed")
    parsed = packed.read().select(F.from_json(F.col("data").cast("string"), EVENT).alias("e")).select("e.*")
    assert parsed.exceptAll(events(packed.spark, 20).select("event.*")).count() == 0


def test_a_query_copies_packs_exactly_once_through_a_lost_commit(
    packed: Packed, streams: Streams, tmp_path: Path
) -> None:
    streams.make("OUT", subjects=["o.>"], allow_atomic=True)
    packed.write(numbers(packed.spark, 6000), pack="rows", packRows=100)
    source = {"maxRowsPerTrigger": 20, "consumer": "copy", "startingOffsets": "earliest"}
    target = {"servers": packed.server.url, "stream": "OUT", "subject": "o.x", "pack": "rows", "packRows": "250"}
    for _ in range(2):
        frame = packed.spark.readStream.format("jetstream").options(**packed.given(source)).load().select("data")
        writer = frame.writeStream.format("jetstream").options(**target, checkpointLocation=str(tmp_path / "c"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(300)
        assert len(query.recentProgress) > 0
        commits = tmp_path / "c" / "commits"
        last = max((one.name for one in commits.glob("[0-9]*")), key=int)
        for name in (last, f".{last}.crc"):  # as after a crash before Spark's commit
            (commits / name).unlink(missing_ok=True)
    there = [int(row.data) for row in packed.read(stream="OUT").select("data").collect()]
    assert sorted(there) == list(range(6000))
    assert len(stream_messages(packed.server.settings, "OUT")) < 60


def test_a_row_shows_the_time_and_subject_that_it_says_itself(packed: Packed) -> None:
    encoded = packs.encode_rows([PackedRow(b"1", "s.own", {"A": ["b"]}, NOON), PackedRow(b"2")])
    with connect(packed.server.settings) as connection:
        connection.request("s.x", encoded.body, headers=encoded.headers)
    own, other = packed.read().orderBy("data").collect()
    assert (own.subject, own.timestamp.astimezone(UTC), own.headers) == ("s.own", NOON, {"A": ["b"]})
    assert (other.subject, other.headers) == ("s.x", {})
    assert other.timestamp.astimezone(UTC) > NOON


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_bodies_that_are_not_asked_for_are_not_read(packed: Packed, streams: Streams, retention: str) -> None:
    streams.make("B", subjects=["b.>"], retention=retention, allow_direct=True, allow_atomic=True)
    rows = packed.spark.createDataFrame([("b.1", "x" * 9, {"K": ["v"]})], "subject string, data string, headers "
                                        "map<string,array<string>>")  # fmt: skip
    packed.write(rows, stream="B")
    (found,) = packed.read(stream="B", includeData="false", consumer="c").collect()
    assert (found.subject, found.data, found.headers["K"]) == ("b.1", None, ["v"])
    if retention == "limits":
        assert found.headers["Nats-Msg-Size"] == ["9"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pack": "row"}, "pack must be none, rows or typed, not 'row'; did you mean 'rows'?"),
        ({"packRows": 5}, "packRows is for packs"),
        ({"pack": "rows", "packBytes": "9MiB"}, "packBytes is 9437184"),
        ({"pack": "rows", "serverHeaders": "keep"}, "serverHeaders=keep is for messages"),
        ({"pack": "typed"}, "typed packs need a column `event` of type struct"),
    ],
)
def test_what_does_not_go_with_packs_is_told_before_a_job(packed: Packed, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PySparkException, match=says):
        packed.write(numbers(packed.spark, 1), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pack": "typed"}, "pack=typed and eventSchema go together"),
        ({"eventSchema": "a int"}, "pack=typed and eventSchema go together"),
        ({"includeData": "false", "decompress": "header"}, "includeData=false reads no bodies"),
    ],
)
def test_columns_that_cannot_be_had_are_told_at_load(packed: Packed, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PySparkException, match=says):
        packed.read(**options)


def test_the_examples_of_the_page_run(packed: Packed, streams: Streams, capsys: pytest.CaptureFixture[str]) -> None:
    streams.make("ORDERS", subjects=["orders.>"], allow_atomic=True)
    page = (Path(__file__).parents[3] / "docs" / "packs.md").read_text()
    place = f'.option("servers", "{packed.server.url}").option("stream", "ORDERS")'
    names = {"spark": packed.spark}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code.replace('.option("stream", "ORDERS")', place), "packs.md", "exec"), names)
    printed = re.search(r"^print.*?```\n```\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert printed
    assert printed[1] in capsys.readouterr().out
    assert packed.read(stream="ORDERS").count() == 20_000
    for header in packs.HEADERS:
        assert f"`{header}`" in page
