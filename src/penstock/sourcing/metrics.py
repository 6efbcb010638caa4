"""A bridge's statistics in Prometheus' text form, on a small HTTP server on loopback."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.sourcing.bridge import Bridge, BridgeStatistics

METRICS = {
    "position": ("gauge", "Origin sequence of the last message that is stored."),
    "stored": ("counter", "Messages stored by this instance."),
    "bytes": ("counter", "Bytes of data stored by this instance."),
    "batches": ("counter", "Atomic batches committed by this instance."),
    "lag": ("gauge", "Messages that the origin has behind the last one received; NaN until known."),
    "gaps": ("counter", "Times that messages were lost on the way and asked for again."),
    "resets_by_others": ("counter", "Times that somebody else reset the consumer."),
    "sessions": ("counter", "Times that both sides were connected."),
}


def text(bridge: str, statistics: BridgeStatistics) -> str:
    """All metrics, each with its help."""
    lines = []
    for name, (kind, help_) in METRICS.items():
        full = f"penstock_bridge_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {help_}", f"# TYPE {full} {kind}"]
        value = getattr(statistics, name)
        lines.append(f'{full}{{bridge="{bridge}"}} {"NaN" if value is None else value}')
    return "\n".join(lines) + "\n"


def serve(bridge: Bridge, port: int) -> ThreadingHTTPServer:
    """Answer `GET /metrics` on loopback until `shutdown`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = text(bridge.config.name, bridge.statistics()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads a line for every scrape."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"metrics cannot be served on port {port}: {exc}") from exc
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
