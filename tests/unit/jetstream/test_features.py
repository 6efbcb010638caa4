"""Features by version and API level, decided without a server."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.errors import FeatureMissing
from penstock.jetstream import features
from penstock.jetstream.model import AccountInfo


@dataclass
class Server:
    server_version: str


def account(level: int) -> AccountInfo:
    return AccountInfo.parse({"api": {"level": level}} if level else {})


@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_there_from_its_version_and_level_on(feature: features.Feature) -> None:
    features.require(Server(feature.version), feature)
    features.require(account(feature.api_level), feature)
    with pytest.raises(FeatureMissing):
        features.require(account(feature.api_level - 1), feature)
    with pytest.raises(FeatureMissing):
        features.require(Server("2.10.25"), feature)


def test_the_error_names_the_feature_and_both_versions() -> None:
    with pytest.raises(FeatureMissing) as caught:
        features.require(Server("2.11.9"), features.ATOMIC_BATCH)
    assert caught.value.args == ("atomic batch publishing", "2.11.9", "2.12.0")
    assert "atomic batch publishing needs nats-server 2.12.0 or newer, but this server is 2.11.9" in str(caught.value)


def test_versions_compare_as_numbers_and_previews_count() -> None:
    assert features.supports(Server("2.100.0"), features.ATOMIC_BATCH)
    assert features.supports(Server("2.14.0-RC.2"), features.FAST_INGEST)
    assert not features.supports(Server("2.9.25"), features.CONSUMER_PAUSE)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({"name": "S"}, []),
        ({"allow_atomic": False, "allow_msg_ttl": False, "sources": None, "mirror": None}, []),
        ({"allow_atomic": True, "allow_batched": True}, [features.FAST_INGEST, features.ATOMIC_BATCH]),
        ({"sources": [{"name": "A"}, {"name": "B", "consumer": {"name": "c"}}]}, [features.DURABLE_SOURCING]),
        ({"mirror": {"name": "A", "consumer": {"name": "c"}}}, [features.DURABLE_SOURCING]),
        ({"persist_mode": "async"}, [features.ASYNC_PERSISTENCE]),
    ],
)
def test_a_stream_configuration_tells_what_it_needs(config: dict[str, object], needed: list[features.Feature]) -> None:
    assert features.of_stream(config) == needed


def test_a_consumer_configuration_tells_what_it_needs() -> None:
    assert features.of_consumer({"ack_policy": "explicit", "priority_policy": "none"}) == []
    assert features.of_consumer({"ack_policy": "flow_control"}) == [features.FLOW_CONTROL_ACK]
    assert features.of_consumer({"priority_groups": ["a"]}) == [features.PRIORITY_GROUPS]
