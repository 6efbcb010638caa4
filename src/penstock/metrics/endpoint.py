"""What a worker answers over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever starts it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from penstock.errors import ConfigError

OK, UNAVAILABLE, NOT_FOUND = "200 OK", "503 Service Unavailable", "404 Not Found"


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker stands."""

    broken: str = ""
    """Why it should be started anew; empty while it should not."""
    waiting: str = ""
    """What it waits for before it can handle messages; empty when it can."""


def always_well() -> Health:
    return Health()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is not worth a line."""


def serve(
    port: int, address: str, health: Callable[[], Health], collector: Collector
) -> tuple[int, Callable[[], None]]:
    """Answer `/metrics`, `/healthz` and `/readyz`; returns the port (0: a free one is chosen), and what ends it."""
    registry = CollectorRegistry()
    registry.register(collector)
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/" | "/metrics":
                found: Iterable[bytes] = metrics(environ, start)
                return found
            case "/healthz":
                return _told(start, health().broken)
            case "/readyz":
                now = health()
                return _told(start, now.broken or now.waiting)
        start(NOT_FOUND, [("Content-Type", "text/plain; charset=utf-8")])
        return [b"there are /metrics, /healthz and /readyz\n"]

    try:
        server = make_server(address, port, answer, _Server6 if ":" in address else _Server, _Quiet)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"metrics cannot be served on {address}:{port}: {exc}") from exc
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    return int(server.server_port), end


def _told(start: Callable[..., Any], wrong: str) -> list[bytes]:
    start(UNAVAILABLE if wrong else OK, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{wrong or 'ok'}\n".encode()]
