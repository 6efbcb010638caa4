"""Streams for the tests of the Spark source and sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.streams import Streams

from penstock.settings import Settings
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
