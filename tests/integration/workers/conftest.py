"""A world for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.workers.world import World

from penstock.broker.embedded import EmbeddedServer
from penstock.publish import Publisher


@pytest.fixture
async def world(nats_server: EmbeddedServer) -> AsyncIterator[World]:
    async with await Publisher.connect(nats_server.settings) as publisher:
        made = World(nats_server, publisher)
        try:
            yield made
        finally:
            await made.open.aclose()
