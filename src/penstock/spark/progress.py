"""What Spark reports about micro-batches, and the board on the server where drivers leave it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from penstock.jetstream.codes import api_error
from penstock.jetstream.model import Json
from penstock.observe.pipelines import BUCKET, BUCKET_CONFIG, STREAM, Progress
from penstock.spark.link import Link


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, from Spark's own report of it."""

    number: int
    ended: datetime
    seconds: float
    rows: int
    state_rows: int
    state_bytes: int
    late_rows: int

    @classmethod
    def of(cls, report: Json, reads: int = 1) -> Self:
        """`reads`: how often the plan reads its input, since Spark counts each of them."""
        began = datetime.fromisoformat(report["timestamp"])
        seconds = report["batchDuration"] / 1000
        state = report.get("stateOperators") or []
        return cls(
            number=report["batchId"],
            ended=began + timedelta(seconds=seconds),
            seconds=seconds,
            rows=report["numInputRows"] // reads,
            state_rows=sum(operator["numRowsTotal"] for operator in state),
            state_bytes=sum(operator["memoryUsedBytes"] for operator in state),
            late_rows=sum(operator["numRowsDroppedByWatermark"] for operator in state),
        )

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


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


def new_batches(reports: Iterable[Json], after: int, reads: int) -> list[Batch]:
    """The micro-batches beyond number `after`, in order. Spark also reports on waiting, with the number to come."""
    ran = [report for report in reports if report["batchId"] > after and "addBatch" in report["durationMs"]]
    return [Batch.of(report, reads) for report in sorted(ran, key=lambda report: report["batchId"])]
