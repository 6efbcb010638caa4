"""Delta and Iceberg tables of pipelines whose driver is killed: written once, as other engines read them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession
from tests.e2e.spark.test_pipeline_command import PARTS, Pipelines

from penstock.jetstream import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.spark import steps
from penstock.spark.iceberg_log import own_catalog
from penstock.spark.lakes import DELTA, ICEBERG
from penstock.spark.link import Link
from penstock.topology.load import load

PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], allow_atomic: true, allow_direct: true}
pipelines:
  copy:
    from: {stream: IN, max_rows: 300}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    sql: "SELECT id, part, jetstream.timestamp AS at FROM events"
    to: [{format: delta, path: lake/copy_delta, partition_by: [part]}, {format: iceberg, path: lake/copy_iceberg}]
  totals:
    from: {stream: IN, max_rows: 300}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    sql: "SELECT part, id %% 2 AS odd, count(*) AS events, sum(id) AS total FROM events GROUP BY ALL"
    to: [{format: delta, path: lake/totals_delta}, {format: iceberg, path: lake/totals_iceberg, partition_by: [odd]}]
"""


class LakePipelines(Pipelines):
    """A pipeline that appends and one that upserts, each to both formats."""

    def prepare(self, trigger: str = "") -> None:
        (self.folder / "holds").mkdir()
        self.file.write_text(PLATFORM % self.server.url)
        with Link(self.server.settings) as link:
            for stream in load(self.file).streams.values():
                link.call(partial(JetStream.create_stream, config=stream.config))

    def arrow(self, name: str, form: str) -> pa.Table:
        path = self.folder / "lake" / f"{name}_{form}"
        if form == DELTA:
            return DeltaTable(path).to_pyarrow_table()
        catalog = load_catalog("penstock", **own_catalog(path.as_uri()))
        return catalog.load_table(f"penstock.{path.name}").scan().to_arrow()

    def wrong(self, count: int) -> list[str]:
        """Tables that are not what a calculation by hand gives."""
        ids = range(1, count + 1)
        groups = {
            (part, odd): [n for n in ids if (n % PARTS, n % 2) == (part, odd)]
            for part in range(PARTS)
            for odd in (0, 1)
        }
        totals = Counter((*group, len(some), sum(some)) for group, some in groups.items())
        found = []
        for form in (DELTA, ICEBERG):
            copied = Counter((row["id"], row["part"]) for row in self.arrow("copy", form).to_pylist())
            if copied != Counter((n, n % PARTS) for n in ids):
                found.append(f"copy as {form}")
            summed = self.arrow("totals", form).select(["part", "odd", "events", "total"]).to_pylist()
            if Counter(tuple(row.values()) for row in summed) != totals:
                found.append(f"totals as {form}")
        return found


@pytest.fixture
def pipelines(nats_server: EmbeddedServer, tmp_path: Path, spark: SparkSession) -> Iterator[LakePipelines]:
    made = LakePipelines(nats_server, tmp_path)
    yield made
    if made.process and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait(120)


@pytest.mark.parametrize(
    ("count", "kills"),
    [
        pytest.param(200, [], id="without a kill"),
        pytest.param(500, [steps.FILES_STAGED, steps.FILES_WRITTEN, steps.BATCH_WRITTEN] * 2, id="at each step"),
    ],
)
@pytest.mark.kills
@pytest.mark.timeout(1500)
def test_delta_and_iceberg_tables_are_right_after_crashes(
    pipelines: LakePipelines, count: int, kills: list[str]
) -> None:
    pipelines.prepare()
    pipelines.publish(1, count)
    for step in kills:
        pipelines.kill_at(step)
    pipelines.finish()
    assert pipelines.wrong(count) == []
    pipelines.publish(count + 1, count + 100)
    pipelines.finish()
    assert pipelines.wrong(count + 100) == []
    assert pipelines.wrong(count) == [f"{name} as {form}" for form in (DELTA, ICEBERG) for name in ("copy", "totals")]
