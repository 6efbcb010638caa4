"""Streams for the tests of the Spark source and sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.broker import JetStream
from penstock.broker.embedded import EmbeddedServer
from penstock.broker.model import ConsumerInfo, StreamInfo
from penstock.settings import Settings
from penstock.wire import frames, headers
from penstock.wire.blocking import Connection, connect, run


@pytest.fixture
def jobs_started(spark: SparkSession) -> Callable[[], int]:
    """Counts the jobs that Spark has started, those of streaming queries too."""
    context: Any = spark.sparkContext._jsc
    count: Callable[[], int] = context.sc().dagScheduler().numTotalJobs
    return count


class Streams:
    """Streams of a server, for tests: made, filled, and looked at."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.api = JetStream(connection.requester())

    def make(self, name: str, **config: Any) -> None:
        subjects = [f"{name.lower()}.>"]
        run(self.api.create_stream({"name": name, "subjects": subjects, "allow_direct": True, **config}))

    def publish(self, subject: str, bodies: Sequence[bytes], **names: str) -> None:
        """Publish in order; all is stored when this returns."""
        for start in range(0, len(bodies), 500):
            *most, last = bodies[start : start + 500]
            self.connection.send(b"".join(frames.publish(subject, one, headers=headers.encode(names)) for one in most))
            self.connection.request(subject, last, names or None)

    def number(self, subject: str, first: int, last: int) -> None:
        """Publish the numbers from first to last."""
        self.publish(subject, [str(n).encode() for n in range(first, last + 1)])

    def info(self, name: str) -> StreamInfo:
        return run(self.api.stream_info(name))

    def consumer(self, stream: str, name: str) -> ConsumerInfo:
        return run(self.api.consumer_info(stream, name))


@pytest.fixture
def streams(nats_server: EmbeddedServer) -> Iterator[Streams]:
    """Streams of the test's own server."""
    with connect(nats_server.settings) as connection:
        yield Streams(connection)


@pytest.fixture
def open_streams() -> Iterator[Any]:
    """Makes a `Streams` for any settings; closed with the test."""
    opened: list[Connection] = []

    def make(settings: Settings) -> Streams:
        opened.append(connect(settings))
        return Streams(opened[-1])

    yield make
    for connection in opened:
        connection.close()
