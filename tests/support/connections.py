"""The two connections with one surface, so that one suite runs on both.

`ThreadedConnection` is the blocking connection for `await`: each call that may wait runs in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from penstock.settings import Settings
from penstock.wire import aio, blocking, frames, login
from penstock.wire.headers import Headers

HALVES = ("asyncio", "blocking")
"""What fixtures are parametrized with, and test ids show."""
HalfName = Literal["asyncio", "blocking"]


class ThreadedConnection:
    """A blocking connection with the calls of `aio.Connection`."""

    def __init__(self, inner: blocking.BlockingConnection) -> None:
        self.inner = inner

    async def reconnect(self) -> None:
        await asyncio.to_thread(self.inner.reconnect)

    async def close(self) -> None:
        await asyncio.to_thread(self.inner.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def settings(self) -> Settings:
        return self.inner.settings

    @property
    def connected(self) -> bool:
        return self.inner.connected

    @property
    def opened(self) -> int:
        return self.inner.opened

    @property
    def info(self) -> login.ServerInfo:
        return self.inner.info

    @property
    def server(self) -> str:
        return self.inner.server

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self.inner.send, data)

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, reply: str = "") -> None:
        await asyncio.to_thread(self.inner.publish, subject, data, headers, reply)

    async def subscribe(self, subject: str, queue: str = "") -> int:
        return await asyncio.to_thread(self.inner.subscribe, subject, queue)

    async def unsubscribe(self, sid: int, after: int | None = None) -> None:
        await asyncio.to_thread(self.inner.unsubscribe, sid, after)

    def inbox(self) -> str:
        return self.inner.inbox()

    def forget(self, *replies: str) -> None:
        self.inner.forget(*replies)

    async def wait(self, reply: str, timeout: float | None = None, what: str = "a request") -> frames.Message:
        return await asyncio.to_thread(self.inner.wait, reply, timeout, what)

    async def request(
        self, subject: str, data: bytes, headers: Headers | None = None, timeout: float | None = None
    ) -> frames.Message:
        return await asyncio.to_thread(self.inner.request, subject, data, headers, timeout)

    def requester(self) -> ThreadedRequester:
        return ThreadedRequester(self)

    async def receive(self, timeout: float | None = None) -> frames.Message:
        return await asyncio.to_thread(self.inner.receive, timeout)

    async def flush(self, timeout: float | None = None) -> None:
        await asyncio.to_thread(self.inner.flush, timeout)


class ThreadedRequester:
    """`blocking.Requester`, in a thread."""

    def __init__(self, connection: ThreadedConnection) -> None:
        self._connection = connection

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        return (await self._connection.request(subject, payload, timeout=timeout)).data


AnyConnection = aio.Connection | ThreadedConnection


class Connect(Protocol):
    """`connect` of either half."""

    def __call__(self, settings: Settings, *, echo: bool = False) -> Awaitable[AnyConnection]: ...


async def connect_asyncio(settings: Settings, *, echo: bool = False) -> AnyConnection:
    return await aio.connect(settings, echo=echo)


async def connect_blocking(settings: Settings, *, echo: bool = False) -> AnyConnection:
    return ThreadedConnection(await asyncio.to_thread(lambda: blocking.connect(settings, echo=echo)))


@dataclass(frozen=True, slots=True)
class ConnectionHalf:
    """One of the two implementations."""

    name: HalfName
    connect: Connect


CONNECTION_HALVES = {
    "asyncio": ConnectionHalf("asyncio", connect_asyncio),
    "blocking": ConnectionHalf("blocking", connect_blocking),
}
