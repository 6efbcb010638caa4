"""Records events whose handler has finished, by their id, so that it is not called again for them.

    1. look for the event's id in the bucket        there: the message is only acknowledged
    2. run the handler
    3. write the id                                  crash before: the handler is run again
    4. acknowledge the message                       crash before: it comes again, and 1 finds the id

So a handler is never called again for an event whose id was written, for as long as ids are kept. There is no further
guarantee: a handler that was killed before it finished, or between 2 and 3, is called again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.app.message import Message
from penstock.deadletter import letters
from penstock.errors import AlreadyExists
from penstock.jetstream.kv import KeyValue, bucket_layout, stream_of
from penstock.jetstream.model import NANOSECONDS
from penstock.publish.atomic import Publisher
from penstock.publish.control import Control
from penstock.retry import retrying

BUCKET = "penstock-handled"
STREAM = stream_of(BUCKET)
NOTED_WITHIN = 30.0
"""Seconds that writing an id is retried while the server is unavailable: the handler has finished, and would be called
again without it."""


class Handled:
    """Skips events that are handled."""

    def __init__(self, publisher: Publisher, consumer: str, call: Callable[[Message], Awaitable[Any]]) -> None:
        self._ids = KeyValue(Control(publisher), BUCKET)
        self._consumer = consumer
        self._call = call

    @classmethod
    async def around(
        cls, publisher: Publisher, consumer: str, keep: float, call: Callable[[Message], Awaitable[Any]]
    ) -> Handled:
        """The call, with a bucket that keeps ids for `keep` seconds at least."""
        config = bucket_layout(BUCKET, "", max_age=int(keep * NANOSECONDS))
        try:
            await publisher.jetstream.create_stream(config)
        except AlreadyExists:  # another app keeps ids for longer or shorter: the longer time applies
            longest = {"max_age": config["max_age"]}
            await publisher.jetstream.update_stream(
                STREAM, lambda now: {**now, "max_age": max(now.get("max_age", 0), longest["max_age"])}
            )
        return cls(publisher, consumer, call)

    async def __call__(self, message: Message) -> Any:
        key = f"{self._consumer}.{key_of(message)}"
        if await self._ids.newest(key):
            return
        await self._call(message)
        # Harmless when it is repeated, since an id is kept once.
        await retrying(lambda: self._ids.add(key, b"%d" % message.sequence), NOTED_WITHIN)


def key_of(message: Message) -> str:
    """Return a key from the event's id; without one, from the position of its message."""
    found = letters.event_id(message.data, message.headers) or f"{message.stream}#{message.sequence}"
    return hashlib.blake2b(found.encode(), digest_size=16).hexdigest()
