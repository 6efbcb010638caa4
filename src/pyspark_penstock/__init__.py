"""Found by Spark itself: `format("jetstream")` without `register`.

Spark imports every top-level package whose name begins with `pyspark_`, in the Python that `PYSPARK_PYTHON` names, and
takes its `DefaultSource` for a data source.
"""

import warnings

try:
    from penstock.spark.datasource import JetStreamDataSource as DefaultSource
except ImportError as exc:  # raising here would end Spark's search for the data sources of all packages
    warnings.warn(f"Spark cannot use format jetstream: {exc}; is this PySpark 4.2 or newer?", stacklevel=1)
else:
    __all__ = ["DefaultSource"]
