"""The package reaches executors that do not have it: shipped the documented way, to processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow.dataset
import pytest
from tests.e2e.spark.clusters import (
    LOOPBACK,
    QUICK,
    python_with_package_on_the_driver,
    python_without_package,
    spark_home,
    standalone,
)

from penstock.jetstream import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.spark import submit
from penstock.spark.link import Link
from penstock.topology.load import load

PENSTOCK = [sys.executable, "-m", "penstock"]
COUNT = 50
PLATFORM = """
streams:
  IN: {subjects: [in.>], allow_direct: true}
  OUT: {subjects: [out.>], allow_atomic: true}
pipelines:
  shout:
    from: {stream: IN}
    event: {format: json, schema: "id string NOT NULL"}
    function: shouting:loud
    to: [{format: parquet, path: lake/shout}, {stream: OUT, subject: out.shout}]
"""
MODULE = """
from pyspark.sql import functions as F

def shout(text):
    import penstock
    return text.upper() + "|" + penstock.__file__

def loud(events):
    return events.select(F.udf(shout, useArrow=False)("id").alias("id"))
"""
SMALL = ["--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false", "--conf", "spark.cores.max=2"]
pytestmark = [pytest.mark.timeout(600), pytest.mark.kills]


@pytest.fixture
def platform(nats_server: EmbeddedServer, tmp_path: Path) -> Path:
    """A platform file with a pipeline that tells where executors have the package from; its events are published."""
    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM)
    (tmp_path / "shouting.py").write_text(MODULE)
    with Link(nats_server.settings) as link:
        for stream in load(file).streams.values():
            link.call(partial(JetStream.create_stream, config=stream.config))
        for n in range(COUNT):
            link.stubbornly(partial(link.publish, "in.a", json.dumps({"id": f"e{n}"}).encode()))
    return file


def ran(command: list[str], platform: Path, server: EmbeddedServer, **environment: str) -> str:
    """What a command says that runs the pipeline; it must end well."""
    given: Mapping[str, str] = {**os.environ, **QUICK, "PENSTOCK_SERVERS": server.url, **environment}
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, check=False, timeout=500, cwd=platform.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def package_was_from(platform: Path) -> set[str]:
    """From where the executors had the package; every event must have come to the table."""
    rows = pyarrow.dataset.dataset(platform.parent / "lake/shout").to_table().to_pylist()
    assert sorted(row["id"].partition("|")[0] for row in rows) == sorted(f"E{n}" for n in range(COUNT))
    return {row["id"].partition("|")[2] for row in rows}


def test_spark_submit_sends_the_archive_to_executors(nats_server: EmbeddedServer, platform: Path) -> None:
    archive = platform.with_name("penstock.zip")
    packed = [*PENSTOCK, "pipeline", "package", "-o", str(archive), "--file", str(platform)]
    subprocess.run(packed, check=True, timeout=60)
    python = str(python_with_package_on_the_driver(platform.parent))
    home = str(spark_home(platform.parent / "spark"))
    program = str(Path(sysconfig.get_path("scripts")) / "spark-submit")
    where = ["--master", "local-cluster[2,1,1024]", *SMALL, "--conf", "spark.sql.shuffle.partitions=2"]
    command = [program, *where, "--py-files", str(archive), submit.__file__, str(platform), "shout", "--once"]
    pythons = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    said = ran(command, platform, nats_server, SPARK_HOME=home, **pythons)
    assert "shout: finished, 50 read, 50 written, 0 bad" in said
    # relative: from the executor's own folder, where Spark puts what was sent
    assert package_was_from(platform) == {"./penstock.zip/penstock/__init__.py"}


def test_a_pipeline_runs_on_a_standalone_cluster_and_sends_itself_there(
    nats_server: EmbeddedServer, platform: Path
) -> None:
    python = str(python_without_package(platform.parent / "python"))
    with standalone(platform.parent) as master:
        command = [*PENSTOCK, "pipeline", "run", "shout", "--once", "--master", master, *SMALL, "--json"]
        said = ran(command, platform, nats_server, PYSPARK_PYTHON=python, SPARK_LOCAL_IP=LOOPBACK)
    [ended] = json.loads(said)["pipelines"]
    assert (ended["state"], ended["rows_read"], ended["rows_written"]) == ("finished", COUNT, COUNT)
    (place,) = package_was_from(platform)
    assert place.endswith("penstock.zip/penstock/__init__.py")
