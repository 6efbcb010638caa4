"""Plain publishes with their acks pipelined: every message is stored, or refused, by itself."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from penstock.broker.codes import api_error
from penstock.errors import (
    AccessDenied,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    OutcomeUnknown,
    PenstockError,
    ProtocolError,
    Unavailable,
)
from penstock.publish.rows import Rows
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.frames import Message
from penstock.wire.headers import Headers
from penstock.wire.session import Denied

WINDOW = 1_000
"""Messages whose acks may be outstanding."""
TICK = 0.2
"""Seconds between two looks at the connection while waiting."""
CHUNK = 64 * 1024
"""Bytes that are collected before they are sent."""


@dataclass(frozen=True, slots=True)
class PubAck:
    """Where the server stored a message; `duplicate` when its id was there before."""

    stream: str
    sequence: int
    duplicate: bool = False


class PublishInterrupted(OutcomeUnknown):
    """The connection was lost while acks were outstanding."""

    def __init__(self, in_doubt: int, reason: str) -> None:
        super().__init__(in_doubt, reason)
        self.in_doubt = in_doubt
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.in_doubt} messages were sent and not acknowledged ({self.reason}): they may or may not be stored; "
            "with message ids, publishing them again stores nothing twice within the stream's duplicate window"
        )


class PlainPublisher:
    """Publishes without waiting for each ack: at most `window` are outstanding.

    `add` returns the outcomes that came in meanwhile, in the order of publishing: a `PubAck`, or the error of that
    message. Messages behind a refused one may be stored: nothing ties them together.
    """

    def __init__(self, settings: Settings, window: int = WINDOW) -> None:
        self._connection = aio.Connection(settings, name="penstock publish")
        self._window = window
        self._rows = Rows(max_payload=0)
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._first = 1
        """The number of the first message whose outcome was not handed out."""
        self._outcomes: deque[PubAck | PenstockError | None] = deque()
        self.last_outcomes: list[PubAck | PenstockError] = []
        """After an error of `add` or `finish`: the outcomes that came before it and were not handed out."""
        self._buffer = bytearray()
        self._came = asyncio.Event()
        self._denied: AccessDenied | None = None

    async def __aenter__(self) -> Self:
        await self._connection.reconnect()
        self._rows.max_payload = self._connection.info.max_payload
        self._connection.on_denied(self._deny)
        await self._connection.subscribe(f"{self._inbox}.*", handler=self._receive)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, with its headers."""
        return self._rows.max_payload

    @property
    def outstanding(self) -> int:
        """Messages whose outcome was not handed out yet."""
        return len(self._outcomes)

    async def add(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> list[PubAck | PenstockError]:
        """Publish a message; waits while too many acks are outstanding."""
        lead, block, body = self._rows.one(subject, data, headers, message_id)
        number = self._first + len(self._outcomes)
        self._outcomes.append(None)
        sizes = b"%d %d" % (len(block), len(block) + len(body)) if block else b"%d" % len(body)
        verb = b"HPUB " if block else b"PUB "
        self._buffer += b"%b%b%b.%d %b\r\n%b%b\r\n" % (verb, lead, self._inbox.encode(), number, sizes, block, body)
        if len(self._buffer) >= CHUNK or len(self._outcomes) >= self._window:
            return await self._settle(self._window // 2)
        return []

    async def finish(self) -> list[PubAck | PenstockError]:
        """Wait for all acks, and return the outcomes that were not handed out."""
        return await self._settle(0)

    async def send(self) -> None:
        """Send what was collected: before a pause."""
        data, self._buffer = bytes(self._buffer), bytearray()
        if data:
            await self._connection.send(data)

    async def _settle(self, leave: int) -> list[PubAck | PenstockError]:
        """Send, and wait until at most `leave` outcomes are missing."""
        taken: list[PubAck | PenstockError] = []
        try:
            await self.send()
            taken += self._taken()
            while len(self._outcomes) > leave:
                await self._wait()
                taken += self._taken()
        except PenstockError as exc:
            self.last_outcomes = taken
            if not isinstance(exc, Unavailable):
                raise
            raise PublishInterrupted(self.outstanding, str(exc)) from exc
        return taken

    async def _wait(self) -> None:
        settings = self._connection.settings
        deadline = time.monotonic() + settings.timeout
        while not self._came.is_set():
            if self._denied:
                raise self._denied
            if not self._connection.connected:
                raise ConnectionLost(", ".join(settings.servers), "while acks were outstanding")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("publishing", settings.timeout)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._came.wait()
        self._came.clear()

    def _deny(self, denied: Denied) -> None:
        self._denied = denied.error()

    def _taken(self) -> list[PubAck | PenstockError]:
        taken: list[PubAck | PenstockError] = []
        while self._outcomes and (first := self._outcomes[0]) is not None:
            taken.append(first)
            self._outcomes.popleft()
        self._first += len(taken)
        return taken

    def _receive(self, message: Message) -> None:
        at = int(message.subject.rpartition(".")[2]) - self._first
        if 0 <= at < len(self._outcomes):
            self._outcomes[at] = _outcome(message)
        if self._outcomes and self._outcomes[0] is not None:
            self._came.set()


def _outcome(message: Message) -> PubAck | PenstockError:
    if message.status:
        return ConfigError("no stream takes its subject; create one, or check the subject")
    try:
        answer: dict[str, Any] = json.loads(message.data)
        if "error" in answer:
            return api_error("publish", answer["error"])
        return PubAck(answer["stream"], answer["seq"], bool(answer.get("duplicate")))
    except (ValueError, KeyError, TypeError) as exc:
        raise ProtocolError(f"an answer to a publish that makes no sense: {message.data[:200]!r}") from exc
