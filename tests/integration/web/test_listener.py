"""The gateway's listener when the system does not let it accept."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.testing import eventually_async
from penstock.web import listener
from penstock.web.listener import Listener, Places


class Greets(asyncio.Protocol):
    """Says hello, and tells when its connection has ended."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


async def test_failures_to_accept_are_one_warning_and_it_goes_on_after_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio's own server logs a traceback for each: 30 MB in 10 s when descriptors ran out."""
    loop, failures = asyncio.get_running_loop(), iter(range(500))
    real = loop.sock_accept

    async def failing(bound: socket.socket) -> tuple[socket.socket, object]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(bound)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr(listener, "ACCEPT_PAUSE", 0)
    places = Places(1, 1)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        listening = Listener(bound, Greets, places, None, Counter(), 16)
        for _ in range(3):  # one after the other: each gives its place back
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection(*bound.getsockname())
                assert await reader.read() == b"hello"
                writer.close()
                await writer.wait_closed()
            await eventually_async(lambda: not places.taken, what="the place given back")
        listening.close()
        await listening.wait_closed()
    assert [record.getMessage() for record in caplog.records if record.name == "penstock.gateway"] == [
        "a connection could not be accepted (Too many open files); trying again"
    ]


async def test_a_connection_beyond_its_place_is_closed_at_once_and_counted() -> None:
    refused = Counter[str]()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        listening = Listener(bound, Greets, Places(0, 0), None, refused, 16)
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        listening.close()
        await listening.wait_closed()
    assert refused == {"connections": 1}
