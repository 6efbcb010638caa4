"""Asks a server for its status, once or again and again."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Self, TypeVar

from penstock.deadletter.capturer import dlq_of
from penstock.deadletter.letters import DeadLetter
from penstock.deadletter.letters import read as read_letter
from penstock.deadletter.waiting import given_up
from penstock.errors import AccessDenied, MessageNotFound, NotFound
from penstock.jetstream import ConsumerInfo, JetStream, StreamInfo, metadata
from penstock.jetstream.listing import StreamMemory
from penstock.jetstream.model import parse_time
from penstock.observe.status import ConsumerStatus, Durables, OfPipeline, Place, SourceStatus, Status, StreamStatus
from penstock.publish import advisories
from penstock.spark import progress
from penstock.subjects import any_overlap

T = TypeVar("T")

TURNS = 30
"""Looks after which everything was asked for again, also what stands still."""
FEW_STREAMS = 32
"""Up to so many streams without movement, their consumers are asked for with every look."""
IN_TURN = 16
"""Of more streams, about so many are asked for in one look."""
SPECIAL = ("$JS.>", "dlq.>")
"""Subjects of advisories and dead letters."""
GROUP = "penstock.group"
"""Metadata of a consumer of a worker: its group."""
AT_ONCE = 32
"""API requests under way at the same time."""
MOST_LETTERS_READ = 5_000
"""Letters of a subject that several consumers share and that are read to tell whose they are."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream as it was listed, and what is shown of it."""

    info: StreamInfo
    status: StreamStatus
    is_special: bool
    """Whether it keeps advisories or dead letters."""

    @classmethod
    def of(cls, info: StreamInfo) -> Self:
        status = stream_status(info)
        return cls(info, status, any_overlap(status.subjects, SPECIAL) is not None)

    def has_moved(self, now: StreamInfo) -> bool:
        """Whether messages or consumers came or went."""
        return self.info is not now and _place_of(self.info) != _place_of(now)


def _place_of(info: StreamInfo) -> tuple[object, ...]:
    return info.created, info.state.last_seq, info.state.messages, info.state.consumers


@dataclass(frozen=True, slots=True)
class _Oldest:
    """When the oldest message that a consumer has not acknowledged was stored."""

    where: tuple[object, ...]
    """While this is the same, it is the same message: the floor, and what has gone from the stream."""
    time: datetime | None


def _where(stream: StreamInfo, consumer: ConsumerInfo) -> tuple[object, ...]:
    gone = (stream.created, stream.state.first_seq, stream.state.deleted)
    return (*gone, consumer.created, consumer.ack_floor_stream_seq, consumer.filters)


@dataclass(frozen=True, slots=True)
class _Consumers:
    """The consumers of a stream, as they were when they were last asked for, and what is shown of them."""

    infos: Sequence[ConsumerInfo] = ()
    shown: tuple[ConsumerStatus, ...] = ()
    is_moving: bool = False
    """Whether messages are on their way."""
    is_behind: bool = False
    oldest: Mapping[str, _Oldest] = field(default_factory=dict)
    """What waits, by consumer."""

    @classmethod
    def of(cls, infos: Sequence[ConsumerInfo], oldest: Mapping[str, _Oldest], before: _Consumers) -> Self:
        known = {one.name: one for one in before.shown}
        found = []
        for info in infos:
            waits = oldest.get(info.name)
            now, seen = _consumer_status(info, waits.time if waits else None), known.get(info.name)
            found.append(seen if seen and now == _alone(seen) else now)
        moving = any(one.ack_pending or (one.lag_messages and one.waiting) for one in found)
        return cls(infos, tuple(found), moving, any(one.lag_messages for one in found), oldest)

    def later(self, passed: timedelta) -> Self:
        """The same, not asked for again: what waits there has become older."""
        if not self.is_behind:
            return self
        shown = (replace(one, lag=one.lag + passed) if one.lag_messages else one for one in self.shown)
        return replace(self, shown=tuple(shown))


class StatusWatch:
    """Looks at a server again and again. What has not changed is the same object in the next status.

    Only the consumers of streams where something moves are asked for with every look, and of the others some in turns,
    more often where messages wait: on a server with few streams that is all of them, on a large one each is at most
    `TURNS` looks old.
    """

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self._memory = StreamMemory()
        self._streams: dict[str, _Stream] = {}
        self._consumers: dict[str, _Consumers] = {}
        self._moved: frozenset[str] = frozenset()
        """Streams that had moved at the last look: the server counts a message for consumers after it has stored it."""
        self._turn = 0
        self._taken_at = datetime.now(UTC)
        self._users: dict[Place, str] = {}
        self._letters: list[StreamStatus] = []
        self._dead: Mapping[Place, int | None] = {}

    async def streams(self) -> list[StreamInfo]:
        """All streams now, for the next `look`."""
        return await self._js.streams_again(self._memory)

    def consumers_of(self, stream: str) -> Sequence[ConsumerInfo]:
        """The consumers of a stream, as they were when they were last asked for."""
        known = self._consumers.get(stream)
        return known.infos if known else ()

    async def look(
        self, streams: Sequence[StreamInfo], durables: Durables | None = None, stirred: Collection[str] = ()
    ) -> Status:
        """Ask for everything else; the number of requests grows with pages, streams, and consumers that lag.

        `durables`: which consumers belong to pipelines; None: those of the pipelines that have left a record.
        `stirred`: streams whose consumers are asked for in any case.
        """
        known = {one.name: self._stream(one) for one in sorted(streams, key=attrgetter("name"))}
        read = {name: one.info for name, one in known.items() if one.info.state.consumers}
        due = self._due(read, stirred)
        special = [one.info for one in known.values() if one.is_special]
        listed = dict(zip(due, await _gathered(_consumers(self._js, name) for name in due), strict=True))
        oldest = await self._find_oldest(known, listed)
        lost = await given_up(self._js, special)
        now = datetime.now(UTC)
        passed, self._taken_at, self._turn = now - self._taken_at, now, self._turn + 1
        asked = {
            name: _Consumers.of(some, oldest[name], self._consumers.get(name, _Consumers()))
            for name, some in listed.items()
        }
        self._consumers = {name: asked.get(name) or self._consumers[name].later(passed) for name in read}
        self._streams, statuses = known, tuple(one.status for one in known.values())
        await self._count_letters(statuses)
        if durables is None:
            durables = await _recorded_durables(self._js, streams)
        self._consumers = {
            name: self._described(some, lost.by_consumer, durables) for name, some in self._consumers.items()
        }
        return Status(
            taken_at=now,
            streams=statuses,
            consumers=tuple(one for some in self._consumers.values() for one in some.shown),
            abandoned_batches=await advisories.kept(self._js, special),
            given_up=lost,
        )

    def _due(self, read: Mapping[str, StreamInfo], stirred: Collection[str]) -> list[str]:
        """The streams whose consumers are asked for in this look."""
        moved, moving, behind, still = [], [], [], []
        for name, info in read.items():
            known, consumers = self._streams.get(name), self._consumers.get(name)
            if known is not None and known.has_moved(info):
                moved.append(name)
            elif consumers is None or consumers.is_moving or name in self._moved or name in stirred:
                moving.append(name)
            elif consumers.is_behind:
                behind.append(name)
            else:
                still.append(name)
        self._moved = frozenset(moved)
        many = len(moved) + len(moving)
        return moved + moving + self._in_turn(behind, many) + self._in_turn(still, many)

    def _in_turn(self, names: Sequence[str], many: int) -> list[str]:
        """Some of these streams; fewer where there are many others to ask."""
        if len(names) + many <= FEW_STREAMS:
            return list(names)
        turns = min(TURNS, -(-len(names) // max(IN_TURN - many // 2, 1)))
        return [name for name in names if zlib.crc32(name.encode()) % turns == self._turn % turns]

    def _stream(self, info: StreamInfo) -> _Stream:
        known = self._streams.get(info.name)
        return known if known and known.info is info else _Stream.of(info)

    async def _find_oldest(
        self, streams: Mapping[str, _Stream], listed: Mapping[str, Sequence[ConsumerInfo]]
    ) -> dict[str, dict[str, _Oldest]]:
        """The oldest message that waits, by stream and consumer: asked for where it is not that of the last look."""
        found: dict[str, dict[str, _Oldest]] = {name: {} for name in listed}
        asked = []
        for stream, some in listed.items():
            before = self._consumers.get(stream, _Consumers()).oldest
            for one in some:
                known, where = before.get(one.name), _where(streams[stream].info, one)
                if not one.unprocessed:
                    continue
                if known and known.where == where and known.time:
                    found[stream][one.name] = known
                else:
                    asked.append((one, where))
        times = await _gathered(_oldest_unacknowledged(self._js, one) for one, _ in asked)
        for (one, where), time in zip(asked, times, strict=True):
            found[one.stream][one.name] = _Oldest(where, time)
        return found

    async def _count_letters(self, streams: Sequence[StreamStatus]) -> None:
        """Count dead letters by consumer, unless letters and consumers are those of the last look."""
        users = {(one.stream, one.name): one.dlq for some in self._consumers.values() for one in some.shown if one.dlq}
        letters = [one for one in streams if one.messages and one.is_dead_letters]
        if (users, letters) != (self._users, self._letters):
            self._dead = await _dead_letters(self._js, letters, users)
            self._users, self._letters = users, letters

    def _described(self, some: _Consumers, lost: Mapping[Place, int], durables: Durables) -> _Consumers:
        """Consumers with their letters and pipelines; the same object if nothing of that has changed."""
        changed = False
        found = []
        for one in some.shown:
            key = (one.stream, one.name)
            owner = durables.get(key)
            name, state = (owner.name, owner.state) if owner else (None, None)
            facts = (self._dead.get(key, 0), lost.get(key, 0), name, state)
            if facts != (one.dead_letters, one.given_up, one.pipeline, one.pipeline_state):
                dead, gone, name, state = facts
                one = replace(one, dead_letters=dead, given_up=gone, pipeline=name, pipeline_state=state)
                changed = True
            found.append(one)
        return replace(some, shown=tuple(found)) if changed else some


def described(consumer: ConsumerStatus, known: ConsumerStatus) -> ConsumerStatus:
    """A consumer with what others say about it, as it is known of a look before."""
    return replace(
        consumer,
        dead_letters=known.dead_letters,
        given_up=known.given_up,
        pipeline=known.pipeline,
        pipeline_state=known.pipeline_state,
    )


def _alone(consumer: ConsumerStatus) -> ConsumerStatus:
    """A consumer as it is without what others say about it."""
    if (consumer.dead_letters, consumer.given_up, consumer.pipeline, consumer.pipeline_state) == (0, 0, None, None):
        return consumer
    return replace(consumer, dead_letters=0, given_up=0, pipeline=None, pipeline_state=None)


async def collect(js: JetStream) -> Status:
    """Ask the server for everything, once."""
    watch = StatusWatch(js)
    return await watch.look(await watch.streams())


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


async def consumer_status(js: JetStream, stream: str, name: str) -> ConsumerStatus | None:
    """One consumer, without its dead letters; None when it is not there."""
    try:
        info = await js.consumer_info(stream, name)
    except NotFound:
        return None
    return await status_of(js, info)


async def status_of(js: JetStream, info: ConsumerInfo) -> ConsumerStatus:
    """What is shown of a consumer, without its dead letters."""
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
    js: JetStream, letters: Sequence[StreamStatus], consumers: Mapping[Place, str]
) -> dict[Place, int | None]:
    """Dead letters by the consumer that gave up. The subject of one consumer is counted, that of several is read."""
    users: dict[str, list[Place]] = defaultdict(list)
    for consumer, dlq in consumers.items():
        users[dlq].append(consumer)
    asked = [(stream.name, dlq) for dlq in sorted(users) for stream in letters]
    found = await _gathered(_letters_below(js, *one) for one in asked)
    counts: dict[Place, int | None] = dict.fromkeys(consumers, 0)
    for (stream, dlq), count in zip(asked, found, strict=True):
        names = users[dlq]
        theirs = await _readers(js, stream, dlq) if count and len(names) > 1 else {names[0]: count}
        for name in names:
            known = counts[name]
            counts[name] = None if known is None or theirs is None else known + theirs.get(name, 0)
    return counts


async def _readers(js: JetStream, stream: str, dlq: str) -> Mapping[Place, int] | None:
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


def stream_status(info: StreamInfo) -> StreamStatus:
    """What is shown of a stream."""
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
