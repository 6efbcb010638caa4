"""Fast ingest over a real connection.

Each ingest has its own connection, so that a slow or broken one affects no other. It reconnects by itself, for up to
`IngestOptions.patience` seconds, and resumes where the stream really ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
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
"""Seconds between two timer checks: for pings, for settling when idle, for a lost connection."""

INBOX_BYTES = 6
"""Random bytes of the inbox subject; few, since every message carries it."""

CONNECTION_NAME = "penstock fast ingest"
OnLost = Callable[[Lost], object]


class FastIngest:
    """Any number of messages in order: `async with publisher.fast("ORDERS") as ingest: await ingest.add(…)`.

    Leaving the block commits: everything added is stored when it is left, and `ingest.ack` says where. An exception
    inside ends the ingest: what was sent is stored, since fast ingest is ordered and safe, but not atomic.
    """

    def __init__(
        self,
        settings: Settings,
        stream: str,
        options: IngestOptions | None = None,
        on_lost: OnLost | None = None,
        connection: aio.Connection | None = None,
    ) -> None:
        """`on_lost` is called for messages that are known to be lost; only with `on_gap="continue"`."""
        self.settings = settings
        self.connection = connection or aio.Connection(settings, name=CONNECTION_NAME)
        self._core = Ingest(stream, options or IngestOptions(), settings.new_inbox(INBOX_BYTES), on_lost or _ignore)
        self._rows = RowEncoder(max_payload=0)
        self._send_at = CHUNK
        """The position at which rows that were added one by one are sent."""
        self._is_open = False
        self.ack: FastAck | None = None
        """The result, once the ingest was committed."""
        self._answers = 0
        """Number of answers and failures so far: a waiting call checks whether it has changed."""
        self._left = asyncio.Event()
        """Set when rows were left for the ticker to send as soon as the caller yields."""
        self._callers = 0
        """Calls that send and take answers themselves; while there are any, the ticker only checks the timers."""
        self._reconnecting = asyncio.Lock()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        self._ticker = asyncio.create_task(self._tick(), name=CONNECTION_NAME)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.leave(kind)
        finally:
            if self._ticker:
                self._ticker.cancel()
                with suppress(asyncio.CancelledError):
                    await self._ticker
            await self.close()

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

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self._core.error is not None

    async def add(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        """Add one message and return its position. Waits only while the server is behind.

        It is stored once `stored` has reached the position: see `flush`.
        """
        position = self.queue(self.row(subject, data, headers, message_id))
        if position >= self._send_at:
            await self.send_queued()
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
            for rows in self.encoded(messages):
                await self.add_rows(rows)
        return self.added

    async def add_data(self, subject: str, data: Iterable[bytes]) -> int:
        """Add messages of one subject without headers: the fastest way."""
        for rows in self.encoded_data(subject, data):
            await self.add_rows(rows)
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
        self._is_open = False
        self.ack = self._core.ack()
        return self.ack

    # -- the steps, for both publishers ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and start."""
        if self._is_open or self.ack or self.added:
            raise ConfigError(f"this ingest into {self._core.stream!r} was opened before: make a new one")
        try:
            await reconnect(self.connection, 0, self._begin)
        except BaseException:
            await self.connection.close()
            raise
        self._is_open = True

    async def leave(self, kind: type[BaseException] | None) -> None:
        """Commit; after an exception, tell the server without waiting that nothing more comes."""
        if kind is None:
            await self.commit()
        elif self._core.error is None:
            with suppress(PenstockError):
                self._core.end()
                if self.connection.connected:
                    await self.connection.send(self._core.outgoing(time.monotonic()))

    async def close(self) -> None:
        self._is_open = False
        await self.connection.close()

    def row(self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None) -> Row:
        """One message as it is sent."""
        if self._core.error or not self._is_open:
            self._check_open()
        return self._rows.one(subject, data, headers, message_id)

    def queue(self, row: Row) -> int:
        """Add a row that is sent later, with others; returns its position."""
        if self._core.error or not self._is_open:
            self._check_open()
        return self._core.add_one(row)

    def is_due(self, position: int) -> bool:
        """Whether enough rows are queued to send them."""
        return position >= self._send_at

    async def send_queued(self) -> None:
        """Send rows that were queued, as far as the server takes them."""
        await self._until(lambda: self._core.unsent < CHUNK)
        self._send_at = self._core.added + CHUNK

    async def add_rows(self, rows: list[Row]) -> None:
        self._check_open()
        self._core.add(rows)
        await self._until(lambda: self._core.unsent < CHUNK)

    def encoded(self, messages: Iterable[Publication]) -> Iterator[list[Row]]:
        """Messages as rows, in chunks."""
        return map(self._rows.many, chunks(messages))

    def encoded_data(self, subject: str, data: Iterable[bytes]) -> Iterator[list[Row]]:
        return (self._rows.of_subject(subject, chunk) for chunk in chunks(data))

    def prepared(self, messages: Iterable[tuple[str, bytes, bytes]]) -> Iterator[list[Row]]:
        """The same of messages with encoded headers."""
        return map(self._rows.prepared, chunks(messages))

    async def step(self) -> None:
        """Send what can be sent now; reconnects if needed."""
        if self._core.stalled or not self.connection.connected:
            await self._reconnect()
        self._check()
        await self._send(self._core.outgoing(time.monotonic()))
        self._check()

    async def catch_up(self) -> None:
        """Take received answers, and send remaining rows: for a connection that no event loop feeds."""
        with suppress(ConnectionLost):  # the step opens a new one
            if self.connection.connected:
                self.connection.poll()
        await self.step()

    def fail(self, error: PenstockError) -> None:
        """Mark the ingest as failed: the next call raises the error."""
        self._core.error = self._core.error or error
        self._answers += 1

    async def _until(self, done: Callable[[], bool]) -> None:
        """Send and take answers until it is done."""
        self._callers += 1
        try:
            while True:
                before = self._answers
                await self.step()
                if done():
                    return
                with suppress(ConnectionLost, DeadlineExceeded):  # the next step opens a new one if this one is gone
                    await self.connection.until(partial(self._heard_since, before), TICK)
        finally:
            self._callers -= 1

    def _heard_since(self, before: int) -> bool:
        return self._answers != before

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        try:
            await self.connection.send(data)
        except ConnectionLost:
            await self._reconnect()
        except DeadlineExceeded:  # the server takes no more bytes
            self._core.stalled = True
            await self._reconnect()

    async def _tick(self) -> None:
        """Send the rows that a pausing caller left, check the timers, and notice a lost connection."""
        while self._core.error is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._left.wait()
            self._left.clear()
            try:
                await self.step()
            except PenstockError as exc:
                self.fail(exc)

    async def _reconnect(self) -> None:
        async with self._reconnecting:
            if self.connection.connected and not self._core.stalled:
                return
            try:
                await reconnect(self.connection, self._core.options.patience, self._begin)
            except Unavailable as exc:
                self._core.error = exc
                raise

    async def _begin(self) -> None:
        features.require(self.connection.info, features.FAST_INGEST)
        self._rows.max_payload = self._core.max_payload = self.connection.info.max_payload
        self.connection.on_denied(lambda denied: self.fail(denied.error()))
        inbox = self.settings.new_inbox(INBOX_BYTES)
        await self.connection.subscribe(f"{inbox}.>", handler=self._receive)
        self._core.connected(inbox, time.monotonic())

    def _receive(self, message: Message) -> None:
        self._answers += 1
        try:
            self._core.receive(message, time.monotonic())
        except ProtocolError as exc:  # a message is missing that no later call can account for
            self.fail(exc)
        if not self._callers:
            self._left.set()

    def _check(self) -> None:
        if self._core.error:
            raise self._core.error

    def _check_open(self) -> None:
        self._check()
        if self.ack:
            raise ConfigError(f"this ingest into {self._core.stream!r} is committed: open a new one to add more")
        if not self._is_open:
            raise ConfigError(f"this ingest into {self._core.stream!r} is not open: use it inside its `with` block")


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _ignore(_: Lost) -> None:
    """`FastAck.lost` counts them."""
