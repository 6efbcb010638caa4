"""A connection to a server, for asyncio; `wire.blocking` is the same over a link that blocks.

It never reconnects by itself: when the connection breaks, everything that waits on it raises `ConnectionLost`, and
`reconnect` opens a new one, without the old subscriptions.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from typing import Self

from penstock.errors import AccessDenied, ConnectionLost, DeadlineExceeded, PenstockError, ProtocolError, Unavailable
from penstock.settings import Settings
from penstock.wire import frames, login
from penstock.wire.aio_link import LoopLink
from penstock.wire.headers import Headers
from penstock.wire.link import BaseLink, Handler
from penstock.wire.session import Denied, checked_answer, unreachable


async def connect(
    settings: Settings, *, name: str = "penstock", echo: bool = False, shuffle: bool = False
) -> Connection:
    """Open a connection to the first server that accepts us, in order, or in random order with `shuffle`.

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
        """How often it was opened: another number means another connection, without the earlier subscriptions."""
        self._opening = asyncio.Lock()
        self._cluster: tuple[login.Endpoint, ...] = ()
        self._link: BaseLink | None = None

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Ensure an open connection: a lost one is replaced, by one task for all."""
        if not self.connected:
            async with self._opening:
                if not self.connected:
                    await self.reconnect()

    async def reconnect(self) -> None:
        """Close the connection and connect again, also to cluster members learned meanwhile."""
        await self.close()
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
                self._link = await self._open(endpoint, share)
            except (AccessDenied, ProtocolError, Unavailable) as exc:
                failures.append(exc)
                continue
            self._cluster = login.discovered(known, endpoint, self.info.connect_urls)
            self.opened += 1
            return
        raise unreachable(candidates, failures)

    def _new_link(self, endpoint: login.Endpoint) -> BaseLink:
        return LoopLink(endpoint, self.settings)

    async def _open(self, endpoint: login.Endpoint, seconds: float) -> BaseLink:
        link = self._new_link(endpoint)
        try:
            async with link.within("the login", seconds):
                await self._greet(link, endpoint)
        except DeadlineExceeded as exc:
            link.abort()
            raise DeadlineExceeded("the login", self.settings.timeout) from exc
        except (OSError, ConnectionLost) as exc:
            link.abort()
            raise login.failure(endpoint, await self._alert(link, endpoint) or exc) from exc
        except BaseException:
            link.abort()
            raise
        return link

    async def _alert(self, link: BaseLink, endpoint: login.Endpoint) -> OSError | ConnectionLost | None:
        """Return why a server that verifies clients ended a login. Its TLS alert is lost when we write at the same
        moment: so repeat the handshake, and only read."""
        if not link.verifies:
            return None
        again = self._new_link(endpoint)
        try:
            async with again.within("an alert", login.ALERT_WITHIN):
                await again.reach(None)
                await again.greeted()
                await again.encrypt(self._context())
                await again.until(lambda: False)
        except (OSError, ConnectionLost) as exc:
            return exc
        except PenstockError:
            return None
        finally:
            again.abort()
        return None

    async def _greet(self, link: BaseLink, endpoint: login.Endpoint) -> None:
        first = self._context() if self.settings.tls_first else None
        await link.reach(first)
        info = await link.greeted()
        encrypted = login.needs_tls(info, self.settings, endpoint)
        if encrypted and not first:
            await link.encrypt(self._context())
        link.begin()
        options = login.connect_options(info, self.settings, name=self._name, echo=self._echo, encrypted=encrypted)
        link.write(frames.connect(options))
        await link.pong()

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
        await link.drained("sending", self.settings.timeout)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send whole frames without waiting until the server takes them; for answers that are small and bounded."""
        self._open_link.write(data)

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Publish one message without waiting for an answer."""
        await self.send(self.publication(subject, data, headers, reply))

    def publication(self, subject: str, data: bytes, headers: Headers | None = None, reply: str = "") -> bytes:
        """Return the frames of one message, for `send`. Refuses one that is larger than the server takes."""
        return self._open_link.session.publication(subject, data, headers, reply)

    def on_denied(self, handler: Callable[[Denied], None]) -> None:
        """Call the handler when the server refuses a publish or a subscription on this connection, until it ends."""
        self._open_link.on_denied = handler

    async def subscribe(self, subject: str, queue: str = "", handler: Handler | None = None, then: bytes = b"") -> int:
        """Subscribe, and return the subscription's id. Messages go to the handler, else to `receive`.

        `then` are whole frames to send in the same write, such as a request whose answers come to the subscription.
        """
        link = self._open_link
        sid = link.session.next_sid()
        if handler:
            link.handlers[sid] = handler
        await self.send(frames.subscribe(subject, sid, queue) + then)
        return sid

    def handle(self, sid: int, handler: Handler) -> None:
        """Give the messages of a subscription to another handler from now on."""
        self._open_link.handlers[sid] = handler

    def skim_with(self, look: Callable[[bytearray, int], int]) -> None:
        """Register a function that takes whole frames off the receive buffer before the parser, until the connection
        ends.

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
        link.replies[reply] = (link.new_answer(), subject)
        return reply

    def forget(self, *replies: str) -> None:
        """No longer expect these answers."""
        for reply in replies:
            if self._link and (waiting := self._link.replies.pop(reply, None)):
                waiting[0].cancel()

    async def wait(self, reply: str, timeout: float | None = None, what: str = "a request") -> frames.Message:
        """Return the answer sent to a subject of `inbox`; status messages are answers too."""
        link = self._open_link
        if not (waiting := link.replies.get(reply)):
            raise ConnectionLost(self.server, "the answer was expected on an earlier connection")
        async with link.within(what, self.settings.timeout if timeout is None else timeout):
            try:
                return await link.answered(waiting[0])
            finally:
                link.replies.pop(reply, None)

    async def request(
        self, subject: str, data: bytes, headers: Headers | None = None, timeout: float | None = None
    ) -> frames.Message:
        """Send a request, and return its answer. Raises `Unavailable` at once when there are no responders."""
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
        """Return the next message of any subscription without handler. `DeadlineExceeded` if none arrives in time."""
        link = self._open_link
        async with link.within("a message", self.settings.timeout if timeout is None else timeout):
            return await link.next_message()

    async def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything sent so far."""
        link = self._open_link
        async with link.within("a ping", self.settings.timeout if timeout is None else timeout):
            await link.pong()

    async def until(self, done: Callable[[], bool], timeout: float, what: str = "an answer") -> None:
        """Wait until message handlers make the condition true. `DeadlineExceeded` when they do not in time."""
        link = self._open_link
        async with link.within(what, timeout):
            await link.until(done)

    def poll(self) -> None:
        """Process received bytes, without waiting: for a blocking connection, which no event loop feeds.

        Call it before using one that was idle: it answers pings, and raises when the server has gone away.
        """
        self._open_link.poll()

    @property
    def _open_link(self) -> BaseLink:
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
