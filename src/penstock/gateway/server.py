"""The gateway's process: listeners, TLS, and an end that lets calls finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import ConfigError
from penstock.facts import Facts
from penstock.gateway.app import PEER, Gateway
from penstock.settings import Settings
from penstock.topology.model import GatewaySpec

KEEP_ALIVE = 75  # seconds; longer than the idle time of most load balancers
BACKLOG = 512


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


class Connection(HttpToolsProtocol):
    """Leaves the client's certificate where the application finds it; uvicorn itself does not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its own base has it
        super().connection_made(transport)
        # asyncio does this only for sockets that it made itself. Without it, the body of an answer waits behind its
        # head until the client's delayed acknowledgement, 40 ms later.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = transport.get_extra_info("ssl_object")
        self.app_state = {**self.app_state, PEER: tls.getpeercert() if tls else None}


class _Server(uvicorn.Server):
    """Ends when told to, and leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    calls = _server(gateway, listen.host, listen.port, listen, context)
    servers = [calls]
    if listen.admin_port is not None:
        servers.append(_server(gateway.admin, listen.admin_host, listen.admin_port, listen, None))
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


def _server(
    app: Any, host: str, port: int, listen: Listen, context: ssl.SSLContext | None
) -> tuple[_Server, socket.socket]:
    config = uvicorn.Config(
        app,
        http=Connection,
        interface="asgi3",
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(listen.finish),
    )
    config.load()
    config.ssl = context
    return _Server(config), _bound(host, port)


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
