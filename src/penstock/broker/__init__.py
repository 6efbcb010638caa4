"""The control plane: the embedded server, the connection, and the JetStream API."""

from penstock.broker.connection import Broker, connect
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
