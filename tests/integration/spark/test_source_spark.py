"""The source in a real Spark, reading real servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.query import StreamingQuery
from tests.support.streams import Streams

from penstock.errors import OutcomeUnknown, PenstockError, ServerBusy, Unavailable
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.testing import Certificates, eventually
from penstock.wire.blocking import run

RETENTIONS = pytest.mark.parametrize("retention", ["workqueue", "interest"])


def options(settings: Settings, **others: Any) -> dict[str, str]:
    found = {"servers": ",".join(settings.servers), "stream": "S", **others}
    names = {"user": settings.user, "password": settings.password, "tlsCa": settings.tls_ca}
    names |= {"tlsCert": settings.tls_cert, "tlsKey": settings.tls_key}
    return {name: str(value) for name, value in {**names, **found}.items() if value is not None}


def batch(spark: SparkSession, settings: Settings, **others: Any) -> DataFrame:
    return spark.read.format("jetstream").options(**options(settings, **others)).load()


def stream(spark: SparkSession, settings: Settings, **others: Any) -> DataFrame:
    return spark.readStream.format("jetstream").options(**options(settings, **others)).load()


def numbers(frame: DataFrame) -> list[int]:
    """The published numbers, in the order of the stream."""
    return [int(row.data) for row in frame.select("sequence", "data").orderBy("sequence").collect()]


def finish(query: StreamingQuery) -> list[int]:
    """Wait for an availableNow query; the rows of each of its micro-batches."""
    try:
        assert query.awaitTermination(400), query.status
    finally:
        query.stop()
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def to_parquet(frame: DataFrame, home: Path) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(home / "checkpoint"))
    return writer.trigger(availableNow=True).start(str(home / "lake"))


# -- batch -------------------------------------------------------------------------------------------------------------


def test_a_batch_read_has_the_columns_of_the_contract(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.make("S")
    streams.publish("s.a", [b"one"], A="1", B="2")
    streams.publish("s.b", [b"", b"\r\n"])
    frame = batch(jetstream, nats_server.settings)
    assert frame.schema.simpleString() == (
        "struct<stream:string,subject:string,sequence:bigint,timestamp:timestamp,"
        "headers:map<string,array<string>>,data:binary>"
    )
    rows = frame.orderBy("sequence").collect()
    assert [(row.stream, row.subject, row.sequence, bytes(row.data)) for row in rows] == [
        ("S", "s.a", 1, b"one"),
        ("S", "s.b", 2, b""),
        ("S", "s.b", 3, b"\r\n"),
    ]
    assert [row.headers for row in rows] == [{"A": ["1"], "B": ["2"]}, {}, {}]
    stored = run(streams.api.get_message("S", 1)).time
    microseconds = frame.where("sequence = 1").selectExpr("unix_micros(timestamp) AS t").first()
    assert microseconds
    assert stored
    assert microseconds.t == round(stored.timestamp() * 1_000_000)


@pytest.fixture
def thirds(jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams) -> DataFrame:
    """One DataFrame over a stream with the numbers 1 to 30, by turns on three subjects."""
    streams.make("S")
    for n in range(1, 31):
        streams.number(f"s.{n % 3}.x", n, n)
    return batch(jetstream, nats_server.settings, partitions="2")


WHERES = [
    ("subject = 's.1.x'", list(range(1, 31, 3))),
    ("subject IN ('s.1.x', 's.2.x') AND sequence > 10", [n for n in range(11, 31) if n % 3]),
    ("subject LIKE 's.0.%'", list(range(3, 31, 3))),
    ("sequence BETWEEN 5 AND 7", [5, 6, 7]),
    ("subject = 's.none'", []),
    ("true", list(range(1, 31))),
]


def test_the_filters_of_one_query_do_not_cut_another_on_the_same_load(thirds: DataFrame) -> None:
    for where, expected in [*WHERES, *reversed(WHERES)]:
        assert numbers(thirds.where(where)) == expected, where
    assert thirds.count() == 30
    assert thirds.rdd.getNumPartitions() == 2


def test_a_union_of_two_parts_of_a_stream_has_both(thirds: DataFrame) -> None:
    low, high = thirds.where("sequence <= 10"), thirds.where("sequence > 10")
    assert numbers(low.union(high)) == list(range(1, 31))
    assert numbers(high.union(low).where("subject = 's.1.x'")) == list(range(1, 31, 3))


def test_a_stream_joined_with_itself_gives_the_pairs(thirds: DataFrame) -> None:
    ones, twos = thirds.where("subject = 's.1.x'").alias("a"), thirds.where("subject = 's.2.x'").alias("b")
    pairs = ones.join(twos, F.expr("b.sequence = a.sequence + 1")).select("a.sequence", "b.sequence")
    assert sorted(tuple(row) for row in pairs.collect()) == [(n, n + 1) for n in range(1, 31, 3)]


def test_cached_parts_and_views_of_a_stream_stay_what_they_are(jetstream: SparkSession, thirds: DataFrame) -> None:
    cached = thirds.where("subject = 's.0.x'").cache()
    thirds.createOrReplaceTempView("thirds")
    try:
        assert cached.count() == 10
        view = "SELECT * FROM thirds WHERE sequence "
        assert numbers(jetstream.sql(view + "> 28")) == [29, 30]
        assert numbers(jetstream.sql(view + "< 3 UNION ALL " + view + "= 9")) == [1, 2, 9]
        assert numbers(cached) == list(range(3, 31, 3))
        assert numbers(thirds) == list(range(1, 31))
    finally:
        cached.unpersist()
        jetstream.catalog.dropTempView("thirds")


def test_a_dataframe_is_pinned_at_its_first_action(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, thirds: DataFrame
) -> None:
    assert thirds.count() == 30
    streams.number("s.1.x", 31, 40)
    assert thirds.count() == 30
    assert batch(jetstream, nats_server.settings).count() == 40


@RETENTIONS
def test_a_batch_read_takes_nothing_away(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, retention: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
    streams.number("s.a", 1, 2500)
    assert numbers(batch(jetstream, nats_server.settings, consumer="d")) == list(range(1, 2501))
    assert streams.info("S").state.messages == 2500
    assert streams.consumer("S", "d").pending == 2500


WRONG = [
    ({"startingOffset": "1"}, "did you mean 'startingOffsets'"),
    ({"stream": "X"}, "no stream 'X'"),
    ({"stream": "WORK"}, "name a durable consumer for the query"),
    ({"consumer": "lazy"}, "it has ack policy 'none', and explicit or all is needed"),
    ({"consumer": "narrow"}, "it filters s.b, and the query reads every subject"),
    ({"startingOffsets": "99"}, "startingOffsets 99 lies in the future"),
    ({"startingOffsets": "2999-01-01T00:00:00Z"}, "lies in the future"),
    ({"subjects": "s.a,s.>"}, "overlap"),
    ({"servers": "nats://127.0.0.1:1", "timeout": "1"}, "no NATS server answers"),
]
"""Options that cannot work, whatever is read, and what is said about them."""


@pytest.fixture
def unfit_consumers(streams: Streams) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    streams.make("WORK", retention="workqueue")
    run(streams.api.create_consumer("S", {"durable_name": "lazy", "ack_policy": "none"}))
    run(streams.api.create_consumer("S", {"durable_name": "narrow", "ack_policy": "explicit", "filter_subject": "s.b"}))


@pytest.mark.usefixtures("unfit_consumers")
@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "streaming"])
def test_what_cannot_work_is_told_before_a_job_starts(
    jetstream: SparkSession,
    nats_server: EmbeddedServer,
    jobs_started: Callable[[], int],
    tmp_path: Path,
    streaming: bool,
) -> None:
    """Streaming queries, of which each takes long to start, only with the first, a middle and the last of them."""
    jobs = jobs_started()
    for number, (wrong, complaint) in enumerate(WRONG[::4] if streaming else WRONG):
        with pytest.raises(PySparkException, match=complaint):
            used(stream if streaming else batch, jetstream, nats_server.settings, wrong, tmp_path / str(number))
    assert jobs_started() == jobs


@pytest.mark.usefixtures("unfit_consumers")
@pytest.mark.parametrize(("wrong", "complaint"), WRONG)
def test_what_cannot_work_is_told_to_a_streaming_query_too(
    nats_server: EmbeddedServer, wrong: dict[str, str], complaint: str
) -> None:
    def begin() -> None:
        reader = JetStreamDataSource({"servers": nats_server.url, "stream": "S", **wrong}).streamReader(COLUMNS)
        try:
            reader.initialOffset()
        finally:
            reader.stop()

    with pytest.raises(PenstockError, match=complaint):
        begin()


def used(read: Callable[..., DataFrame], spark: SparkSession, settings: Settings, wrong: Any, home: Path) -> None:
    """Load, and let Spark do what makes it read."""
    frame = read(spark, settings, **wrong)
    if frame.isStreaming:
        finish(to_parquet(frame, home))
    else:
        frame.count()


def test_the_columns_are_not_for_the_user_to_choose(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.make("S")
    given = jetstream.read.format("jetstream").options(**options(nats_server.settings)).schema("a int")
    with pytest.raises(PySparkException, match=r"leave out \.schema"):
        given.load().count()


def test_tls_with_a_login_over_several_servers(
    jetstream: SparkSession, tmp_path: Path, tls_certificates: Certificates, open_streams: Callable[[Settings], Streams]
) -> None:
    tls = tls_certificates.server_tls(verify=True)
    with EmbeddedServer(data=tmp_path / "nats", user="u", password="p", tls=tls) as server:
        streams = open_streams(server.settings)
        streams.make("S")
        streams.number("s.a", 1, 100)
        several = server.settings.with_servers("tls://127.0.0.1:1", *server.settings.servers)
        assert numbers(batch(jetstream, several)) == list(range(1, 101))


# -- streaming ---------------------------------------------------------------------------------------------------------


def test_a_restarted_query_continues_behind_its_checkpoint(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 1000)
    frame = stream(jetstream, nats_server.settings, consumer="d", maxRowsPerTrigger="400", partitions="2")
    query = to_parquet(frame, tmp_path)
    assert finish(query) == [400, 400, 200]
    source = query.recentProgress[-1].sources[0]
    assert json.loads(source.endOffset)["sequence"] == json.loads(source.latestOffset)["sequence"] == 1000
    assert streams.consumer("S", "d").ack_floor_stream_seq == 1000
    streams.number("s.a", 1001, 1100)
    assert finish(to_parquet(frame, tmp_path)) == [100]
    assert numbers(jetstream.read.parquet(str(tmp_path / "lake"))) == list(range(1, 1101))
    found = streams.consumer("S", "d")
    assert (found.ack_floor_stream_seq, found.pending) == (1100, 0)


def test_a_query_without_its_checkpoint_continues_at_its_durable(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    streams.number("s.b", 11, 12)
    frame = stream(jetstream, nats_server.settings, consumer="d", subjects="s.a", startingOffsets="consumer")
    assert finish(to_parquet(frame, tmp_path / "one")) == [10]
    streams.number("s.a", 13, 15)
    assert finish(to_parquet(frame, tmp_path / "two")) == [3]
    assert numbers(jetstream.read.parquet(str(tmp_path / "two" / "lake"))) == [13, 14, 15]


@RETENTIONS
def test_messages_are_deleted_when_and_only_when_their_batch_has_committed(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path, retention: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit", "headers_only": True}))
    streams.number("s.a", 1, 300)
    seen: list[tuple[int, list[int], int]] = []
    failing = {1}

    def look(frame: DataFrame, number: int) -> None:
        found = numbers(frame)
        seen.append((number, found, streams.info("S").state.first_seq))
        if number in failing:
            raise RuntimeError("stopped on purpose")

    def start() -> StreamingQuery:
        frame = stream(jetstream, nats_server.settings, consumer="d", maxRowsPerTrigger="100")
        writer = frame.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "c"))
        return writer.trigger(availableNow=True).start()

    with pytest.raises(StreamingQueryException, match="stopped on purpose"):
        finish(start())
    assert [(number, found[0], first) for number, found, first in seen] == [(0, 1, 1), (1, 101, 101)]
    assert streams.info("S").state.messages == 200
    failing.clear()
    finish(start())
    assert [(number, found[0], first) for number, found, first in seen[2:]] == [(1, 101, 101), (2, 201, 201)]
    assert sorted({n for _, found, _ in seen for n in found}) == list(range(1, 301))
    state = streams.info("S").state
    assert (state.messages, state.last_seq) == (0, 300)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_asynchronous_progress_tracking_is_refused_where_acknowledging_deletes(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path, asynchronous: bool
) -> None:
    streams.make("S", retention="workqueue")
    streams.number("s.a", 1, 60)
    frame = stream(jetstream, nats_server.settings, consumer="d", maxRowsPerTrigger="10")
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    if asynchronous:
        writer = writer.option("asyncProgressTrackingEnabled", "true")
        writer = writer.option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
    query = writer.start()
    try:
        if asynchronous:
            with pytest.raises(StreamingQueryException, match="leave that option out"):
                query.awaitTermination(60)
            assert streams.info("S").state.messages >= 40
        else:
            eventually(lambda: streams.info("S").state.messages == 0, within=60, what="all batches to be committed")
    finally:
        query.stop()


def test_a_loss_fails_a_query_unless_it_may_go_on(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    finish(to_parquet(stream(jetstream, nats_server.settings), tmp_path))
    streams.number("s.a", 11, 30)
    run(streams.api.purge_stream("S", before_seq=21))
    with pytest.raises(StreamingQueryException, match="10 messages of stream 'S' are gone"):
        finish(to_parquet(stream(jetstream, nats_server.settings), tmp_path))
    finish(to_parquet(stream(jetstream, nats_server.settings, failOnDataLoss="false"), tmp_path))
    assert numbers(jetstream.read.parquet(str(tmp_path / "lake"))) == [*range(1, 11), *range(21, 31)]


def test_a_checkpoint_of_another_stream_is_told_before_a_job_starts(
    jetstream: SparkSession,
    nats_server: EmbeddedServer,
    streams: Streams,
    jobs_started: Callable[[], int],
    tmp_path: Path,
) -> None:
    for name in ("S", "T"):
        streams.make(name)
        streams.number(f"{name.lower()}.a", 1, 10)
    finish(to_parquet(stream(jetstream, nats_server.settings), tmp_path))
    jobs = jobs_started()
    with pytest.raises(StreamingQueryException, match="belongs to stream 'S', the query reads 'T'"):
        finish(to_parquet(stream(jetstream, nats_server.settings, stream="T"), tmp_path))
    assert jobs_started() == jobs


def stepped_down(streams: Streams) -> bool:
    """Whether the stream's leader has handed over; one that is not elected yet, or not reached, cannot."""
    try:
        streams.connection.reconnect()
        run(streams.api.step_down_stream("S"))
    except (Unavailable, OutcomeUnknown, ServerBusy):
        return False
    return True


@pytest.mark.kills
def test_a_query_outlives_leader_changes_and_the_death_of_a_node(
    jetstream: SparkSession,
    nats_cluster: EmbeddedCluster,
    open_streams: Callable[[Settings], Streams],
    tmp_path: Path,
) -> None:
    streams = open_streams(nats_cluster.settings)
    streams.make("S", num_replicas=3)
    streams.number("s.a", 1, 6000)
    turns = iter(nats_cluster.nodes)

    def disturb(frame: DataFrame, number: int) -> None:
        frame.write.mode("append").parquet(str(tmp_path / "lake" / str(number)))
        if number % 2:
            eventually(partial(stepped_down, streams), 60, "the stream's leader to hand over")
        elif (node := next(turns, None)) is not None:
            node.kill()
            node.start()

    frame = stream(jetstream, nats_cluster.settings, consumer="d", maxRowsPerTrigger="1000", partitions="2")
    writer = frame.writeStream.foreachBatch(disturb).option("checkpointLocation", str(tmp_path / "c"))
    assert finish(writer.trigger(availableNow=True).start()) == [1000] * 6
    assert numbers(jetstream.read.parquet(str(tmp_path / "lake" / "*"))) == list(range(1, 6001))
    streams.connection.reconnect()
    assert streams.consumer("S", "d").ack_floor_stream_seq == 6000
