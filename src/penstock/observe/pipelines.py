"""How far each Spark pipeline is. Its driver leaves a record on the server, in the KV bucket `penstock_pipelines`.

Where a pipeline stands in its streams is not in the record: its durable consumers know that, at any moment. So the
whole picture can be had from any machine, without Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from penstock.broker import JetStream
from penstock.broker.model import Json
from penstock.errors import NotFound, StreamNotFound
from penstock.observe.codec import plain, typed
from penstock.observe.status import ConsumerStatus, consumer_status

BUCKET = "penstock_pipelines"
STREAM = f"KV_{BUCKET}"
VERSION = 1
HEARTBEAT = timedelta(seconds=5)
SILENT_AFTER = 6 * HEARTBEAT
"""A running pipeline that has not been heard of for this long has died, or cannot reach the server."""

RUNNING, FINISHED, STOPPED, FAILED, SILENT, NEVER = "running", "finished", "stopped", "failed", "silent", "never ran"

MAX_RECENT = 20
"""Micro-batches of a pipeline that its record lists."""

BUCKET_CONFIG: Json = {
    "name": STREAM,
    "description": "Penstock: progress of Spark pipelines",
    "subjects": [f"$KV.{BUCKET}.>"],
    "max_msgs_per_subject": 1,
    "allow_rollup_hdrs": True,
    "allow_direct": True,
    "deny_delete": True,
    "discard": "new",
}


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
class Progress:
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
    """Where Spark's own pages about it are; None when they are off, or the driver cannot tell."""

    @property
    def ui_link(self) -> str | None:
        """The pages, if that is a place to go to: whoever may write to the bucket chooses the text."""
        return self.ui if self.ui and self.ui.lower().startswith(("http://", "https://")) else None

    def state_at(self, now: datetime) -> str:
        """The state, with the doubt that comes with time."""
        return SILENT if self.state == RUNNING and now - self.heard > SILENT_AFTER else self.state

    def tells_less_than(self, later: Progress) -> bool:
        """Whether there is something new, or it is time for a sign of life."""
        return (self.batches, self.state) != (later.batches, later.state) or later.heard - self.heard >= HEARTBEAT

    def micro_batch(self, number: int) -> MicroBatch | None:
        """A micro-batch of this run, if it is among the last ones."""
        return next((one for one in self.recent if one.number == number), None)

    def json(self) -> Json:
        return {"version": VERSION, **plain(self)}

    @classmethod
    def parse(cls, raw: Json) -> Self:
        """A record of this version, or of a later one, whose further fields are ignored."""
        found: Self = typed(cls, raw)
        return found


async def recorded(js: JetStream) -> dict[str, Progress]:
    """Every record there is, by pipeline."""
    prefix = f"$KV.{BUCKET}."
    try:
        names = (await js.stream_info(STREAM, subjects_filter=f"{prefix}>")).state.subjects
    except StreamNotFound:
        return {}
    found: dict[str, Progress] = {}
    for subject in sorted(names):
        try:
            record = await js.get_message(STREAM, last_of=subject)
        except NotFound:
            continue  # removed since it was listed
        if record.data:
            found[subject.removeprefix(prefix)] = Progress.parse(json.loads(record.data))
    return found


@dataclass(frozen=True, slots=True)
class Declared:
    """A pipeline as the platform file has it; enough to look for it on a server."""

    name: str
    streams: tuple[str, ...]
    consumer: str


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """One pipeline: what its driver says, and where it stands."""

    name: str
    state: str
    streams: tuple[str, ...]
    consumer: str
    behind_rows: int | None
    """Messages it has not committed yet; None when it has no consumer on the server, so never ran."""
    behind: timedelta
    """Age of the oldest of them."""
    progress: Progress | None

    @property
    def needs_attention(self) -> bool:
        return self.state in (FAILED, SILENT)


async def collect_pipelines(js: JetStream, declared: Iterable[Declared] = ()) -> list[PipelineStatus]:
    """Every pipeline that is declared or has left a record, in this order."""
    records = await recorded(js)
    known = {one.name: one for one in declared}
    known |= {name: Declared(name, r.streams, r.consumer) for name, r in records.items() if name not in known}
    return [await _status(js, one, records.get(one.name)) for one in known.values()]


async def _status(js: JetStream, one: Declared, record: Progress | None) -> PipelineStatus:
    found = [await consumer_status(js, stream, one.consumer) for stream in one.streams]
    there: list[ConsumerStatus] = [status for status in found if status is not None]
    return PipelineStatus(
        name=one.name,
        state=record.state_at(now()) if record else NEVER,
        streams=one.streams,
        consumer=one.consumer,
        behind_rows=sum(status.lag_messages for status in there) if there else None,
        behind=max((status.lag for status in there), default=timedelta()),
        progress=record,
    )


def now() -> datetime:
    return datetime.now(UTC)
