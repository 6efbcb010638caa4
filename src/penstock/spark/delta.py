"""Delta Lake beside Spark: a jar that users bring, and two settings of the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
EXTENSIONS = "spark.sql.extensions"
SETTINGS = {
    EXTENSIONS: EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""Without these Delta refuses to write."""
JARS = ("spark.jars", "spark.jars.packages")


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """The session's settings for Delta, when the user's own bring its jar."""
    return dict(SETTINGS) if any("delta-spark" in given.get(name, "") for name in JARS) else {}


def missing(spark: SparkSession) -> str | None:
    """What keeps the Spark session from writing Delta tables, and what to do about it; None when nothing does."""
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
