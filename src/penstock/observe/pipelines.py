"""How far each Spark pipeline is: what its driver has recorded, and where its durable consumers are.

The whole picture can be had from any machine, without Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from penstock.jetstream import JetStream
from penstock.observe.collecting import consumer_status
from penstock.observe.status import ConsumerStatus, Durables, OfPipeline
from penstock.spark.progress import FAILED, NEVER, SILENT, PipelineProgress, now, recorded


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
    progress: PipelineProgress | None

    @property
    def needs_attention(self) -> bool:
        return self.state in (FAILED, SILENT)


async def collect_pipelines(js: JetStream, declared: Iterable[Declared] = ()) -> list[PipelineStatus]:
    """Every pipeline that is declared or has left a record, in this order."""
    records = await recorded(js)
    known = {one.name: one for one in declared}
    known |= {name: Declared(name, r.streams, r.consumer) for name, r in records.items() if name not in known}
    return [await _status(js, one, records.get(one.name)) for one in known.values()]


def durables(found: Iterable[PipelineStatus]) -> Durables:
    """Which consumers hold the positions of these pipelines."""
    return {(stream, one.consumer): OfPipeline(one.name, one.state) for one in found for stream in one.streams}


async def _status(js: JetStream, one: Declared, record: PipelineProgress | None) -> PipelineStatus:
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
