"""What is in a stream, all of it, in order: for tests that compare it with what should be there."""

from __future__ import annotations

import secrets
from contextlib import suppress

from penstock.errors import DeadlineExceeded, PenstockError
from penstock.jetstream.connection import Broker
from penstock.jetstream.fetch import fetch
from penstock.settings import Settings
from penstock.wire import blocking, frames

PULL = 1000
"""Messages asked for at a time: whoever is sent a large stream at once, and reads slowly, is cut off."""
ATTEMPTS = 3
INACTIVE = {"inactive_threshold": 60_000_000_000}
"""Nanoseconds without a pull after which the server removes the consumer; its own 5 s are little on a busy machine."""


def stream_messages(settings: Settings, stream: str) -> list[frames.Message]:
    """Every message of a stream as delivered, by an ephemeral consumer that acknowledges nothing.

    In a cluster that has just lost a server a consumer may be given to nobody: after a silence another one reads anew.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(DeadlineExceeded):
            return _read(settings, stream)
    return _read(settings, stream)


def _read(settings: Settings, stream: str) -> list[frames.Message]:
    return blocking.run(_read_async(settings, stream))


async def _read_async(settings: Settings, stream: str) -> list[frames.Message]:
    name = secrets.token_hex(8)
    async with Broker(settings, "penstock test") as broker:
        left = (await broker.jetstream.stream_info(stream)).state.messages
        config = {"name": name, "ack_policy": "none", "mem_storage": True, "num_replicas": 1, **INACTIVE}
        await broker.jetstream.create_consumer(stream, config)
        try:
            return await _fetch_all(broker, stream, name, left)
        finally:
            with suppress(PenstockError):  # then the server removes it by itself
                await broker.jetstream.delete_consumer(stream, name)


async def _fetch_all(broker: Broker, stream: str, consumer: str, count: int) -> list[frames.Message]:
    found: list[frames.Message] = []
    while count > len(found):
        came = await fetch(broker, stream, consumer, min(PULL, count - len(found)), wait=broker.settings.timeout)
        if not came:
            raise DeadlineExceeded(f"the messages of stream {stream!r}", broker.settings.timeout)
        found += came
    return found


def stream_data(settings: Settings, stream: str) -> list[bytes]:
    """The data of every message of a stream."""
    return [message.data for message in stream_messages(settings, stream)]
