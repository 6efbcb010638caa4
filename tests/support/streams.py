"""Streams on a server, for tests: created, filled and inspected. `make_stream` is for asyncio, `Streams` blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.jetstream import JetStream
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.wire import frames, headers
from penstock.wire.blocking import BlockingConnection, run


def stream_config(name: str = "S", **config: Any) -> Json:
    """The configuration of a stream, which takes `name.>` in lower case unless `config` names subjects or a source."""
    if config.keys().isdisjoint(("subjects", "mirror", "sources")):
        config = {"subjects": [f"{name.lower()}.>"], **config}
    return {"name": name, **config}


async def make_stream(jetstream: JetStream, name: str = "S", **config: Any) -> StreamInfo:
    """Create a stream as `stream_config` describes it."""
    return await jetstream.create_stream(stream_config(name, **config))


async def delete_streams(jetstream: JetStream) -> None:
    """Delete every stream, for the next test on the same server."""
    for name in await jetstream.stream_names():
        await jetstream.delete_stream(name)


class Streams:
    """The streams of a server, over a connection that blocks."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.api = JetStream(connection.requester())

    def make(self, name: str = "S", **config: Any) -> StreamInfo:
        """Create a stream as `stream_config` describes it, with direct reads, which Spark and workers need."""
        return run(make_stream(self.api, name, **{"allow_direct": True, **config}))

    def publish(self, subject: str, bodies: Sequence[bytes], **names: str) -> None:
        """Publish in order, with these headers; all is stored when this returns."""
        for start in range(0, len(bodies), 500):
            *most, last = bodies[start : start + 500]
            self.connection.send(b"".join(frames.publish(subject, one, headers=headers.encode(names)) for one in most))
            self.connection.request(subject, last, names or None)

    def number(self, subject: str, first: int, last: int) -> None:
        """Publish the numbers from first to last."""
        self.publish(subject, [str(n).encode() for n in range(first, last + 1)])

    def info(self, name: str = "S") -> StreamInfo:
        return run(self.api.stream_info(name))

    def consumer(self, stream: str, name: str) -> ConsumerInfo:
        return run(self.api.consumer_info(stream, name))
