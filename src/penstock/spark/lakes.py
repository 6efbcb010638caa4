"""Tables with a log of their own, Delta and Iceberg: executors write Parquet, the driver commits the files to the log.

No jar is needed, and any Spark will do: the logs are written by `deltalake` and `pyiceberg`. The commit of a
micro-batch names query and batch, so that it happens once. The steps, and what a crash after each leaves:

    1. ask the log for the last batch of the query     nothing
    2. upsert: read what the touched partitions hold   nothing
    3. write files below `data/<query>-<batch>-<try>`  unreferenced files; the next run writes others
    4. commit them, and what they replace, with the batch's number
                                                       the batch is there, and the next run finds it in step 1

Files hold all columns. Those that the table is partitioned by are also in the names of folders, so that a file has
rows of one partition.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    IntegralType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from penstock.errors import ConfigError, PenstockError
from penstock.spark import steps
from penstock.spark.files import files_at

DELTA, ICEBERG = "delta", "iceberg"
LIBRARIES = {DELTA: "deltalake", ICEBERG: "pyiceberg"}
"""Format and the library that writes its log; both are optional."""
DATA = "data"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose partition column is null."""
TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
"""Neither format supports the timestamps that Spark writes by default."""
PARTITION_TYPES = (StringType, IntegralType, BooleanType, DateType)
"""Column types whose values have one text form in every library."""
ATTEMPTS = 3
"""How often a batch is rewritten when another writer committed first."""
COMMITS = 10
"""How often a commit that only adds files is retried after another writer's commit."""
PAUSE = 0.5
"""Seconds, at most, before a commit is repeated."""

Values = tuple[str | None, ...]
"""The values of the partition columns as text."""


class OtherWriter(PenstockError):
    """Another writer has committed to the table meanwhile."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: another writer has changed the table while it was being written; run the pipeline again"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table."""

    path: str
    """Below the table."""
    values: Values


@dataclass(frozen=True, slots=True)
class Commit:
    """The content of one commit."""

    query: str
    batch: int
    added: Sequence[DataFile]
    removed: Sequence[str] = ()
    """Files that the added ones stand for, as the log named them."""
    is_blind: bool = True
    """It does not depend on the table's content, so it may follow any other commit."""


class LakeLog(Protocol):
    """The log of one table."""

    def last_batch(self, query: str) -> int | None:
        """The last batch of a query that the table has; None: there is none."""

    def check(self, schema: StructType) -> None:
        """Create the table if it is missing; raise `ConfigError` when it has other columns or partitions."""

    def files(self, touched: set[Values]) -> dict[str, str]:
        """The files of some partitions: as the log names them, and as Spark reads them."""

    def commit(self, commit: Commit) -> None:
        """Add and remove files in one commit. Raises `OtherWriter` when the log is not what it was at `files`."""


@dataclass(frozen=True, slots=True)
class Lake:
    """A table with a log."""

    path: str
    """An absolute path, or a URI."""
    format: str
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None

    def append(self, rows: DataFrame, query: str, batch: int) -> None:
        """Append the rows of a micro-batch; no effect if they are already written."""
        self._check_partitions(rows)
        self._persistently(rows, None, query, batch)

    def upsert(self, rows: DataFrame, key: Sequence[str], query: str, batch: int) -> None:
        """Replace the rows with the same keys, or add new ones, in one commit."""
        check_key(self.path, rows, key, self.partition_by)
        self._check_partitions(rows)
        self._persistently(rows, key, query, batch)

    def _persistently(self, rows: DataFrame, key: Sequence[str] | None, query: str, batch: int) -> None:
        """Write the batch; rewrites it when another writer committed first."""
        for _ in range(ATTEMPTS - 1):
            with suppress(OtherWriter):
                return self._write(rows, key, query, batch)
        return self._write(rows, key, query, batch)

    def _write(self, rows: DataFrame, key: Sequence[str] | None, query: str, batch: int) -> None:
        log = self._log()
        if _has(log, query, batch):
            return
        rows = self._fitting(rows)
        log.check(plain(rows.schema))
        old = {} if key is None else log.files(self._touched(rows))
        added = self._written(_merged(rows, list(old.values()), key or ()), f"{query}-{batch}")
        steps.reached(steps.FILES_STAGED)
        self._commit(log, Commit(query, batch, added, tuple(old), is_blind=key is None))

    def _commit(self, log: LakeLog, commit: Commit) -> None:
        """Commit, also after other writers' commits if they do not conflict."""
        for _ in range(COMMITS if commit.is_blind else 0):
            with suppress(OtherWriter):
                return log.commit(commit)
            time.sleep(random.uniform(0, PAUSE))
            log = self._log()
            if _has(log, commit.query, commit.batch):  # by a driver that was considered dead
                return None
        return log.commit(commit)

    def _fitting(self, rows: DataFrame) -> DataFrame:
        """The rows with columns that the format has; Iceberg's smallest number has 32 bits."""
        small = [field.name for field in rows.schema if isinstance(field.dataType, (ByteType, ShortType))]
        if self.format != ICEBERG or not small:
            return rows
        return rows.withColumns({name: F.col(f"`{name}`").cast("int") for name in small})

    def _log(self) -> LakeLog:
        if self.format == DELTA:
            from penstock.spark.delta_log import DeltaLog

            return DeltaLog(self.path, self.partition_by, dict(self.options or {}))
        from penstock.spark.iceberg_log import IcebergLog

        return IcebergLog(self.path, self.partition_by, dict(self.options or {}))

    def _touched(self, rows: DataFrame) -> set[Values]:
        """The partitions that the rows belong to, as folders name them."""
        if not self.partition_by:
            return {()}
        texts = [F.col(f"`{column}`").cast("string") for column in self.partition_by]
        return {tuple(text_of(value) for value in row) for row in rows.select(*texts).distinct().collect()}

    def _written(self, rows: DataFrame, name: str) -> list[DataFile]:
        """Write the rows as Parquet below a new unique folder."""
        folder = f"{DATA}/{name}-{secrets.token_hex(4)}"
        shadows = {f"p{index}": column for index, column in enumerate(self.partition_by)}
        if clash := shadows.keys() & {column.lower() for column in rows.columns}:
            raise ConfigError(
                f"{self.path}: a column cannot be called {clash.pop()!r} in a partitioned table; rename it"
            )
        spread = rows.repartition(*(F.col(f"`{column}`") for column in self.partition_by)) if shadows else rows
        for shadow, column in shadows.items():
            spread = spread.withColumn(shadow, F.col(f"`{column}`"))
        writer = spread.write.options(**self._writer_options())
        with _setting(rows, *TIMESTAMPS):
            (writer.partitionBy(*shadows) if shadows else writer).parquet(f"{self.path}/{folder}")
        found = files_at(rows.sparkSession, self.path).listed(folder)
        return [DataFile(file, _values(file, len(shadows))) for file in found]

    def _check_partitions(self, rows: DataFrame) -> None:
        for column in self.partition_by:
            if column not in rows.columns:
                raise ConfigError(
                    f"{self.path}: partition_by {column!r} is not in the result: {', '.join(rows.columns)}"
                )
            if not isinstance(kind := rows.schema[column].dataType, PARTITION_TYPES):
                raise ConfigError(
                    f"{self.path}: partition_by {column!r} is a {kind.simpleString()}; partition by text, whole "
                    "numbers, booleans or dates, such as to_date(occurred_at)"
                )

    def _writer_options(self) -> dict[str, str]:
        """The user's options for Spark's writer: those without a dot are not for the log."""
        return {name: value for name, value in (self.options or {}).items() if "." not in name and name != "table"}


def _has(log: LakeLog, query: str, batch: int) -> bool:
    last = log.last_batch(query)
    return last is not None and last >= batch


def text_of(value: object) -> str | None:
    """A value of a partition column as Spark writes it into the name of a folder; an empty text is no value there."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None or value == "" else str(value)


def missing(format_: str) -> str | None:
    """Return why a format cannot be written, and what to do about it; None when it can."""
    if find_spec(LIBRARIES[format_]) is None:
        return f"the package {LIBRARIES[format_]} is not there: pip install 'penstock-nats[{format_}]'"
    return None


def plain(schema: StructType) -> StructType:
    """The schema with every column nullable, as it is in a table that others may write to as well."""
    return StructType([StructField(field.name, _nullable(field.dataType)) for field in schema.fields])


def _nullable(kind: DataType) -> DataType:
    match kind:
        case StructType():
            return plain(kind)
        case ArrayType():
            return ArrayType(_nullable(kind.elementType))
        case MapType():
            return MapType(kind.keyType, _nullable(kind.valueType))
    return kind


def check_key(path: str, rows: DataFrame, key: Sequence[str], partition_by: Sequence[str]) -> None:
    """Raise unless rows of one key always lie in one partition."""
    if absent := [column for column in key if column not in rows.columns]:
        raise ConfigError(f"{path}: key column {absent[0]!r} is not in the result: {', '.join(rows.columns)}")
    if outside := [column for column in partition_by if column not in key]:
        raise ConfigError(
            f"{path}: partition_by {outside[0]!r} is not part of the key ({', '.join(key)}), so a row could "
            "move between folders and be there twice; partition by columns of the key"
        )


def same(old: DataFrame, new: DataFrame, key: Sequence[str]) -> list[Column]:
    """The join condition; a null is a value of a key like any other."""
    return [old[column].eqNullSafe(new[column]) for column in key]


def _merged(rows: DataFrame, old: Sequence[str], key: Sequence[str]) -> DataFrame:
    """The rows, and those of the old files whose keys they do not have."""
    if not old:
        return rows
    kept = rows.sparkSession.read.schema(rows.schema).option("recursiveFileLookup", "true").parquet(*old)
    return kept.join(rows, same(kept, rows, key), "left_anti").unionByName(rows)


def _values(file: str, count: int) -> Values:
    """The partition that a file's folders name."""
    parts = [part.partition("=")[2] for part in PurePosixPath(file).parts[-1 - count : -1]]
    return tuple(None if part == NO_VALUE else unquote(part) for part in parts)


@contextmanager
def _setting(frame: DataFrame, name: str, value: str) -> Iterator[None]:
    """A setting of the session for the length of the block."""
    conf = frame.sparkSession.conf
    before = conf.get(name)
    conf.set(name, value)
    try:
        yield
    finally:
        conf.set(name, before or value)
