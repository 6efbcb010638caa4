"""A snapshot of what is where, how far behind, and what is stuck. Tables and metrics render it and add nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache

from penstock.deadletter.waiting import GivenUp
from penstock.jetstream import SourceInfo
from penstock.spark import progress
from penstock.subjects import holds_dead_letters

Place = tuple[str, str]
"""Stream and consumer."""


_holds_dead_letters = lru_cache(maxsize=10_000)(holds_dead_letters)
"""It is asked several times in every look, for all streams."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """One source, or the mirror, of a stream."""

    name: str
    lag: int
    heard_ago: timedelta | None
    error: str | None

    @classmethod
    def of(cls, info: SourceInfo) -> SourceStatus:
        return cls(info.name, info.lag, info.active, info.error)


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream."""

    name: str
    subjects: tuple[str, ...]
    retention: str
    messages: int
    bytes: int
    max_bytes: int | None
    first_seq: int
    last_seq: int
    last_time: datetime | None
    consumers: int
    replicas: int
    healthy_replicas: int
    sources: tuple[SourceStatus, ...]
    takes_batches: bool
    """Whether it allows atomic batches."""
    platform: str | None
    """The declared platform that owns it."""

    @property
    def is_dead_letters(self) -> bool:
        """Whether the stream holds dead letters and nothing else."""
        return _holds_dead_letters(self.subjects)


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer."""

    stream: str
    name: str
    filters: tuple[str, ...]
    service: str | None
    owner: str | None
    purpose: str | None
    lag_messages: int
    """Matching messages that are not acknowledged yet."""
    lag: timedelta
    """Age of the oldest of them; zero when there is none."""
    ack_pending: int
    max_ack_pending: int | None
    ack_floor: int
    delivered: int
    """Sequence of the last message delivered."""
    redelivered: int
    waiting: int
    paused_for: timedelta | None
    dlq: str | None
    dead_letters: int | None
    """Its letters; None where so many of several consumers share a subject that they were not read."""
    given_up: int
    """Messages that it gave up on and of which there is no letter."""
    platform: str | None
    """The declared platform that owns it."""
    settled: int = 0
    """Deliveries up to its floor: how much it gets done is how fast this grows."""
    group: str | None = None
    """The group of workers that it belongs to."""
    carries: bool = False
    """Whether a stream or a bridge copies through it."""
    pipeline: str | None = None
    """The Spark pipeline whose position it holds."""
    pipeline_state: str | None = None
    """The state of that pipeline, as `PipelineStatus` has it."""

    @property
    def undelivered(self) -> int:
        """Matching messages that were not delivered yet."""
        return self.lag_messages - self.ack_pending

    @property
    def is_unattended(self) -> bool:
        """Whether messages wait and nobody asks for them.

        A pipeline does not pull through its durable: there its driver must have failed or gone silent.
        """
        if not self.lag_messages or self.paused_for is not None:
            return False
        if self.pipeline_state is not None:
            return self.pipeline_state in (progress.FAILED, progress.SILENT)
        return not self.waiting and not self.ack_pending

    @property
    def awaits_run(self) -> bool:
        """Whether messages wait for the next run of a pipeline that is not running."""
        resting = (progress.FINISHED, progress.STOPPED, progress.NEVER)
        return self.lag_messages > 0 and self.pipeline_state in resting


@dataclass(frozen=True, slots=True)
class Status:
    """Everything `penstock status` shows."""

    taken_at: datetime
    streams: tuple[StreamStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    abandoned_batches: dict[str, int] | None
    """Abandoned atomic batches by stream; None when no stream keeps the advisories."""
    given_up: GivenUp = field(default_factory=GivenUp)
    """What consumers gave up on and nobody has captured."""

    def of_stream(self, name: str) -> StreamStatus | None:
        at = bisect_left(self.streams, name, key=lambda one: one.name)
        return self.streams[at] if at < len(self.streams) and self.streams[at].name == name else None

    def consumers_of(self, stream: str) -> tuple[ConsumerStatus, ...]:
        first = bisect_left(self.consumers, stream, key=lambda one: one.stream)
        return self.consumers[first : bisect_right(self.consumers, stream, first, key=lambda one: one.stream)]

    @property
    def dead_letters(self) -> int:
        return sum(stream.messages for stream in self.streams if stream.is_dead_letters)

    def of_platform(self, name: str) -> Status:
        """Only what the declared platform of that name owns."""
        streams = tuple(stream for stream in self.streams if stream.platform == name)
        consumers = tuple(consumer for consumer in self.consumers if consumer.platform == name)
        names = {(consumer.stream, consumer.name) for consumer in consumers}
        theirs = {at: count for at, count in self.given_up.by_consumer.items() if at in names}
        return replace(self, streams=streams, consumers=consumers, given_up=replace(self.given_up, by_consumer=theirs))


@dataclass(frozen=True, slots=True)
class OfPipeline:
    """The pipeline that a consumer belongs to."""

    name: str
    state: str


Durables = Mapping[Place, OfPipeline]
"""The pipelines of durable consumers, by stream and consumer."""
