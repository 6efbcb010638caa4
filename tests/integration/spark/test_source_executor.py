"""What an executor needs to read: the package in a zip, what the driver sends with a task, and no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyspark.serializers import CPickleSerializer

from penstock.server.embedded import EmbeddedServer
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.spark.session import package_archive
from penstock.wire import compiled

EXECUTOR = """
import json, pickle, sys
import penstock
reader, partition = pickle.load(open(sys.argv[1], "rb"))
rows = sum(batch.num_rows for batch in reader.read(partition))
from penstock.wire import compiled
kind = type(compiled._machine).__name__
print(json.dumps([rows, kind, compiled._compiling is None, "numba" in sys.modules, ".zip" in penstock.__file__]))
"""


def test_a_task_uses_the_drivers_machine_code_and_never_compiles(
    nats_server: EmbeddedServer, streams: Any, tmp_path: Path
) -> None:
    compiled.warm()
    streams.make("S")
    streams.number("s.a", 1, 1000)
    reader = JetStreamDataSource({"servers": nats_server.url, "stream": "S"}).reader(COLUMNS)
    sent = tmp_path / "task"
    sent.write_bytes(CPickleSerializer().dumps((reader, reader.partitions()[0])))  # type: ignore[no-untyped-call]  # Spark's
    nowhere = tmp_path / "nowhere"
    places = {name: str(nowhere) for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", compiled.CACHE_VARIABLE)}
    environment = {**os.environ, **places, "PYTHONPATH": str(package_archive(tmp_path / "penstock.zip"))}
    command = [sys.executable, "-c", EXECUTOR, str(sent)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [1000, "MachineKernels", True, False, True]
