"""One connection that is opened again when it broke, and what named readers and writers ask over it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from penstock.broker.codes import WRONG_LAST_SEQUENCE, api_error
from penstock.broker.jetstream import JetStream
from penstock.broker.model import Json
from penstock.errors import AccessDenied, ApiError, ProtocolError
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.headers import Headers
from penstock.wire.session import NO_RESPONDERS


class WrongRevision(ApiError):
    """A subject of `stream` has another last message than the one that was expected."""

    def __init__(self, what: str, code: int, err_code: int, description: str, stream: str) -> None:
        super().__init__(what, code, err_code, description)
        self.args = (what, code, err_code, description, stream)
        self.stream = stream


class NoStream(ApiError):
    """No stream takes a subject."""


class Link:
    """A connection for any number of tasks; found broken, the next call opens it again."""

    def __init__(self, settings: Settings, name: str = "penstock facts") -> None:
        self.settings = settings
        self.connection = aio.Connection(settings, name=name)
        self.jetstream = JetStream(self._request, settings.domain, settings.timeout)
        self._opening = asyncio.Lock()
        self.denied: AccessDenied | None = None
        """The last thing that the server would not let us do on this connection."""

    async def ready(self) -> aio.Connection:
        """The connection, open."""
        if self.connection.connected:
            return self.connection
        async with self._opening:
            if not self.connection.connected:
                await self.connection.reconnect()
                self.denied = None
                self.connection.on_denied(self._deny)
        return self.connection

    async def close(self) -> None:
        await self.connection.close()

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> Json:
        """Store one message, and return the stream's answer.

        `subject` is prefixed for the domain where that matters. Raises `WrongRevision` when the subject's last message
        is not the expected one, `NoStream` when nobody takes it.
        """
        connection = await self.ready()
        reply = connection.inbox(subject)
        try:
            await connection.publish(subject, data, headers, reply)
            answer = await connection.wait(reply, what=f"publishing to {subject!r}")
        finally:
            connection.forget(reply)
        if answer.status and answer.status[0] == NO_RESPONDERS:
            raise NoStream(f"publish to {subject!r}", NO_RESPONDERS, 0, "no stream takes this subject")
        return _accepted(subject, answer.data)

    def _deny(self, denied: Any) -> None:
        self.denied = denied.error()

    async def _request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        connection = await self.ready()
        return (await connection.request(subject, payload, timeout=timeout)).data


def _accepted(subject: str, raw: bytes) -> Json:
    try:
        answer: Json = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"an answer to a publish that makes no sense: {raw[:200]!r}") from exc
    if error := answer.get("error"):
        refusal = api_error(f"publish to {subject!r}", error)
        if refusal.err_code not in WRONG_LAST_SEQUENCE:
            raise refusal
        said = refusal.description
        raise WrongRevision(refusal.what, refusal.code, refusal.err_code, said, answer.get("stream", ""))
    return answer
