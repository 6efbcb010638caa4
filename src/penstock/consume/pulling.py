"""Pull requests to one consumer over one connection, until that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from penstock.consume.messages import Message, delivered
from penstock.errors import Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import PullEvent, next_verb, pull_request, pull_status
from penstock.jetstream.model import ConsumerInfo
from penstock.wire import aio, deliveries, frames

EXPIRES = 30.0
HEARTBEAT = 5.0
SILENCE = 2.5 * HEARTBEAT
"""Seconds without a word on an open request: the request is lost, or the consumer is."""
FOR_EVER = 10.0**9
MAX_BYTES = 32 * 2**20
"""Bytes that one request may bring, unless a single message may be larger."""


class PullEnded(Unavailable):
    """The consumer can no longer be pulled from over this connection; a new request may succeed."""


class Pulling:
    """Keeps requests open for as many messages as there is room for."""

    def __init__(
        self,
        connection: aio.Connection,
        jetstream: JetStream,
        consumer: ConsumerInfo,
        came: Callable[[list[Message]], None],
        room: Callable[[], int],
    ) -> None:
        """`came` takes messages, and must not wait. `room`: messages that may still come."""
        self._connection = connection
        self._subject = jetstream.subject(next_verb(consumer.stream, consumer.name))
        self._name = consumer.name
        self._came = came
        self._room = room
        self._inbox = connection.settings.new_inbox()
        self._sid = 0
        self._asked = 0
        self._heard = 0.0
        self._soon = False
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Pull until the connection or the consumer ends; raises `Unavailable` then."""
        self._sid = await self._connection.subscribe(self._inbox, handler=self._other)
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
        """Ask for nothing more; what was asked for is dropped by the server once the inbox is gone."""
        if not self._stopped:
            self._stopped = True
            if self._connection.connected:
                self._connection.write(frames.unsubscribe(self._sid))

    def soon(self) -> None:
        """There may be room: ask for more once all that came with this read has been taken in."""
        if not self._soon and not self._stopped:
            self._soon = True
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._soon = False
        if self._stopped or not self._connection.connected:
            return
        room = self._room()
        if self._asked > room // 2 or room <= 0:
            return
        count = room - self._asked
        self._asked += count
        most = max(MAX_BYTES, self._connection.info.max_payload * 2)
        ask = pull_request(count, max_bytes=most, expires=EXPIRES, heartbeat=HEARTBEAT)
        self._connection.write(frames.publish(self._subject, ask, reply=self._inbox))

    def _skim(self, buffer: bytearray, at: int) -> int:
        found, at = deliveries.take(buffer, at, self._sid, Message, datetime.now(UTC))
        if found:
            self._take(found)
        return at

    def _take(self, found: list[Message]) -> None:
        self._heard = self._loop.time()
        if not self._stopped:
            self._asked = max(0, self._asked - len(found))
            self._came(found)
            self.soon()

    def _other(self, frame: frames.Message) -> None:
        """A status, or a delivery that is not a usual one."""
        self._heard = self._loop.time()
        if message := delivered(frame, datetime.now(UTC)):
            self._take([message])
            return
        status = pull_status(frame)
        if status and status.is_over:
            self._asked = max(0, self._asked - status.left) if status.left else 0
            self.soon()
        elif not (status and status.event is PullEvent.HEARTBEAT) and not self._ended.done():
            self._ended.set_exception(PullEnded(f"consumer {self._name!r} answers {status or frame.subject}"))

    async def _check(self) -> None:
        while not self._ended.done():
            await asyncio.sleep(HEARTBEAT / 2)
            if not self._asked:
                self._heard = self._loop.time()
            elif self._loop.time() - self._heard > SILENCE:
                self._ended.set_exception(PullEnded(f"consumer {self._name!r} has been silent for {SILENCE:g} s"))
