"""The process behind `penstock ui`: one listener, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.settings import Settings, without_login
from penstock.topology.model import Platform
from penstock.ui.access import Access, is_loopback
from penstock.ui.app import application
from penstock.ui.page import Site
from penstock.ui.runs import Runs
from penstock.ui.watch import Watch
from penstock.web.listener import places_within_descriptors
from penstock.web.server import address_of, http_config, http_server, server_context, told_by_signals, until_started

log = logging.getLogger(__name__)

CONNECTIONS = 256
FINISH = 1.0
"""Seconds that requests may take to end after the last word; open streams of events never do by themselves."""

FIRST_LOOK_WITHIN = 15.0
"""Seconds after which the URL is told although the first look at the server is not over: it takes longest of all, and
whoever opens a page right after the start should not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where and how the pages are served."""

    host: str = "127.0.0.1"
    port: int = 8222
    """0: any free one."""
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext | None:
        return server_context(self.cert, self.key, self.client_ca) if self.cert else None


def check(listen: Listen, access: Access) -> None:
    """Raise `ConfigError` when the pages would be open to people who should not see them."""
    if is_loopback(listen.host):
        return
    if not listen.cert:
        raise ConfigError(f"beyond loopback ({listen.host}) the pages need TLS: give --cert and --key")
    if not access.needs_login:
        raise ConfigError(
            f"beyond loopback ({listen.host}) people must log in: give --tokens, --client-ca or --user-header"
        )


async def serve(
    settings: Settings,
    platform: Platform | None,
    listen: Listen,
    access: Access,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve the pages until told to stop. `on_ready` hears the URL."""
    check(listen, access)
    context = listen.context()
    watch = Watch(settings, platform)
    servers = ", ".join(map(without_login, settings.servers))
    place = f"{platform.environment.name} at {servers}" if platform else servers
    runs = Runs()
    app = application(watch, access, Site(platform.name if platform else "NATS JetStream", place), runs)
    places = places_within_descriptors(CONNECTIONS, CONNECTIONS)
    server, bound = http_server(http_config(app, context, FINISH), listen.host, listen.port, places, Counter())
    told = stop or told_by_signals()
    looking = asyncio.create_task(watch.run())
    running = asyncio.create_task(server.serve([bound]))
    try:
        await until_started(lambda: server.started, [running])
        await watch.first_look(FIRST_LOOK_WITHIN)
        if watch.error:
            log.warning("%s; the pages say so, and go on by themselves", watch.error)
        on_ready(f"{'https' if context else 'http'}://{address_of(bound)}")
        await told.wait()
    finally:
        server.should_exit = True
        looking.cancel()
        await asyncio.gather(running, looking, return_exceptions=True)
        await runs.close()
        await watch.close()
