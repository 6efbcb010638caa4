"""Plain publishes with their acks pipelined: every message is stored, or refused, by itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

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
from penstock.jetstream.codes import api_error
from penstock.publish.model import NO_RESPONDERS_TIMEOUT
from penstock.publish.rows import RowEncoder
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.frames import Message
from penstock.wire.headers import Headers
from penstock.wire.session import Denied

WINDOW = 1_000
"""Messages whose acks may be outstanding."""
TICK = 0.2
"""Seconds between two checks of the connection while waiting."""
CHUNK = 64 * 1024
"""Bytes that are collected before they are sent."""
MAX_OUTSTANDING_BYTES = 16 * 1024 * 1024
"""Messages are kept until they are acknowledged, to be sent again; beyond this many bytes `add` waits."""
RETRY_DELAY = 0.1
"""Seconds before messages that no stream stored are resent."""
MAX_UNHEARD = 10_000
"""Maximum number of remembered subjects that no stream stored."""


@dataclass(frozen=True, slots=True)
class PubAck:
    """Where the server stored a message; `duplicate` when its id was there before."""

    stream: str
    sequence: int
    duplicate: bool = False


@dataclass(slots=True)
class _Sent:
    """A message whose outcome was not handed out yet."""

    subject: bytes
    frame: bytes
    """Its bytes; empty once the outcome is known."""
    outcome: PubAck | PenstockError | None = None


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

    A message that no stream stores is resent for `no_responders_timeout` seconds, and then stored after those sent with
    it. To avoid this for a new stream, the first message is sent alone.
    """

    def __init__(
        self, settings: Settings, window: int = WINDOW, *, no_responders_timeout: float = NO_RESPONDERS_TIMEOUT
    ) -> None:
        self.no_responders_timeout = no_responders_timeout
        self._connection = aio.Connection(settings, name="penstock publish")
        self._window = window
        self._rows = RowEncoder(max_payload=0)
        self._inbox = settings.new_inbox(8)
        self._first = 1
        """The number of the first message whose outcome was not handed out."""
        self._sent: deque[_Sent] = deque()
        self._outstanding_bytes = 0
        self._begun = False
        """Whether the first message has its outcome: until then no other is sent."""
        self._again: list[_Sent] = []
        """Messages that no stream took, to be sent again at `_again_at`."""
        self._again_at = 0.0
        self._unheard: dict[bytes, float] = {}
        """Subjects that no stream stored at the last attempt, and since when."""
        self._heard = 0.0
        """When the server last answered."""
        self._ready: list[PubAck | PenstockError] = []
        """Outcomes of the messages before `_sent`, to be handed out by the call under way."""
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._came = asyncio.Event()
        self._denied: AccessDenied | None = None

    async def __aenter__(self) -> Self:
        await self._connection.ready()
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
    def in_doubt(self) -> int:
        """Messages that were sent, as far as is known, and have no outcome."""
        return self.left().count(None)

    def left(self) -> list[PubAck | PenstockError | None]:
        """The outcomes that were not handed out, in order; None for a message that was sent and may be stored.

        To be asked after an error. Messages that were not sent, the last ones, are left out.
        """
        sent = islice(self._sent, len(self._sent) - len(self._buffer))
        return [*self._ready, *(message.outcome for message in sent)]

    async def add(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> list[PubAck | PenstockError]:
        """Publish a message; waits while too many acks are outstanding."""
        lead, block, body = self._rows.one(subject, data, headers, message_id)
        number = self._first + len(self._sent)
        sizes = b"%d %d" % (len(block), len(block) + len(body)) if block else b"%d" % len(body)
        verb = b"HPUB " if block else b"PUB "
        frame = b"%b%b%b.%d %b\r\n%b%b\r\n" % (verb, lead, self._inbox.encode(), number, sizes, block, body)
        self._sent.append(_Sent(lead, frame))
        self._outstanding_bytes += len(frame)
        self._buffer.append(frame)
        self._buffered += len(frame)
        if self._buffered >= CHUNK or len(self._sent) >= self._window:
            return await self._settle(self._window // 2)
        return []

    async def finish(self) -> list[PubAck | PenstockError]:
        """Wait for all acks, and return the outcomes that were not handed out."""
        return await self._settle(0)

    async def send(self) -> None:
        """Send what was collected: before a pause."""
        try:
            await self._send()
        except Unavailable as exc:
            raise PublishInterrupted(self.in_doubt, str(exc)) from exc

    async def _send(self) -> None:
        if self._buffer and not self._begun:
            await self._send_first()
        frames, self._buffer, self._buffered = self._buffer, [], 0
        if frames:
            await self._connection.send(b"".join(frames))

    async def _send_first(self) -> None:
        first = self._sent[0]
        if self._buffer[0] is first.frame:  # otherwise it was sent, and the wait for its outcome was abandoned
            self._buffered -= len(self._buffer.pop(0))
            await self._connection.send(first.frame)
        while first.outcome is None:
            await self._wait()
        self._begun = True

    async def _settle(self, leave: int) -> list[PubAck | PenstockError]:
        """Send, and wait until at most `leave` outcomes are missing."""
        try:
            await self._send()
            self._take()
            while len(self._sent) > leave or self._outstanding_bytes > MAX_OUTSTANDING_BYTES:
                await self._wait()
                self._take()
        except Unavailable as exc:
            raise PublishInterrupted(self.in_doubt, str(exc)) from exc
        taken, self._ready = self._ready, []
        return taken

    async def _wait(self) -> None:
        settings = self._connection.settings
        self._heard = time.monotonic()
        while not self._came.is_set():
            if self._denied:
                raise self._denied
            if not self._connection.connected:
                raise ConnectionLost(", ".join(settings.servers), "while acks were outstanding")
            if time.monotonic() - self._heard >= settings.timeout:
                raise DeadlineExceeded("publishing", settings.timeout)
            await self._send_again()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_DELAY if self._again else TICK):
                    await self._came.wait()
        self._came.clear()

    async def _send_again(self) -> None:
        if self._again and time.monotonic() >= self._again_at:
            messages, self._again = self._again, []
            await self._connection.send(b"".join(message.frame for message in messages))

    def _deny(self, denied: Denied) -> None:
        self._denied = denied.error()

    def _take(self) -> None:
        while self._sent and (first := self._sent[0].outcome) is not None:
            self._ready.append(first)
            self._sent.popleft()
            self._first += 1

    def _receive(self, message: Message) -> None:
        at = int(message.subject.rpartition(".")[2]) - self._first
        if 0 <= at < len(self._sent):
            self._answered(self._sent[at], message, time.monotonic())
        if self._sent and self._sent[0].outcome is not None:
            self._came.set()

    def _answered(self, sent: _Sent, message: Message, now: float) -> None:
        self._heard = now
        if message.status:
            tried = now - self._unheard.setdefault(sent.subject, now)
            if tried < self.no_responders_timeout:
                self._again_at = self._again_at if self._again else now + RETRY_DELAY
                self._again.append(sent)
                return
            sent.outcome = ConfigError(
                f"no stream takes its subject (tried for {tried:.1f} s); create one, or check the subject"
            )
            if len(self._unheard) >= MAX_UNHEARD:
                self._unheard.clear()
        else:
            self._unheard.pop(sent.subject, None)
            sent.outcome = _outcome(message)
        self._outstanding_bytes -= len(sent.frame)
        sent.frame = b""


def _outcome(message: Message) -> PubAck | PenstockError:
    try:
        answer: dict[str, Any] = json.loads(message.data)
        if "error" in answer:
            return api_error("publish", answer["error"])
        return PubAck(answer["stream"], answer["seq"], bool(answer.get("duplicate")))
    except (ValueError, KeyError, TypeError) as exc:
        raise ProtocolError(f"the server sent an invalid answer to a publish: {message.data[:200]!r}") from exc
