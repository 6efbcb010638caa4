"""One gateway for all tests of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.integration.gateway.zone import Zone, prepare
from tests.support.gateways import Papers, RunningGateway, write_platform

from penstock.server.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def zone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zone]:
    folder = tmp_path_factory.mktemp("gateway")
    papers = Papers(folder)
    with EmbeddedServer(data=folder / "nats") as broker:
        asyncio.run(prepare(broker))
        file = write_platform(folder, broker.url)
        with RunningGateway(file, *papers.flags()) as gateway:
            yield Zone(broker, gateway, papers, folder)
