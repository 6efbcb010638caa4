"""Fast ingest over a real connection: the asyncio publisher, and what it shares with the blocking one.

Each ingest has a connection of its own, so that a slow or broken one disturbs nobody else. Both reconnect by
themselves, for up to `IngestOptions.patience` seconds, and go on where the stream really ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Self, TypeVar

from penstock.errors import ConfigError, ConnectionLost, DeadlineExceeded, PenstockError, ProtocolError, Unavailable
from penstock.jetstream import features
from penstock.jetstream.connection import reconnect
from penstock.publish.ingest import Ingest
from penstock.publish.interruptions import IngestInterrupted
from penstock.publish.options import FastAck, IngestOptions, Lost
from penstock.publish.rows import Publication, Row, RowEncoder
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.frames import Message
from penstock.wire.headers import Headers

T = TypeVar("T")
CHUNK = 250
"""Rows that are sent at once; fewer when the caller pauses, more when it adds them in bulk."""
TICK = 0.2
"""Seconds between two looks at the clock: for pings, for settling when idle, for a connection that is gone."""

INBOX_BYTES = 6
"""Of the subject for answers; few, since every message carries it."""

OnLost = Callable[[Lost], object]


class FastIngestBase:
    """What the two publishers share: the series, and what a caller may ask about it."""

    def __init__(
        self, settings: Settings, stream: str, options: IngestOptions | None = None, on_lost: OnLost | None = None
    ) -> None:
        """`on_lost` is called for messages that are known to be lost; only with `on_gap="continue"`."""
        self.settings = settings
        self._core = Ingest(stream, options or IngestOptions(), settings.new_inbox(INBOX_BYTES), on_lost or _ignore)
        self._rows = RowEncoder(max_payload=0)
        self._send_at = CHUNK
        """The position at which rows that were added one by one are sent."""
        self._is_open = False
        self.ack: FastAck | None = None
        """The result, once the ingest was committed."""

    @property
    def stored(self) -> int:
        """Every message up to this position (counted from 1, in the order they were added) is safely in the stream.

        With `on_gap="continue"` the callback was told about the exceptions, as far as the server reported them.
        """
        return self._core.stored

    @property
    def added(self) -> int:
        """The position of the last message added."""
        return self._core.added

    @property
    def in_doubt(self) -> int:
        """Messages behind `stored` that were sent and not confirmed: they may be stored."""
        error = self._core.error
        if isinstance(error, IngestInterrupted):
            return error.in_doubt
        is_final = error is not None and not isinstance(error, Unavailable)
        return 0 if is_final else self._core.added - self._core.stored - self._core.unsent

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, with its headers."""
        return self._rows.max_payload

    @property
    def sequence(self) -> int:
        """Stream sequence of the last message stored, as of the last `flush` (or pause); 0 before."""
        return self._core.sequence

    @property
    def maybe_twice(self) -> int:
        """Messages without an id that were sent again while in doubt: at most so many are stored twice."""
        return self._core.maybe_twice

    def _check(self) -> None:
        if self._core.error:
            raise self._core.error

    def _check_open(self) -> None:
        self._check()
        if self.ack:
            raise ConfigError(f"this ingest into {self._core.stream!r} is committed: open a new one to add more")
        if not self._is_open:
            raise ConfigError(f"this ingest into {self._core.stream!r} is not open: use it inside its `with` block")

    def _check_new(self) -> None:
        if self._is_open or self.ack or self.added:
            raise ConfigError(f"this ingest into {self._core.stream!r} was opened before: make a new one")

    def _committed(self) -> FastAck:
        self._is_open = False
        self.ack = self._core.ack()
        return self.ack


class FastIngest(FastIngestBase):
    """The asyncio publisher: `async with publisher.fast("ORDERS") as ingest: await ingest.add(…)`.

    Leaving the block commits: everything added is stored when it is left, and `ingest.ack` says where. An exception
    inside ends the ingest: what was sent is stored, since fast ingest is ordered and safe, but not atomic.
    """

    def __init__(
        self, settings: Settings, stream: str, options: IngestOptions | None = None, on_lost: OnLost | None = None
    ) -> None:
        super().__init__(settings, stream, options, on_lost)
        self._connection = aio.Connection(settings, name="penstock fast ingest")
        self._changed = asyncio.Event()
        """The server has answered."""
        self._left = asyncio.Event()
        """Rows were left for the ticker to send, as soon as the caller lets it run."""
        self._callers = 0
        """Calls that send and take answers by themselves; while there are any, the ticker only looks at the clock."""
        self._reconnecting = asyncio.Lock()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._check_new()
        try:
            await reconnect(self._connection, 0, self._begin)
        except BaseException:
            await self._connection.close()
            raise
        self._ticker = asyncio.create_task(self._tick(), name="penstock fast ingest")
        self._is_open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.commit()
            elif self._core.error is None:
                await self._let_go()
        finally:
            await self._close()

    async def add(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        """Add one message and return its position. Waits only while the server is behind.

        It is stored once `stored` has reached the position: see `flush`.
        """
        if self._core.error or not self._is_open:
            self._check_open()
        position = self._core.add_one(self._rows.one(subject, data, headers, message_id))
        if position >= self._send_at:
            await self._until(lambda: self._core.unsent < CHUNK)
            self._send_at = self._core.added + CHUNK
        else:
            self._left.set()
        return position

    async def add_many(self, messages: Iterable[Publication] | AsyncIterable[Publication]) -> int:
        """Add `(subject, data)`, `(subject, data, headers)` or `(subject, data, headers, message_id)` tuples.

        The fast way for many messages; returns the position of the last. Takes them as the server does: an endless
        iterable needs no more memory than a short one.
        """
        if isinstance(messages, AsyncIterable):
            async for message in messages:
                await self.add(*message)
        else:
            for chunk in chunks(messages):
                await self._add_rows(self._rows.many(chunk))
        return self.added

    async def add_data(self, subject: str, data: Iterable[bytes]) -> int:
        """Add messages of one subject without headers: the fastest way."""
        for chunk in chunks(data):
            await self._add_rows(self._rows.of_subject(subject, chunk))
        return self.added

    async def flush(self) -> int:
        """Return once everything added so far is stored; returns its last position, and `sequence` is up to date."""
        if self.ack:
            return self.added
        self._check_open()
        target = self._core.end()
        await self._until(lambda: self._core.stored >= target and not self._core.ending)
        return target

    async def ping(self) -> None:
        """Ask the server for its last ack again; also keeps a batch alive. Done by itself when an ack is late."""
        self._check_open()
        await self._send(self._core.ping(time.monotonic()))

    async def commit(self) -> FastAck:
        """Store everything that was added, end the ingest, and say where the messages are."""
        if self.ack:
            return self.ack
        self._check_open()
        self._core.end()
        await self._until(lambda: self._core.settled)
        return self._committed()

    async def _add_rows(self, rows: list[Row]) -> None:
        self._check_open()
        self._core.add(rows)
        await self._until(lambda: self._core.unsent < CHUNK)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Send and take answers until it is done."""
        self._callers += 1
        try:
            while True:
                self._changed.clear()
                await self._step()
                if done():
                    return
                await _within_a_tick(self._changed)
        finally:
            self._callers -= 1

    async def _step(self) -> None:
        if self._core.stalled or not self._connection.connected:
            await self._reconnect()
        self._check()
        await self._send(self._core.outgoing(time.monotonic()))
        self._check()

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        try:
            await self._connection.send(data)
        except ConnectionLost:
            await self._reconnect()
        except DeadlineExceeded:  # the server takes no more bytes
            self._core.stalled = True
            await self._reconnect()

    async def _tick(self) -> None:
        """Send what a caller that pauses has left behind, keep the clock, and notice a connection that is gone."""
        while self._core.error is None:
            await _within_a_tick(self._left)
            self._left.clear()
            try:
                await self._step()
            except PenstockError as exc:  # the caller is told at the next call
                self._fail(exc)

    async def _reconnect(self) -> None:
        async with self._reconnecting:
            if self._connection.connected and not self._core.stalled:
                return
            try:
                await reconnect(self._connection, self._core.options.patience, self._begin)
            except Unavailable as exc:
                self._core.error = exc
                raise

    async def _begin(self) -> None:
        features.require(self._connection.info, features.FAST_INGEST)
        self._rows.max_payload = self._core.max_payload = self._connection.info.max_payload
        self._connection.on_denied(lambda denied: self._fail(denied.error()))
        inbox = self.settings.new_inbox(INBOX_BYTES)
        await self._connection.subscribe(f"{inbox}.>", handler=self._receive)
        self._core.connected(inbox, time.monotonic())

    def _receive(self, message: Message) -> None:
        try:
            self._core.receive(message, time.monotonic())
        except ProtocolError as exc:
            self._fail(exc)
        (self._changed if self._callers else self._left).set()

    def _fail(self, error: PenstockError) -> None:
        self._core.error = self._core.error or error
        self._changed.set()

    async def _let_go(self) -> None:
        """Tell the server, without waiting, that nothing more comes."""
        self._core.end()
        if self._connection.connected:
            with suppress(PenstockError):
                await self._connection.send(self._core.outgoing(time.monotonic()))

    async def _close(self) -> None:
        self._is_open = False
        if self._ticker:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        await self._connection.close()


async def _within_a_tick(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(TICK):
            await event.wait()


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _ignore(_: Lost) -> None:
    """`FastAck.lost` counts them."""
