"""Connections to more than one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.streams import delete_streams

from penstock.jetstream import Broker, connect
from penstock.testing import LeafPair


@asynccontextmanager
async def both(pair: LeafPair) -> AsyncIterator[tuple[Broker, Broker]]:
    """Connections to the hub and to the leaf; the streams of both are deleted afterwards."""
    async with connect(pair.hub.settings) as hub, connect(pair.leaf.settings) as leaf:
        try:
            yield hub, leaf
        finally:
            await delete_streams(hub.jetstream)
            await delete_streams(leaf.jetstream)
