"""Pull requests to one consumer over one connection, until the connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from penstock.consume.messages import Message, delivered
from penstock.errors import PenstockError, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import PullEvent
from penstock.jetstream.model import ConsumerInfo
from penstock.jetstream.requests import PullRequests
from penstock.wire import aio, deliveries, frames

EXPIRES = 30.0
HEARTBEAT = 5.0
SILENCE = 2.5 * HEARTBEAT
"""Seconds without any frame on an open request after which the request, or its consumer, counts as lost."""
FOR_EVER = 10.0**9
DEAD_INBOX = 2.5
"""Seconds after which no server delivers to an inbox without a subscription any more. With leaf nodes or gateways it
does so for 2 after a request, since the subscription may not have reached it yet."""
MAX_BYTES = 32 * 2**20
"""Maximum bytes of one request, unless a single message may be larger."""


class PullEnded(Unavailable):
    """The consumer can no longer be pulled from over this connection; a new request may succeed."""


class Pulling:
    """Keeps pull requests open for as many messages as there is room for."""

    def __init__(
        self,
        connection: aio.Connection,
        jetstream: JetStream,
        consumer: ConsumerInfo,
        came: Callable[[list[Message]], None],
        room: Callable[[], int],
    ) -> None:
        """`came` takes messages, and must not block. `room`: messages that may still be requested."""
        self._connection = connection
        self._name = consumer.name
        self._came = came
        self._room = room
        inbox = connection.settings.new_inbox()
        self._requests = PullRequests(jetstream, consumer.stream, consumer.name, inbox)
        self._sid = 0
        self._asked_at = 0.0
        self._answered = asyncio.Event()
        """Set when no request is open any more."""
        self._heard = 0.0
        self._soon = False
        self._enough = False
        """Whether no more requests are sent."""
        self._left = False
        """Whether the inbox is gone."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Pull until the connection or the consumer ends; raises `Unavailable` then."""
        self._sid = await self._connection.subscribe(self._requests.reply, handler=self._other)
        self._connection.skim_with(self._skim)
        self._heard = self._loop.time()
        lost = asyncio.create_task(self._connection.receive(FOR_EVER))  # ends when the connection does
        watch = asyncio.create_task(self._check())
        try:
            self._ask()
            await asyncio.wait((self._ended, lost), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            await lost
        finally:
            self.stop()
            for task in (lost, watch):
                task.cancel()
            await asyncio.gather(lost, watch, return_exceptions=True)

    def stop(self) -> None:
        """Send no more requests; the server drops open ones once the inbox is gone."""
        if not self._left:
            self._enough = self._left = True
            if self._connection.connected:
                self._connection.write(frames.unsubscribe(self._sid))

    async def drain(self, last_chance: bool) -> None:
        """Send no more requests, and take what the server has sent before it noticed.

        The server counts what it sends to a removed inbox as a delivery, and may do so for a while. With `last_chance`,
        when a message is delivered only once, the inbox is kept until the server no longer does.
        """
        self._enough = True
        if last_chance and self._requests.asked:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), self._asked_at + DEAD_INBOX - self._loop.time())
        self.stop()
        with suppress(PenstockError):  # the connection is lost, and all messages in transit with it
            await self._connection.flush()

    def soon(self) -> None:
        """Request more, if there is room, once everything from this read has been taken in."""
        if not self._soon and not self._enough:
            self._soon = True
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._soon = False
        if self._enough or not self._connection.connected:
            return
        room = self._room()
        asked = self._requests.asked
        if asked > room // 2 or room <= 0:
            return
        self._asked_at = self._loop.time()
        most = max(MAX_BYTES, self._connection.info.max_payload * 2)
        ask = self._requests.request(room - asked, max_bytes=most, expires=EXPIRES, heartbeat=HEARTBEAT)
        self._connection.write(ask)

    def _skim(self, buffer: bytearray, at: int) -> int:
        found, at = deliveries.take(buffer, at, self._sid, Message, datetime.now(UTC))
        if found:
            self._take(found)
        return at

    def _take(self, found: list[Message]) -> None:
        self._heard = self._loop.time()
        self._requests.received(len(found))
        self._served()
        self._came(found)
        self.soon()

    def _served(self) -> None:
        if self._enough and not self._requests.asked:
            self._answered.set()

    def _other(self, frame: frames.Message) -> None:
        """Handle a status, or an unusual delivery."""
        self._heard = self._loop.time()
        if message := delivered(frame, datetime.now(UTC)):
            self._take([message])
            return
        status = self._requests.status(frame)
        if status and status.is_over:
            self._served()
            self.soon()
        elif not (status and status.event is PullEvent.HEARTBEAT) and not self._ended.done():
            self._ended.set_exception(PullEnded(f"consumer {self._name!r} answers {status or frame.subject}"))

    async def _check(self) -> None:
        while not self._ended.done():
            await asyncio.sleep(HEARTBEAT / 2)
            if not self._requests.asked:
                self._heard = self._loop.time()
            elif self._loop.time() - self._heard > SILENCE:
                self._ended.set_exception(PullEnded(f"consumer {self._name!r} has been silent for {SILENCE:g} s"))
