"""Delta Lake beside Spark: a jar that users bring, and two settings of the session.

If it is present, Delta's own writer appends, and its `MERGE` upserts. Both commit with the query and the batch as an
application transaction, as `delta_log` does, so that either of the two may have written a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError
from penstock.spark.lakes import DELTA, check_key

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
EXTENSIONS = "spark.sql.extensions"
SETTINGS = {
    EXTENSIONS: EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""Without these Delta refuses to write."""
JARS = ("spark.jars", "spark.jars.packages")
ONCE = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
"""Settings of a session that name the transaction of a statement in SQL."""
ROWS = "penstock_rows"
DEPTH = 20
"""Causes of an exception that are looked at."""


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """The session's settings for Delta, when the user's own bring its jar."""
    return dict(SETTINGS) if any("delta-spark" in given.get(name, "") for name in JARS) else {}


def missing(spark: SparkSession) -> str | None:
    """Return why the Spark session cannot write Delta tables, and what to do about it; None when it can."""
    jvm: Any = spark._jvm
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(EXTENSION)
    except Py4JJavaError:
        return (
            "Delta Lake's jar is not there: give `--conf spark.jars.packages=io.delta:delta-spark_2.13:<version for "
            "your Spark>`"
        )
    if EXTENSION in (spark.conf.get(EXTENSIONS, "") or ""):
        return None
    wanted = " ".join(f"--conf {name}={value}" for name, value in SETTINGS.items())
    return f"Spark has its jar, but was not started for it: give `{wanted}`"


class JarDoesNotFit(ConfigError):
    """The jar was made for another version of Spark."""


@dataclass(frozen=True, slots=True)
class JarTable:
    """A Delta table that the jar writes. Raises `JarDoesNotFit` when it cannot, with this Spark."""

    path: str
    """An absolute path, or a URI."""
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None

    def append(self, rows: DataFrame, query: str, batch: int) -> None:
        """Append the rows of a micro-batch; no effect if they are already written."""
        with _fitting(rows.sparkSession):
            self._append(rows, query, batch)

    def upsert(self, rows: DataFrame, key: Sequence[str], query: str, batch: int) -> None:
        """Replace the rows with the same keys, or add new ones, in one commit."""
        check_key(self.path, rows, key, self.partition_by)
        with _fitting(rows.sparkSession):
            if self._is_there(rows.sparkSession):
                self._merge(rows, key, query, batch)
            else:
                self._append(rows, query, batch)

    def _append(self, rows: DataFrame, query: str, batch: int) -> None:
        once = {"txnAppId": query, "txnVersion": str(batch)}
        writer = rows.write.format(DELTA).mode("append").options(**once).options(**dict(self.options or {}))
        (writer.partitionBy(*self.partition_by) if self.partition_by else writer).save(self.path)

    def _is_there(self, spark: SparkSession) -> bool:
        jvm: Any = spark._jvm
        return bool(jvm.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, self.path))

    def _merge(self, rows: DataFrame, key: Sequence[str], query: str, batch: int) -> None:
        same = " AND ".join(f"old.{_quoted(column)} <=> new.{_quoted(column)}" for column in key)
        rows.createOrReplaceTempView(ROWS)
        with _once(rows.sparkSession, query, batch):
            rows.sparkSession.sql(
                f"MERGE INTO {DELTA}.{_quoted(self.path)} AS old USING {ROWS} AS new ON {same} "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


@contextmanager
def _once(spark: SparkSession, query: str, batch: int) -> Iterator[None]:
    """Statements in the block are the transaction of this batch, which Delta does once."""
    for name, value in zip(ONCE, (query, str(batch)), strict=True):
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in ONCE:
            spark.conf.unset(name)


@contextmanager
def _fitting(spark: SparkSession) -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as exc:
        if _is_linkage(exc.java_exception):
            raise JarDoesNotFit(
                f"Delta's jar was made for another version of Spark than {spark.version}: take the jar for this one, "
                "or leave it away and `pip install 'penstock-nats[delta]'`"
            ) from exc
        raise


def _is_linkage(thrown: Any) -> bool:
    """Whether classes do not fit together, somewhere among the causes."""
    gateway = SparkContext._gateway
    for _ in range(DEPTH):
        if thrown is None:
            return False
        if is_instance_of(gateway, thrown, "java.lang.LinkageError"):
            return True
        thrown = thrown.getCause()
    return False
