"""What the source decides on the driver, against a real server, without a Spark job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from tests.support.streams import Streams

from penstock.errors import ConfigError
from penstock.jetstream.direct import DirectGetRefused
from penstock.jetstream.pull import ConsumersUsedUp
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.spark import commit as committing
from penstock.spark import durable
from penstock.spark.commit import Acknowledging
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.spark.durable import ConsumerTaken, UnfitConsumer
from penstock.spark.link import Link
from penstock.spark.loss import HistoryChanged, MessagesGone, StreamReplaced
from penstock.spark.offsets import CheckpointMismatch
from penstock.spark.source import JetStreamReader, JetStreamStreamReader, Part
from penstock.testing import eventually
from penstock.wire.blocking import connect, run


@pytest.fixture
def stream_reader(nats_server: EmbeddedServer) -> Iterator[Any]:
    readers: list[JetStreamStreamReader] = []

    def make(**options: Any) -> JetStreamStreamReader:
        reader = source(nats_server, options).streamReader(COLUMNS)
        assert isinstance(reader, JetStreamStreamReader)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.stop()


@pytest.fixture
def batch_reader(nats_server: EmbeddedServer) -> Any:
    def make(**options: Any) -> JetStreamReader:
        reader = source(nats_server, options).reader(COLUMNS)
        assert isinstance(reader, JetStreamReader)
        return reader

    return make


def source(server: EmbeddedServer, options: dict[str, Any]) -> JetStreamDataSource:
    texts = {name: str(value) for name, value in {"servers": server.url, "stream": "S", **options}.items()}
    return JetStreamDataSource(texts)


def logged(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset as it comes back from Spark's log."""
    again: dict[str, Any] = json.loads(json.dumps(offset))
    return again


def ranges(parts: list[Part]) -> list[tuple[int, int]]:
    return [(part.value.first, part.value.last) for part in parts]


def rows(reader: Any, parts: list[Part]) -> list[int]:
    return [n for part in parts for batch in reader.read(part) for n in batch.column("sequence").to_pylist()]


# -- where a read starts and ends --------------------------------------------------------------------------------------


def test_positions_are_found_by_name_sequence_and_time(streams: Streams, batch_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    last = run(streams.api.get_message("S", 10)).time
    assert last
    middle = last + timedelta(microseconds=1)
    streams.number("s.a", 11, 20)
    for options, expected in [
        ({}, (1, 20)),
        ({"startingOffsets": "5", "endingOffsets": "7"}, (5, 7)),
        ({"startingOffsets": middle.isoformat()}, (11, 20)),
        ({"endingOffsets": middle.isoformat()}, (1, 10)),
        ({"startingOffsets": "2020-01-01T00:00:00Z"}, (1, 20)),
    ]:
        assert ranges(batch_reader(**options).partitions()) == [expected]
    assert ranges(batch_reader(startingOffsets="latest").partitions()) == []
    assert ranges(batch_reader(startingOffsets=datetime.now(UTC).isoformat()).partitions()) == []


def test_a_durable_gives_start_and_end(streams: Streams, batch_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
    run(streams.api.reset_consumer("S", "d", 7))
    assert ranges(batch_reader(consumer="d", startingOffsets="consumer").partitions()) == [(7, 10)]
    assert ranges(batch_reader(consumer="d", endingOffsets="consumer").partitions()) == [(1, 6)]
    with pytest.raises(UnfitConsumer, match="no consumer 'e'"):
        batch_reader(consumer="e", startingOffsets="consumer").partitions()


def test_the_option_partitions_splits_a_batch_read(streams: Streams, batch_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = batch_reader(partitions="3")
    assert ranges(reader.partitions()) == [(1, 3), (4, 6), (7, 10)]
    assert rows(reader, reader.partitions()) == list(range(1, 11))


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
@pytest.mark.parametrize("value", ["99", "2999-01-01T00:00:00Z"])
def test_an_offset_in_the_future_is_refused(streams: Streams, batch_reader: Any, option: str, value: str) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    with pytest.raises(ConfigError, match=f"{option} .* lies in the future"):
        batch_reader(**{option: value}).partitions()


def test_the_very_next_message_is_a_start(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    assert stream_reader(startingOffsets="11").initialOffset()["sequence"] == 10


def test_a_missing_stream_is_told_with_the_nearest_name(
    streams: Streams, batch_reader: Any, stream_reader: Any
) -> None:
    streams.make("ORDERS")
    for failing in (batch_reader(stream="ORDRES").partitions, stream_reader(stream="ORDRES").initialOffset):
        with pytest.raises(ConfigError, match="no stream 'ORDRES'; did you mean 'ORDERS'"):
            failing()


def test_of_many_streams_it_is_told_how_many_there_are(streams: Streams, batch_reader: Any) -> None:
    for number in range(12):
        streams.make(f"T{number:02}")
    with pytest.raises(ConfigError, match=r"no stream 'ORDERS'; there are T00, .*, T09 and 2 more"):
        batch_reader(stream="ORDERS").partitions()


# -- micro-batches -----------------------------------------------------------------------------------------------------


def planned(reader: JetStreamStreamReader, limit: Any = None) -> list[tuple[int, int]]:
    """First and last sequence of each micro-batch, until nothing is new."""
    batches = []
    start = logged(reader.initialOffset())
    while (end := logged(reader.latestOffset(start, limit or reader.getDefaultReadLimit()))) != start:
        batches.append((start["sequence"] + 1, end["sequence"]))
        start = end
    return batches


def test_without_a_limit_a_micro_batch_takes_everything(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    assert planned(stream_reader()) == []
    streams.number("s.a", 1, 10)
    assert planned(stream_reader()) == [(1, 10)]
    assert isinstance(stream_reader().getDefaultReadLimit(), ReadAllAvailable)


def test_rows_limit_a_micro_batch(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(maxRowsPerTrigger="4")
    assert reader.getDefaultReadLimit() == ReadMaxRows(4)
    assert planned(reader) == [(1, 4), (5, 8), (9, 10)]
    assert planned(reader, ReadAllAvailable()) == [(1, 10)]


def test_rows_are_counted_behind_filters_and_gaps(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    for n in range(1, 201):
        streams.number("s.rare" if n % 20 == 0 else "s.often", n, n)
    for n in range(50, 60):
        run(streams.api.delete_message("S", n))
    reader = stream_reader(subjects="s.rare", maxRowsPerTrigger="4")
    start, seen = logged(reader.initialOffset()), []
    while (end := logged(reader.latestOffset(start, reader.getDefaultReadLimit()))) != start:
        found = rows(reader, reader.partitions(start, end))
        assert 0 < len(found) <= 4
        seen += found
        start = end
    assert seen == list(range(20, 201, 20))
    assert len(planned(stream_reader(maxRowsPerTrigger="50"))) == 4
    assert streams.info("S").state.consumers == 0


def test_bytes_limit_a_micro_batch_by_the_mean_message(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.publish("s.a", [b"x" * 1000] * 20)
    reader = stream_reader(maxBytesPerTrigger="6kB")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(6000)
    batches = planned(reader)
    assert len(batches) == 4
    assert max(last - first + 1 for first, last in batches) == 5
    assert planned(stream_reader(maxBytesPerTrigger="6kB", maxRowsPerTrigger="2"))[0] == (1, 2)
    assert planned(stream_reader(maxBytesPerTrigger="1"))[0] == (1, 1)


def test_nothing_new_for_the_filter_is_nothing_new(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(subjects="s.a")
    start = logged(reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
    streams.number("s.b", 1, 5)
    assert logged(reader.latestOffset(start, ReadAllAvailable())) == start


def test_an_idle_position_moves_on_before_it_falls_off_the_old_end(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", max_msgs=20)
    streams.number("s.a", 1, 5)
    reader = stream_reader(subjects="s.a")
    start = logged(reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
    for n in range(1, 100):
        streams.number("s.b", n, n)
        end = logged(reader.latestOffset(start, ReadAllAvailable()))
        reader.partitions(start, end)
        start = end
    assert start["sequence"] > 80


def test_available_now_ends_where_the_stream_ended_at_the_start(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(maxRowsPerTrigger="4")
    reader.prepareForTriggerAvailableNow()
    streams.number("s.a", 11, 20)
    assert planned(reader) == [(1, 4), (5, 8), (9, 10)]
    assert reader.reportLatestOffset()["sequence"] == 20


def test_tasks_are_a_function_of_the_logged_offsets(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    first = stream_reader(partitions="3")
    start = logged(first.initialOffset())
    end = logged(first.latestOffset(start, ReadAllAvailable()))
    after_a_crash = stream_reader(partitions="8")
    assert ranges(after_a_crash.partitions(start, end)) == ranges(first.partitions(start, end))
    assert len(first.partitions(start, end)) == 3


def atomic_batch(streams: Streams, name: str, count: int) -> None:
    for n in range(1, count + 1):
        headers = {"Nats-Batch-Id": name, "Nats-Batch-Sequence": str(n)}
        if n == count:
            headers["Nats-Batch-Commit"] = "1"
        if n in (1, count):
            answer = streams.connection.request("s.a", b"x", headers).data
            assert b"error" not in answer
        else:
            streams.connection.publish("s.a", b"x", headers)


def test_atomic_batches_are_kept_whole_if_wanted(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", allow_atomic=True)
    streams.number("s.a", 1, 3)
    atomic_batch(streams, "one", 6)  # 4 to 9
    atomic_batch(streams, "two", 5)  # 10 to 14
    streams.number("s.a", 15, 17)
    assert planned(stream_reader(maxRowsPerTrigger="5")) == [(1, 5), (6, 10), (11, 15), (16, 17)]
    whole = stream_reader(maxRowsPerTrigger="5", keepBatchesWhole="true")
    assert planned(whole) == [(1, 3), (4, 9), (10, 14), (15, 17)]


# -- losses ------------------------------------------------------------------------------------------------------------


def started(reader: JetStreamStreamReader) -> tuple[dict[str, Any], dict[str, Any]]:
    start = logged(reader.initialOffset())
    return start, logged(reader.latestOffset(start, ReadMaxRows(10)))


def test_what_was_purged_or_expired_is_counted(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 30)
    _, end = started(stream_reader())
    run(streams.api.purge_stream("S", before_seq=25))
    reader = stream_reader()
    with pytest.raises(MessagesGone, match="14 messages of stream 'S' are gone"):
        reader.partitions(end, logged(reader.latestOffset(end, ReadAllAvailable())))
    relaxed = stream_reader(failOnDataLoss="false")
    assert rows(relaxed, relaxed.partitions(end, logged(relaxed.latestOffset(end, ReadAllAvailable())))) == list(
        range(25, 31)
    )


def test_single_deletions_are_counted_except_those_before_the_query(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 30)
    for n in (5, 12, 13):
        run(streams.api.delete_message("S", n))
    reader = stream_reader(maxRowsPerTrigger="10")
    start, end = started(reader)
    assert rows(reader, reader.partitions(start, end)) == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    streams.number("s.a", 31, 40)
    for n in (20, 35):
        run(streams.api.delete_message("S", n))
    with pytest.raises(MessagesGone, match="2 messages"):
        reader.partitions(end, logged(reader.latestOffset(end, ReadAllAvailable())))


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_where_consuming_deletes_what_nobody_has_consumed_is_missed(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    reader = stream_reader(consumer="d")
    reader.initialOffset()
    streams.number("s.a", 1, 30)
    _, end = started(reader)
    reader.commit(end)
    run(streams.api.delete_message("S", 30))
    again = stream_reader(consumer="d")
    with pytest.raises(MessagesGone, match="1 message of stream 'S' is gone"):
        again.partitions(end, logged(again.latestOffset(end, ReadAllAvailable())))
    relaxed = stream_reader(consumer="d", failOnDataLoss="false")
    last = logged(relaxed.latestOffset(end, ReadAllAvailable()))
    assert rows(relaxed, relaxed.partitions(end, last)) == list(range(11, 30))


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_what_others_consume_and_what_the_durable_forgot_is_no_loss(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    readers = {subject: stream_reader(consumer=subject[-1], subjects=subject) for subject in ("s.a", "s.b")}
    begin = {subject: logged(reader.initialOffset()) for subject, reader in readers.items()}
    for n in range(1, 31):
        streams.number("s.b" if n % 3 else "s.a", n, n)
    other = readers["s.b"]
    other.commit(logged(other.latestOffset(begin["s.b"], ReadAllAvailable())))
    reader = readers["s.a"]
    assert rows(
        reader, reader.partitions(begin["s.a"], logged(reader.latestOffset(begin["s.a"], ReadMaxRows(50))))
    ) == [*range(3, 31, 3)]
    run(streams.api.purge_stream("S", before_seq=15))  # as after a crash: deleted, and the durable does not know
    started_anew = stream_reader(consumer="a", subjects="s.a")
    assert started_anew.initialOffset()["sequence"] == 14


def test_a_purged_batch_fails_also_when_it_is_run_again(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    start, end = started(stream_reader())
    run(streams.api.purge_stream("S"))
    with pytest.raises(MessagesGone, match="10 messages"):
        stream_reader().partitions(start, end)
    assert rows(stream_reader(), stream_reader(failOnDataLoss="false").partitions(start, end)) == []


def test_the_oldest_message_may_expire_before_the_first_batch_reads_it(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", max_msgs=10)
    streams.number("s.a", 1, 30)
    reader = stream_reader()
    start, end = started(reader)
    streams.number("s.a", 31, 35)
    assert rows(reader, reader.partitions(start, end)) == [26, 27, 28, 29, 30]
    streams.number("s.a", 36, 50)
    with pytest.raises(MessagesGone, match="10 messages"):
        reader.partitions(end, logged(reader.latestOffset(end, ReadAllAvailable())))


def test_a_recreated_stream_is_noticed(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    start, end = started(stream_reader())
    run(streams.api.delete_stream("S"))
    streams.make("S")
    streams.number("s.a", 1, 4)
    with pytest.raises(StreamReplaced, match="deleted and recreated"):
        stream_reader().latestOffset(end, ReadAllAvailable())
    with pytest.raises(StreamReplaced):
        stream_reader().partitions(start, end)
    relaxed = stream_reader(failOnDataLoss="false", consumer="d")
    after = logged(relaxed.latestOffset(end, ReadAllAvailable()))
    assert rows(relaxed, relaxed.partitions(end, after)) == [1, 2, 3, 4]
    run(streams.api.delete_consumer("S", "d"))
    relaxed.commit(after)
    assert streams.consumer("S", "d").ack_floor_stream_seq == 4
    assert logged(relaxed.latestOffset(after, ReadAllAvailable())) == after


def test_superseded_values_are_no_loss(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", max_msgs_per_subject=1)
    streams.number("s.a", 1, 10)
    _, end = started(stream_reader())
    streams.number("s.a", 11, 15)
    reader = stream_reader()
    assert rows(reader, reader.partitions(end, logged(reader.latestOffset(end, ReadAllAvailable())))) == [15]


@pytest.mark.parametrize("subjects", ["", "s.a"], ids=["all", "filtered"])
def test_what_vanishes_between_planning_and_reading_is_an_error(
    streams: Streams, stream_reader: Any, batch_reader: Any, subjects: str
) -> None:
    streams.make("S")
    streams.number("s.a", 1, 80)
    options = {"partitions": "8", "subjects": subjects}
    batch, streaming, relaxed = (
        batch_reader(**options),
        stream_reader(**options),
        batch_reader(**options, failOnDataLoss="false"),
    )
    begin = logged(streaming.initialOffset())
    planned_parts = [
        (batch, batch.partitions()),
        (streaming, streaming.partitions(begin, logged(streaming.latestOffset(begin, ReadAllAvailable())))),
        (relaxed, relaxed.partitions()),
    ]
    for reader, parts in planned_parts:
        assert len(rows(reader, parts[:2])) == 20
    run(streams.api.purge_stream("S"))
    for reader, parts in planned_parts[:2]:
        with pytest.raises(MessagesGone, match="removed between planning and reading, between sequence 21 and 30"):
            rows(reader, parts[2:])
    assert rows(relaxed, planned_parts[2][1]) == []


def test_a_single_message_that_vanishes_before_it_is_read_is_an_error(streams: Streams, batch_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 30)
    run(streams.api.delete_message("S", 5))
    reader = batch_reader()
    parts = reader.partitions()
    assert len(rows(reader, parts)) == 29
    run(streams.api.delete_message("S", 12))
    with pytest.raises(MessagesGone, match="1 message of stream 'S' is gone"):
        rows(reader, parts)


def test_the_oldest_messages_of_a_full_stream_may_go_while_they_are_read(streams: Streams, batch_reader: Any) -> None:
    streams.make("S", max_msgs=10)
    streams.number("s.a", 1, 10)
    reader = batch_reader()
    parts = reader.partitions()
    exact = batch_reader(startingOffsets="1")
    exact_parts = exact.partitions()
    streams.number("s.a", 11, 13)
    assert rows(reader, parts) == list(range(4, 11))
    with pytest.raises(MessagesGone, match="3 messages"):
        rows(exact, exact_parts)
    run(streams.api.delete_message("S", 7))
    with pytest.raises(MessagesGone, match="4 messages"):
        rows(reader, parts)


@pytest.mark.parametrize("flag", ["allow_msg_ttl", "allow_rollup_hdrs"])
def test_a_stream_that_allows_ttl_or_roll_ups_can_lose_messages(
    streams: Streams, stream_reader: Any, flag: str
) -> None:
    streams.make("S", **{flag: True})
    streams.number("s.a", 1, 30)
    _, end = started(stream_reader())
    run(streams.api.delete_message("S", 17))  # by its own time to live, or a roll-up
    reader = stream_reader()
    again = logged(reader.latestOffset(end, ReadAllAvailable()))
    assert len(rows(reader, reader.partitions(end, again))) == 19
    run(streams.api.purge_stream("S", before_seq=25))
    with pytest.raises(MessagesGone, match="14 messages"):
        stream_reader().partitions(end, again)


@pytest.mark.parametrize("flag", ["allow_msg_ttl", "allow_rollup_hdrs"])
def test_what_publishers_remove_between_planning_and_reading_is_no_loss(
    streams: Streams, batch_reader: Any, flag: str
) -> None:
    streams.make("S", **{flag: True})
    streams.number("s.a", 1, 20)
    reader, exact = batch_reader(partitions="2"), batch_reader(partitions="2", startingOffsets="1")
    parts, exact_parts = reader.partitions(), exact.partitions()
    run(streams.api.delete_message("S", 11))  # the first message of a part: by its own time to live, or a roll-up
    assert rows(exact, exact_parts) == [n for n in range(1, 21) if n != 11]
    run(streams.api.delete_message("S", 1))
    assert rows(reader, parts) == [n for n in range(2, 21) if n != 11]
    run(streams.api.purge_stream("S", before_seq=15))
    with pytest.raises(MessagesGone):
        rows(exact, exact_parts[1:])


@pytest.mark.parametrize("flag", ["allow_rollup_hdrs", "allow_msg_schedules", "allow_msg_ttl"])
def test_a_stream_that_has_never_had_a_message_is_read(
    streams: Streams, batch_reader: Any, stream_reader: Any, flag: str
) -> None:
    streams.make("S", **{flag: True})
    assert rows(batch_reader(), batch_reader().partitions()) == []
    reader = stream_reader()
    start = logged(reader.initialOffset())
    assert logged(reader.latestOffset(start, ReadAllAvailable())) == start
    streams.number("s.a", 1, 3)
    assert rows(reader, reader.partitions(start, logged(reader.latestOffset(start, ReadAllAvailable())))) == [1, 2, 3]


def test_messages_that_were_rolled_up_are_no_loss(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", allow_rollup_hdrs=True)
    streams.number("s.a", 1, 30)
    _, end = started(stream_reader())
    streams.publish("s.a", [b"31"], **{"Nats-Rollup": "all"})
    reader = stream_reader()
    assert rows(reader, reader.partitions(end, logged(reader.latestOffset(end, ReadAllAvailable())))) == [31]


def test_a_mirror_of_some_subjects_is_sparse_and_not_lossy(streams: Streams, stream_reader: Any) -> None:
    streams.make("O", subjects=["s.>"])
    streams.make("S", mirror={"name": "O", "filter_subject": "s.a"})
    streams.number("s.a", 1, 1)
    eventually(lambda: streams.info("S").state.messages == 1, what="the mirror to begin")
    reader = stream_reader(maxRowsPerTrigger="4")
    start, seen = logged(reader.initialOffset()), []
    for n in range(2, 31):
        streams.number("s.a" if n % 3 == 0 else "s.b", n, n)
    eventually(lambda: streams.info("S").state.messages == 11, what="the mirror to catch up")
    while (end := logged(reader.latestOffset(start, reader.getDefaultReadLimit()))) != start:
        seen += rows(reader, reader.partitions(start, end))
        start = end
    assert seen == [1, *range(3, 31, 3)]


def test_a_stream_restored_to_an_older_state_that_has_grown_is_noticed(tmp_path: Path) -> None:
    """A stream that is restored keeps its creation time: only its messages tell."""
    data, backup = tmp_path / "data", tmp_path / "backup"

    def published(server: EmbeddedServer, first: int, last: int) -> None:
        with connect(server.settings) as connection:
            Streams(connection).number("s.a", first, last)

    def read(server: EmbeddedServer, start: dict[str, Any] | None, **options: str) -> dict[str, Any]:
        reader = source(server, options).streamReader(COLUMNS)
        try:
            return logged(reader.latestOffset(start or logged(reader.initialOffset()), ReadAllAvailable()))
        finally:
            reader.stop()

    with EmbeddedServer(data=data) as server:
        with connect(server.settings) as connection:
            Streams(connection).make("S")
        published(server, 1, 20)
        old = read(server, None)
    shutil.copytree(data, backup)
    with EmbeddedServer(data=data) as server:
        published(server, 21, 30)
        end = read(server, old)
    with EmbeddedServer(data=backup) as server:
        published(server, 21, 40)
        assert read(server, old)["sequence"] == 40, "the stream still holds what was read"
        with pytest.raises(HistoryChanged, match="message 30, which the query read last, was stored at"):
            read(server, end)
        assert read(server, end, failOnDataLoss="false")["sequence"] == 40


def test_a_start_that_is_gone_fails_a_batch_read(streams: Streams, batch_reader: Any) -> None:
    streams.make("S", max_msgs=5)
    streams.number("s.a", 1, 10)
    with pytest.raises(MessagesGone, match="3 messages"):
        batch_reader(startingOffsets="3").partitions()
    reader = batch_reader(startingOffsets="3", failOnDataLoss="false")
    assert rows(reader, reader.partitions()) == [6, 7, 8, 9, 10]


def test_a_checkpoint_of_another_stream_is_refused(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.make("T")
    _, end = started(stream_reader())
    with pytest.raises(CheckpointMismatch, match="belongs to stream 'S', the query reads 'T'"):
        stream_reader(stream="T").latestOffset(end, ReadAllAvailable())


# -- streams with limits for consumers ---------------------------------------------------------------------------------


def test_a_stream_whose_consumers_go_away_soon_is_read(streams: Streams, batch_reader: Any, stream_reader: Any) -> None:
    streams.make("S", consumer_limits={"inactive_threshold": 5_000_000_000})
    for n in range(1, 31):
        streams.number("s.a" if n % 3 == 0 else "s.b", n, n)
    reader = batch_reader()
    assert rows(reader, reader.partitions()) == list(range(1, 31))
    assert planned(stream_reader(subjects="s.a", maxRowsPerTrigger="4"))[0] == (1, 14)


def test_a_stream_that_takes_no_more_consumers_is_read_without_one(
    streams: Streams, batch_reader: Any, stream_reader: Any
) -> None:
    streams.make("S", max_consumers=1)
    run(streams.api.create_consumer("S", {"durable_name": "other", "ack_policy": "explicit"}))
    for n in range(1, 31):
        streams.number("s.a" if n % 3 == 0 else "s.b", n, n)
    reader = batch_reader(subjects="s.a")
    assert rows(reader, reader.partitions()) == list(range(3, 31, 3))
    batches = planned(stream_reader(subjects="s.a", maxRowsPerTrigger="4"))
    assert batches[0][0] == 1
    assert batches[-1][1] == 30
    run(streams.api.update_stream("S", {"allow_direct": False}))
    with pytest.raises(ConsumersUsedUp, match="raise max_consumers, or set `allow_direct: true`"):
        rows(reader, reader.partitions())


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_durable_keeps_within_the_limits_of_its_stream(streams: Streams, stream_reader: Any, retention: str) -> None:
    streams.make("S", retention=retention, consumer_limits={"max_ack_pending": 10})
    streams.number("s.a", 1, 30)
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    reader.commit(logged(reader.latestOffset(start, ReadAllAvailable())))
    assert streams.consumer("S", "d").config["max_ack_pending"] == 10
    assert durable.floor(streams.consumer("S", "d")) == 30


# -- bytes of the real world -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_headers_and_subjects_that_are_no_text_are_made_readable(
    streams: Streams, batch_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
    block = b"NATS/1.0\r\nLatin: caf\xe9\r\nGood: \xc3\xa9\r\n\r\n"
    body = b"\xff"
    head = b"HPUB s.\xe9 %d %d\r\n" % (len(block), len(block) + len(body))
    streams.connection.send(head + block + body + b"\r\n")
    streams.number("s.a", 2, 2)
    for option, latin, subject in (("replace", "caf\ufffd", "s.\ufffd"), ("escape", "caf\\xe9", "s.\\xe9")):
        reader = batch_reader(invalidText=option, consumer="d")
        (found,) = (batch for part in reader.partitions() for batch in reader.read(part))
        found.validate(full=True)
        row = found.slice(0, 1).to_pylist()[0]
        assert (row["subject"], dict(row["headers"]), row["data"]) == (
            subject,
            {"Latin": [latin], "Good": ["é"]},
            body,
        )


# -- the durable -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_of_two_queries_on_one_durable_one_is_refused_with_both_names(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    first = stream_reader(consumer="d")
    start = logged(first.initialOffset())
    streams.number("s.a", 1, 10)
    end = logged(first.latestOffset(start, ReadAllAvailable()))
    first.commit(end)
    second = stream_reader(consumer="d")
    begun = logged(second.initialOffset())
    assert begun["sequence"] == 10, "it continues where the durable is"
    streams.number("s.a", 11, 20)
    both = f"{begun['owner']}.*{end['owner']}"
    further = logged(first.latestOffset(end, ReadAllAvailable()))
    for again, commit in ((first, further), (stream_reader(consumer="d"), further)):
        with pytest.raises(ConsumerTaken, match=both):
            again.commit(commit)
    with pytest.raises(ConsumerTaken, match=both):
        stream_reader(consumer="d").latestOffset(further, ReadAllAvailable())
    assert durable.floor(streams.consumer("S", "d")) == 10, "nothing was committed for the one that is refused"
    second.commit(logged(second.latestOffset(begun, ReadAllAvailable())))
    assert durable.floor(streams.consumer("S", "d")) == 20


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_batches_that_spark_does_not_commit_in_time_are_refused_where_acknowledging_deletes(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    """With asynchronous progress tracking Spark runs batches whose predecessors are not on disk."""
    streams.make("S", retention=retention)
    first, second = (stream_reader(consumer=name, maxRowsPerTrigger="5", subjects=f"s.{name}") for name in "ab")
    starts = [logged(reader.initialOffset()) for reader in (first, second)]
    for _ in range(3):
        for name in "ab":
            streams.number(f"s.{name}", 1, 5)
    for synchronous, reader, end in zip((True, False), (first, second), starts, strict=True):
        ends = [end]
        for _ in range(2):
            ends.append(logged(reader.latestOffset(ends[-1], ReadMaxRows(5))))
            if synchronous:
                reader.commit(ends[-2])
        if synchronous or retention == "limits":
            assert reader.latestOffset(ends[-1], ReadMaxRows(5))["sequence"] > ends[-1]["sequence"]
        else:
            with pytest.raises(ConfigError, match="asyncProgressTrackingEnabled"):
                reader.latestOffset(ends[-1], ReadMaxRows(5))


def test_a_query_stays_the_owner_however_often_spark_asks_where_to_begin(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    end = logged(reader.latestOffset(start, ReadAllAvailable()))
    assert logged(reader.initialOffset())["owner"] == start["owner"] == end["owner"]
    # The driver dies before the batch is committed: Spark asks again, and goes on with the offsets that it has logged.
    second = stream_reader(consumer="d")
    assert rows(second, second.partitions(logged(second.initialOffset()), end)) == list(range(1, 11))
    assert second.latestOffset(end, ReadAllAvailable()) == end
    third = stream_reader(consumer="d")
    assert third.latestOffset(end, ReadAllAvailable()) == end
    assert durable.floor(streams.consumer("S", "d")) == 10


def test_a_checkpoint_of_before_there_were_owners_takes_a_durable_that_nobody_has(
    streams: Streams, stream_reader: Any
) -> None:
    created = streams.make("S").raw["created"]
    streams.number("s.a", 1, 10)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit", "metadata": {"my": "own"}}))
    old = {"version": 1, "stream": "S", "created": created, "sequence": 4, "tasks": 1, "openStart": False}
    for _ in range(2):  # also after a crash before the next offset was logged
        end = logged(stream_reader(consumer="d").latestOffset(old, ReadAllAvailable()))
    assert end["owner"] == streams.consumer("S", "d").config["metadata"]["penstock.query"] != ""
    assert streams.consumer("S", "d").config["metadata"]["my"] == "own"
    stream_reader(consumer="d").commit(end)
    stream_reader(consumer="d").initialOffset()
    with pytest.raises(ConsumerTaken):
        stream_reader(consumer="d").latestOffset(old, ReadAllAvailable())


def test_the_durable_is_made_with_the_filters_of_the_query(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    stream_reader(consumer="d", subjects="s.a,s.b").initialOffset()
    found = streams.consumer("S", "d")
    assert set(found.config["filter_subjects"]) == {"s.a", "s.b"}
    assert found.config["ack_policy"] == "explicit"


@pytest.mark.parametrize(
    ("retention", "config", "complaint"),
    [
        ("limits", {"ack_policy": "none"}, "ack policy 'none'"),
        ("limits", {"ack_policy": "explicit", "filter_subject": "s.b"}, "it filters s.b, and the query reads s.a"),
        ("limits", {"ack_policy": "explicit"}, "it filters every subject"),
        ("interest", {"ack_policy": "none", "filter_subject": "s.a"}, "ack policy 'none'"),
        ("limits", {"ack_policy": "explicit", "filter_subject": "s.a", "deliver_policy": "new"}, "it delivers 'new'"),
        ("workqueue", {"ack_policy": "explicit", "filter_subject": "s.b"}, "it filters s.b"),
        (
            "limits",
            {"ack_policy": "explicit", "filter_subject": "s.a", "deliver_subject": "x"},
            "a pull consumer is needed",
        ),
    ],
)
def test_an_unfit_durable_is_refused(
    streams: Streams, stream_reader: Any, retention: str, config: dict[str, Any], complaint: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", **config}))
    with pytest.raises(UnfitConsumer, match=complaint):
        stream_reader(consumer="d", subjects="s.a").initialOffset()


@pytest.mark.parametrize("subjects", ["", "s.a"])
def test_who_else_consumes_a_work_queue_is_named(streams: Streams, stream_reader: Any, subjects: str) -> None:
    streams.make("S", retention="workqueue")
    for name in "ab":
        config = {"durable_name": f"worker_{name}", "ack_policy": "explicit", "filter_subject": f"s.{name}"}
        run(streams.api.create_consumer("S", config))
    rivals = "'worker_a'" if subjects else "'worker_a', 'worker_b'"
    with pytest.raises(UnfitConsumer, match=f"consumer 'd' cannot be made: .* and {rivals} has what the query reads"):
        stream_reader(consumer="d", subjects=subjects).initialOffset()


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_streams_that_consuming_deletes_need_a_durable(
    streams: Streams, stream_reader: Any, batch_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    for failing in (stream_reader().initialOffset, batch_reader().partitions):
        with pytest.raises(ConfigError, match="name a durable consumer"):
            failing()
    with pytest.raises(ConfigError, match="never acknowledged"):
        stream_reader(consumer="d", startingOffsets="latest").initialOffset()


def test_streams_that_consuming_deletes_need_direct_get(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", retention="workqueue", allow_direct=False)
    with pytest.raises(DirectGetRefused, match="allow_direct: true"):
        stream_reader(consumer="d").initialOffset()


def test_a_commit_on_a_limits_stream_moves_the_durable(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(consumer="d", maxRowsPerTrigger="6")
    start = logged(reader.initialOffset())
    end = logged(reader.latestOffset(start, reader.getDefaultReadLimit()))
    assert streams.consumer("S", "d").ack_floor_stream_seq == 0
    reader.commit(end)
    reader.commit(end)
    found = streams.consumer("S", "d")
    assert (found.ack_floor_stream_seq, found.pending) == (6, 4)
    assert stream_reader(consumer="d").initialOffset()["sequence"] == 6


@pytest.mark.kills
@pytest.mark.short
def test_a_commit_on_replicas_takes_a_status_that_overtakes_its_messages(nats_cluster: EmbeddedCluster) -> None:
    """A consumer with replicas says that a pull is complete before its messages arrive."""
    with Link(nats_cluster.settings) as link:
        streams = Streams(link.connection)
        link.call(lambda api: api.stream_names())  # connects
        streams.make("S", retention="workqueue", num_replicas=3)
        run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
        streams.number("s.a", 1, 5000)
        for end in (2500, 5000):
            committing.commit(link, streams.info("S"), streams.consumer("S", "d"), end)
            assert streams.consumer("S", "d").ack_floor_stream_seq == end
        eventually(lambda: streams.info("S").state.messages == 0, 30, "nothing left", lambda: streams.info("S").state)


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
@pytest.mark.parametrize("subjects", ["", "s.a"])
def test_a_commit_deletes_exactly_the_range(
    streams: Streams, stream_reader: Any, retention: str, subjects: str
) -> None:
    streams.make("S", retention=retention)
    first = stream_reader(consumer="d", subjects=subjects)
    start = logged(first.initialOffset())
    if subjects and retention == "interest":  # without interest in s.b its messages would not be kept
        run(
            streams.api.create_consumer(
                "S", {"durable_name": "other", "filter_subject": "s.b", "ack_policy": "explicit"}
            )
        )
    for n in range(1, 41):
        streams.number("s.b" if n % 4 == 0 else "s.a", n, n)
    end = logged(first.latestOffset(start, ReadMaxRows(22)))
    assert len(left(streams)) == 40
    first.commit(end)
    done = [n for n in range(1, end["sequence"] + 1) if not subjects or n % 4]
    assert left(streams) == [n for n in range(1, 41) if n not in done]
    again = stream_reader(consumer="d", subjects=subjects)  # another process, after a crash
    again.commit(end)
    assert left(streams) == [n for n in range(1, 41) if n not in done]
    last = logged(again.latestOffset(end, ReadAllAvailable()))
    again.commit(last)
    assert left(streams) == ([n for n in range(1, 41) if n % 4 == 0] if subjects else [])


def left(streams: Streams) -> list[int]:
    """The sequences that the stream still holds."""
    state = run(streams.api.stream_info("S", deleted_details=True)).raw["state"]
    gone = set(state.get("deleted") or [])
    if not state["messages"]:
        return []
    return [n for n in range(state["first_seq"], state["last_seq"] + 1) if n not in gone]


def test_a_commit_goes_on_when_the_server_is_too_slow_for_one_try(
    streams: Streams, stream_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Acknowledging._pulled
    monkeypatch.setattr(Acknowledging, "_pulled", lambda self, count: whole(self, min(count, 3)) and False)
    streams.make("S", retention="workqueue")
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    streams.number("s.a", 1, 30)
    reader.commit(logged(reader.latestOffset(start, ReadMaxRows(25))))
    assert left(streams) == list(range(26, 31))


def test_a_commit_that_was_cut_short_is_taken_up(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", retention="workqueue")
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    streams.number("s.a", 1, 30)
    end = logged(reader.latestOffset(start, ReadMaxRows(20)))
    # As a crash leaves it: some messages delivered and not answered.
    streams.connection.subscribe("inbox")
    streams.connection.publish("$JS.API.CONSUMER.MSG.NEXT.S.d", b"10", reply="inbox")
    for _ in range(10):
        streams.connection.receive(5)
    assert streams.consumer("S", "d").ack_pending == 10
    stream_reader(consumer="d").commit(end)
    assert left(streams) == list(range(21, 31))
