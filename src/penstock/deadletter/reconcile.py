"""Finds dead messages whose advisory was not stored: the server publishes it once, and a stream that did not exist yet,
or was full, has missed it.

What can be known: the server does not list what a consumer has given up on, but counts it: as long as a dead message is
not acknowledged for its consumer it stays in `num_redelivered`, also through a restart. While nothing is pending, every
message up to the last one delivered is either acknowledged or dead, so that

    no redeliveries      nothing was missed, on every retention
    WorkQueue, Interest  acknowledged messages are gone: when as many are left as the server counts, they are dead.
                         When more are left, some are wanted by another consumer, or were jumped over by a reset
    Limits               acknowledged and dead messages lie side by side

Where reading alone does not decide, each candidate is acknowledged for the consumer, which changes nothing for one that
was acknowledged, and removes a dead one from the count. On WorkQueue and Interest its letter is stored before that,
because the acknowledgement may delete the message, and deleted again when the count has not changed. On Limits the
message stays, and the letter is stored right after: a crash in between leaves the message in its stream and no sign
that it is dead.

While messages are pending the count is not conclusive, and nothing is done: pause the consumer, and run it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from penstock.deadletter import inventory
from penstock.deadletter.advisories import Advisory
from penstock.deadletter.capture import Captured, let_go
from penstock.deadletter.capturer import Capturer, Desk, dlq_of
from penstock.deadletter.letters import BY_RECONCILIATION
from penstock.errors import ConfigError, NotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StoredMessage, StreamInfo
from penstock.settings import Settings
from penstock.wire import aio

PENDING: Final = "messages are pending; pause the consumer until they are settled, and run this again"
MOVED: Final = "the consumer went on meanwhile; run this again when it is idle, or pause it"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result for one consumer."""

    stream: str
    consumer: str
    marked: int
    """Dead messages that the server counted before and that had no letter, as far as can be known."""
    stored: int = 0
    """Letters stored now."""
    known: int = 0
    """Letters that were there already."""
    undecided: str | None = None
    """Why the result may be incomplete."""


async def reconcile(settings: Settings, only: tuple[str, ...] = ()) -> list[Reconciled]:
    """Check every consumer with a `dlq:`, or those named; store the missing letters.

    Advisories that are waiting are captured first. Raises `ConfigError` for a name that no consumer with a `dlq:` has.
    """
    await Capturer(settings).run(until_caught_up=True)
    async with await aio.connect(settings, name="penstock dlq reconcile") as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        desk = Desk(connection, jetstream, settings.domain)
        there = [
            (stream, consumer)
            for stream in await jetstream.streams()
            for consumer in (await jetstream.consumers(stream.name) if stream.state.consumers else [])
        ]
        _require(only, [consumer for _, consumer in there])
        return [
            await Search(settings, connection, jetstream, desk, stream, consumer).run()
            for stream, consumer in there
            if dlq_of(consumer) and (not only or consumer.name in only)
        ]


def _require(only: tuple[str, ...], consumers: list[ConsumerInfo]) -> None:
    """Raise for a name that no consumer with a `dlq:` has: otherwise nothing would be checked, and no error shown."""
    for name in only:
        named = [consumer for consumer in consumers if consumer.name == name]
        if not named:
            raise ConfigError(f"there is no consumer {name!r}; `penstock consumer ls` lists them")
        if not any(dlq_of(consumer) for consumer in named):
            raise ConfigError(
                f"consumer {name!r} has no `dlq:`, so there is nowhere for its letters to go; declare one, and run "
                "`penstock apply`"
            )


class Search:
    """Searches the messages that one consumer has given up on."""

    def __init__(
        self,
        settings: Settings,
        connection: aio.Connection,
        jetstream: JetStream,
        desk: Desk,
        stream: StreamInfo,
        consumer: ConsumerInfo,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._jetstream = jetstream
        self._desk = desk
        self._stream = stream
        self._consumer = consumer
        self._marked = consumer.redelivered
        self._found: list[Captured] = []

    async def run(self) -> Reconciled:
        if not self._consumer.redelivered:
            return self._said()
        if self._consumer.ack_pending:
            return self._said(PENDING)
        keeps_acknowledged = self._stream.config.get("retention", "limits") == "limits"
        candidates = await self._candidates()
        certain = not keeps_acknowledged and len(candidates) == self._marked
        for message in candidates:
            if not self._marked:
                break
            if certain:
                await self._take(message)
            elif not await self._look(message, keep_first=not keeps_acknowledged):
                return self._said(MOVED)
        return self._said()

    def _said(self, undecided: str | None = None) -> Reconciled:
        stored = sum(done.new for done in self._found)
        return Reconciled(
            self._consumer.stream,
            self._consumer.name,
            self._consumer.redelivered,
            stored,
            len(self._found) - stored,
            undecided,
        )

    async def _candidates(self) -> list[StoredMessage]:
        return await asyncio.to_thread(lambda: list(self._delivered()))

    def _delivered(self) -> Iterator[StoredMessage]:
        """Yield delivered messages that are still stored."""
        last, first = self._consumer.delivered_stream_seq, self._stream.state.first_seq
        return inventory.messages(self._settings, self._stream, first, last, self._consumer.filters)

    async def _look(self, message: StoredMessage, keep_first: bool) -> bool:
        """Find out whether a candidate is dead, and store its letter if so. False when that cannot be decided."""
        kept = await self._take(message, release=False) if keep_first else None
        await let_go(self._connection, self._consumer.stream, self._consumer.name, message.sequence)
        now = await self._jetstream.consumer_info(self._consumer.stream, self._consumer.name)
        if now.ack_pending or now.redelivered > self._marked:
            return False
        dead = now.redelivered < self._marked
        self._marked = now.redelivered
        if dead and kept is None:
            await self._take(message, release=False)
        elif not dead and kept is not None:
            await self._take_back(kept)
        return True

    async def _take(self, message: StoredMessage, release: bool = True) -> Captured:
        limit = self._consumer.config.get("max_deliver", 0)
        advisory = Advisory(
            self._consumer.stream,
            self._consumer.name,
            message.sequence,
            max(limit, 0),
            self._consumer.last_delivered or datetime.now(UTC),
        )
        done = await self._desk.take(advisory, BY_RECONCILIATION, message, release=release)
        assert done is not None, "only consumers with a dlq are searched"
        self._found.append(done)
        return done

    async def _take_back(self, done: Captured) -> None:
        """Delete the letter of a candidate that turned out to be acknowledged."""
        self._found.remove(done)
        if not done.new:
            return
        for stream in await self._jetstream.stream_names(done.subject):
            try:
                stored = await self._jetstream.get_message(stream, last_of=done.subject)
                await self._jetstream.delete_message(stream, stored.sequence)
            except NotFound:
                continue
