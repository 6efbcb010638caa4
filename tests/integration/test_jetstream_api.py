"""The JetStream API against a real server."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock import errors
from penstock.broker import connect
from penstock.broker.embedded import EmbeddedServer


async def test_stream_and_consumer_live_from_create_to_delete(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        js = broker.jetstream
        await js.create_stream({"name": "S", "subjects": ["s.>"]})
        await broker.request("s.a", b"one", 2)
        message = await js.get_message("S", 1)
        assert (message.subject, message.data) == ("s.a", b"one")
        await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
        assert [c.name for c in await js.consumers("S")] == ["c"]
        assert (await js.consumer_info("S", "c")).pending == 1
        assert await js.pause_consumer("S", "c", timedelta(hours=1)) is not None
        assert (await js.consumer_info("S", "c")).paused
        await js.resume_consumer("S", "c")
        assert not (await js.consumer_info("S", "c")).paused
        assert (await js.reset_consumer("S", "c", 2)).reset_seq == 2
        await js.delete_consumer("S", "c")
        with pytest.raises(errors.ConsumerNotFound):
            await js.consumer_info("S", "c")
        assert await js.purge_stream("S") == 1
        await js.delete_stream("S")
        with pytest.raises(errors.StreamNotFound):
            await js.stream_info("S")


async def test_listing_goes_beyond_one_page(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        js = broker.jetstream
        for n in range(300):
            await js.create_stream({"name": f"S{n}", "subjects": [f"s{n}"], "storage": "memory"})
        assert len(await js.streams()) == 300
        assert len(await js.stream_names()) == 300
