"""An asyncio connection with the same surface as the blocking one.

There is no reconnecting behind the caller's back: when the connection breaks, everything that waits on it raises
`ConnectionLost`, and `reconnect` opens a new one, without the old subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Self, cast

from penstock.errors import AccessDenied, ConnectionLost, DeadlineExceeded, PenstockError, ProtocolError, Unavailable
from penstock.settings import Settings
from penstock.wire import frames, login, resolve
from penstock.wire.headers import Headers
from penstock.wire.session import (
    MAX_WAITING_BYTES,
    Denied,
    Session,
    as_checked,
    check_nothing_before_tls,
    checked_answer,
    first_info,
    unreachable,
)

Handler = Callable[[frames.Message], None]
"""Called in the event loop for each message of a subscription; it must not wait."""
READ_BYTES = 256 * 1024
"""As much as one read may bring. Pages of it that were never needed take no memory."""
KIND_TOKENS = 4
"""Refused subjects with so many equal tokens at their beginning are logged once."""
MAX_LOGGED = 100
"""Refusals that one connection logs."""

log = logging.getLogger(__name__)


async def connect(
    settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
) -> Connection:
    """Open a connection to the first server that takes us, in order, or in random order with `shuffle`.

    Raises `BrokerUnreachable` when none answers within the settings' timeout, `AccessDenied` when one refuses the
    login. Without `echo` the server does not send us what we publish ourselves.
    """
    connection = Connection(settings, name=name, echo=echo, shuffle=shuffle)
    await connection.reconnect()
    return connection


class Connection:
    """One connection; any number of tasks of one event loop may use it."""

    def __init__(
        self, settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
    ) -> None:
        self.settings = settings
        self._name = name
        self._echo = echo
        self._shuffle = shuffle
        self.opened = 0
        """How often it was opened: another number is another connection, without the subscriptions of the last."""
        self._opening = asyncio.Lock()
        self._cluster: tuple[login.Endpoint, ...] = ()
        self._link: _Link | None = None

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Have an open connection: one that was lost is replaced, by one task for all."""
        if not self.connected:
            async with self._opening:
                if not self.connected:
                    await self.reconnect()

    async def reconnect(self) -> None:
        """Close what is open and connect anew, also to cluster members learned meanwhile."""
        await self.close()
        known = login.endpoints(self.settings)
        candidates = [*known, *self._cluster]
        if self._shuffle:
            random.shuffle(candidates)
        failures: list[PenstockError] = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.timeout
        for index, endpoint in enumerate(candidates):
            # Each gets its share of the time left, so that one that never answers does not use it all.
            share = (deadline - loop.time()) / (len(candidates) - index)
            try:
                self._link = await self._open(endpoint, share)
            except (AccessDenied, ProtocolError, Unavailable) as exc:
                failures.append(exc)
                continue
            self._cluster = login.discovered(known, endpoint, self.info.connect_urls)
            self.opened += 1
            return
        raise unreachable(candidates, failures)

    async def _open(self, endpoint: login.Endpoint, seconds: float) -> _Link:
        link = _Link(endpoint, self.settings)
        try:
            async with asyncio.timeout(seconds):
                await self._greet(link, endpoint)
        except TimeoutError as exc:
            link.abort()
            raise DeadlineExceeded("the login", self.settings.timeout) from exc
        except (OSError, ConnectionLost) as exc:
            link.abort()
            raise login.failure(endpoint, await self._alert(link, endpoint) or exc) from exc
        except BaseException:
            link.abort()
            raise
        return link

    async def _alert(self, link: _Link, endpoint: login.Endpoint) -> OSError | ConnectionLost | None:
        """Why a server that verifies clients ended a login. Its alert is lost when we write at the same moment: so
        shake hands once more, and only listen."""
        if not link.verifies:
            return None
        again = _Link(endpoint, self.settings)
        try:
            async with asyncio.timeout(login.ALERT_WITHIN):
                await self._reach(again, endpoint, None)
                await again.greeting
                await again.encrypt(self._context())
                await again.ended()
        except TimeoutError:
            return None
        except (OSError, ConnectionLost) as exc:
            return exc
        finally:
            again.abort()
        return None

    async def _greet(self, link: _Link, endpoint: login.Endpoint) -> None:
        first = self._context() if self.settings.tls_first else None
        await self._reach(link, endpoint, first)
        info = await link.greeting
        encrypted = login.needs_tls(info, self.settings, endpoint)
        if encrypted and not first:
            await link.encrypt(self._context())
        link.begin()
        options = login.connect_options(info, self.settings, name=self._name, echo=self._echo, encrypted=encrypted)
        link.write(frames.connect(options))
        await link.pong()

    async def _reach(self, link: _Link, endpoint: login.Endpoint, first: ssl.SSLContext | None) -> None:
        """Connect to the first address of the host that answers."""
        loop = asyncio.get_running_loop()
        name = endpoint.tls_name if first else None
        *others, last = await resolve.hosts_async(endpoint.host, endpoint.port)
        for address in others:
            with suppress(OSError):
                await loop.create_connection(lambda: link, address, endpoint.port, ssl=first, server_hostname=name)
                return
        await loop.create_connection(lambda: link, last, endpoint.port, ssl=first, server_hostname=name)

    def _context(self) -> ssl.SSLContext:
        return self.settings.ssl_context() or ssl.create_default_context()

    async def close(self) -> None:
        """Close the connection, after sending what is buffered. What was not received is dropped."""
        link, self._link = self._link, None
        if link:
            await link.close(self.settings.timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.error is None

    @property
    def info(self) -> login.ServerInfo:
        """What the server says about itself."""
        return self._open_link.session.info

    @property
    def server(self) -> str:
        """The URL of the server we are connected to, without secrets."""
        return str(self._open_link.session.endpoint)

    # -- sending ---------------------------------------------------------------------------------------------------

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of whole protocol frames as they are; waits while the server does not take more."""
        link = self._open_link
        link.write(data)
        async with _deadline(f"sending {len(data)} bytes", self.settings.timeout):
            await link.drained()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send whole frames without waiting until the server takes them; for answers that are small and bounded."""
        self._open_link.write(data)

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Publish one message without waiting for anybody."""
        await self.send(self._open_link.session.publication(subject, data, headers, reply))

    def on_denied(self, handler: Callable[[Denied], None]) -> None:
        """Call the handler when the server refuses a publish or a subscription on this connection, until it ends."""
        self._open_link.on_denied = handler

    async def subscribe(self, subject: str, queue: str = "", handler: Handler | None = None) -> int:
        """Subscribe, and return the subscription's id. Messages go to the handler, else to `receive`."""
        link = self._open_link
        sid = link.session.next_sid()
        if handler:
            link.handlers[sid] = handler
        await self.send(frames.subscribe(subject, sid, queue))
        return sid

    def skim_with(self, look: Callable[[bytearray, int], int]) -> None:
        """Let somebody take whole frames off what was received before anybody else sees them, until this one ends.

        `look` gets the buffer and where its unread bytes begin, and returns where they begin afterwards. For
        subscriptions with so many messages that taking them one by one costs too much.
        """
        self._open_link.look = look

    async def unsubscribe(self, sid: int, after: int | None = None) -> None:
        """End a subscription, at once or after that many messages."""
        if after is None:
            self._open_link.handlers.pop(sid, None)
        await self.send(frames.unsubscribe(sid, after))

    # -- requests --------------------------------------------------------------------------------------------------

    def inbox(self, subject: str = "") -> str:
        """A fresh reply subject; its answer is collected with `wait`, or given up with `forget`.

        `subject` is where the request goes: when the server forbids to publish there, `wait` raises `AccessDenied`.
        """
        link = self._open_link
        session = link.session
        if not link.inbox_open:
            link.write(frames.subscribe(f"{session.inbox_prefix}*", session.next_sid()))
            link.inbox_open = True
        reply = session.next_reply()
        link.replies[reply] = (asyncio.get_running_loop().create_future(), subject)
        return reply

    def forget(self, *replies: str) -> None:
        """No longer expect these answers."""
        for reply in replies:
            if self._link and (waiting := self._link.replies.pop(reply, None)):
                waiting[0].cancel()

    async def wait(self, reply: str, timeout: float | None = None, what: str = "a request") -> frames.Message:
        """The answer sent to a subject of `inbox`; status messages are answers too."""
        link = self._open_link
        if not (waiting := link.replies.get(reply)):
            raise ConnectionLost(self.server, "the answer was expected on an earlier connection")
        async with _deadline(what, self.settings.timeout if timeout is None else timeout):
            try:
                return await waiting[0]
            finally:
                link.replies.pop(reply, None)

    async def request(
        self, subject: str, data: bytes, headers: Headers | None = None, timeout: float | None = None
    ) -> frames.Message:
        """Send a request, and return its answer. Raises `Unavailable` at once when nobody listens."""
        reply = self.inbox(subject)
        try:
            await self.publish(subject, data, headers, reply)
            return checked_answer(await self.wait(reply, timeout, subject), subject, self.settings)
        finally:
            self.forget(reply)

    def requester(self) -> AsyncRequester:
        """For `JetStream(connection.requester())`."""
        return AsyncRequester(self)

    # -- receiving -------------------------------------------------------------------------------------------------

    async def receive(self, timeout: float | None = None) -> frames.Message:
        """The next message of any subscription without a handler. `DeadlineExceeded` when none comes in time."""
        link = self._open_link
        async with _deadline("a message", self.settings.timeout if timeout is None else timeout):
            return await link.next_message()

    async def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything sent so far."""
        link = self._open_link
        async with _deadline("a ping", self.settings.timeout if timeout is None else timeout):
            await link.pong()

    @property
    def _open_link(self) -> _Link:
        if self._link is None:
            raise ConnectionLost(", ".join(map(str, login.endpoints(self.settings))), "it is closed")
        if self._link.error:
            raise self._link.error
        return self._link


class AsyncRequester:
    """An asyncio connection in the shape that the JetStream API asks for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        return (await self._connection.request(subject, payload, timeout=timeout)).data


class _Link(asyncio.BufferedProtocol):
    """One TCP connection's life: the session fed by the event loop, and what waits for its events.

    It brings its own buffer to read into: a plain protocol costs a new one, of 256 KiB, for every read.
    """

    def __init__(self, endpoint: login.Endpoint, settings: Settings) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._settings = settings
        self._parser = frames.Parser()
        self._received = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._begun = False
        """Whether more than the greeting may be looked at: not before it is clear whether to encrypt."""
        self.greeting: asyncio.Future[login.ServerInfo] = loop.create_future()
        self.error: PenstockError | None = None
        self.inbox_open = False
        self.replies: dict[str, tuple[asyncio.Future[frames.Message], str]] = {}
        self.handlers: dict[int, Handler] = {}
        self.look: Callable[[bytearray, int], int] | None = None
        self.on_denied: Callable[[Denied], None] | None = None
        self._logged: set[str] = set()
        self._messages: deque[frames.Message] = deque()
        self._message_bytes = 0
        self._changed = asyncio.Event()
        """Set when a message, a pong or the end came."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    @property
    def session(self) -> Session:
        assert self._session, "the greeting comes first"
        return self._session

    @property
    def verifies(self) -> bool:
        """Whether the server has said that it wants a certificate of ours."""
        return self._session is not None and self._session.info.tls_verify

    # -- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other event loops have transports of their own
        self._transport.set_write_buffer_limits(high=1024 * 1024)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.feed(self._received[:nbytes])
        try:
            self._take()
        except PenstockError as exc:
            self._fail(exc)
            self.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        error = ConnectionLost(str(self._endpoint), str(exc or "closed by the server"))
        error.__cause__ = exc
        self._fail(error)
        self._gone.set()

    # -- what came ---------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self._session is None:
            if (info := first_info(self._parser)) is None:
                return
            self._session = Session(self._endpoint, info, self._parser, self._settings)
            if not self.greeting.done():  # who waited for it may have been cancelled
                self.greeting.set_result(info)
        if not self._begun:
            return
        session = self._session
        if self.look:
            self._parser.skim(self.look)
        while (event := session.next()) is not None:
            if isinstance(event, Denied):
                self._denied(event)
            else:
                self._message(event)
            if self.look:
                self._parser.skim(self.look)
        if session.outgoing:
            self.write(bytes(session.outgoing))
            session.outgoing.clear()
        self._changed.set()

    def _message(self, message: frames.Message) -> None:
        if handler := self.handlers.get(message.sid):
            handler(message)
        elif message.subject.startswith(self.session.inbox_prefix):
            if (waiting := self.replies.get(message.subject)) and not waiting[0].done():
                waiting[0].set_result(message)
        else:
            self._messages.append(message)
            self._message_bytes += len(message.data) + len(message.headers)
            if self._message_bytes > MAX_WAITING_BYTES:
                reason = f"{len(self._messages)} messages came that nobody received"
                raise ConnectionLost(str(self._endpoint), reason)

    def _denied(self, denied: Denied) -> None:
        """Tell who waits for it. What nobody waits for, such as an acknowledgement, is logged."""
        if self.on_denied:
            self.on_denied(denied)
        no_answers = denied.subject.startswith(self.session.inbox_prefix)
        if no_answers:
            self.inbox_open = False
        domain = self._settings.domain
        concerned = [
            future
            for future, subject in self.replies.values()
            if no_answers or denied.subject in (subject, as_checked(subject, domain))
        ]
        for future in concerned:
            _settle(future, denied.error())
        if not (concerned or self.on_denied):
            self._log_denied(denied)

    def _log_denied(self, denied: Denied) -> None:
        """Once for subjects that begin alike: every acknowledgement has one of its own."""
        kind = ".".join(denied.subject.split(".")[:KIND_TOKENS])
        if kind not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(kind)
            log.warning("%s", denied.error(), extra={"action": "denied"})

    def _fail(self, error: PenstockError) -> None:
        self.error = self.error or error
        if not self.greeting.done():
            self.greeting.set_exception(self.error)
        for future, _ in self.replies.values():
            _settle(future, self.error)
        self._changed.set()
        self._writable.set()

    # -- what goes ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.error:
            raise self.error
        assert self._transport
        self._transport.write(data)

    async def drained(self) -> None:
        await self._writable.wait()
        if self.error:
            raise self.error

    def begin(self) -> None:
        """Look at what came after the greeting, and from now on at everything that comes."""
        self._begun = True
        self._take()

    async def encrypt(self, context: ssl.SSLContext) -> None:
        assert self._transport
        check_nothing_before_tls(self._parser)
        loop = asyncio.get_running_loop()
        # A paused reader would miss what comes right after the handshake; the old transport must not be used again.
        transport = await loop.start_tls(self._transport, self, context, server_hostname=self._endpoint.tls_name)
        assert transport
        self.connection_made(transport)

    async def pong(self) -> None:
        """Send a ping and wait for its answer."""
        answered = self.session.ping()
        self.write(frames.PING)
        await self._until(lambda: self.session.pongs >= answered)

    async def ended(self) -> None:
        """Wait for the end; raises it."""
        await self._until(lambda: False)

    async def next_message(self) -> frames.Message:
        await self._until(lambda: bool(self._messages))
        message = self._messages.popleft()
        self._message_bytes -= len(message.data) + len(message.headers)
        return message

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.error:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    async def close(self, timeout: float) -> None:
        self._fail(ConnectionLost(str(self._endpoint), "it was closed here"))
        if self._transport:
            self._transport.close()
            try:
                async with asyncio.timeout(timeout):  # Python 3.11's `wait_for` swallows cancellations
                    await self._gone.wait()
            except TimeoutError:
                self.abort()

    def abort(self) -> None:
        self.greeting.cancel()  # nobody waits for it any more: an error set later would be complained about
        if self._transport:
            self._transport.abort()


def _settle(future: asyncio.Future[frames.Message], error: PenstockError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # counts as seen: nobody may be waiting for it any more


@asynccontextmanager
async def _deadline(what: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        raise DeadlineExceeded(what, seconds) from exc
