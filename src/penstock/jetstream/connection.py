"""A connection that is reopened when lost, and the JetStream API on it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self

from penstock.errors import AccessDenied, ApiError, BrokerUnreachable, ProtocolError
from penstock.jetstream.api import JetStream
from penstock.jetstream.codes import WRONG_LAST_SEQUENCE, api_error
from penstock.jetstream.model import Json
from penstock.retry import is_away, retrying
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.frames import Message
from penstock.wire.headers import Headers
from penstock.wire.session import NO_RESPONDERS, Denied

PATIENCE = 1.0
"""Seconds that `connect` retries a server that is down, as during a restart."""


class WrongRevision(ApiError):
    """The last message of a subject, or of a stream, is not the expected one: another publisher was first.

    `stream` is the stream that refused the message, where the server names it.
    """

    def __init__(self, what: str, code: int, err_code: int, description: str, stream: str = "") -> None:
        super().__init__(what, code, err_code, description)
        self.args = (what, code, err_code, description, stream)
        self.stream = stream


class NoStream(ApiError):
    """No stream takes a subject."""


class Broker:
    """One connection for any number of tasks; the next call reopens it when it was lost.

    Nothing is sent while the connection is down: `BrokerUnreachable` means that nothing happened. After
    `ConnectionLost` and `DeadlineExceeded` a request may or may not have been carried out.
    """

    def __init__(self, settings: Settings, name: str = "penstock", connection: aio.Connection | None = None) -> None:
        """Uses a shared `connection`, or opens its own."""
        self.settings = settings
        self.connection = connection or aio.Connection(settings, name=name)
        self.jetstream = JetStream(self.request, settings.domain, settings.timeout)
        self.server_version = ""
        """The version of the server that we are, or were last, connected to, such as `2.15.1`."""
        self._opened = 0
        self.opened_at = 0.0
        """When the connection was opened, on the monotonic clock: earlier actions of the server came before then."""
        self.denied: AccessDenied | None = None
        """The last publish or subscription that the server refused on this connection."""

    async def ready(self) -> aio.Connection:
        """Return the open connection. Raises `BrokerUnreachable` when no server answers, `AccessDenied` if refused."""
        await self.connection.ready()
        if self.connection.opened != self._opened:
            self._opened, self.opened_at = self.connection.opened, time.monotonic()
            self.server_version, self.denied = self.connection.info.version, None
            self._opened_anew()
        return self.connection

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """Send one request, and return the body of its answer. `timeout` includes reconnecting."""
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                connection = await self.ready()
        except TimeoutError as exc:
            raise BrokerUnreachable(self.settings.servers, f"no connection within {timeout:g} s") from exc
        left = max(deadline - time.monotonic(), 0.001)
        return (await connection.request(subject, payload, timeout=left)).data

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, what: str = "") -> Json:
        """Publish one message, and return the answer of the stream that has stored it.

        `what` names it in errors. Raises `WrongRevision` when the last message is not the expected one, `NoStream` when
        no stream stores the subject.
        """
        what = what or f"publish to {subject!r}"
        connection = await self.ready()
        reply = connection.inbox(subject)
        try:
            await connection.publish(subject, data, headers, reply)
            answer = await connection.wait(reply, what=what)
        finally:
            connection.forget(reply)
        return publish_answer(what, answer)

    async def close(self) -> None:
        await self.connection.close()

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _opened_anew(self) -> None:
        self.connection.on_denied(self._deny)

    def _deny(self, denied: Denied) -> None:
        self.denied = denied.error()


def publish_answer(what: str, answer: Message) -> Json:
    """Return the answer of a stream to a publish, as `stored` does. Raises `NoStream` when no stream has answered."""
    if answer.status and answer.status[0] == NO_RESPONDERS:
        raise NoStream(what, NO_RESPONDERS, 0, "no stream takes this subject")
    return stored(what, answer.data)


def stored(what: str, raw: bytes) -> Json:
    """Parse the answer of a stream to a publish. Raises the server's error: `WrongRevision` for another last sequence.

    `what` describes the publish in error messages.
    """
    try:
        answer: Json = json.loads(raw)
        error = answer.get("error")
    except (ValueError, RecursionError, AttributeError) as exc:
        raise ProtocolError(f"the server sent an invalid answer to a publish: {raw[:200]!r}") from exc
    if not error:
        return answer
    refusal = api_error(what, error)
    if refusal.err_code not in WRONG_LAST_SEQUENCE:
        raise refusal
    raise WrongRevision(refusal.what, refusal.code, refusal.err_code, refusal.description, answer.get("stream", ""))


@asynccontextmanager
async def connect(settings: Settings, name: str = "penstock") -> AsyncIterator[Broker]:
    """Open a connection for the duration of the block.

    Raises `BrokerUnreachable` when no server answers within the settings' timeout, and `AccessDenied` at once when one
    refuses the login or the TLS handshake fails. A server that is down is retried for a second.
    """
    broker = Broker(settings, name)
    await retrying(broker.ready, PATIENCE)
    try:
        yield broker
    finally:
        await broker.close()


async def reconnect(
    connection: aio.Connection,
    within: float | None,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Reopen a connection, and prepare it with `begin`; retries while no server is available, for `within` seconds.

    None: retries without limit. Raises permanent errors, such as `AccessDenied`, at once.
    """

    async def opened() -> None:
        await connection.reconnect()
        if begin:
            await begin()

    await retrying(opened, within, retry_on=is_away)
