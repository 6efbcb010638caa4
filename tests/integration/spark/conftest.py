"""One Spark for all tests of this folder: its start costs more than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.spark.session import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark on two threads of this machine."""
    made = session("penstock-tests", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
