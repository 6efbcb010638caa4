"""Snapshots survive being kept."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tests.unit.observe.test_flow import consumer, snapshot, stream

from penstock.deadletter.waiting import GivenUp
from penstock.observe.pipelines import PipelineStatus
from penstock.observe.record import decode, encode
from penstock.observe.snapshot import Snapshot
from penstock.observe.status import SourceStatus
from penstock.spark.progress import PipelineProgress
from penstock.workers.group.overview import GroupOverview, PartitionOverview, WorkerOverview

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
PROGRESS = PipelineProgress(
    pipeline="p", state="running", streams=("S",), consumer="c", host="h", pid=1, started=NOW, heard=NOW
)
GROUP = GroupOverview(
    "g",
    "S",
    3,
    "w1",
    (WorkerOverview("w1", "active", "normal", "h", 1, ("a",), True, 2, 3, None, 0),),
    (PartitionOverview("p", ("s.p",), "w1", None, 7, None, "waits"),),
    pins={"p": "w1"},
)


def whole() -> Snapshot:
    source = SourceStatus("O", 3, timedelta(seconds=1.5), None)
    made = snapshot(
        consumer("bill", paused_for=timedelta(minutes=2), lag=timedelta(seconds=3)),
        streams=(stream("S", "s.>", sources=(source,)),),
    )
    status = replace(made.status, given_up=GivenUp({("S", "bill"): 4}), abandoned_batches={"S": 2})
    pipeline = PipelineStatus("p", "running", ("S",), "c", 5, timedelta(seconds=9), PROGRESS)
    return Snapshot(status, (pipeline,), (GROUP,))


def test_a_snapshot_comes_back_as_it_was() -> None:
    assert decode(encode(whole())) == whole()


def test_fields_of_a_later_version_are_passed_over() -> None:
    raw = json.loads(zlib.decompress(encode(whole())))
    raw["weather"] = "fine"
    raw["status"]["streams"][0]["colour"] = "blue"
    assert decode(zlib.compress(json.dumps(raw).encode())) == whole()
