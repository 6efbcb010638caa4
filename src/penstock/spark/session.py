"""The Spark session of a pipeline: its settings in one place, and the package on its executors."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext, SparkFiles
from pyspark.errors import PySparkRuntimeError
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.spark import delta, jvm
from penstock.spark.json_events import ALL_OR_NOTHING

LOCAL_THREADS = 4
"""A local pipeline shuffles between no more tasks than this: it keeps its state in as many files a batch."""

STREAMING_FILES = "streaming_job"
"""Where Spark looks for the Python files of a streaming query, below the folder of all files."""

ALWAYS = {
    "spark.sql.session.timeZone": "UTC",  # a window of an hour is the same hour on every machine
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    ALL_OR_NOTHING[0]: ALL_OR_NOTHING[1],
}
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
}


QUERY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""They write what is wrong with a query, such as a column that is not there, as JSON with two stacks."""

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives a minute: the optimizing compiler would use more time than it saves."""


def session(
    name: str,
    master: str | None = "local[*]",
    settings: Mapping[str, str] | None = None,
    verbose: bool = False,
    short_lived: bool = False,
) -> SparkSession:
    """The process's Spark session, started if there is none. `master` None: whatever spark-submit said.

    With executors on other machines, this package is sent to them; what it needs (`penstock-nats[spark]` brings it)
    must be installed there.
    """
    place = {"spark.app.name": name} | ({"spark.master": master} if master else {})
    own = dict(settings or {})
    made = _started({**place, **defaults(master, verbose, short_lived), **delta.settings(own), **own})
    if verbose:
        made.sparkContext.setLogLevel("WARN")
    else:
        hush()
    if master and not is_local(master):  # spark-submit has its own way: --py-files
        ship(made)
    return made


def hush() -> None:
    """Keep PySpark from logging errors with full stacks before the pipeline reports them in one line."""
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)  # errors in a micro-batch
    for name in QUERY_LOGGERS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _started(settings: dict[str, Any]) -> SparkSession:
    try:
        jvm.launch(settings)
        return SparkSession.builder.config(map=settings).getOrCreate()
    except PySparkRuntimeError as exc:
        if exc.getCondition() == "JAVA_GATEWAY_EXITED":
            raise ConfigError("Spark did not start: it needs Java 17 or newer; is JAVA_HOME right?") from exc
        raise


class SparkDied(PenstockError):
    """Spark's JVM ended while it was in use."""

    def __str__(self) -> str:
        return "Spark's JVM has ended, killed or out of memory; run it again, with more memory if that was it"


@contextmanager
def running(
    name: str,
    master: str | None = "local[*]",
    settings: Mapping[str, str] | None = None,
    verbose: bool = False,
    short_lived: bool = False,
) -> Iterator[SparkSession]:
    """Open a session for the duration of the block. Raises `SparkDied` when its JVM ends.

    A session that this process had before, as in a notebook, is used, and left running.
    """
    had_one = SparkContext._active_spark_context is not None
    spark = session(name, master, settings, verbose, short_lived)
    try:
        yield spark
    except (Py4JNetworkError, ConnectionError) as exc:
        raise SparkDied from exc
    finally:
        if not had_one:
            with suppress(Py4JError, ConnectionError):  # then there is nothing left to stop
                spark.stop()


def defaults(master: str | None, verbose: bool = False, short_lived: bool = False) -> dict[str, str]:
    """The settings for a master, before the user's own."""
    chosen = dict(ALWAYS)
    if master is None:
        return chosen
    java = [SHORT_LIVED] if short_lived else []
    if not verbose:
        java.append(f"-Dlog4j2.configurationFile={_log_config()}")
    chosen["spark.driver.extraJavaOptions"] = " ".join(java)
    if is_local(master):
        chosen |= LOCAL
        chosen["spark.sql.shuffle.partitions"] = str(min(os.cpu_count() or 1, LOCAL_THREADS))
    return chosen


def is_local(master: str) -> bool:
    """Whether everything runs in the driver's process and its Python children."""
    return master == "local" or master.startswith("local[")


def ship(spark: SparkSession, extra: Iterable[Path] = ()) -> None:
    """Send this package, and Python files or folders besides, to every executor, now and later ones."""
    archive = package_archive(Path(tempfile.mkdtemp(prefix="penstock-")) / "penstock.zip", extra)
    spark.sparkContext.addPyFile(str(archive))
    # Spark's own Python processes on the driver look for it here when they plan and commit a streaming query, and Spark
    # does not put it there; they need it when their interpreter (PYSPARK_PYTHON) is not the one we run on.
    place = Path(SparkFiles.getRootDirectory()) / STREAMING_FILES
    place.mkdir(exist_ok=True)
    shutil.copy(archive, place)


def package_archive(target: Path, extra: Iterable[Path] = ()) -> Path:
    """Write this package as a zip that Python can import from, for `--py-files`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for root in (Path(penstock.__file__).parent, *extra):
            for file in [root] if root.is_file() else sorted(root.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to(root.parent))
    return target


def _log_config() -> Path:
    with resources.as_file(resources.files("penstock.spark") / "log4j2.properties") as path:
        return path
