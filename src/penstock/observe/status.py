"""A snapshot of what is where, how far behind, and what is stuck. Tables and metrics render it and add nothing."""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import TypeVar

from penstock.deadletter.capturer import dlq_of
from penstock.deadletter.letters import DeadLetter
from penstock.deadletter.letters import read as read_letter
from penstock.deadletter.waiting import GivenUp, given_up
from penstock.errors import AccessDenied, MessageNotFound, NotFound
from penstock.jetstream import ConsumerInfo, JetStream, SourceInfo, StreamInfo, metadata
from penstock.jetstream.model import parse_time
from penstock.publish import advisories
from penstock.spark import progress
from penstock.subjects import holds_dead_letters

T = TypeVar("T")

TURNS = 10
"""Looks after which everything was asked for again, also what stands still."""
FEW_STREAMS = 32
"""Up to so many streams with consumers, everything is asked for with every look."""
GROUP = "penstock.group"
"""Metadata of a consumer of a worker: its group."""
AT_ONCE = 32
"""API requests under way at the same time."""
MOST_LETTERS_READ = 5_000
"""Letters of a subject that several consumers share and that are read to tell whose they are."""


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
        return holds_dead_letters(self.subjects)


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


Durables = Mapping[tuple[str, str], OfPipeline]
"""The pipelines of durable consumers, by stream and consumer."""


async def collect(
    js: JetStream, before: Status | None = None, turn: int = 0, durables: Durables | None = None
) -> Status:
    """Ask the server for everything; the number of requests grows with pages, streams, and consumers that lag.

    `durables`: which consumers belong to pipelines; None: those of the pipelines that have left a record.

    Whoever looks again and again gives what was seen `before` and counts `turn` up. Then on a server with more than
    `FEW_STREAMS` only the consumers of streams where something moves are asked for, and the others in turns: each is at
    most `TURNS` looks old.
    """
    streams = await js.streams()
    read = [one for one in streams if one.state.consumers]
    due = [one.name for one in read if len(read) <= FEW_STREAMS or _is_due(one, before, turn)]
    listed = await _gathered(_consumers(js, name) for name in due)
    consumers = [consumer for page in listed for consumer in page]
    ages = await _gathered(_oldest_unacknowledged(js, consumer) for consumer in consumers)
    lost = await given_up(js, streams)
    seen = [_consumer_status(info, age) for info, age in zip(consumers, ages, strict=True)]
    now, not_asked = datetime.now(UTC), {one.name for one in read}.difference(due)
    if before:
        seen += [_later(one, now - before.taken_at) for one in before.consumers if one.stream in not_asked]
    statuses = tuple(sorted(map(_stream_status, streams), key=attrgetter("name")))
    dead = await _dead_letters(js, statuses, seen, before)
    if durables is None:
        durables = await _recorded_durables(js, streams)
    seen = [_with_pipeline(one, durables.get((one.stream, one.name))) for one in seen]
    return Status(
        taken_at=now,
        streams=statuses,
        consumers=tuple(sorted((_with_letters(one, dead, lost) for one in seen), key=attrgetter("stream", "name"))),
        abandoned_batches=await advisories.kept(js, streams),
        given_up=lost,
    )


def _is_due(stream: StreamInfo, before: Status | None, turn: int) -> bool:
    """Whether the consumers of a stream are to be asked for: something moves there, or it is its turn."""
    known = before.of_stream(stream.name) if before else None
    if before is None or known is None or zlib.crc32(stream.name.encode()) % TURNS == turn % TURNS:
        return True
    state = stream.state
    if (known.last_seq, known.messages, known.consumers) != (state.last_seq, state.messages, state.consumers):
        return True
    return any(one.ack_pending or (one.lag_messages and one.waiting) for one in before.consumers_of(stream.name))


def _later(consumer: ConsumerStatus, passed: timedelta) -> ConsumerStatus:
    """A consumer that was not asked for again: what waits there has become older."""
    return replace(consumer, lag=consumer.lag + passed) if consumer.lag_messages else consumer


async def _recorded_durables(js: JetStream, streams: Sequence[StreamInfo]) -> Durables:
    """The consumers of pipelines that have left a record; none where there are no records, or we may not read them."""
    if not any(one.name == progress.BUCKET_CONFIG["name"] for one in streams):
        return {}
    try:
        records, now = await progress.recorded(js), progress.now()
    except AccessDenied:
        return {}
    return {
        (stream, one.consumer): OfPipeline(name, one.state_at(now))
        for name, one in records.items()
        for stream in one.streams
    }


def _with_pipeline(consumer: ConsumerStatus, owner: OfPipeline | None) -> ConsumerStatus:
    name, state = (owner.name, owner.state) if owner else (None, None)
    if (name, state) == (consumer.pipeline, consumer.pipeline_state):
        return consumer
    return replace(consumer, pipeline=name, pipeline_state=state)


def _with_letters(
    consumer: ConsumerStatus, dead: Mapping[tuple[str, str], int | None], lost: GivenUp
) -> ConsumerStatus:
    key = (consumer.stream, consumer.name)
    found = dead.get(key, 0), lost.by_consumer.get(key, 0)
    if found == (consumer.dead_letters, consumer.given_up):
        return consumer
    return replace(consumer, dead_letters=found[0], given_up=found[1])


async def consumer_status(js: JetStream, stream: str, name: str) -> ConsumerStatus | None:
    """One consumer, without its dead letters; None when it is not there."""
    try:
        info = await js.consumer_info(stream, name)
    except NotFound:
        return None
    return _consumer_status(info, await _oldest_unacknowledged(js, info))


async def _gathered(calls: Iterable[Awaitable[T]]) -> list[T]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


async def _consumers(js: JetStream, stream: str) -> list[ConsumerInfo]:
    try:
        return await js.consumers(stream)
    except NotFound:
        return []  # deleted since it was listed


async def _oldest_unacknowledged(js: JetStream, consumer: ConsumerInfo) -> datetime | None:
    """When the oldest message that the consumer has not acknowledged was stored; None when there is none."""
    if not consumer.unprocessed:
        return None
    found = await asyncio.gather(
        *(_time_of_next(js, consumer.stream, consumer.ack_floor_stream_seq + 1, f) for f in consumer.filters or ">")
    )
    return min((time for time in found if time), default=None)


async def _time_of_next(js: JetStream, stream: str, seq: int, subject: str) -> datetime | None:
    try:
        return (await js.get_message(stream, seq, next_of=subject)).time
    except (MessageNotFound, NotFound):
        return None  # acknowledged or expired since it was counted


async def _dead_letters(
    js: JetStream, streams: Sequence[StreamStatus], consumers: Sequence[ConsumerStatus], before: Status | None
) -> dict[tuple[str, str], int | None]:
    """Dead letters by the consumer that gave up. The subject of one consumer is counted, that of several is read."""
    users: dict[str, list[ConsumerStatus]] = defaultdict(list)
    for consumer in consumers:
        if consumer.dlq:
            users[consumer.dlq].append(consumer)
    letters = [one for one in streams if one.messages and one.is_dead_letters]
    if before and letters == [one for one in before.streams if one.messages and one.is_dead_letters]:
        return {(one.stream, one.name): one.dead_letters for one in before.consumers}
    asked = [(stream.name, dlq) for dlq in sorted(users) for stream in letters]
    found = await _gathered(_letters_below(js, *one) for one in asked)
    counts: dict[tuple[str, str], int | None] = {(one.stream, one.name): 0 for some in users.values() for one in some}
    for (stream, dlq), count in zip(asked, found, strict=True):
        names = [(one.stream, one.name) for one in users[dlq]]
        theirs = await _readers(js, stream, dlq) if count and len(names) > 1 else {names[0]: count}
        for name in names:
            known = counts[name]
            counts[name] = None if known is None or theirs is None else known + theirs.get(name, 0)
    return counts


async def _readers(js: JetStream, stream: str, dlq: str) -> Mapping[tuple[str, str], int] | None:
    """Who gave up on the letters below a subject; None when there are too many to look."""
    if await js.subject_count(stream, f"{dlq}.*.*") > MOST_LETTERS_READ:
        return None
    subjects = (await js.stream_info(stream, subjects_filter=f"{dlq}.*.*")).state.subjects
    read = await _gathered(_letter(js, stream, subject) for subject in subjects)
    return Counter((one.stream, one.consumer) for one in read if one and one.consumer)


async def _letter(js: JetStream, stream: str, subject: str) -> DeadLetter | None:
    try:
        return read_letter(await js.get_message(stream, last_of=subject)).letter
    except NotFound:
        return None  # replayed since it was listed


async def _letters_below(js: JetStream, stream: str, dlq: str) -> int:
    """Letters of workers and advisories have a subject each, of which there may be millions; bad records share one."""
    try:
        own = await js.subject_count(stream, f"{dlq}.*.*")
        shared = (await js.stream_info(stream, subjects_filter=dlq)).state.subjects
    except NotFound:
        return 0  # deleted since it was listed
    return own + shared.get(dlq, 0)


def _stream_status(info: StreamInfo) -> StreamStatus:
    followers_ok = sum(replica.current and not replica.offline for replica in info.replicas)
    clustered = info.leader is not None or bool(info.replicas)
    sources = ([info.mirror] if info.mirror else []) + list(info.sources)
    limit = info.config.get("max_bytes", -1)
    return StreamStatus(
        name=info.name,
        subjects=tuple(info.config.get("subjects") or ()),
        retention=info.config.get("retention", "limits"),
        messages=info.state.messages,
        bytes=info.state.bytes,
        max_bytes=limit if limit > 0 else None,
        first_seq=info.state.first_seq,
        last_seq=info.state.last_seq,
        last_time=info.state.last_time,
        consumers=info.state.consumers,
        replicas=info.config.get("num_replicas", 1),
        healthy_replicas=followers_ok + (info.leader is not None) if clustered else 1,
        sources=tuple(SourceStatus.of(source) for source in sources),
        takes_batches=bool(info.config.get("allow_atomic")),
        platform=(info.config.get("metadata") or {}).get(metadata.PLATFORM),
    )


def _consumer_status(info: ConsumerInfo, oldest: datetime | None) -> ConsumerStatus:
    """A consumer, without its dead letters."""
    described, dlq = info.config.get("metadata") or {}, dlq_of(info)
    limit = info.config.get("max_ack_pending", -1)
    # The server's clock on both sides: ours may be off.
    now = parse_time(info.raw.get("ts", "")) or datetime.now(UTC)
    return ConsumerStatus(
        stream=info.stream,
        name=info.name,
        filters=info.filters,
        service=described.get(metadata.SERVICE),
        owner=described.get(metadata.OWNER),
        purpose=described.get(metadata.PURPOSE),
        lag_messages=info.unprocessed,
        lag=max(now - oldest, timedelta()) if oldest else timedelta(),
        ack_pending=info.ack_pending,
        max_ack_pending=limit if limit > 0 else None,
        ack_floor=info.ack_floor_stream_seq,
        delivered=info.delivered_stream_seq,
        redelivered=info.redelivered,
        waiting=info.waiting,
        paused_for=info.paused_for,
        dlq=dlq,
        dead_letters=0,
        given_up=0,
        platform=described.get(metadata.PLATFORM),
        settled=info.ack_floor_consumer_seq,
        group=described.get(GROUP),
        carries=info.config.get("ack_policy") == "flow_control",
    )
