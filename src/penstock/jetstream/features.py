"""Features of newer servers, by name, version and JetStream API level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import FeatureMissing
from penstock.jetstream.model import AccountInfo


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that older servers do not have."""

    name: str
    version: str
    """The first nats-server that has it."""
    api_level: int
    """The JetStream API level of that server, as in its account info."""


CONSUMER_PAUSE = Feature("pausing a consumer", "2.11.0", 1)
MESSAGE_TTL = Feature("a time to live for single messages", "2.11.0", 1)
BATCH_DIRECT_GET = Feature("batched direct get", "2.11.0", 1)
GET_BY_TIME = Feature("finding a message by time", "2.11.0", 1)
PRIORITY_GROUPS = Feature("priority groups of a consumer", "2.11.0", 1)
ATOMIC_BATCH = Feature("atomic batch publishing", "2.12.0", 2)
MESSAGE_COUNTER = Feature("message counters", "2.12.0", 2)
MESSAGE_SCHEDULE = Feature("message schedules", "2.12.0", 2)
ASYNC_PERSISTENCE = Feature("asynchronous persistence", "2.12.0", 2)
FAST_INGEST = Feature("fast batch publishing", "2.14.0", 4)
CONSUMER_RESET = Feature("resetting a consumer", "2.14.0", 4)
FLOW_CONTROL_ACK = Feature("the flow-control ack policy", "2.14.0", 4)
DURABLE_SOURCING = Feature("sourcing through a named consumer", "2.14.0", 4)

FEATURES = tuple(value for value in globals().copy().values() if isinstance(value, Feature))

STREAM_FIELDS = {
    "allow_msg_ttl": MESSAGE_TTL,
    "subject_delete_marker_ttl": MESSAGE_TTL,
    "allow_atomic": ATOMIC_BATCH,
    "allow_msg_counter": MESSAGE_COUNTER,
    "allow_msg_schedules": MESSAGE_SCHEDULE,
    "allow_batched": FAST_INGEST,
}
CONSUMER_FIELDS = {
    "pause_until": CONSUMER_PAUSE,
    "priority_groups": PRIORITY_GROUPS,
    "priority_policy": PRIORITY_GROUPS,
}
"""Fields that an older server silently drops; a value that is false, zero or empty needs no feature."""


class HasVersion(Protocol):
    """A connection that knows its server's version, such as `Broker`."""

    @property
    def server_version(self) -> str: ...


def require(server: HasVersion | AccountInfo, feature: Feature) -> None:
    """Raise `FeatureMissing` when the server is too old.

    A connection has the version of the server it is connected to; account info has the API level of the server that
    answered, which decides in a cluster of several versions.
    """
    if not supports(server, feature):
        raise FeatureMissing(feature.name, _found(server), feature.version)


def supports(server: HasVersion | AccountInfo, feature: Feature) -> bool:
    if isinstance(server, AccountInfo):
        return server.api_level >= feature.api_level
    return _numbers(server.server_version) >= _numbers(feature.version)


def of_stream(config: dict[str, Any]) -> list[Feature]:
    """Return the features that a stream configuration needs."""
    needed = {feature for name, feature in STREAM_FIELDS.items() if config.get(name)}
    if config.get("persist_mode") == "async":
        needed.add(ASYNC_PERSISTENCE)
    if any(origin.get("consumer") for origin in (config.get("mirror") or {}, *(config.get("sources") or ()))):
        needed.add(DURABLE_SOURCING)
    return _sorted(needed)


def of_consumer(config: dict[str, Any]) -> list[Feature]:
    """Return the features that a consumer configuration needs."""
    needed = {feature for name, feature in CONSUMER_FIELDS.items() if config.get(name) and config[name] != "none"}
    if config.get("ack_policy") == "flow_control":
        needed.add(FLOW_CONTROL_ACK)
    return _sorted(needed)


def _sorted(needed: set[Feature]) -> list[Feature]:
    return sorted(needed, key=lambda feature: (-feature.api_level, feature.name))


def _found(server: HasVersion | AccountInfo) -> str:
    if isinstance(server, AccountInfo):
        return f"at JetStream API level {server.api_level}"
    return server.server_version


def _numbers(version: str) -> tuple[int, ...]:
    """`2.12.0-preview.1` → (2, 12, 0): a preview counts as what it previews."""
    return tuple(int(part) for part in version.partition("-")[0].split("."))
