"""Against a real server that is too old: the feature, the version found and the version needed are named."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.errors import FeatureMissing
from penstock.jetstream import connect, features
from penstock.server.embedded import EmbeddedServer


async def test_version_and_level_of_an_old_server_are_read(old_server: EmbeddedServer) -> None:
    async with connect(old_server.settings) as broker:
        assert broker.server_version == "2.10.25"
        assert (await broker.jetstream.account_info()).api_level == 0
        with pytest.raises(FeatureMissing, match=r"needs nats-server 2\.12\.0 or newer, but this server is 2\.10\.25"):
            features.require(broker, features.ATOMIC_BATCH)
        await broker.jetstream.require()


async def test_what_an_old_server_would_drop_in_silence_is_refused(old_server: EmbeddedServer) -> None:
    async with connect(old_server.settings) as broker:
        js = broker.jetstream
        for config in ({"allow_atomic": True}, {"allow_batched": True}, {"allow_msg_ttl": True}):
            with pytest.raises(FeatureMissing):
                await js.create_stream({"name": "S", "subjects": ["s"], **config})
        await make_stream(js, subjects=["s"])
        with pytest.raises(FeatureMissing):
            await js.update_stream("S", {"allow_atomic": True})
        await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
        with pytest.raises(FeatureMissing, match="pausing a consumer"):
            await js.pause_consumer("S", "c", timedelta(hours=1))
        with pytest.raises(FeatureMissing, match="resetting a consumer"):
            await js.reset_consumer("S", "c", 1)


async def test_a_new_server_has_every_feature(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        for feature in features.FEATURES:
            features.require(broker, feature)
        await broker.jetstream.require(*features.FEATURES)
        everything: dict[str, Any] = {
            "allow_msg_ttl": True,
            "allow_atomic": True,
            "allow_batched": True,
            "allow_msg_schedules": True,
            "persist_mode": "default",
        }
        await make_stream(broker.jetstream, subjects=["s"], **everything)
        await make_stream(broker.jetstream, "C", subjects=["c"], allow_msg_counter=True)
        await make_stream(broker.jetstream, "P", subjects=["p"], persist_mode="async")


async def test_the_level_is_asked_for_once(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        js = broker.jetstream
        await make_stream(js, subjects=["s"])
        await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
        await js.pause_consumer("S", "c", timedelta(hours=1))
        before = js.requests
        await js.resume_consumer("S", "c")
        assert js.requests == before + 1
