"""Publishers to a stream `S` that takes atomic batches: both in turn, or one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.connections import HALVES
from tests.support.publishers import AnyPublisher, connect_publisher
from tests.support.streams import make_stream

from penstock.publish import BlockingPublisher, Publisher
from penstock.server.embedded import EmbeddedServer


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> str:
    """Which of the two publishers is tested."""
    return str(request.param)


@pytest.fixture
async def publisher(nats_server: EmbeddedServer, half: str) -> AsyncIterator[AnyPublisher]:
    async with await connect_publisher(half, nats_server.settings) as made:
        await make_stream(made.jetstream, allow_atomic=True)
        yield made


@pytest.fixture
async def asyncio_publisher(nats_server: EmbeddedServer) -> AsyncIterator[Publisher]:
    """For tests that are about the asyncio publisher only."""
    async with await Publisher.connect(nats_server.settings) as made:
        await make_stream(made.jetstream, allow_atomic=True)
        yield made


@pytest.fixture
def blocking_publisher(nats_server: EmbeddedServer, asyncio_publisher: Publisher) -> Iterator[BlockingPublisher]:
    """For tests that are about the blocking publisher only."""
    with BlockingPublisher.connect(nats_server.settings) as made:
        yield made
