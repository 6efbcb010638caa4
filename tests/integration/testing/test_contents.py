"""What a test reads of a stream, and what the reading leaves behind: nothing."""

from __future__ import annotations

from tests.support.streams import make_stream

from penstock.jetstream.connection import Broker
from penstock.publish.plain import PlainPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import stream_data


async def test_reading_a_stream_again_and_again_leaves_no_consumer_behind(nats_server: EmbeddedServer) -> None:
    async with Broker(nats_server.settings, "test") as broker:
        await make_stream(broker.jetstream, "S", subjects=["s"], max_consumers=1)
        async with PlainPublisher(nats_server.settings) as publisher:
            await publisher.add("s", b"one")
            await publisher.finish()
        assert [stream_data(nats_server.settings, "S") for _ in range(3)] == [[b"one"]] * 3
        assert await broker.jetstream.consumers("S") == []
