"""One open connection: dispatches received frames to the handler, the answer or the queue they are for.

The two subclasses do the I/O: `aio_link.LoopLink` is fed by an event loop, `blocking.SocketLink` reads while a call
waits.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from penstock.errors import ConnectionLost, PenstockError
from penstock.settings import Settings
from penstock.wire import frames, login
from penstock.wire.session import MAX_WAITING_BYTES, Denied, Event, Session, as_checked, first_info

Handler = Callable[[frames.Message], None]
"""Called for each message of a subscription; it must not block."""


class Answer(Protocol):
    """An answer that is expected: `asyncio.Future` has this shape."""

    def done(self) -> bool: ...

    def set_result(self, message: frames.Message, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def exception(self) -> BaseException | None: ...

    def cancel(self) -> bool: ...


class BaseLink(ABC):
    """One TCP connection, from the greeting to its end."""

    def __init__(self, endpoint: login.Endpoint, settings: Settings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._parser = frames.Parser()
        self._session: Session | None = None
        self.error: PenstockError | None = None
        """The error that ended it."""
        self.inbox_open = False
        self.replies: dict[str, tuple[Answer, str]] = {}
        """Expected answers, each with the subject of its request."""
        self.handlers: dict[int, Handler] = {}
        self.look: Callable[[bytearray, int], int] | None = None
        self.on_denied: Callable[[Denied], None] | None = None
        self._messages: deque[frames.Message] = deque()
        self._message_bytes = 0

    @property
    def session(self) -> Session:
        assert self._session, "the greeting comes first"
        return self._session

    @property
    def verifies(self) -> bool:
        """Whether the server has said that it wants a certificate of ours."""
        return self._session is not None and self._session.info.tls_verify

    # -- implemented by the transport ------------------------------------------------------------------------------

    @abstractmethod
    def within(self, what: str, seconds: float) -> AbstractAsyncContextManager[None]:
        """Raise `DeadlineExceeded` when the block takes longer."""

    @abstractmethod
    async def reach(self, tls_first: ssl.SSLContext | None) -> None:
        """Connect to the first address of the host that answers."""

    @abstractmethod
    async def greeted(self) -> login.ServerInfo:
        """The server's greeting."""

    @abstractmethod
    async def encrypt(self, context: ssl.SSLContext) -> None:
        """Go on with TLS. Raises `ProtocolError` when more than the greeting came before it."""

    @abstractmethod
    def begin(self) -> None:
        """Parse what arrived after the greeting, and everything from now on."""

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send whole frames."""

    @abstractmethod
    async def drained(self, what: str, seconds: float) -> None:
        """Wait until the server takes more."""

    @abstractmethod
    async def until(self, done: Callable[[], bool]) -> None:
        """Process received frames until the condition is true; raises the error that ends the link."""

    @abstractmethod
    async def answered(self, answer: Answer) -> frames.Message:
        """Return the answer when it has arrived."""

    @abstractmethod
    def poll(self) -> None:
        """Take what has arrived, without waiting."""

    @abstractmethod
    def new_answer(self) -> Answer: ...

    @abstractmethod
    async def close(self, timeout: float) -> None:
        """End it, after what was written is sent."""

    @abstractmethod
    def abort(self) -> None:
        """End it at once."""

    # -- shared by both transports ---------------------------------------------------------------------------------

    async def pong(self) -> None:
        """Send a ping and wait for its answer."""
        answered = self.session.ping()
        self.write(frames.PING)
        await self.until(lambda: self.session.pongs >= answered)

    async def next_message(self) -> frames.Message:
        await self.until(lambda: bool(self._messages))
        message = self._messages.popleft()
        self._message_bytes -= len(message.data) + len(message.headers)
        return message

    def drop_messages(self) -> None:
        self._messages.clear()
        self._message_bytes = 0

    def _greeting(self) -> login.ServerInfo | None:
        """The greeting, once it is complete: with it the session begins."""
        if (info := first_info(self._parser)) is not None:
            self._session = Session(self._endpoint, info, self._parser, self._settings)
        return info

    def _take(self, event: Event) -> None:
        if isinstance(event, Denied):
            self._denied(event)
        elif handler := self.handlers.get(event.sid):
            handler(event)
        elif event.subject.startswith(self.session.inbox_prefix):
            if (waiting := self.replies.get(event.subject)) and not waiting[0].done():
                waiting[0].set_result(event)
        else:
            self._messages.append(event)
            self._message_bytes += len(event.data) + len(event.headers)
            if self._message_bytes > MAX_WAITING_BYTES:
                reason = f"{len(self._messages)} messages came that nobody received"
                raise ConnectionLost(str(self._endpoint), reason)

    def _denied(self, denied: Denied) -> None:
        """Pass a refusal to `on_denied`, and raise it in the calls that wait for it."""
        if self.on_denied:
            self.on_denied(denied)
        no_answers = denied.subject.startswith(self.session.inbox_prefix)
        if no_answers:
            self.inbox_open = False
        domain = self._settings.domain
        concerned = [
            answer
            for answer, subject in self.replies.values()
            if no_answers or denied.subject in (subject, as_checked(subject, domain))
        ]
        for answer in concerned:
            _settle(answer, denied.error())
        if not (concerned or self.on_denied):
            self._denied_unasked(denied)

    @abstractmethod
    def _denied_unasked(self, denied: Denied) -> None:
        """Handle a refusal that no call waits for, such as of an acknowledgement or a subscription."""

    def _flush_session(self) -> None:
        """Send the session's outgoing bytes: answers to pings."""
        if self.session.outgoing:
            self.write(bytes(self.session.outgoing))
            self.session.outgoing.clear()

    def fail(self, error: PenstockError) -> None:
        """End the link, and raise the error in every waiting call."""
        self.error = self.error or error
        for answer, _ in self.replies.values():
            _settle(answer, self.error)


def _settle(answer: Answer, error: PenstockError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # marks it as retrieved: no task may wait for it any more
