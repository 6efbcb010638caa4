"""What a program says to a server: the connection, the JetStream API, reading ranges of a stream."""

from typing import TYPE_CHECKING, Any

from penstock.jetstream.api import JetStream
from penstock.jetstream.model import (
    AccountInfo,
    ConsumerInfo,
    ConsumerReset,
    ReplicaInfo,
    SourceInfo,
    StoredMessage,
    StreamInfo,
    StreamState,
)

if TYPE_CHECKING:
    from penstock.jetstream.connection import Broker, connect

__all__ = [
    "AccountInfo",
    "Broker",
    "ConsumerInfo",
    "ConsumerReset",
    "JetStream",
    "ReplicaInfo",
    "SourceInfo",
    "StoredMessage",
    "StreamInfo",
    "StreamState",
    "connect",
]


def __getattr__(name: str) -> Any:
    """`Broker` and `connect` bring nats-py along, which Spark tasks never need: it is imported on first use."""
    if name in ("Broker", "connect"):
        from penstock.jetstream import connection

        return getattr(connection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
