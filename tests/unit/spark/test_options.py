"""Options of format `jetstream`: everything a user can get wrong is told, with what would be right."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.spark.options import (
    CONSUMER,
    DEAD_LETTERS,
    EARLIEST,
    LATEST,
    Position,
    PositionKind,
    check_source_names,
    sink_options,
    source_options,
)


def read(streaming: bool = True, **options: str) -> Any:
    return source_options({"stream": "S", **options}, streaming)


def test_the_defaults_read_everything_and_fail_on_loss() -> None:
    found = read(streaming=False)
    assert (found.stream, found.subjects, found.starting, found.ending) == ("S", (), EARLIEST, LATEST)
    assert (found.fail_on_data_loss, found.keep_batches_whole, found.partitions) == (True, False, None)


def test_a_streaming_query_with_a_durable_starts_where_that_is() -> None:
    assert read(consumer="c").starting == CONSUMER
    assert read(consumer="c", startingOffsets="latest").starting == LATEST


def test_names_are_taken_in_any_case_as_spark_gives_them() -> None:
    found = source_options({"STREAM": "S", "maxrowspertrigger": "10", "TLSca": "", "Servers": "a:1, b:2"}, True)
    assert found.max_rows == 10
    assert found.settings.servers == ("nats://a:1", "nats://b:2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", EARLIEST),
        ("LATEST", LATEST),
        ("17", Position(PositionKind.SEQUENCE, sequence=17)),
        ("2026-03-01T12:00:00Z", Position(PositionKind.TIME, time=datetime(2026, 3, 1, 12, tzinfo=UTC))),
        ("2026-03-01T13:00:00.5+01:00", Position(PositionKind.TIME, time=datetime(2026, 3, 1, 12, 0, 0, 500000, UTC))),
    ],
)
def test_positions_are_names_sequences_and_times(text: str, expected: Position) -> None:
    assert read(startingOffsets=text).starting == expected
    if expected != EARLIEST:
        assert read(streaming=False, endingOffsets=text).ending == expected


def test_offsets_by_stream_are_json() -> None:
    given = {"streams": "A, B,A,C", "startingOffsets": '{"A": 5, "B": "latest", "C": -1}', "minOffsetsPerTrigger": "9"}
    found = source_options(given, streaming=True)
    assert (found.is_several, found.streams) == (True, ("A", "B", "C"))
    assert [found.of(name).starting for name in "ABC"] == [Position(PositionKind.SEQUENCE, sequence=5), LATEST, LATEST]
    assert (found.min_rows, found.of("A").min_rows) == (9, None)
    assert source_options({"path": "A"}, streaming=True).stream == "A"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"startingOffsets": '{"A": 5}'}, "by stream is for several streams"),
        ({"streams": "A"}, "each say what is read"),
        ({"stream": "", "streams": "A", "startingOffsets": "{A}"}, "is no JSON"),
        ({"stream": "", "streams": "A", "startingOffsets": '{"A": "x"}'}, "startingOffsets of A 'x' is none of"),
        ({"stream": "", "streamPattern": "("}, "no regular expression"),
        ({"maxTriggerDelay": "5"}, "maxTriggerDelay: '5' is not a duration"),
        ({"partitions": "2", "minPartitions": "2"}, "leave out minPartitions"),
        ({"decompress": "yes"}, "must be none or header"),
        ({"asOf": "earliest"}, "nothing lies before"),
        ({"provider": "jetstream"}, "CREATE TEMPORARY VIEW"),
    ],
)
def test_what_cannot_be_meant_is_told(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checked({"stream": "S", **options})


def checked(options: dict[str, str]) -> None:
    """What Spark has done of the options when it begins to read."""
    check_source_names(options)
    source_options(options, streaming=True)


def test_sizes_are_written_as_people_write_them() -> None:
    assert read(maxBytesPerTrigger="64MiB").max_bytes == 64 * 1024 * 1024
    assert read(maxBytesPerTrigger="1000").max_bytes == 1000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"startingOffset": "1"}, "no option 'startingOffset'; did you mean 'startingOffsets'?"),
        ({"maxrowspertriger": "1"}, "did you mean 'maxRowsPerTrigger'?"),
        ({"xyzzy": "1"}, "known are stream, streams"),
        ({"stream": ""}, "option stream is missing"),
        ({"stream": "a.b"}, "'a.b' is not a name"),
        ({"consumer": "a b"}, "'a b' is not a name"),
        ({"subjects": "a..b"}, "'a..b' is no filter"),
        ({"subjects": "a.>,a.b"}, "'a.>' and 'a.b' overlap"),
        ({"startingOffsets": "yesterday"}, "none of earliest, latest, consumer"),
        ({"startingOffsets": "2026-03-01T12:00:00"}, "offset from UTC"),
        ({"startingOffsets": "2026-13-01T12:00:00Z"}, "no time"),
        ({"startingOffsets": "consumer"}, "give the option consumer"),
        ({"endingOffsets": "5"}, "endingOffsets is for batch reads"),
        ({"maxRowsPerTrigger": "0"}, "must be 1 or more"),
        ({"maxRowsPerTrigger": "many"}, "whole number"),
        ({"maxBytesPerTrigger": "5 apples"}, "maxBytesPerTrigger: '5 apples' is not a size"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"tlsCert": "c.pem"}, "tls_cert and tls_key go together"),
        ({"user": "u", "token": "t"}, "give only one"),
        ({"credentials": "/nowhere"}, "there is no file"),
    ],
)
def test_wrong_options_are_told(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("?", r"\?")):
        read(streaming=True, **options)


@pytest.mark.parametrize("name", ["maxRowsPerTrigger", "maxBytesPerTrigger"])
def test_limits_of_a_trigger_are_refused_in_batch_reads(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is for streaming reads"):
        read(streaming=False, **{name: "5"})


@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "streaming"])
def test_sequences_begin_with_one(streaming: bool) -> None:
    with pytest.raises(ConfigError, match="sequences begin with 1"):
        read(streaming=streaming, startingOffsets="0")


def test_a_batch_read_ends_behind_its_start() -> None:
    with pytest.raises(ConfigError, match="lies before"):
        read(streaming=False, startingOffsets="9", endingOffsets="7")
    with pytest.raises(ConfigError, match="cannot be `earliest`"):
        read(streaming=False, endingOffsets="earliest")


def test_names_are_checked_before_it_is_clear_how_to_read() -> None:
    check_source_names({"stream": "S", "maxRowsPerTrigger": "1", "endingOffsets": "1"})
    with pytest.raises(ConfigError, match="did you mean 'subjects'"):
        check_source_names({"stream": "S", "subject": "a"})


def test_sink_options_have_their_own_names() -> None:
    found = sink_options({"stream": "S", "delivery": "fast", "checkpointLocation": "/c", "subject": "a.b"})
    assert (found.stream, found.delivery, found.subject) == ("S", "fast", "a.b")
    with pytest.raises(ConfigError, match="did you mean 'atomic'"):
        sink_options({"stream": "S", "delivery": "atomc"})
    with pytest.raises(ConfigError, match="sink has no option 'startingOffsets'"):
        sink_options({"stream": "S", "startingOffsets": "1"})
    with pytest.raises(ConfigError, match="go together"):
        sink_options({"stream": "S", "txnAppId": "a"})


def test_options_that_are_sparks_own_are_no_business_of_the_sink_but_one() -> None:
    own = {"queryname": "q", "asyncprogresstrackingenabled": "false", "asyncprogresstrackingcheckpointintervalms": "1"}
    assert sink_options({"stream": "S", **own}).stream == "S"
    with pytest.raises(ConfigError, match="leave that option out"):
        sink_options({"stream": "S", "asyncProgressTrackingEnabled": "true"})


def test_dead_letters_of_a_write_have_a_subject_of_theirs_and_one_stream() -> None:
    assert sink_options({"stream": "S", "deadLetters": "dlq.copy"}).letters == "dlq.copy"
    for options, complaint in (
        ({"stream": "S", "deadLetters": "copy.bad"}, "no subject for dead letters"),
        ({"stream": "S", "deadLetters": "dlq.>"}, "wildcard"),
        ({"deadLetters": "dlq.copy"}, "to one stream"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            sink_options(options)


def test_only_pipelines_say_that_rows_are_dead_letters_and_no_hint_tells_how() -> None:
    assert not sink_options({"stream": "DLQ"}).dead_letters
    assert sink_options({"stream": "DLQ", DEAD_LETTERS.lower(): "true"}).dead_letters
    for wrong in ("penstockDeadLetter", "xyzzy"):
        with pytest.raises(ConfigError) as refused:
            sink_options({"stream": "DLQ", wrong: "true"})
        assert DEAD_LETTERS not in str(refused.value)
