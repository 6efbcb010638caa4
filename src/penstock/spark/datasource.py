"""Format `jetstream`: the class that Spark pickles by name and asks for readers and writers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import ArrayType, BinaryType, LongType, MapType, StringType, StructType, TimestampType

from penstock.errors import ConfigError
from penstock.spark import interpreter
from penstock.spark.options import check_source_names, column_options, sink_options, source_options
from penstock.wire import compiled

FORMAT = "jetstream"
COLUMNS = (
    StructType()
    .add("stream", StringType())
    .add("subject", StringType())
    .add("sequence", LongType())
    .add("timestamp", TimestampType())
    .add("headers", MapType(StringType(), ArrayType(StringType())))
    .add("data", BinaryType())
)


def register(spark: SparkSession) -> None:
    """Make `format("jetstream")` known to a Spark session that has not found it by itself.

    Also starts to compile the reader's inner loops in the background if no process has on this machine; until then
    reading is slower. Raises `ConfigError` when the session runs a Python without this package.
    """
    if not hasattr(spark, "_jsparkSession"):  # Spark Connect: its server does everything else
        spark.dataSource.register(JetStreamDataSource)
        return
    interpreter.check(spark.sparkContext.pythonExec, _added_files(spark))
    _register_once(spark)
    compiled.prepare()


def _added_files(spark: SparkSession) -> list[str]:
    """Return the paths of Python packages that were sent to executors (`addPyFile`, `--py-files`)."""
    from pyspark import SparkFiles  # not in a client that only speaks Spark Connect

    root = SparkFiles.getRootDirectory()
    return [root, *(os.path.join(root, name) for name in spark.sparkContext._python_includes or ())]


def _register_once(spark: SparkSession) -> None:
    session = spark._jsparkSession
    known = session.sessionState().dataSourceManager().dataSourceExists(FORMAT)
    # Tasks look for what Spark has found by itself without the packages that were sent to executors.
    if not known or spark.sparkContext._python_includes:
        # Spark looks for the name in whichever session is active, and refuses it if that one has it already.
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session)
        spark.dataSource.register(JetStreamDataSource)


class JetStreamDataSource(DataSource):
    """A JetStream stream as a table that is read, streamed from, and written to."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        """Return the columns. Spark calls this at `load()`, the first moment to report a wrong option."""
        check_source_names(self.options)
        events, places = column_options(self.options)
        if not events and not places:
            return COLUMNS
        more = ["row int"] * places + [f"event struct<{events}>"] * bool(events)
        return ", ".join([*(f"{field.name} {field.dataType.simpleString()}" for field in COLUMNS), *more])

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.several import SeveralReader
        from penstock.spark.source import JetStreamReader, row_shape

        _check_schema(schema, self.options)
        options = source_options(self.options, streaming=False)
        shape = row_shape(options, schema)
        return SeveralReader(options, shape) if options.is_several else JetStreamReader(options, shape)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.several import SeveralStreamReader
        from penstock.spark.source import JetStreamStreamReader, row_shape

        _check_schema(schema, self.options)
        options = source_options(self.options, streaming=True)
        shape = row_shape(options, schema)
        return SeveralStreamReader(options, shape) if options.is_several else JetStreamStreamReader(options, shape)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import batch_writer

        return batch_writer(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.sink import stream_writer

        return stream_writer(sink_options(self.options), schema)


def _check_schema(schema: StructType, options: Mapping[str, str]) -> None:
    """Refuse a user's schema: columns are chosen by options only; decoding `data` is the query's part."""
    events, places = column_options(options)
    more = ["row"] * places + ["event"] * bool(events)
    given = [(field.name, field.dataType) for field in schema]
    known = [(field.name, field.dataType) for field in COLUMNS]
    if given[: len(known)] != known or [name for name, _ in given[len(known) :]] != more:
        raise ConfigError(
            f"format jetstream has the columns {COLUMNS.simpleString()}: leave out .schema(…), and decode `data` with "
            "from_json or a pipeline's event schema"
        )
