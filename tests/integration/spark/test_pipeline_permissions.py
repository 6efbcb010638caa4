"""The example's pipelines run under the permissions that `penstock permissions` prints, and are refused the rest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.test_example import LOW, ROLLED_UP, on, publish_shift, table
from tests.support.guarded import Guarded, refused, started

from penstock.examples import example_dir
from penstock.spark.pipelines import pipeline
from penstock.spark.runs import run
from penstock.topology.load import load

EXAMPLE = example_dir() / "penstock.yaml"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    yield from started(tmp_path, EXAMPLE, trace=True)


ONLY_SOMETIMES = re.compile(r"\.DLQ(\.|$)|STREAM\.(CREATE\.KV_|PURGE\.KV_penstock_ledger)")
"""What was written of bad records is read back after a crash; whoever is first creates a bucket; old batches go."""
ALL = ("event_lake", "usage_hourly", "balance_watch", "dlq_report")


@pytest.mark.parametrize(
    "names", [("usage_hourly",), pytest.param(ALL, marks=pytest.mark.kills)], ids=["reads and writes", "all"]
)
def test_every_pipeline_runs_under_its_permissions(
    jetstream: SparkSession, guarded: Guarded, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Those that take long together run in the ring of the long tests."""
    platform = load(EXAMPLE, "dev")
    assert set(ALL) == set(platform.pipelines)
    publish_shift(guarded.operator, 0)
    for name in names:
        flow = pipeline(platform, name, guarded.settings(f"pipeline-{name}"), tmp_path)
        (result,) = run(jetstream, [flow], once=True)
        assert result.error is None, (result.error, guarded.violations())
    assert guarded.violations() == []
    unused = {grant for name in names for grant in guarded.unused(f"pipeline-{name}")}
    assert {grant for grant in unused if not ONLY_SOMETIMES.search(grant)} == set()
    assert on(ROLLED_UP, guarded.operator)
    if names == ALL:
        assert on(LOW, guarded.operator)
        assert len(table(tmp_path / "lake/dlq_report")) > 2
    for name in names:
        settings = guarded.settings(f"pipeline-{name}")
        for subject in ("platform.payments.balance_credited", "$JS.API.STREAM.DELETE.BILLING",
                        "$JS.API.STREAM.PURGE.DLQ", "$KV.penstock_facts.signing-key"):  # fmt: skip
            assert asyncio.run(refused(settings, subject)), (name, subject)
