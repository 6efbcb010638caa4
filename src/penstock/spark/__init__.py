"""The Spark source, sink and pipelines: the only package that imports pyspark.

Importing it before the first session makes Spark run this Python, unless `PYSPARK_PYTHON` is set. Spark then finds
`format("jetstream")` by itself; `register(spark)` is for sessions that do not.
"""

from typing import TYPE_CHECKING, Any

from penstock.spark import interpreter

if TYPE_CHECKING:
    from penstock.spark.datasource import register

__all__ = ["register"]

interpreter.choose()


def __getattr__(name: str) -> Any:
    """Import on first use: modules of this package that need no Spark can be used without it."""
    if name == "register":
        from penstock.spark.datasource import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
