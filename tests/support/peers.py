"""nats-py as a second opinion: another client on the same server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
from nats.js.client import JetStreamContext

from penstock.settings import Settings


@asynccontextmanager
async def nats_py(settings: Settings) -> AsyncIterator[JetStreamContext]:
    """JetStream as nats-py has it, over a connection of its own."""
    client = await nats.connect(list(settings.servers), user=settings.user, password=settings.password)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def acknowledge(settings: Settings, stream: str, consumer: str, count: int, acknowledged: int) -> None:
    """Fetch some messages of a consumer, and acknowledge the first of them."""
    async with nats_py(settings) as js:
        messages = await (await js.pull_subscribe_bind(consumer, stream)).fetch(count, timeout=20)
        assert len(messages) == count
        for message in messages[:acknowledged]:
            await message.ack_sync(timeout=20)
