"""Fetches messages of a pull consumer, a few at a time, over an asyncio connection."""

from __future__ import annotations

import asyncio

from penstock.errors import ConsumerNotFound, DeadlineExceeded, ServerBusy, Unavailable
from penstock.jetstream.connection import Broker
from penstock.jetstream.consumer import PullEvent, PullStatus, pull_status
from penstock.jetstream.requests import PullRequests
from penstock.wire import aio
from penstock.wire.frames import Message

MARGIN = 2.0
"""Seconds that an answer may be late."""
LOOK_EVERY = 0.2
"""Seconds between two checks whether an answer can still arrive."""


async def fetch(
    broker: Broker, stream: str, consumer: str, batch: int, *, max_bytes: int | None = None, wait: float = 0.0
) -> list[Message]:
    """Return what the consumer has now, up to the limits; with `wait`, waits until it has something.

    A message that is larger than `max_bytes` is returned alone. Raises `ConsumerNotFound` when the consumer was
    deleted, `ServerBusy` when it refuses the request, `Unavailable` when it does not answer. Messages delivered to an
    abandoned request are redelivered after the ack wait.
    """
    at = (stream, consumer)
    found = await _asked(broker, at, batch, max_bytes)
    if found or wait <= 0:
        return found
    found = await _asked(broker, at, 1, None, wait)
    if found and batch > 1:
        found += await _asked(broker, at, batch - 1, max_bytes)
    return found


async def _asked(
    broker: Broker, at: tuple[str, str], batch: int, max_bytes: int | None, wait: float | None = None
) -> list[Message]:
    """Send one request: for what is available now, or for what arrives within `wait` seconds."""
    connection = await broker.ready()
    answers = _Answers(batch)
    requests = PullRequests(broker.jetstream, *at, broker.settings.new_inbox())
    sid = await connection.subscribe(requests.reply, handler=answers.take)
    try:
        await connection.send(requests.request(batch, max_bytes=max_bytes, expires=wait, no_wait=wait is None))
        await until_set(
            broker, connection, answers.ended, (wait or 0.0) + max(MARGIN, broker.settings.timeout), "a pull"
        )
    finally:
        if connection.connected:
            await connection.unsubscribe(sid)
    if answers.too_large and not answers.messages:
        return await _asked(broker, at, 1, None)
    _raise_refused(requests.subject, answers.refused)
    return answers.messages


def _raise_refused(subject: str, refused: PullStatus | None) -> None:
    if not refused:
        return
    if refused.event is PullEvent.NO_RESPONDERS:
        raise Unavailable(f"nobody answers on {subject!r}: the consumer has no leader right now")
    kind = ConsumerNotFound if refused.event is PullEvent.DELETED else ServerBusy
    raise kind(subject, refused.code, 0, refused.text)


class _Answers:
    """Collects the answers to one pull request."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.messages: list[Message] = []
        self.too_large = False
        self.refused: PullStatus | None = None
        self.ended = asyncio.Event()

    def take(self, message: Message) -> None:
        status = pull_status(message)
        if status is None:
            self.messages.append(message)
            if len(self.messages) < self._batch:
                return
        elif status.event is PullEvent.HEARTBEAT:
            return
        elif status.event is PullEvent.TOO_LARGE:
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
