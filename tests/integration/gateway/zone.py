"""A broker with a gateway in front of it, and raw requests to it."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.gateways import TOKENS, Papers, RunningGateway
from tests.support.streams import make_stream

from penstock.facts import Facts
from penstock.gateway import BlockingGatewayClient
from penstock.jetstream.api import JetStream
from penstock.server.embedded import EmbeddedServer

DROPPED = 0
"""Instead of a status: the server has ended the connection without an answer."""


@dataclass
class Zone:
    """A broker, a gateway in front of it, and the papers of callers."""

    broker: EmbeddedServer
    gateway: RunningGateway
    papers: Papers
    folder: Path

    def client(self, certificate: str | None = None, token: str | None = None) -> BlockingGatewayClient:
        secret = TOKENS.get(token, token) if token else None
        return BlockingGatewayClient(self.gateway.url, self.papers.login(certificate, secret), timeout=30)

    def state(self) -> tuple[int, list[tuple[str, int, int]]]:
        """Messages of the stream, and where every consumer is."""
        return asyncio.run(self._state())

    async def _state(self) -> tuple[int, list[tuple[str, int, int]]]:
        async with Facts(self.broker.settings) as facts:
            js = facts.link.jetstream
            consumers = [(one.name, one.ack_floor_stream_seq, one.ack_pending) for one in await js.consumers("FACTS")]
            return (await js.stream_info("FACTS")).state.messages, consumers


async def prepare(broker: EmbeddedServer) -> None:
    async with Facts(broker.settings) as facts:
        js: JetStream = facts.link.jetstream
        await make_stream(js, "FACTS")
        for name in ("edge", "other", "busy"):
            config = {"durable_name": f"{name}_reader", "ack_policy": "explicit", "ack_wait": 60_000_000_000}
            await js.create_consumer("FACTS", {**config, "filter_subject": f"facts.{name}.>"})


def connected(zone: Zone) -> HTTPSConnection:
    parts = urlsplit(zone.gateway.url)
    context = ssl.create_default_context(cafile=zone.papers.ca)
    return HTTPSConnection(parts.hostname or "", parts.port, context=context, timeout=60)


def send(
    connection: HTTPSConnection, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """Status and body of the answer to a raw request; `DROPPED` where the server ends the connection instead."""
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (HTTPException, OSError):
        connection.close()  # the next request opens it again
        return DROPPED, b""
