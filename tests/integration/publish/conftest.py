"""Publishers to a stream `S` that takes atomic batches."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.streams import make_stream

from penstock.publish import Publisher
from penstock.server.embedded import EmbeddedServer


@pytest.fixture
async def publisher(nats_server: EmbeddedServer) -> AsyncIterator[Publisher]:
    async with await Publisher.connect(nats_server.settings) as made:
        await make_stream(made.jetstream, allow_atomic=True)
        yield made
