"""The gateway's process: listeners, TLS, and an end that lets calls finish."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.facts import Facts
from penstock.gateway.app import Gateway
from penstock.settings import Settings
from penstock.topology.model import GatewaySpec
from penstock.web.listener import ADMIN_CONNECTIONS, Places, places_within_descriptors
from penstock.web.server import (
    address_of,
    http_config,
    http_server,
    server_context,
    told_by_signals,
    until_started,
    wait_for,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayListen:
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
    """Seconds that running calls may take to end after that."""

    def context(self) -> ssl.SSLContext | None:
        """The TLS context, or None for plain HTTP."""
        if not self.cert:
            return None
        return server_context(self.cert, self.key, self.client_ca, self.require_certificate)


async def serve(
    settings: Settings, spec: GatewaySpec, listen: GatewayListen, on_ready: Callable[[str, str | None], None]
) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    In order: report "not ready" and continue for `drain` seconds; stop listening; let running calls finish. A second
    signal skips the wait. `on_ready` is called with the URLs for callers and for operators.
    """
    facts = Facts(settings, "penstock gateway")
    gateway = Gateway(facts, spec)
    context = listen.context()
    limits, refused = spec.limits, gateway.metrics.refused
    places = places_within_descriptors(limits.connections, limits.connections_per_address)
    calls = http_server(http_config(gateway, context, listen.finish), listen.host, listen.port, places, refused)
    servers = [calls]
    if listen.admin_port is not None:
        own = Places(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS)
        config = http_config(gateway.admin, None, listen.finish)
        servers.append(http_server(config, listen.admin_host, listen.admin_port, own, Counter()))
    stop = told_by_signals()
    running = [asyncio.create_task(server.serve([bound])) for server, bound in servers]
    try:
        await until_started(lambda: all(server.started for server, _ in servers), running)
        scheme = "https" if context else "http"
        admin = f"http://{address_of(servers[1][1])}" if len(servers) > 1 else None
        on_ready(f"{scheme}://{address_of(calls[1])}", admin)
        await stop.wait()
        gateway.draining = True
        stop.clear()
        await wait_for(stop, listen.drain)
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        await facts.close()
