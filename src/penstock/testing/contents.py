"""What is in a stream, all of it, in order: for tests that compare it with what should be there."""

from __future__ import annotations

import secrets
from contextlib import suppress

from penstock.errors import DeadlineExceeded
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import next_verb, pull_request
from penstock.settings import Settings
from penstock.wire import blocking, frames

PULL = 1000
"""Messages asked for at a time: whoever is sent a large stream at once, and reads slowly, is cut off."""
ATTEMPTS = 3
INACTIVE = {"inactive_threshold": 60_000_000_000}
"""Nanoseconds without a pull after which the server removes the consumer; its own 5 s are little on a busy machine."""


def stream_messages(settings: Settings, stream: str) -> list[frames.Message]:
    """Every message of a stream as delivered, by an ephemeral consumer that acknowledges nothing.

    In a cluster that has just lost a server a consumer may be given to nobody: after a silence another one reads anew.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(DeadlineExceeded):
            return _read(settings, stream)
    return _read(settings, stream)


def _read(settings: Settings, stream: str) -> list[frames.Message]:
    with blocking.connect(settings, name="penstock test") as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        left = blocking.run(jetstream.stream_info(stream)).state.messages
        inbox, name = settings.new_inbox(8), secrets.token_hex(8)
        connection.subscribe(inbox)
        config = {"name": name, "ack_policy": "none", "mem_storage": True, "num_replicas": 1, **INACTIVE}
        blocking.run(jetstream.create_consumer(stream, config))
        subject = jetstream.subject(next_verb(stream, name))
        found: list[frames.Message] = []
        while left > len(found):
            count = min(PULL, left - len(found))
            connection.publish(subject, pull_request(count), reply=inbox)
            found += [connection.receive() for _ in range(count)]
        return found


def stream_data(settings: Settings, stream: str) -> list[bytes]:
    """The data of every message of a stream."""
    return [message.data for message in stream_messages(settings, stream)]
