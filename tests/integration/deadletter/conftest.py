"""A stage for dead letters on a server of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.deadletter.stage import Stage

from penstock.server.embedded import EmbeddedServer
from penstock.wire import aio


@pytest.fixture
async def stage(nats_server: EmbeddedServer) -> AsyncIterator[Stage]:
    async with await aio.connect(nats_server.settings) as connection:
        yield Stage(nats_server.settings, connection)
