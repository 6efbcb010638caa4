"""Client of a server: the connection, the JetStream API, KV buckets, ranges of a stream."""

from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import Broker, connect
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
