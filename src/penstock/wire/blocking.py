"""A blocking connection: for Spark tasks, blocking publishers, and everything that has no event loop.

Every call has a deadline. There is no reconnecting behind the caller's back: a broken connection raises
`ConnectionLost`, and `reconnect` opens a new one, without the old subscriptions.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

from penstock.errors import (
    AccessDenied,
    ConnectionLost,
    DeadlineExceeded,
    PenstockError,
    ProtocolError,
    Unavailable,
)
from penstock.settings import Settings
from penstock.wire import frames, login, resolve
from penstock.wire.headers import Headers
from penstock.wire.session import (
    MAX_WAITING_BYTES,
    Denied,
    Event,
    Session,
    check_nothing_before_tls,
    checked_answer,
    first_info,
    unreachable,
)

T = TypeVar("T")
CHUNK = 256 * 1024


def connect(
    settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
) -> BlockingConnection:
    """Open a connection to the first server that takes us, in order, or in random order with `shuffle`.

    Raises `BrokerUnreachable` when none answers within the settings' timeout, `AccessDenied` when one refuses the
    login. Without `echo` the server does not send us what we publish ourselves.
    """
    connection = BlockingConnection(settings, name=name, echo=echo, shuffle=shuffle)
    connection.reconnect()
    return connection


class BlockingConnection:
    """One connection, used by one thread at a time."""

    def __init__(
        self, settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
    ) -> None:
        self.settings = settings
        self._name = name
        self._echo = echo
        self._shuffle = shuffle
        self.opened = 0
        """How often it was opened: another number is another connection, without the subscriptions of the last."""
        self._cluster: tuple[login.Endpoint, ...] = ()
        self._socket: socket.socket | None = None
        self._session: Session | None = None
        self._verifies = False
        self._reset()

    def _reset(self) -> None:
        self._inbox_open = False
        self._expected: set[str] = set()
        self._replies: dict[str, frames.Message] = {}
        self._waiting: deque[frames.Message] = deque()
        self._waiting_bytes = 0

    # -- opening and closing ---------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Have an open connection: one that was lost is replaced."""
        if not self.connected:
            self.reconnect()

    def reconnect(self) -> None:
        """Close what is open and connect anew, also to cluster members learned meanwhile."""
        self.close()
        known = login.endpoints(self.settings)
        candidates = [*known, *self._cluster]
        if self._shuffle:
            random.shuffle(candidates)
        failures: list[PenstockError] = []
        deadline = time.monotonic() + self.settings.timeout
        for index, endpoint in enumerate(candidates):
            # Each gets its share of the time left, so that one that never answers does not use it all.
            share = (deadline - time.monotonic()) / (len(candidates) - index)
            try:
                self._open(endpoint, time.monotonic() + share)
            except (AccessDenied, ProtocolError, Unavailable) as exc:
                failures.append(exc)
                continue
            self._cluster = login.discovered(known, endpoint, self.info.connect_urls)
            self.opened += 1
            return
        raise unreachable(candidates, failures)

    def _open(self, endpoint: login.Endpoint, deadline: float) -> None:
        self._verifies = False
        try:
            with self._io(endpoint, "the login", self.settings.timeout):
                self._greet(endpoint, deadline)
        except ConnectionLost as exc:
            self.close()
            raise login.failure(endpoint, self._alert(endpoint) or exc) from exc
        except BaseException:
            self.close()
            raise

    def _alert(self, endpoint: login.Endpoint) -> OSError | None:
        """Why a server that verifies clients ended a login. Its alert is lost when we write at the same moment: so
        shake hands once more, and only listen."""
        if not self._verifies:
            return None
        deadline = time.monotonic() + login.ALERT_WITHIN
        try:
            self._socket = self._reached(endpoint, deadline)
            self._greeting(frames.Parser(), deadline)
            self._encrypt(endpoint, deadline)
            self._read(deadline)
        except (TimeoutError, NothingYet, PenstockError):
            return None
        except OSError as exc:
            return exc
        finally:
            self.close()
        return None

    def _greet(self, endpoint: login.Endpoint, deadline: float) -> None:
        self._socket = self._reached(endpoint, deadline)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.settings.tls_first:
            self._encrypt(endpoint, deadline)
        parser = frames.Parser()
        info = self._greeting(parser, deadline)
        self._verifies = info.tls_verify
        encrypted = login.needs_tls(info, self.settings, endpoint)
        if encrypted and not self.settings.tls_first:
            check_nothing_before_tls(parser)
            self._encrypt(endpoint, deadline)
        options = login.connect_options(info, self.settings, name=self._name, echo=self._echo, encrypted=encrypted)
        session = self._session = Session(endpoint, info, parser, self.settings)
        answered = session.ping()
        self.send(frames.connect(options) + frames.PING)
        self._until(lambda: session.pongs >= answered, deadline)

    def _reached(self, endpoint: login.Endpoint, deadline: float) -> socket.socket:
        """A socket connected to the first address of the host that answers."""
        *others, last = resolve.hosts(endpoint.host, endpoint.port, _left(deadline))
        for address in others:
            with suppress(OSError):
                return socket.create_connection((address, endpoint.port), _left(deadline))
        return socket.create_connection((last, endpoint.port), _left(deadline))

    def _greeting(self, parser: frames.Parser, deadline: float) -> login.ServerInfo:
        while (info := first_info(parser)) is None:
            parser.feed(self._read(deadline))
        return info

    def _encrypt(self, endpoint: login.Endpoint, deadline: float) -> None:
        assert self._socket
        context = self.settings.ssl_context() or ssl.create_default_context()
        self._socket.settimeout(_left(deadline))
        self._socket = context.wrap_socket(self._socket, server_hostname=endpoint.tls_name)

    def close(self) -> None:
        """Close the connection. What was not received is dropped."""
        if self._socket:
            with suppress(OSError):
                self._socket.close()
        self._socket = self._session = None
        self._reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def info(self) -> login.ServerInfo:
        """What the server says about itself."""
        return self._open_session.info

    @property
    def server(self) -> str:
        """The URL of the server we are connected to, without secrets."""
        return str(self._open_session.endpoint)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of whole protocol frames as they are."""
        session = self._open_session
        assert self._socket
        try:
            self._socket.settimeout(self.settings.timeout)
            self._socket.sendall(data)
        except TimeoutError as exc:
            # Part of a frame may be out: nothing more can be said on this connection.
            self.close()
            raise ConnectionLost(str(session.endpoint), f"it took no bytes for {self.settings.timeout:g} s") from exc
        except OSError as exc:
            self.close()
            raise ConnectionLost(str(session.endpoint), str(exc) or type(exc).__name__) from exc

    def publish(self, subject: str, data: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Publish one message without waiting for anybody."""
        self.send(self._open_session.publication(subject, data, headers, reply))

    def subscribe(self, subject: str, queue: str = "") -> int:
        """Subscribe, and return the subscription's id, which its messages carry."""
        sid = self._open_session.next_sid()
        self.send(frames.subscribe(subject, sid, queue))
        return sid

    def unsubscribe(self, sid: int, after: int | None = None) -> None:
        """End a subscription, at once or after that many messages."""
        self.send(frames.unsubscribe(sid, after))

    # -- requests --------------------------------------------------------------------------------------------------

    def inbox(self) -> str:
        """A fresh reply subject; its answer is collected with `wait`, or given up with `forget`."""
        session = self._open_session
        if not self._inbox_open:
            self.subscribe(f"{session.inbox_prefix}*")
            self._inbox_open = True
        reply = session.next_reply()
        self._expected.add(reply)
        return reply

    def forget(self, *replies: str) -> None:
        """No longer expect these answers."""
        for reply in replies:
            self._expected.discard(reply)
            self._replies.pop(reply, None)

    def wait(self, reply: str, timeout: float | None = None, what: str = "a request") -> frames.Message:
        """The answer sent to a subject of `inbox`; status messages are answers too."""
        seconds = self.settings.timeout if timeout is None else timeout
        endpoint = self._open_session.endpoint
        if reply not in self._expected:
            raise ConnectionLost(str(endpoint), "the answer was expected on an earlier connection")
        with self._io(endpoint, what, seconds):
            self._until(lambda: reply in self._replies, time.monotonic() + seconds)
        self._expected.discard(reply)
        return self._replies.pop(reply)

    def request(
        self, subject: str, data: bytes, headers: Headers | None = None, timeout: float | None = None
    ) -> frames.Message:
        """Send a request, and return its answer. Raises `Unavailable` at once when nobody listens."""
        reply = self.inbox()
        try:
            self.publish(subject, data, headers, reply)
            return checked_answer(self.wait(reply, timeout, subject), subject, self.settings)
        finally:
            self.forget(reply)

    def requester(self) -> BlockingRequester:
        """For `JetStream(connection.requester())`, whose calls `run` makes blocking."""
        return BlockingRequester(self)

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> frames.Message:
        """The next message of any subscription. `DeadlineExceeded` when none comes in time."""
        seconds = self.settings.timeout if timeout is None else timeout
        with self._io(self._open_session.endpoint, "a message", seconds):
            self._until(lambda: bool(self._waiting), time.monotonic() + seconds)
        message = self._waiting.popleft()
        self._waiting_bytes -= len(message.data) + len(message.headers)
        return message

    def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything sent so far."""
        seconds = self.settings.timeout if timeout is None else timeout
        session = self._open_session
        answered = session.ping()
        self.send(frames.PING)
        with self._io(session.endpoint, "a ping", seconds):
            self._until(lambda: session.pongs >= answered, time.monotonic() + seconds)

    def settle(self) -> None:
        """Flush, and drop every message that has come: nothing is left of subscriptions that have ended."""
        self.flush()
        self._waiting.clear()
        self._waiting_bytes = 0

    def poll(self) -> None:
        """Take what has arrived, without waiting: answers pings, and raises when the server has gone away.

        Call it before using a connection that was idle: the server closes those that leave pings unanswered.
        """
        with self._io(self._open_session.endpoint, "a look at the connection", 0), suppress(NothingYet):
            self._until(lambda: False, time.monotonic())

    # -- the raw byte stream ---------------------------------------------------------------------------------------

    def take_buffered(self) -> bytes:
        """The bytes received and not yet parsed: from here on the caller owns the stream, until `give_back`.

        The caller then reads with `recv_into`, and answers pings with `send(frames.PONG)`.
        """
        return self._open_session.parser.take_buffered()

    def recv_into(self, buffer: memoryview, timeout: float | None = None) -> int:
        """Read at least one byte into the buffer, and return how many."""
        seconds = self.settings.timeout if timeout is None else timeout
        with self._io(self._open_session.endpoint, "more bytes", seconds):
            assert self._socket
            self._socket.settimeout(seconds)
            if count := self._socket.recv_into(buffer):
                return count
            raise ConnectionResetError("closed by the server")

    def give_back(self, rest: bytes | memoryview) -> None:
        """Return what was read with `recv_into` and not used: the connection parses again from there."""
        self._open_session.parser.feed(rest)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise ConnectionLost(", ".join(map(str, login.endpoints(self.settings))), "it is closed")
        return self._session

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Take in what comes until it has brought what is waited for."""
        session = self._open_session
        while not done():
            if (event := session.next()) is not None:
                self._keep(event)
                continue
            if session.outgoing:
                self.send(session.outgoing)
                session.outgoing.clear()
            if not done():
                session.parser.feed(self._read(deadline))

    def _keep(self, event: Event) -> None:
        if isinstance(event, Denied):
            raise event.error()
        if event.subject.startswith(self._open_session.inbox_prefix):
            if event.subject in self._expected:
                self._replies[event.subject] = event
            return
        self._waiting.append(event)
        self._waiting_bytes += len(event.data) + len(event.headers)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise ConnectionLost(self.server, f"{len(self._waiting)} messages came that nobody received")

    def _read(self, deadline: float) -> bytes:
        assert self._socket
        left = deadline - time.monotonic()
        self._socket.settimeout(max(left, 0))
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise NothingYet from None
        if not data:
            raise ConnectionResetError("closed by the server")
        return data

    @contextmanager
    def _io(self, endpoint: login.Endpoint, what: str, seconds: float) -> Iterator[None]:
        """Turn the socket's errors into ours; what breaks the connection also closes it."""
        try:
            yield
        except (TimeoutError, NothingYet) as exc:
            raise DeadlineExceeded(what, seconds) from exc
        except OSError as exc:
            self.close()
            raise ConnectionLost(str(endpoint), str(exc) or type(exc).__name__) from exc
        except (ConnectionLost, ProtocolError):
            self.close()
            raise


class BlockingRequester:
    """A blocking connection in the shape that the JetStream API asks for; it blocks the loop that awaits it."""

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        return self._connection.request(subject, payload, timeout=timeout).data


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run an async call to its end from blocking code, also inside a notebook, where a loop already runs.

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
    """A read that must not wait found nothing."""


def _left(deadline: float) -> float:
    """Seconds until then, never none: 0 would mean a socket that does not wait at all."""
    return max(deadline - time.monotonic(), 0.001)
