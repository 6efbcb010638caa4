"""Streams for the tests of the Spark source and sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.spark_readers import source
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.datasource import COLUMNS
from penstock.spark.source import JetStreamReader, JetStreamStreamReader
from penstock.wire.blocking import BlockingConnection, connect


@pytest.fixture
def jobs_started(spark: SparkSession) -> Callable[[], int]:
    """Counts the jobs that Spark has started, those of streaming queries too."""
    context: Any = spark.sparkContext._jsc
    count: Callable[[], int] = context.sc().dagScheduler().numTotalJobs
    return count


@pytest.fixture
def open_streams() -> Iterator[Any]:
    """Makes a `Streams` for any settings; closed with the test."""
    opened: list[BlockingConnection] = []

    def make(settings: Settings) -> Streams:
        opened.append(connect(settings))
        return Streams(opened[-1])

    yield make
    for connection in opened:
        connection.close()


@pytest.fixture
def stream_reader(nats_server: EmbeddedServer) -> Iterator[Any]:
    readers: list[JetStreamStreamReader] = []

    def make(**options: Any) -> JetStreamStreamReader:
        reader = source(nats_server, options).streamReader(COLUMNS)
        assert isinstance(reader, JetStreamStreamReader)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.stop()


@pytest.fixture
def batch_reader(nats_server: EmbeddedServer) -> Any:
    def make(**options: Any) -> JetStreamReader:
        reader = source(nats_server, options).reader(COLUMNS)
        assert isinstance(reader, JetStreamReader)
        return reader

    return make
