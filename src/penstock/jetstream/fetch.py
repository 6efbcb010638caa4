"""Fetches messages of a pull consumer, a few at a time, over an asyncio connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.errors import ConsumerNotFound, DeadlineExceeded, ServerBusy, Unavailable
from penstock.jetstream.connection import Broker
from penstock.jetstream.consumer import PullEvent, PullStatus, pull_status
from penstock.jetstream.requests import PullRequests
from penstock.wire import aio, deliveries
from penstock.wire.frames import Message

T = TypeVar("T", bound=tuple[Any, ...])
M = TypeVar("M")

MARGIN = 2.0
"""Seconds that an answer may be late."""
NO_MESSAGES = 404
MOST_IDLE = 32
"""Subscriptions of a connection that are kept for its next pull requests."""
LOOK_EVERY = 0.2
"""Seconds between two checks whether an answer can still arrive."""


_Request = Callable[[str], bytes]
"""The frames of a request whose answers go to the given inbox."""


class _Subscription(NamedTuple):
    sid: int
    inbox: str


class Skimmer(Generic[T]):
    """Takes the deliveries of pull requests off the receive buffer, many at a time, and not as a `Message` each.

    `made` is the named tuple that `deliveries.take` creates; `of` creates it from a message that came another way. It
    serves one connection, which nothing else may skim, and any number of requests on it.
    """

    def __init__(self, made: type[T], of: Callable[[Message], T]) -> None:
        self._made = made
        self.of = of
        self._connection: aio.Connection | None = None
        self._opened = 0
        self._sinks: dict[bytes, _Answers[T]] = {}
        self._idle: list[_Subscription] = []

    async def begin(self, connection: aio.Connection, answers: _Answers[T], request: _Request) -> _Subscription:
        """Send a request on a subscription that none uses: a new one only if there is none."""
        if self._connection is not connection or self._opened != connection.opened:
            self._connection, self._opened = connection, connection.opened
            self._idle.clear()
            self._sinks.clear()
            connection.skim_with(self._look)
        if self._idle:
            used = self._idle.pop()
            self._sinks[b"%d" % used.sid] = answers
            connection.handle(used.sid, answers.take)
            await connection.send(request(used.inbox))
            return used
        inbox = connection.settings.new_inbox()
        used = _Subscription(await connection.subscribe(inbox, handler=answers.take, then=request(inbox)), inbox)
        self._sinks[b"%d" % used.sid] = answers
        return used

    def end(self, used: _Subscription, answers: _Answers[T]) -> bool:
        """Whether the subscription is kept: nothing that was requested can still come."""
        self._sinks.pop(b"%d" % used.sid, None)
        if answers.is_complete and len(self._idle) < MOST_IDLE:
            self._idle.append(used)
            return True
        return False

    def _look(self, buffer: bytearray, at: int) -> int:
        """Hand deliveries at the front of the buffer to the request that they answer."""
        while self._sinks and buffer.startswith((b"MSG ", b"HMSG "), at):
            subject_end = buffer.find(b" ", at + 5)
            sid = bytes(buffer[subject_end + 1 : buffer.find(b" ", subject_end + 1)])
            if (answers := self._sinks.get(sid)) is None:
                break
            found, after = deliveries.take(buffer, at, int(sid), self._made, datetime.now(UTC))
            if not found:
                break
            answers.add(found)
            at = after
        return at


async def fetch(
    broker: Broker, stream: str, consumer: str, batch: int, *, max_bytes: int | None = None, wait: float = 0.0
) -> list[Message]:
    """Return what the consumer has now, up to the limits; with `wait`, waits until it has something.

    A message that is larger than `max_bytes` is returned alone. Raises `ConsumerNotFound` when the consumer was
    deleted, `ServerBusy` when it refuses the request, `Unavailable` when it does not answer. Messages delivered to an
    abandoned request are redelivered after the ack wait.
    """
    return await _fetch(broker, (stream, consumer), batch, max_bytes, wait, _unchanged)


async def skim(
    broker: Broker,
    skimmer: Skimmer[T],
    stream: str,
    consumer: str,
    batch: int,
    *,
    max_bytes: int | None = None,
    wait: float = 0.0,
) -> list[T]:
    """Return the same as `fetch`, as tuples of the skimmer: for many messages at once."""
    return await _fetch(broker, (stream, consumer), batch, max_bytes, wait, skimmer.of, skimmer)


async def _fetch(
    broker: Broker,
    of: tuple[str, str],
    batch: int,
    max_bytes: int | None,
    wait: float,
    made: Callable[[Message], M],
    skimmer: Skimmer[Any] | None = None,
) -> list[M]:
    async def asked(count: int, most: int | None, within: float | None = None) -> list[M]:
        return await _asked(broker, of, _Answers(count, made), most, within, skimmer)

    found = await asked(batch, max_bytes)
    if found or wait <= 0:
        return found
    found = await asked(1, None, wait)
    if found and batch > 1:
        found += await asked(batch - 1, max_bytes)
    return found


async def _asked(
    broker: Broker,
    of: tuple[str, str],
    answers: _Answers[M],
    max_bytes: int | None,
    wait: float | None,
    skimmer: Skimmer[Any] | None,
) -> list[M]:
    """Send one request: for what is available now, or for what arrives within `wait` seconds."""
    connection = await broker.ready()
    requests = PullRequests(broker.jetstream, *of)

    def request(inbox: str) -> bytes:
        requests.reply = inbox
        return requests.request(answers.batch, max_bytes=max_bytes, expires=wait, no_wait=wait is None)

    if skimmer:
        used = await skimmer.begin(connection, answers, request)
    else:
        inbox = broker.settings.new_inbox()
        used = _Subscription(await connection.subscribe(inbox, handler=answers.take, then=request(inbox)), inbox)
    try:
        await until_set(
            broker, connection, answers.ended, (wait or 0.0) + max(MARGIN, broker.settings.timeout), "a pull"
        )
    finally:
        if not (skimmer and skimmer.end(used, answers)) and connection.connected:
            await connection.unsubscribe(used.sid)
    if answers.too_large and not answers.messages:
        return await _asked(broker, of, _Answers(1, answers.made), None, None, skimmer)
    _raise_refused(requests.subject, answers.refused)
    return answers.messages


def _unchanged(message: Message) -> Message:
    return message


def _raise_refused(subject: str, refused: PullStatus | None) -> None:
    if not refused:
        return
    if refused.event is PullEvent.NO_RESPONDERS:
        raise Unavailable(f"nobody answers on {subject!r}: the consumer has no leader right now")
    kind = ConsumerNotFound if refused.event is PullEvent.DELETED else ServerBusy
    raise kind(subject, refused.code, 0, refused.text)


class _Answers(Generic[M]):
    """Collects the answers to one pull request."""

    def __init__(self, batch: int, made: Callable[[Message], M]) -> None:
        self.batch = batch
        self.made = made
        self.messages: list[M] = []
        self.too_large = False
        self.refused: PullStatus | None = None
        self.left = 0
        """Messages of the request that will not come, as its status says."""
        self.ended = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether all has come. (The status of a consumer with replicas may come before the last messages.)"""
        return not self.refused and self.ended.is_set() and len(self.messages) + self.left == self.batch

    def add(self, found: list[M]) -> None:
        """Take deliveries that were skimmed."""
        self.messages += found
        if len(self.messages) >= self.batch:
            self.ended.set()

    def take(self, message: Message) -> None:
        status = pull_status(message)
        if status is None:
            self.add([self.made(message)])
            return
        if status.event is PullEvent.HEARTBEAT:
            return
        self.left = self.batch if status.code == NO_MESSAGES else status.left or 0
        if status.event is PullEvent.TOO_LARGE:
            self.too_large = True
        elif status.event is not PullEvent.ENDED:
            self.refused = status
        self.ended.set()


async def until_set(broker: Broker, connection: aio.Connection, event: asyncio.Event, within: float, what: str) -> None:
    """Wait for an event that messages of the connection set. Raises when it can no longer be set."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while not event.is_set():
        if broker.denied:
            raise broker.denied
        if not connection.connected:
            _ = connection.info  # raises the error that ended it
        if loop.time() >= deadline:
            raise DeadlineExceeded(what, within)
        try:
            async with asyncio.timeout(min(LOOK_EVERY, max(deadline - loop.time(), 0.001))):
                await event.wait()
        except TimeoutError:
            continue
