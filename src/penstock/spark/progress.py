"""The progress of Spark pipelines. Drivers record it on the server, in the KV bucket `penstock_pipelines`.

The position of a pipeline in its streams is not in the record: its durable consumers have it. Nothing here needs Spark.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from penstock.errors import StreamNotFound
from penstock.jetstream import JetStream
from penstock.jetstream.kv import Keys, KeyValue, bucket_layout
from penstock.jetstream.model import NO_ADVISORY, Json
from penstock.records import plain, typed
from penstock.spark.link import Link

log = logging.getLogger(__name__)

BUCKET = "penstock_pipelines"
VERSION = 1
HEARTBEAT = timedelta(seconds=5)
SILENT_AFTER = 6 * HEARTBEAT
"""A running pipeline without a report for this long has died, or cannot reach the server."""

RUNNING, FINISHED, STOPPED, FAILED, SILENT, NEVER = "running", "finished", "stopped", "failed", "silent", "never ran"

MAX_RECENT = 20
"""Micro-batches of a pipeline that its record lists."""

BUCKET_CONFIG = bucket_layout(BUCKET, "Penstock: progress of Spark pipelines")


@dataclass(frozen=True, slots=True)
class InputRange:
    """The part of a stream that one micro-batch read."""

    stream: str
    first: int | None
    """None for the first micro-batch of a query: Spark does not report where it began."""
    last: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a pipeline, as Spark reported it."""

    number: int
    ended: datetime
    seconds: float
    rows: int
    """Messages it read."""
    state_rows: int = 0
    state_bytes: int = 0
    late_rows: int = 0
    inputs: tuple[InputRange, ...] = ()

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgress:
    """One pipeline, as its driver last saw it."""

    pipeline: str
    state: str
    streams: tuple[str, ...]
    consumer: str
    host: str
    pid: int
    started: datetime
    heard: datetime
    """When the driver wrote this."""
    query: str = ""
    batch: int | None = None
    """The last micro-batch; None before the first."""
    batch_ended: datetime | None = None
    batch_seconds: float = 0.0
    batch_rows: int = 0
    """Messages it read."""
    rows_per_second: float = 0.0
    state_rows: int = 0
    state_bytes: int = 0
    late_rows: int = 0
    """Rows that the pipeline's own watermark has dropped in this run."""
    rows_read: int = 0
    """In this run, like the counts below."""
    rows_written: int = 0
    bad_records: int = 0
    batches: int = 0
    error: str | None = None
    recent: tuple[MicroBatch, ...] = ()
    """The last micro-batches of this run, the newest last."""
    ui: str | None = None
    """URL of Spark's own UI; None when it is off, or unknown to the driver."""

    @property
    def ui_link(self) -> str | None:
        """The UI's URL, if it is a valid link: any client with write access to the bucket can choose the text."""
        return self.ui if self.ui and self.ui.lower().startswith(("http://", "https://")) else None

    def state_at(self, now: datetime) -> str:
        """Return the state; a running pipeline without recent reports counts as silent."""
        return SILENT if self.state == RUNNING and now - self.heard > SILENT_AFTER else self.state

    def tells_less_than(self, later: PipelineProgress) -> bool:
        """Whether the later record has news, or a heartbeat is due."""
        return (self.batches, self.state) != (later.batches, later.state) or later.heard - self.heard >= HEARTBEAT

    def micro_batch(self, number: int) -> MicroBatch | None:
        """A micro-batch of this run, if it is among the last ones."""
        return next((one for one in self.recent if one.number == number), None)

    def checkpoint(self, stream: str) -> int | None:
        """Return the sequence up to which its last micro-batch has read a stream; None when none is recorded."""
        read = (one.last for batch in reversed(self.recent) for one in batch.inputs if one.stream == stream)
        return next(read, None)

    def json(self) -> Json:
        return {"version": VERSION, **plain(self)}

    @classmethod
    def parse(cls, raw: Json) -> Self:
        """A record of this version, or of a later one, whose further fields are ignored."""
        found: Self = typed(cls, raw)
        return found


async def recorded(js: JetStream) -> dict[str, PipelineProgress]:
    """Return every record, by pipeline. What is no record is passed over: others may write to the bucket too."""
    bucket, found = Keys(js, BUCKET), dict[str, PipelineProgress]()
    for key in await bucket.keys():
        with suppress(StreamNotFound):  # removed since its keys were listed
            record = await bucket.newest(key)
            if record and record.data:
                try:
                    told = PipelineProgress.parse(json.loads(record.data))
                    told.state_at(now())  # its times can be compared
                    found[key] = told
                except NO_ADVISORY as exc:
                    log.info("what key %r of bucket %r holds is no record of a pipeline: %r", key, BUCKET, exc)
    return found


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
        self._bucket = KeyValue(link, BUCKET)

    def create(self) -> None:
        """Create the bucket if it is missing."""
        if not self._link.stubbornly(self._bucket.exists):
            config = {**BUCKET_CONFIG, "num_replicas": self._replicas}
            self._link.call(lambda api: api.create_stream(config))

    def put(self, record: PipelineProgress) -> None:
        data = json.dumps(record.json()).encode()
        self._link.stubbornly(lambda: self._bucket.add(record.pipeline, data))


def new_batches(reports: Iterable[Json], after: int, reads: int) -> list[MicroBatch]:
    """The micro-batches beyond number `after`, in order. Spark also reports on waiting, with the number to come."""
    ran = [report for report in reports if report["batchId"] > after and "addBatch" in report["durationMs"]]
    return [micro_batch(report, reads) for report in sorted(ran, key=lambda report: report["batchId"])]


def now() -> datetime:
    return datetime.now(UTC)
