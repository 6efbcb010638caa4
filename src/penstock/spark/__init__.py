"""The Spark source, sink and pipelines: the only package that imports pyspark.

`register(spark)` makes `format("jetstream")` known to a session.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.datasource import register

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    """Imported on first use: modules of this package that need no Spark can be used without it."""
    if name == "register":
        from penstock.spark.datasource import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
