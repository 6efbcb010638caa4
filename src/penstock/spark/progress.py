"""What Spark reports about micro-batches, and the board on the server where drivers leave it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from penstock.broker.codes import api_error
from penstock.broker.model import Json
from penstock.observe.pipelines import BUCKET, BUCKET_CONFIG, STREAM, InputRange, MicroBatch, Progress
from penstock.spark.link import Link


def micro_batch(report: Json, reads: int = 1) -> MicroBatch:
    """A micro-batch from Spark's own report. `reads`: how often the plan reads its input, since Spark counts each."""
    seconds = report["batchDuration"] / 1000
    state = report.get("stateOperators") or []
    return MicroBatch(
        number=report["batchId"],
        ended=datetime.fromisoformat(report["timestamp"]) + timedelta(seconds=seconds),
        seconds=seconds,
        rows=report["numInputRows"] // reads,
        state_rows=sum(operator["numRowsTotal"] for operator in state),
        state_bytes=sum(operator["memoryUsedBytes"] for operator in state),
        late_rows=sum(operator["numRowsDroppedByWatermark"] for operator in state),
        inputs=tuple(_inputs(report.get("sources") or ())),
    )


def _inputs(sources: Iterable[Json]) -> Iterator[InputRange]:
    """The ranges that a micro-batch read, one for each stream: a plan that reads its input twice has equal ones."""
    seen: set[str] = set()
    for source in sources:
        starts = _sequences(source.get("startOffset"))
        for stream, (created, last) in _sequences(source.get("endOffset")).items():
            if stream in seen:
                continue
            seen.add(stream)
            before = starts.get(stream)
            first = None if before is None else (before[1] if before[0] == created else 0) + 1
            if first is None or first <= last:
                yield InputRange(stream, first, last)


def _sequences(offset: Any) -> dict[str, tuple[str, int]]:
    """Creation time and last sequence by stream, of an offset of one stream or of several. Other sources have none."""
    if not isinstance(offset, dict):
        return {}
    offsets = offset["streams"].values() if isinstance(offset.get("streams"), dict) else [offset]
    return {
        str(one["stream"]): (str(one.get("created")), int(one["sequence"]))
        for one in offsets
        if isinstance(one, dict) and "stream" in one and "sequence" in one
    }


class Board:
    """Writes records over a blocking connection."""

    def __init__(self, link: Link, replicas: int = 1) -> None:
        self._link = link
        self._replicas = replicas
        domain = link.settings.domain
        self._prefix = f"$JS.{domain}.API.$KV.{BUCKET}." if domain else f"$KV.{BUCKET}."

    def create(self) -> None:
        """Make the bucket if it is missing."""
        if not self._link.has_stream(STREAM):
            config = {**BUCKET_CONFIG, "num_replicas": self._replicas}
            self._link.call(lambda api: api.create_stream(config))

    def put(self, record: Progress) -> None:
        answer = self._link.ask(f"{self._prefix}{record.pipeline}", json.dumps(record.json()).encode())
        if error := answer.get("error"):
            raise api_error(f"record the progress of pipeline {record.pipeline!r}", error)


def new_batches(reports: Iterable[Json], after: int, reads: int) -> list[MicroBatch]:
    """The micro-batches beyond number `after`, in order. Spark also reports on waiting, with the number to come."""
    ran = [report for report in reports if report["batchId"] > after and "addBatch" in report["durationMs"]]
    return [micro_batch(report, reads) for report in sorted(ran, key=lambda report: report["batchId"])]
