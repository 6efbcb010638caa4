"""The package reaches executors that do not have it: shipped the documented way, to separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow.dataset
import pytest

import penstock
from penstock.broker.embedded import EmbeddedServer
from penstock.spark import submit
from penstock.spark.link import Link
from penstock.topology.load import load

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


def python_of_the_cluster(folder: Path) -> Path:
    """An interpreter with everything that is installed here; this package only on the driver's side, not in executors.

    Executors are told by their working directory, which is below the worker's folder.
    """
    installed = folder / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "penstock" not in entry.name:
            (installed / entry.name).symlink_to(entry)
    own = Path(penstock.__file__).parents[1]
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
case "$PWD" in */work/app-*) extra="{installed}" ;; *) extra="{installed}:{own}" ;; esac
PYTHONPATH="$PYTHONPATH:$extra" exec {sys.executable} -S "$@"
"""
    )
    program.chmod(0o755)
    return program


@pytest.mark.timeout(600)
def test_executors_without_the_package_get_it_from_the_archive(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    python = python_of_the_cluster(tmp_path)
    executor = tmp_path / "work" / "app-1"
    executor.mkdir(parents=True)
    tried = subprocess.run(
        [python, "-c", "import penstock"], capture_output=True, check=False, timeout=60, cwd=executor
    )
    assert b"No module named 'penstock'" in tried.stderr

    (tmp_path / "penstock.yaml").write_text(PLATFORM)
    (tmp_path / "shouting.py").write_text(MODULE)
    with Link(nats_server.settings) as link:
        for stream in load(tmp_path / "penstock.yaml").streams.values():
            link.call(lambda api, config=stream.config: api.create_stream(config))
        for n in range(50):
            link.ask("in.a", json.dumps({"id": f"e{n}"}).encode())

    packed = [sys.executable, "-m", "penstock", "pipeline", "package", "-o", str(tmp_path / "penstock.zip")]
    subprocess.run([*packed, "--file", str(tmp_path / "penstock.yaml")], check=True, timeout=60)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "PENSTOCK_SERVERS": nats_server.url,
    }
    command = [
        str(Path(sysconfig.get_path("scripts")) / "spark-submit"),
        *(
            "--master",
            "local-cluster[2,1,1024]",
            "--conf",
            "spark.executor.memory=512m",
            "--conf",
            "spark.ui.enabled=false",
        ),
        *("--conf", "spark.sql.shuffle.partitions=2", "--py-files", str(tmp_path / "penstock.zip")),
        *(submit.__file__, str(tmp_path / "penstock.yaml"), "shout", "--once"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert "shout: finished, 50 read, 50 written, 0 bad" in done.stdout.decode()
    rows = pyarrow.dataset.dataset(tmp_path / "lake/shout").to_table().to_pylist()
    assert sorted(row["id"].partition("|")[0] for row in rows) == sorted(f"E{n}" for n in range(50))
    # relative: from the executor's own folder, where Spark puts what was sent
    assert {row["id"].partition("|")[2] for row in rows} == {"./penstock.zip/penstock/__init__.py"}
