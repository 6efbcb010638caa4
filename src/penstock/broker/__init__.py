"""The control plane: the embedded server, the connection, and the JetStream API."""

from typing import TYPE_CHECKING, Any

from penstock.broker.jetstream import JetStream
from penstock.broker.model import (
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
    from penstock.broker.connection import Broker, connect

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
        from penstock.broker import connection

        return getattr(connection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
