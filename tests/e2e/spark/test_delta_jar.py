"""Delta tables with Delta's own jar, as users bring it: on the Spark it is made for, and on the one that we lock.

Jar and Spark come from the network, once. Their versions are the table in `docs/pipelines.md`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.e2e.spark.test_pipeline_command import PARTS, Pipelines

from penstock.jetstream import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.spark import steps
from penstock.spark.link import Link
from penstock.topology.load import load

JAR = "io.delta:delta-spark_4.2_2.13:4.4.0"
SPARK_OF_THE_JAR = "4.2.1"
PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], allow_atomic: true, allow_direct: true}
pipelines:
  copy:
    from: {stream: IN, max_rows: 100}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    to: [{format: delta, path: lake/copy, partition_by: [part]}]
    sql: "SELECT id, part FROM events"
  totals:
    from: {stream: IN, max_rows: 100}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    sql: "SELECT part, count(*) AS events, sum(id) AS total FROM events GROUP BY ALL"
    to: [{format: delta, path: lake/totals}]
"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class JarPipelines(Pipelines):
    """A pipeline that appends and one that upserts, in a Spark that has the jar."""

    spark_version: str | None = None
    """Another Spark than the locked one."""

    def prepare(self, trigger: str = "") -> None:
        (self.folder / "holds").mkdir()
        self.file.write_text(PLATFORM % self.server.url)
        with Link(self.server.settings) as link:
            for stream in load(self.file).streams.values():
                link.call(partial(JetStream.create_stream, config=stream.config))
        if self.spark_version:
            wanted = [f"pyspark=={self.spark_version}", "--no-deps", "--target", str(self.other_spark)]
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True, timeout=600)

    @property
    def other_spark(self) -> Path:
        return self.folder / "other_spark"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        jar = ["--conf", f"spark.jars.packages={JAR}", "--conf", f"spark.jars.ivy={self.folder / 'ivy'}"]
        return super().start(*arguments, *jar)

    def finish(self, *arguments: str) -> None:
        assert self.start("--once", *arguments).wait(900) == 0, self.log()

    def wrong(self, count: int) -> list[str]:
        """Tables that are not what a calculation by hand gives."""
        ids = range(1, count + 1)
        copied = Counter((row["id"], row["part"]) for row in self.delta("copy").to_pyarrow_table().to_pylist())
        totals = self.delta("totals").to_pyarrow_table().select(["part", "events", "total"]).to_pylist()
        parts = {part: [n for n in ids if n % PARTS == part] for part in range(PARTS)}
        checks = {
            "copy": copied == Counter((n, n % PARTS) for n in ids),
            "totals": Counter(tuple(row.values()) for row in totals)
            == Counter((part, len(some), sum(some)) for part, some in parts.items()),
        }
        return [name for name, well in checks.items() if not well]

    def delta(self, name: str) -> DeltaTable:
        return DeltaTable(self.folder / "lake" / name)

    def writers(self, name: str) -> set[str]:
        """Operations and engines in the table's history."""
        return {
            f"{commit['operation']} by {commit.get('engineInfo', commit.get('clientVersion', '?'))}"
            for commit in self.delta(name).history()
        }


@pytest.fixture
def pipelines(nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JarPipelines]:
    made = JarPipelines(nats_server, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made.other_spark), *sys.path]))
    monkeypatch.delenv("SPARK_HOME")  # it is the home of the locked Spark
    yield made
    if made.process and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait(120)


def test_the_jar_appends_and_merges_once_through_crashes_on_its_own_spark(pipelines: JarPipelines) -> None:
    pipelines.spark_version = SPARK_OF_THE_JAR
    pipelines.prepare()
    pipelines.publish(1, 300)
    for step in (steps.FILES_WRITTEN, steps.BATCH_WRITTEN):
        pipelines.kill_at(step)
    pipelines.finish()
    assert pipelines.wrong(300) == []
    pipelines.publish(301, 350)
    pipelines.finish()
    assert pipelines.wrong(350) == []
    assert pipelines.wrong(300) == ["copy", "totals"]
    engine = f"Apache-Spark/{SPARK_OF_THE_JAR} Delta-Lake/4.4.0"
    assert pipelines.writers("copy") == {f"WRITE by {engine}"}
    assert pipelines.writers("totals") == {f"WRITE by {engine}", f"MERGE by {engine}"}


def test_where_the_jar_does_not_fit_deltalake_writes_on(pipelines: JarPipelines) -> None:
    """With the locked Spark the jar writes a table's first batch, and then finds methods missing."""
    pipelines.prepare()
    pipelines.publish(1, 300)
    pipelines.finish()
    assert "made for another version of Spark" in pipelines.log()
    assert pipelines.wrong(300) == []
    pipelines.publish(301, 350)
    pipelines.finish()
    assert pipelines.wrong(350) == []
