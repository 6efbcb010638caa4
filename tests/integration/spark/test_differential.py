"""A pipeline over a stream gives what it gives over the same rows in memory, whatever the stream and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.differential import ANCHOR, Case
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.wire.blocking import connect, run

SOME, FEW, MANY = 4, 20, 500


@pytest.fixture
def shared_streams(shared_server: EmbeddedServer) -> Iterator[Streams]:
    with connect(shared_server.settings) as connection:
        streams = Streams(connection)
        if ANCHOR not in run(streams.api.stream_names()):
            streams.make(ANCHOR)
        yield streams


@pytest.mark.parametrize(
    "seeds",
    [
        range(1, SOME + 1),
        pytest.param(range(SOME + 1, FEW + 1), marks=pytest.mark.kills),
        pytest.param(range(FEW + 1, FEW + 1 + MANY), marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
    ids=[f"{SOME} seeds", f"{FEW - SOME} further seeds", f"{MANY} seeds"],
)
def test_random_pipelines_give_the_same_rows_over_a_stream_and_over_memory(
    jetstream: SparkSession, shared_server: EmbeddedServer, shared_streams: Streams, tmp_path: Path, seeds: range
) -> None:
    failures = []
    for seed in seeds:
        case = Case(jetstream, shared_server.settings, shared_streams, tmp_path, seed)
        found = case.differences()
        print(case.description)
        failures += [f"{case.description}\n  {text}" for text in found]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.kills)], ids=["batch", "streaming"])
def test_a_row_that_is_missing_on_one_side_is_noticed(
    jetstream: SparkSession, shared_server: EmbeddedServer, shared_streams: Streams, tmp_path: Path, seed: int
) -> None:
    case = Case(jetstream, shared_server.settings, shared_streams, tmp_path, seed, lose=True)
    assert case.differences(), case.description
