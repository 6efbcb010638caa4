"""Messages that consumers gave up on and that are not captured yet: advisories that wait in their stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.deadletter import advisories, streams
from penstock.deadletter.advisories import Advisory
from penstock.deadletter.capturer import CONSUMER, dlq_of, known_letter
from penstock.deadletter.letters import letter_id
from penstock.errors import NotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.subjects import any_overlap, holds_dead_letters

LOOK = 1_000
"""Maximum number of waiting advisories that are read; more are not needed to know that something is wrong."""
AT_ONCE = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Messages that consumers gave up on and that have no dead letter. False when there are none."""

    by_consumer: dict[tuple[str, str], int] = field(default_factory=dict)
    """Stream and consumer to the number of messages."""
    undeclared: frozenset[tuple[str, str]] = frozenset()
    """Those of them without a `dlq:`."""
    more: bool = False
    """Whether there may be more than were read."""

    def __bool__(self) -> bool:
        return bool(self.by_consumer)

    @property
    def total(self) -> int:
        return sum(self.by_consumer.values())

    def only(self, names: Iterable[str]) -> GivenUp:
        """Those of consumers with these names, also as STREAM/NAME; all of them when none is named."""
        wanted = set(names)
        if not wanted:
            return self
        chosen = {at: count for at, count in self.by_consumer.items() if at[1] in wanted or "/".join(at) in wanted}
        return GivenUp(chosen, self.undeclared, self.more)

    def __str__(self) -> str:
        """What happened, and what to do."""
        flag = " --undeclared" if self.undeclared and set(self.by_consumer) <= self.undeclared else ""
        least = "at least " if self.more else ""
        return f"{least}{self.total} given up, not captured: run `penstock dlq capture{flag}`"


async def given_up(js: JetStream, found: Iterable[StreamInfo] | None = None) -> GivenUp:
    """Read the advisories that no capturer has handled yet.

    A message whose letter a worker has stored, or that was replayed or discarded since, does not count. Of consumers
    without a `dlq:` only messages that reached their delivery limit count: a term is intended.
    """
    infos = list(found) if found is not None else await js.streams()
    kept = next((one for one in infos if _keeps_advisories(one)), None)
    if kept is None or not kept.state.messages:
        return GivenUp()
    first = max(kept.state.first_seq, await _captured_up_to(js, kept.name) + 1)
    last = min(kept.state.last_seq, first + LOOK - 1)
    read = await _gathered(_advisory(js, kept.name, sequence) for sequence in range(first, last + 1))
    waiting = {(one.stream, one.consumer, one.sequence): one for one in read if one and one.concerns_letters}
    consumers = await _consumers(js, {(one.stream, one.consumer) for one in waiting.values()})
    letters = {one.name for one in infos if holds_dead_letters(one.config.get("subjects") or ())}
    counts = await _gathered(_counts(js, one, consumers, letters) for one in waiting.values())
    by_consumer = Counter(
        (one.stream, one.consumer) for one, is_lost in zip(waiting.values(), counts, strict=True) if is_lost
    )
    undeclared = frozenset(at for at in by_consumer if not dlq_of(consumers[at]))
    return GivenUp(dict(by_consumer), undeclared, kept.state.last_seq > last)


def _keeps_advisories(info: StreamInfo) -> bool:
    return any_overlap(info.config.get("subjects") or (), streams.ADVISORY_SUBJECTS) is not None


async def _captured_up_to(js: JetStream, stream: str) -> int:
    try:
        return (await js.consumer_info(stream, CONSUMER)).ack_floor_stream_seq
    except NotFound:
        return 0


async def _advisory(js: JetStream, stream: str, sequence: int) -> Advisory | None:
    try:
        return advisories.parse((await js.get_message(stream, sequence)).data)
    except NotFound:
        return None


async def _consumers(js: JetStream, names: set[tuple[str, str]]) -> dict[tuple[str, str], ConsumerInfo]:
    async def one(at: tuple[str, str]) -> ConsumerInfo | None:
        try:
            return await js.consumer_info(*at)
        except NotFound:
            return None

    ordered = sorted(names)
    infos = await _gathered(one(at) for at in ordered)
    return {at: info for at, info in zip(ordered, infos, strict=True) if info}


async def _counts(
    js: JetStream, one: Advisory, consumers: dict[tuple[str, str], ConsumerInfo], letters: set[str]
) -> bool:
    consumer = consumers.get((one.stream, one.consumer))
    if consumer is None:
        return False
    if dlq := dlq_of(consumer):
        return await known_letter(js, dlq, letter_id(one.stream, one.consumer, one.sequence, None)) is None
    return not one.terminated and one.stream not in letters


async def _gathered(calls: Iterable[Awaitable[T]]) -> list[T]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
