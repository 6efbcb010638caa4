"""What is in a stream, all of it, in order: for tests that compare it with what should be there."""

from __future__ import annotations

import secrets

from penstock.broker.jetstream import JetStream
from penstock.settings import Settings
from penstock.wire import blocking, frames


def stream_messages(settings: Settings, stream: str) -> list[frames.Message]:
    """Every message of a stream as delivered, by an ephemeral consumer that acknowledges nothing."""
    with blocking.connect(settings, name="penstock test") as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        count = blocking.run(jetstream.stream_info(stream)).state.messages
        inbox = f"_INBOX.{secrets.token_hex(8)}"
        connection.subscribe(inbox)
        config = {"name": secrets.token_hex(8), "deliver_subject": inbox, "ack_policy": "none", "mem_storage": True}
        blocking.run(jetstream.create_consumer(stream, {**config, "num_replicas": 1}))
        return [connection.receive() for _ in range(count)]


def stream_data(settings: Settings, stream: str) -> list[bytes]:
    """The data of every message of a stream."""
    return [message.data for message in stream_messages(settings, stream)]
