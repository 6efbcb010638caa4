"""A connection that an event loop feeds."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

from penstock.errors import ConnectionLost, DeadlineExceeded, PenstockError
from penstock.settings import Settings
from penstock.wire import frames, login, resolve
from penstock.wire.link import Answer, BaseLink
from penstock.wire.session import Denied, check_nothing_before_tls

READ_BYTES = 256 * 1024
"""Maximum bytes of one read. Pages of the buffer that were never needed take no memory."""
KIND_TOKENS = 4
"""Refused subjects with so many equal tokens at their beginning are logged once."""
MAX_LOGGED = 100
"""Refusals that one connection logs."""

log = logging.getLogger("penstock.wire.aio")


class LoopLink(BaseLink, asyncio.BufferedProtocol):
    """Provides its own read buffer: a plain protocol allocates a new one, of 256 KiB, for every read."""

    def __init__(self, endpoint: login.Endpoint, settings: Settings) -> None:
        super().__init__(endpoint, settings)
        self._loop = asyncio.get_running_loop()
        self._received = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._begun = False
        """Whether bytes after the greeting may be parsed: not before it is clear whether to encrypt."""
        self._hello: asyncio.Future[login.ServerInfo] = self._loop.create_future()
        self._logged: set[str] = set()
        self._changed = asyncio.Event()
        """Set when a message, a pong or the end arrives."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    # -- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other event loops have transports of their own
        self._transport.set_write_buffer_limits(high=1024 * 1024)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.feed(self._received[:nbytes])
        try:
            self._fed()
        except PenstockError as exc:
            self.fail(exc)
            self.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        error = ConnectionLost(str(self._endpoint), str(exc or "closed by the server"))
        error.__cause__ = exc
        self.fail(error)
        self._gone.set()

    # -- received bytes ----------------------------------------------------------------------------------------------

    def _fed(self) -> None:
        # The task that waited for the greeting may have been cancelled.
        if self._session is None and (info := self._greeting()) and not self._hello.done():
            self._hello.set_result(info)
        if not (self._session and self._begun):
            return
        self._skim()
        while (event := self._session.next()) is not None:
            self._take(event)
            self._skim()
        self._flush_session()
        self._changed.set()

    def poll(self) -> None:
        """Nothing to do: the event loop brings what has arrived."""

    def _skim(self) -> None:
        if self.look:
            self._parser.skim(self.look)

    def _denied_unasked(self, denied: Denied) -> None:
        """Log a refusal once for subjects with the same beginning: every acknowledgement has its own subject."""
        kind = ".".join(denied.subject.split(".")[:KIND_TOKENS])
        if kind not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(kind)
            log.warning("%s", denied.error(), extra={"action": "denied"})

    def fail(self, error: PenstockError) -> None:
        super().fail(error)
        if not self._hello.done():
            self._hello.set_exception(self.error or error)
        self._changed.set()
        self._writable.set()

    # -- the transport -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def within(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as exc:
            raise DeadlineExceeded(what, seconds) from exc

    async def reach(self, tls_first: ssl.SSLContext | None) -> None:
        port, name = self._endpoint.port, self._endpoint.tls_name if tls_first else None
        *others, last = await resolve.hosts_async(self._endpoint.host, port)
        for address in others:
            with suppress(OSError):
                await self._loop.create_connection(lambda: self, address, port, ssl=tls_first, server_hostname=name)
                return
        await self._loop.create_connection(lambda: self, last, port, ssl=tls_first, server_hostname=name)

    async def greeted(self) -> login.ServerInfo:
        return await self._hello

    async def encrypt(self, context: ssl.SSLContext) -> None:
        assert self._transport
        check_nothing_before_tls(self._parser)
        # A paused reader would miss what comes right after the handshake; the old transport must not be used again.
        transport = await self._loop.start_tls(self._transport, self, context, server_hostname=self._endpoint.tls_name)
        assert transport
        self.connection_made(transport)

    def begin(self) -> None:
        self._begun = True
        self._fed()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.error:
            raise self.error
        assert self._transport
        self._transport.write(data)

    async def drained(self, what: str, seconds: float) -> None:
        if not self._writable.is_set():
            async with self.within(what, seconds):
                await self._writable.wait()
        if self.error:
            raise self.error

    def new_answer(self) -> Answer:
        return self._loop.create_future()

    async def answered(self, answer: Answer) -> frames.Message:
        return await cast("asyncio.Future[frames.Message]", answer)

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.error:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    async def close(self, timeout: float) -> None:
        self.fail(ConnectionLost(str(self._endpoint), "it was closed here"))
        if self._transport:
            self._transport.close()
            try:
                async with asyncio.timeout(timeout):  # Python 3.11's `wait_for` swallows cancellations
                    await self._gone.wait()
            except TimeoutError:
                self.abort()

    def abort(self) -> None:
        self._hello.cancel()  # no task waits for it: asyncio would log an error set later
        if self._transport:
            self._transport.abort()
