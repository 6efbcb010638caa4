"""A server with a platform, messages, a group's bucket and dead letters, and the pages over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import ended
from tests.support.pages_served import Served, served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.ui.access import Access

FILE = """
name: shop
environments: {dev: {servers: ["%s"]}}
streams:
  ORDERS: {subjects: [orders.>], retention: workqueue, max_age: 1d, max_bytes: 1MiB, allow_direct: true,
           allow_atomic: true}
  DLQ: {subjects: [dlq.>], max_age: 1d, allow_direct: true}
consumers:
  bill: {stream: ORDERS, filter: orders.paid, service: billing, ack_wait: 30s, max_deliver: 1, deliver: all,
         dlq: dlq.orders.paid, purpose: writes bills}
services:
  shop: {publishes: [orders.>]}
"""


@pytest.fixture
def platform(nats_server: EmbeddedServer, tmp_path: Path) -> Platform:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE % nats_server.url)
    ended("apply", file)
    return load(file, "dev")


@pytest.fixture
def pages(nats_server: EmbeddedServer, platform: Platform, streams: Streams) -> Iterator[Served]:
    """Nobody may act."""
    with served(nats_server.settings, platform) as made:
        yield made


@pytest.fixture
def acting(nats_server: EmbeddedServer, platform: Platform, streams: Streams) -> Iterator[Served]:
    """Everybody may act."""
    with served(nats_server.settings, platform, Access(actions=True)) as made:
        yield made
