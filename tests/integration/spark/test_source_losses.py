"""What the source counts as lost, and what not, against a real server, without a Spark job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.support.spark_readers import logged, rows, source
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.spark.datasource import COLUMNS
from penstock.spark.loss import HistoryChanged, MessagesGone, StreamReplaced
from penstock.spark.offsets import CheckpointMismatch
from penstock.spark.source import JetStreamStreamReader
from penstock.testing import eventually
from penstock.wire.blocking import connect, run

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
