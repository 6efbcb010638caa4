"""A blocking connection: for Spark tasks, blocking publishers, and everything that has no event loop.

It is `aio.Connection` over a link that blocks. Every call has a deadline. A broken connection raises `ConnectionLost`,
and `reconnect` opens a new one, without the old subscriptions.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

from penstock.coroutines import blocked, passed
from penstock.errors import ConnectionLost, DeadlineExceeded, PenstockError, ProtocolError
from penstock.settings import Settings
from penstock.wire import aio, frames, login, resolve
from penstock.wire.link import Answer, BaseLink
from penstock.wire.session import Denied, check_nothing_before_tls

T = TypeVar("T")
CHUNK = 256 * 1024


def connect(
    settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
) -> BlockingConnection:
    """Open a connection: see `aio.connect`."""
    connection = BlockingConnection(settings, name=name, echo=echo, shuffle=shuffle)
    connection.reconnect()
    return connection


class BlockingConnection:
    """One connection, used by one thread at a time."""

    def __init__(
        self, settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
    ) -> None:
        self.inner = SocketConnection(settings, name=name, echo=echo, shuffle=shuffle)
        """The same with the calls of `aio.Connection`, which block: for code that is written for both."""
        self.settings = settings

    ready = blocked(aio.Connection.ready)
    reconnect = blocked(aio.Connection.reconnect)
    close = blocked(aio.Connection.close)
    opened = passed[int]()
    connected = passed[bool]()
    info = passed[login.ServerInfo]()
    server = passed[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    send = blocked(aio.Connection.send)
    publish = blocked(aio.Connection.publish)
    subscribe = blocked(aio.Connection.subscribe)
    unsubscribe = blocked(aio.Connection.unsubscribe)
    wait = blocked(aio.Connection.wait)
    request = blocked(aio.Connection.request)
    receive = blocked(aio.Connection.receive)
    flush = blocked(aio.Connection.flush)

    def inbox(self, subject: str = "") -> str:
        """A fresh reply subject; its answer is collected with `wait`, or given up with `forget`."""
        return self.inner.inbox(subject)

    def forget(self, *replies: str) -> None:
        """No longer expect these answers."""
        self.inner.forget(*replies)

    def requester(self) -> aio.AsyncRequester:
        """For `JetStream(connection.requester())`, whose calls `run` makes blocking."""
        return self.inner.requester()

    def poll(self) -> None:
        """Process received bytes, without waiting; see `aio.Connection.poll`."""
        self.inner.poll()

    def settle(self) -> None:
        """Flush, and drop every received message: nothing is left of ended subscriptions."""
        self.flush()
        self.inner.link.drop_messages()

    # -- the raw byte stream ---------------------------------------------------------------------------------------

    def take_buffered(self) -> bytes:
        """The bytes received and not yet parsed: from here on the caller owns the stream, until `give_back`.

        The caller then reads with `recv_into`, and answers pings with `send(frames.PONG)`.
        """
        return self.inner.link.session.parser.take_buffered()

    def recv_into(self, buffer: memoryview, timeout: float | None = None) -> int:
        """Read at least one byte into the buffer, and return how many."""
        seconds = self.settings.timeout if timeout is None else timeout
        return self.inner.link.recv_into(buffer, seconds)

    def give_back(self, rest: bytes | memoryview) -> None:
        """Return what was read with `recv_into` and not used: the connection parses again from there."""
        self.inner.link.session.parser.feed(rest)


class SocketConnection(aio.Connection):
    """`aio.Connection` whose calls block: its coroutines never suspend."""

    def _new_link(self, endpoint: login.Endpoint) -> BaseLink:
        return SocketLink(endpoint, self.settings)

    @property
    def link(self) -> SocketLink:
        link = self._open_link
        assert isinstance(link, SocketLink)
        return link


class SocketLink(BaseLink):
    """Reads from its socket while a call waits."""

    def __init__(self, endpoint: login.Endpoint, settings: Settings) -> None:
        super().__init__(endpoint, settings)
        self._socket: socket.socket | None = None
        self.deadline = 0.0

    def within(self, what: str, seconds: float) -> Within:
        return Within(self, what, seconds)

    def lost(self, error: OSError) -> ConnectionLost:
        lost = ConnectionLost(str(self._endpoint), str(error) or type(error).__name__)
        self.fail(lost)
        return lost

    @property
    def _left(self) -> float:
        """Seconds until the deadline, always above 0: 0 would make the socket non-blocking."""
        return max(self.deadline - time.monotonic(), 0.001)

    async def reach(self, tls_first: ssl.SSLContext | None) -> None:
        self._socket = self._reached()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls_first:
            await self.encrypt(tls_first)

    def _reached(self) -> socket.socket:
        port = self._endpoint.port
        *others, last = resolve.hosts(self._endpoint.host, port, self._left)
        for address in others:
            with suppress(OSError):
                return socket.create_connection((address, port), self._left)
        return socket.create_connection((last, port), self._left)

    async def greeted(self) -> login.ServerInfo:
        while (info := self._greeting()) is None:
            self._parser.feed(self._read())
        return info

    async def encrypt(self, context: ssl.SSLContext) -> None:
        assert self._socket
        check_nothing_before_tls(self._parser)
        self._socket.settimeout(self._left)
        self._socket = context.wrap_socket(self._socket, server_hostname=self._endpoint.tls_name)

    def begin(self) -> None:
        """No effect: everything is parsed while a call waits."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.error or not self._socket:
            raise self.error or ConnectionLost(str(self._endpoint), "it is closed")
        try:
            self._socket.settimeout(self._settings.timeout)
            self._socket.sendall(data)
        except TimeoutError as exc:
            # Part of a frame may have been sent: this connection cannot be used any more.
            raise self.lost(OSError(f"it took no bytes for {self._settings.timeout:g} s")) from exc
        except OSError as exc:
            raise self.lost(exc) from exc

    async def drained(self, what: str, seconds: float) -> None:
        """No effect: `write` has blocked until the bytes were sent."""

    def new_answer(self) -> Answer:
        return _Answer()

    async def answered(self, answer: Answer) -> frames.Message:
        assert isinstance(answer, _Answer)
        self._take_until(answer.done)
        return answer.result()

    async def until(self, done: Callable[[], bool]) -> None:
        self._take_until(done)

    def _take_until(self, done: Callable[[], bool]) -> None:
        """Parse frame by frame: bytes after the last one needed are left to `take_buffered`."""
        session = self.session
        while not done():
            if (event := session.next()) is not None:
                self._take(event)
                continue
            self._flush_session()
            if not done():
                self._parser.feed(self._read())

    def poll(self) -> None:
        with self.within("a look at the connection", 0), suppress(NothingYet):
            self._take_until(lambda: False)

    def _read(self) -> bytes:
        assert self._socket
        self._socket.settimeout(max(self.deadline - time.monotonic(), 0))
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise NothingYet from None
        if not data:
            raise ConnectionResetError("closed by the server")
        return data

    def recv_into(self, buffer: memoryview, seconds: float) -> int:
        with self.within("more bytes", seconds):
            assert self._socket
            self._socket.settimeout(seconds)
            if count := self._socket.recv_into(buffer):
                return count
            raise ConnectionResetError("closed by the server")

    def _denied_unasked(self, denied: Denied) -> None:
        """Raise the refusal in the call that waits now, whatever it waits for."""
        raise denied.error()

    def fail(self, error: PenstockError) -> None:
        super().fail(error)
        self.abort()

    async def close(self, timeout: float) -> None:
        self.fail(ConnectionLost(str(self._endpoint), "it is closed"))

    def abort(self) -> None:
        if self._socket:
            with suppress(OSError):
                self._socket.close()


class Within:
    """A block with a deadline: turns the socket's errors into ours; what breaks the connection also ends the link.

    A class, since a generator would cost twice as much, and every read and every request goes through it.
    """

    __slots__ = ("_link", "_seconds", "_what")

    def __init__(self, link: SocketLink, what: str, seconds: float) -> None:
        self._link = link
        self._what = what
        self._seconds = seconds

    def __enter__(self) -> None:
        self._link.deadline = time.monotonic() + self._seconds

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, TimeoutError | NothingYet):
            raise DeadlineExceeded(self._what, self._seconds) from error
        if isinstance(error, OSError):
            raise self._link.lost(error) from error
        if isinstance(error, ConnectionLost | ProtocolError):
            self._link.fail(error)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)


class _Answer:
    """An expected answer, for one thread."""

    def __init__(self) -> None:
        self._result: frames.Message | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def set_result(self, message: frames.Message, /) -> None:
        self._result = message

    def set_exception(self, error: BaseException, /) -> None:
        self._error = error

    def exception(self) -> BaseException | None:
        return self._error

    def cancel(self) -> bool:
        return True

    def result(self) -> frames.Message:
        if self._error:
            raise self._error
        assert self._result
        return self._result


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run any async call to its end from blocking code, also inside a notebook, where a loop already runs.

    With `JetStream(connection.requester())` this is the whole JetStream API for blocking code:
    `run(jetstream.stream_info("S"))`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


class NothingYet(Exception):  # never leaves this module
    """A non-blocking read found nothing."""
