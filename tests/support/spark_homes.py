"""Homes of Spark: folders of links to the installed PySpark.

`python -m tests.support.spark_homes FOLDER` makes the one that all tests use, with an archive of the classes that
Spark loads. A JVM that maps the archive starts in 0.6 of the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CLASSES = "classes.jsa"
QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""An archive that does not fit the JVM is not used; nobody needs to be told."""
JVM_OPTIONS = "SPARK_SUBMIT_OPTS"
"""Read by `spark-submit`, which starts every driver."""


def installed() -> Path:
    """The folder of PySpark; found without importing it, which takes half a second."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None, "PySpark is missing: install penstock-nats[spark]"
    return Path(found.origin).parent


def linked_home(folder: Path, *without: str) -> Path:
    """Spark under another folder, except for these entries."""
    folder.mkdir(exist_ok=True)
    for entry in installed().iterdir():
        if entry.name not in without:
            (folder / entry.name).symlink_to(entry)
    return folder


def unzipped_home(folder: Path) -> Path:
    """Spark whose Python processes import the installed PySpark, and not the zip file of the same that Spark has.

    What comes from a zip file is compiled anew by every process, which doubles the time that a streaming query takes
    to start.
    """
    home, libraries = linked_home(folder, "python"), installed() / "python" / "lib"
    (home / "python" / "lib").mkdir(parents=True)
    for entry in (installed() / "python").iterdir():
        if entry.name != "lib":
            (home / "python" / entry.name).symlink_to(entry)
    for entry in libraries.iterdir():
        target = installed().parent if entry.name == "pyspark.zip" else entry
        (home / "python" / "lib" / entry.name).symlink_to(target)
    return home


def made_before(home: Path) -> dict[str, str]:
    """Return the environment in which drivers start from a home that has an archive of classes, if it is there."""
    archive = home / CLASSES
    if not archive.is_file():
        return {}
    return {"SPARK_HOME": str(home), JVM_OPTIONS: f"-XX:SharedArchiveFile={archive} {QUIET}"}


def make(home: Path) -> None:
    """Make a home, and the archive of classes by a driver that does a little of what tests do."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    unzipped_home(home)
    unfinished = home / "unfinished.jsa"
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        JVM_OPTIONS: f"-XX:ArchiveClassesAtExit={unfinished} {QUIET}",
    }
    subprocess.run([sys.executable, "-m", __spec__.name, "--load-classes", str(home)], env=environment, check=True)
    unfinished.rename(home / CLASSES)


def load_classes(folder: Path) -> None:
    """Run a few queries, so that the JVM has loaded what they need, and wait until it has ended."""
    from pyspark import SparkContext

    from penstock.spark.session import running

    with running(
        "classes", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"}, short_lived=True
    ) as spark:
        table = str(folder / "table")
        rows = spark.createDataFrame([(number, f"{number}") for number in range(10)], "number bigint, text string")
        rows.mapInArrow(lambda batches: batches, rows.schema).write.parquet(table)
        rows.join(spark.read.parquet(table), ["number", "text"]).groupBy("text").count().collect()
        counted = spark.readStream.schema(rows.schema).parquet(table).groupBy("text").count()
        query = (
            counted.writeStream.format("noop")
            .outputMode("complete")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    for used in ("table", "checkpoint"):
        shutil.rmtree(folder / used)


if __name__ == "__main__":
    *load, where = sys.argv[1:]
    (load_classes if load else make)(Path(where).absolute())
