"""A world for each test, and a connection as workers have it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.workers.world import World

from penstock.publish import Publisher
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer


@pytest.fixture
async def world(nats_server: EmbeddedServer) -> AsyncIterator[World]:
    async with await Publisher.connect(nats_server.settings) as publisher:
        made = World(nats_server, publisher)
        try:
            yield made
        finally:
            await made.open.aclose()


@pytest.fixture
async def control(nats_server: EmbeddedServer) -> AsyncIterator[Control]:
    made = await Control.connect(nats_server.settings)
    yield made
    await made.close()
