"""A snapshot of what is where, how far behind, and what is stuck. Tables and metrics render it and add nothing."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from penstock.broker import ConsumerInfo, JetStream, SourceInfo, StreamInfo, metadata
from penstock.broker.model import parse_time
from penstock.deadletter.capturer import dlq_of
from penstock.deadletter.letters import DeadLetter
from penstock.deadletter.letters import read as read_letter
from penstock.deadletter.waiting import GivenUp, given_up
from penstock.errors import MessageNotFound, NotFound
from penstock.publish import advisories
from penstock.subjects import holds_dead_letters

T = TypeVar("T")

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


async def collect(js: JetStream) -> Status:
    """Ask the server for everything; the number of requests grows with pages, streams, and consumers that lag."""
    streams = await js.streams()
    with_consumers = [stream.name for stream in streams if stream.state.consumers]
    listed = await _gathered(_consumers(js, name) for name in with_consumers)
    consumers = [consumer for page in listed for consumer in page]
    ages = await _gathered(_oldest_unacknowledged(js, consumer) for consumer in consumers)
    dead = await _dead_letters(js, streams, consumers)
    lost = await given_up(js, streams)
    return Status(
        taken_at=datetime.now(UTC),
        streams=tuple(sorted((_stream_status(stream) for stream in streams), key=lambda s: s.name)),
        consumers=tuple(
            sorted(
                (_consumer_status(info, age, dead, lost) for info, age in zip(consumers, ages, strict=True)),
                key=lambda c: (c.stream, c.name),
            )
        ),
        abandoned_batches=await advisories.kept(js, streams),
        given_up=lost,
    )


async def consumer_status(js: JetStream, stream: str, name: str) -> ConsumerStatus | None:
    """One consumer, without its dead letters; None when it is not there."""
    try:
        info = await js.consumer_info(stream, name)
    except NotFound:
        return None
    return _consumer_status(info, await _oldest_unacknowledged(js, info), {}, GivenUp())


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
    js: JetStream, streams: Sequence[StreamInfo], consumers: Sequence[ConsumerInfo]
) -> dict[tuple[str, str], int | None]:
    """Dead letters by the consumer that gave up. The subject of one consumer is counted, that of several is read."""
    users: dict[str, list[ConsumerInfo]] = defaultdict(list)
    for consumer in consumers:
        if dlq := dlq_of(consumer):
            users[dlq].append(consumer)
    letters = [stream for stream in streams if stream.state.messages and _stream_status(stream).is_dead_letters]
    asked = [(stream.name, dlq) for dlq in sorted(users) for stream in letters]
    found = await _gathered(_letters_below(js, *one) for one in asked)
    counts: dict[tuple[str, str], int | None] = {(one.stream, one.name): 0 for some in users.values() for one in some}
    for (stream, dlq), count in zip(asked, found, strict=True):
        names = [(one.stream, one.name) for one in users[dlq]]
        theirs = await _readers(js, stream, dlq) if count and len(names) > 1 else {names[0]: count}
        for name in names:
            before = counts[name]
            counts[name] = None if before is None or theirs is None else before + theirs.get(name, 0)
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
        platform=(info.config.get("metadata") or {}).get(metadata.PLATFORM),
    )


def _consumer_status(
    info: ConsumerInfo, oldest: datetime | None, dead: Mapping[tuple[str, str], int | None], lost: GivenUp
) -> ConsumerStatus:
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
        dead_letters=dead.get((info.stream, info.name), 0),
        given_up=lost.by_consumer.get((info.stream, info.name), 0),
        platform=described.get(metadata.PLATFORM),
    )
