"""HTTP connections within bounds, on uvicorn: request heads are limited in time and size, connections in number.

The gateway and the user interface serve with it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import ConfigError
from penstock.web.listener import HEAD_WITHIN, Listener, Places

PEER = "penstock.peer"
"""Where the server leaves the client's certificate in the state of a connection."""
KEEP_ALIVE = 75  # seconds; longer than the idle time of most load balancers
BACKLOG = 512
MAX_HEAD_LINES = 128
"""Header lines of a request."""
MAX_HEAD_BYTES = 32 * 1024
"""Bytes of a request's first line and headers."""


def server_context(
    cert: str, key: str | None, client_ca: str | None = None, require_certificate: bool = False
) -> ssl.SSLContext:
    """A TLS context for a server. Raises `ConfigError` when the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED if require_certificate else ssl.CERT_OPTIONAL
    except OSError as exc:
        raise ConfigError(f"the TLS files cannot be used ({exc})") from exc
    return context


class HeadTooLarge(Exception):  # never leaves this module: the parser calls us, and we call it off
    """A request has too many headers, or too large ones."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection with a bound on each request head, in time and size.

    It also leaves the client's certificate where the application finds it; uvicorn itself does not.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.on_end: Callable[[], None] = lambda: None
        self.refused: Counter[str] = Counter()
        self._opened_at = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_lines = self._head_bytes = self._unfinished_bytes = 0
        self._head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its own base has it
        super().connection_made(transport)
        # asyncio does this only for sockets that it made itself. Without it, the body of an answer waits behind its
        # head until the client's delayed acknowledgement, 40 ms later.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head_timer = self.loop.call_at(self._opened_at + HEAD_WITHIN, self._head_is_late)
        tls = transport.get_extra_info("ssl_object")
        self.app_state = {**self.app_state, PEER: tls.getpeercert() if tls else None}

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        self.on_end()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing() or (self.cycle and not self.cycle.response_complete):
            return
        # Within a head, or in the rest of a request that is answered: uvicorn takes its own timer away for every byte.
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WITHIN, self._head_is_late)
        self._unfinished_bytes += len(data) if self._in_head else 0
        if self._unfinished_bytes > MAX_HEAD_BYTES:  # the parser keeps a header to itself until it is complete
            self._head_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_lines = self._head_bytes = self._unfinished_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(0, len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(1, len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request, in Connect's words, and close."""
        if self.transport.is_closing():
            return
        code, status = "invalid_argument", b"400 Bad Request"
        if self._head_too_large:
            code, status = "resource_exhausted", b"431 Request Header Fields Too Large"
            msg = f"a request has at most {MAX_HEAD_LINES} header lines, of {MAX_HEAD_BYTES} bytes together"
        self.refused[code] += 1
        body = json.dumps({"code": code, "message": msg}).encode()
        lines = (
            b"HTTP/1.1 " + status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(b"\r\n".join((*lines, b"", body)))
        self.transport.close()

    def _count_head(self, lines: int, size: int) -> None:
        self._head_lines += lines
        self._head_bytes += size
        if self._head_lines > MAX_HEAD_LINES or self._head_bytes > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise HeadTooLarge

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.refused["too_slow"] += 1
        self.transport.abort()

    def _disarm(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer(uvicorn.Server):
    """A server of uvicorn that limits its connections, stops on request, and installs no signal handlers."""

    def __init__(self, config: uvicorn.Config, places: Places, refused: Counter[str]) -> None:
        super().__init__(config)
        self._places = places
        self._refused = refused

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, with a `Listener` in place of asyncio's own server."""
        context = self.config.ssl
        servers = [
            Listener(bound, self._connection, self._places, context, self._refused, self.config.backlog)
            for bound in sockets or []
        ]
        self.servers = cast(list[asyncio.Server], servers)  # all that is asked of them is to close
        self.started = True

    def _connection(self, on_end: Callable[[], None]) -> HttpConnection:
        connection = HttpConnection(self.config, self.server_state, self.lifespan.state)
        connection.on_end, connection.refused = on_end, self._refused
        return connection


def http_config(app: Any, context: ssl.SSLContext | None, finish: float) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        interface="asgi3",
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_level="error",  # a warning for every request that is none would be the caller's way to fill a disk
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(finish),
    )
    config.load()
    config.ssl = context
    return config


def http_server(
    config: uvicorn.Config, host: str, port: int, places: Places, refused: Counter[str]
) -> tuple[HttpServer, socket.socket]:
    return HttpServer(config, places, refused), _bound(host, port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def told_by_signals() -> asyncio.Event:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    return told


async def until_started(condition: Callable[[], bool], running: list[asyncio.Task[None]]) -> None:
    while not condition():
        for task in running:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


async def wait_for(event: asyncio.Event, within: float) -> None:
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return
