"""One read and one write through format `jetstream`, as programs for every way there is to start Spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer

COUNT = 7
CLASSIC = """
import penstock.spark
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
"""
CONNECT = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
"""
COPY = """
events = spark.readStream.format("jetstream").options(servers="{url}", stream="ORDERS", consumer="door").load()
rows = events.selectExpr("'copy.' || subject AS subject", "data").writeStream.format("jetstream").queryName("door")
query = rows.options(servers="{url}", stream="COPY", checkpointLocation="{folder}").trigger(availableNow=True).start()
query.awaitTermination()
"""
REGISTERED = """
from penstock.spark import register
register(spark)
print(spark.read.format("jetstream").options(servers="{url}", stream="COPY").load().count())
"""
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
SPARK_HOME = Path(pyspark.__file__).parent


def fill(streams: Streams) -> None:
    """Create the streams that programs read and write, and publish `COUNT` messages."""
    streams.make("ORDERS")
    streams.make("COPY", allow_atomic=True)
    streams.number("orders.new", 1, COUNT)


def program(start: str, server: EmbeddedServer, folder: Path) -> str:
    """The copy, after the lines that start a session."""
    return start + COPY.format(url=server.url, folder=folder / "checkpoint")


def project(folder: Path, server: EmbeddedServer) -> Path:
    """The copy as a project of Spark Declarative Pipelines: the one that the page shows."""
    text = PAGE.read_text()
    (definitions,) = re.findall(r"```python\n(from pyspark import pipelines.*?)```", text, re.DOTALL)
    (declared,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (folder / "transformations").mkdir(parents=True)
    (folder / "transformations" / "copy.py").write_text(definitions.replace("nats://nats-0:4222", server.url))
    (folder / "spark-pipeline.yml").write_text(declared.replace("/var/lib/copy", str(folder / "storage")))
    return folder


def run(command: list[str | Path], folder: Path, **environment: str | None) -> str:
    """What a program says, which must end well. The environment is this one's, with None for what must not be there."""
    given = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def python(code: str, folder: Path, **environment: str | None) -> str:
    return run([sys.executable, "-c", code], folder, **environment)
