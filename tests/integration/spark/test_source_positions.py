"""Where the source starts and ends, and how much a micro-batch takes, against a real server, without a Spark job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from tests.support.spark_readers import logged, ranges, rows
from tests.support.streams import Streams

from penstock.errors import ConfigError
from penstock.jetstream.pull import ConsumersUsedUp
from penstock.spark import durable
from penstock.spark.durable import UnfitConsumer
from penstock.spark.source import JetStreamStreamReader
from penstock.wire.blocking import run

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
