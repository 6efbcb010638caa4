"""Messages of a durable pull consumer, as they come, over the asyncio connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from penstock.errors import ConsumerNotFound, Unavailable
from penstock.subjects import api_prefix
from penstock.wire import aio
from penstock.wire.frames import Message

EXPIRES = 10.0
"""Seconds after which the server ends a request that nothing came for."""
LOOK_EVERY = 0.5  # seconds
NANOSECONDS = 1_000_000_000


class Pull:
    """One request is always under way; what came is handed out together."""

    def __init__(self, connection: aio.Connection, stream: str, consumer: str, domain: str | None, batch: int) -> None:
        self._connection = connection
        self._what = (stream, consumer)
        self._subject = f"{api_prefix(domain)}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = connection.settings.new_inbox()
        self._batch = batch
        self._asked = 0
        self._sid: int | None = None
        self._came: asyncio.Queue[Message] = asyncio.Queue()

    async def fetch(self, wait: float) -> list[Message]:
        """What has come, or comes within `wait` seconds. Raises `ConnectionLost` when nothing can come any more."""
        if self._sid is None:
            self._sid = await self._connection.subscribe(self._inbox, handler=self._came.put_nowait)
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            await self._ask()
            found = [message for message in await self._next(deadline) if self._counts(message)]
            if found or asyncio.get_running_loop().time() >= deadline:
                return found

    async def close(self) -> None:
        """Ask for nothing more: the server drops the request under way, and what came is delivered again later."""
        if self._sid is not None and self._connection.connected:
            await self._connection.unsubscribe(self._sid)
        self._sid = None

    async def _ask(self) -> None:
        if self._asked <= 0:
            self._asked = self._batch
            body = json.dumps({"batch": self._batch, "expires": int(EXPIRES * NANOSECONDS)})
            await self._connection.publish(self._subject, body.encode(), reply=self._inbox)

    async def _next(self, deadline: float) -> list[Message]:
        """Wait for the first, take what is there besides."""
        while self._came.empty():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return []
            if not self._connection.connected:
                await self._connection.flush()  # raises why
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_EVERY)):
                    return [await self._came.get(), *self._waiting()]
        return self._waiting()

    def _waiting(self) -> list[Message]:
        return [self._came.get_nowait() for _ in range(self._came.qsize())]

    def _counts(self, message: Message) -> bool:
        """Whether it is a message of the stream; a status says that the request has ended."""
        if message.status is None:
            self._asked -= 1
            return True
        code, text = message.status
        if code == 100:
            return False
        self._asked = 0
        if code == 409 and "Deleted" in text:
            raise ConsumerNotFound("consumer {1!r} of {0!r}".format(*self._what), 404, 10014, "consumer was deleted")
        if code == 503:
            raise Unavailable("consumer {1!r} of {0!r} does not answer".format(*self._what))
        return False
