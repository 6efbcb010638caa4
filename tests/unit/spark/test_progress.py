"""Spark's reports of micro-batches, and the records drivers leave on the server."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.spark.progress import (
    HEARTBEAT,
    RUNNING,
    SILENT,
    STOPPED,
    InputRange,
    MicroBatch,
    PipelineProgress,
    micro_batch,
    new_batches,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


def record(**values: Any) -> PipelineProgress:
    given: dict[str, Any] = {
        "pipeline": "p", "state": RUNNING, "streams": ("A", "B"), "consumer": "pipeline_p",
        "host": "h", "pid": 1, "started": START, "heard": START,
    }  # fmt: skip
    return PipelineProgress(**{**given, **values})


def report(number: int, rows: int = 10, ran: bool = True) -> dict[str, Any]:
    """As Spark 4.3 writes it, cut down to what is read."""
    return {
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": number,
        "batchDuration": 2000,
        "numInputRows": rows,
        "durationMs": {"latestOffset": 1, **({"addBatch": 1500} if ran else {})},
        "stateOperators": [
            {"numRowsTotal": 5, "memoryUsedBytes": 100, "numRowsDroppedByWatermark": 1},
            {"numRowsTotal": 2, "memoryUsedBytes": 50, "numRowsDroppedByWatermark": 0},
        ],
    }


def test_a_record_comes_back_from_json_as_it_was() -> None:
    full = record(batch=3, batch_ended=START, rows_per_second=1.5, error="why", batches=4)
    full = replace(
        full, recent=(MicroBatch(3, START, 2.0, 10, inputs=(InputRange("A", None, 9), InputRange("B", 3, 4))),)
    )
    for one in (record(), full):
        assert PipelineProgress.parse(json.loads(json.dumps(one.json()))) == one


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert PipelineProgress.parse({**record().json(), "version": 9, "colour": "blue"}) == record()


@pytest.mark.parametrize(
    ("state", "age", "seen"),
    [
        (RUNNING, timedelta(seconds=1), RUNNING),
        (RUNNING, timedelta(minutes=2), SILENT),
        (STOPPED, timedelta(minutes=2), STOPPED),
    ],
)
def test_a_running_pipeline_that_says_nothing_is_silent(state: str, age: timedelta, seen: str) -> None:
    assert record(state=state).state_at(START + age) == seen


def test_only_news_and_signs_of_life_are_told() -> None:
    told = record(batches=1)
    assert not told.tells_less_than(record(batches=1, heard=START + HEARTBEAT / 2))
    assert told.tells_less_than(record(batches=1, heard=START + HEARTBEAT))
    assert told.tells_less_than(record(batches=2))
    assert told.tells_less_than(record(batches=1, state=STOPPED))


def test_a_report_counts_each_message_once_however_often_the_plan_reads_it() -> None:
    batch = micro_batch(report(7, rows=20), reads=2)
    assert (batch.number, batch.rows, batch.seconds, batch.rows_per_second) == (7, 10, 2.0, 5.0)
    assert (batch.state_rows, batch.state_bytes, batch.late_rows) == (7, 150, 1)
    assert batch.ended == START + timedelta(seconds=2)


def test_reports_of_waiting_do_not_hide_the_batch_that_comes() -> None:
    waiting, ran = report(1, rows=0, ran=False), report(1)
    assert [b.number for b in new_batches([report(0), waiting], after=-1, reads=1)] == [0]
    assert [b.number for b in new_batches([report(0), waiting, ran, report(2)], after=0, reads=1)] == [1, 2]


def offset(stream: str, sequence: int, created: str = "t0") -> dict[str, Any]:
    return {"version": 1, "stream": stream, "created": created, "sequence": sequence}


@pytest.mark.parametrize(
    ("sources", "read"),
    [
        ([{"startOffset": offset("A", 4), "endOffset": offset("A", 9)}], [InputRange("A", 5, 9)]),
        ([{"startOffset": None, "endOffset": offset("A", 9)}], [InputRange("A", None, 9)]),
        ([{"startOffset": offset("A", 9), "endOffset": offset("A", 9)}], []),
        ([{"startOffset": offset("A", 9), "endOffset": offset("A", 3, "t1")}], [InputRange("A", 1, 3)]),
        ([{"startOffset": offset("A", 4), "endOffset": offset("A", 9)}] * 2, [InputRange("A", 5, 9)]),
        (
            [{"startOffset": {"version": 1, "streams": {"A": offset("A", 4), "B": offset("B", 1)}},
              "endOffset": {"version": 1, "streams": {"A": offset("A", 5), "B": offset("B", 7)}}}],
            [InputRange("A", 5, 5), InputRange("B", 2, 7)],
        ),
        ([{"startOffset": {"0": 4}, "endOffset": {"0": 9}}, {"startOffset": 4, "endOffset": 5}], []),
    ],
)  # fmt: skip
def test_a_report_says_what_was_read_of_each_stream(sources: list[Any], read: list[InputRange]) -> None:
    assert list(micro_batch({**report(1), "sources": sources}).inputs) == read
