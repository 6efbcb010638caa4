"""A table of files that micro-batches are written to, such that writing one again changes nothing.

Every micro-batch becomes one file in each folder (partition) it has rows for. Files are written beside the table and
moved into their place one by one, complete, so a reader never sees half a file; a reader of any kind (Spark, DuckDB,
pandas) can take every file it finds. Nothing of a table lies in a log or manifest that a reader would have to know.

Append, the steps and what a crash after each leaves:

    1. write the rows to the staging folder     the next run of the batch removes the folder and writes it again
    2. move each file to `<query>-<batch>.parquet`, unless that is there
                                                files in place stay: by its plan, the batch has the same rows again
    3. remove the staging folder                an empty folder

Upsert, for rows that replace those of the same key:

    1. write the rows to staging                as above
    2. read the folders they belong to, leave out the keys that come new, write old and new to staging
                                                as above
    3. move each file over `table.parquet`      old folders are old, new ones new; the next run does it again, and
                                                putting the same rows in again gives the same table
    4. remove the staging folder                an empty folder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.errors import ConfigError
from penstock.spark.files import Files, files_at

FORMATS = ("parquet", "orc", "json", "csv")
WHOLE = "table"
"""The name of the one file a folder of an upserted table has."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where rows go."""

    path: str
    """An absolute path, or a URI."""
    format: str = "parquet"
    partition_by: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def append(self, rows: DataFrame, query: str, batch: int) -> None:
        """Add the rows of a micro-batch; a second time they are already there."""
        staged = self._staging(rows, f"{query}-{batch}")
        staged.write(rows)
        for folder, file in staged.files():
            target = _joined(self._name, folder, f"{query}-{batch:09}.{self.format}")
            if not staged.system.exists(target):
                staged.system.move(file, target)
        staged.remove()

    def upsert(self, rows: DataFrame, key: Sequence[str], query: str, batch: int) -> None:
        """Put each row in the place of the one with the same key, or add it."""
        self._check_key(rows, key)
        fresh, merged = (self._staging(rows, f"{query}-{batch}-{step}") for step in ("fresh", "merged"))
        fresh.write(rows)
        new = fresh.read(rows, [file for _, file in fresh.files()])
        old = merged.read(rows, [file for folder, _ in fresh.files() for file in self._present(merged.system, folder)])
        merged.write(old.join(new, _same(old, new, key), "left_anti").unionByName(new))
        for folder, file in merged.files():
            merged.system.move(file, _joined(self._name, folder, f"{WHOLE}.{self.format}"))
        merged.remove()
        fresh.remove()

    @property
    def _name(self) -> str:
        return PurePosixPath(self.path).name

    def _present(self, system: Files, folder: str) -> list[str]:
        file = _joined(self._name, folder, f"{WHOLE}.{self.format}")
        return [file] if system.exists(file) else []

    def _staging(self, rows: DataFrame, name: str) -> _Staging:
        parent = str(PurePosixPath(self.path).parent) if "://" not in self.path else self.path.rsplit("/", 1)[0]
        return _Staging(self, files_at(rows.sparkSession, parent), f".staging-{self._name}-{name}")

    def _check_key(self, rows: DataFrame, key: Sequence[str]) -> None:
        if missing := [column for column in key if column not in rows.columns]:
            raise ConfigError(f"{self.path}: key column {missing[0]!r} is not in the result: {', '.join(rows.columns)}")
        if outside := [column for column in self.partition_by if column not in key]:
            raise ConfigError(
                f"{self.path}: partition_by {outside[0]!r} is not part of the key ({', '.join(key)}), so a row could "
                "move between folders and be there twice; partition by columns of the key"
            )


@dataclass(frozen=True, slots=True)
class _Staging:
    """A folder beside the table, for files that are not yet complete."""

    table: Table
    system: Files
    """Its root is the folder that holds the table."""
    name: str

    def write(self, rows: DataFrame) -> None:
        """Write one file for each folder of the table; what an earlier try left is removed first."""
        self.remove()
        by = self.table.partition_by
        # A value of the partition columns is in exactly one task, so it becomes exactly one file.
        spread = rows.repartition(*(F.col(f"`{column}`") for column in by)) if by else rows.repartition(1)
        writer = spread.write.format(self.table.format).options(**dict(self.table.options))
        (writer.partitionBy(*by) if by else writer).save(f"{self.system.root}/{self.name}")

    def files(self) -> list[tuple[str, str]]:
        """Each file with the folder of the table that it belongs to."""
        found = self.system.listed(self.name)
        return [(str(PurePosixPath(file).parent.relative_to(self.name)), file) for file in found]

    def read(self, like: DataFrame, files: Sequence[str]) -> DataFrame:
        """The rows of some files, which may lie in staging or in the table itself."""
        spark = like.sparkSession
        if not files:
            return spark.createDataFrame([], like.schema)
        base = f"{self.system.root}/{PurePosixPath(files[0]).parts[0]}"
        reader = spark.read.format(self.table.format).options(**dict(self.table.options)).schema(like.schema)
        return reader.option("basePath", base).load([f"{self.system.root}/{file}" for file in files])

    def remove(self) -> None:
        self.system.remove(self.name)


def _joined(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _same(old: DataFrame, new: DataFrame, key: Sequence[str]) -> list[Column]:
    """The join condition; a null is a value of a key like any other."""
    return [old[column].eqNullSafe(new[column]) for column in key]
