"""The gateway's process: listeners, TLS, and an end that lets calls finish."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import ConfigError
from penstock.facts import Facts
from penstock.gateway.app import PEER, Gateway
from penstock.gateway.listener import (
    ADMIN_CONNECTIONS,
    HEAD_WITHIN,
    Listener,
    Places,
    places_within_descriptors,
)
from penstock.settings import Settings
from penstock.topology.model import GatewaySpec

KEEP_ALIVE = 75  # seconds; longer than the idle time of most load balancers
BACKLOG = 512
MAX_HEAD_LINES = 128
"""Header lines of a request."""
MAX_HEAD_BYTES = 32 * 1024
"""Bytes of a request's first line and headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where and how the gateway listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """Where health, readiness and metrics are; None: nowhere."""
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    """CA of the callers' certificates; without it only tokens prove who calls."""
    require_certificate: bool = False
    """End a connection without a certificate in the handshake, even where tokens would do."""
    drain: float = 5.0
    """Seconds between "not ready" and the end of listening: for load balancers to notice."""
    finish: float = 35.0
    """Seconds that calls under way may take to end after that."""

    def context(self) -> ssl.SSLContext | None:
        """The TLS context, or None for plain HTTP."""
        if not self.cert:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password="")
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED if self.require_certificate else ssl.CERT_OPTIONAL
        except OSError as exc:
            raise ConfigError(f"the TLS files of the gateway cannot be used ({exc})") from exc
        return context


class HeadTooLarge(Exception):  # never leaves this module: the parser calls us, and we call it off
    """A request has too many headers, or too large ones."""


class Connection(HttpToolsProtocol):
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


class _Server(uvicorn.Server):
    """Accepts within limits, ends when told to, and leaves signals to us."""

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

    def _connection(self, on_end: Callable[[], None]) -> Connection:
        connection = Connection(self.config, self.server_state, self.lifespan.state)
        connection.on_end, connection.refused = on_end, self._refused
        return connection


async def serve(
    settings: Settings, spec: GatewaySpec, listen: Listen, on_ready: Callable[[str, str | None], None]
) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    In order: stop being ready and go on for `drain` seconds; stop listening; let calls under way finish. A second
    signal skips the wait. `on_ready` hears the URLs for callers and for operators.
    """
    facts = Facts(settings, "penstock gateway")
    gateway = Gateway(facts, spec)
    context = listen.context()
    limits, refused = spec.limits, gateway.metrics.refused
    places = places_within_descriptors(limits.connections, limits.connections_per_address)
    calls = _server(_config(gateway, listen, context), listen.host, listen.port, places, refused)
    servers = [calls]
    if listen.admin_port is not None:
        own = Places(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS)
        config = _config(gateway.admin, listen, None)
        servers.append(_server(config, listen.admin_host, listen.admin_port, own, Counter()))
    stop = _on_signals()
    running = [asyncio.create_task(server.serve([bound])) for server, bound in servers]
    try:
        await _until(lambda: all(server.started for server, _ in servers), running)
        scheme = "https" if context else "http"
        admin = f"http://{_address(servers[1][1])}" if len(servers) > 1 else None
        on_ready(f"{scheme}://{_address(calls[1])}", admin)
        await stop.wait()
        gateway.draining = True
        stop.clear()
        await _wait(stop, listen.drain)
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        await facts.close()


def _config(app: Any, listen: Listen, context: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=Connection,
        interface="asgi3",
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_level="error",  # a warning for every request that is none would be the caller's way to fill a disk
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(listen.finish),
    )
    config.load()
    config.ssl = context
    return config


def _server(
    config: uvicorn.Config, host: str, port: int, places: Places, refused: Counter[str]
) -> tuple[_Server, socket.socket]:
    return _Server(config, places, refused), _bound(host, port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise ConfigError(f"the gateway cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _on_signals() -> asyncio.Event:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    return told


async def _until(condition: Callable[[], bool], running: list[asyncio.Task[None]]) -> None:
    while not condition():
        for task in running:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


async def _wait(event: asyncio.Event, within: float) -> None:
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return
