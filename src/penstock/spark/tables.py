"""A table of files that micro-batches are written to, such that writing one again changes nothing.

Every micro-batch becomes one file in each folder (partition) it has rows for, or several with `maxRecordsPerFile`.
Files are written beside the table and moved into their place one by one, complete, so a reader never sees half a file;
a reader of any kind (Spark, DuckDB, pandas) can take every file it finds. Nothing of a table lies in a log or manifest
that a reader would have to know.

Append, the steps and what a crash after each leaves:

    1. write the rows to the staging folder     the next run of the batch removes the folder and writes it again
    2. move each file to `<query>-<batch>.parquet` (the next ones `<query>-<batch>-001.parquet`), unless that is there
                                                files in place stay, and the next run moves the others: it does not
                                                write them again, since the rows could be in other files then
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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.errors import ConfigError, PenstockError
from penstock.spark.files import Files, files_at
from penstock.spark.lakes import check_key, same

FORMATS = ("parquet", "orc", "json", "csv")
WHOLE = "table"
"""The name of the one file a folder of an upserted table has."""
COMPLETE = "_SUCCESS"
"""Spark writes this file when all others are there."""
MARK_COMPLETE = "mapreduce.fileoutputcommitter.marksuccessfuljobs"
MAX_RECORDS = "maxRecordsPerFile"
_NUMBER = re.compile(r"-[0-9a-f]{12}[.-]c(\d+)\.")
"""Where Spark numbers the files that one task writes into one folder: behind its id, which may end like a number."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of files that rows are written to."""

    path: str
    """An absolute path, or a URI."""
    format: str = "parquet"
    partition_by: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def append(self, rows: DataFrame, query: str, batch: int) -> None:
        """Append the rows of a micro-batch; no effect if they are already written."""
        staged = self._staging(rows, f"{query}-{batch}")
        if not staged.is_complete():
            staged.write(rows)
        for file, target in self._targets(staged, f"{query}-{batch:09}").items():
            if not staged.system.exists(target):
                staged.system.move(file, target)
        staged.remove()

    def upsert(self, rows: DataFrame, key: Sequence[str], query: str, batch: int) -> None:
        """Replace the rows with the same keys, or add new ones."""
        check_key(self.path, rows, key, self.partition_by)
        fresh, merged = (self._staging(rows, f"{query}-{batch}-{step}", True) for step in ("fresh", "merged"))
        fresh.write(rows)
        new = fresh.read(rows, [file for _, file in fresh.files()])
        old = merged.read(rows, [file for folder, _ in fresh.files() for file in self._present(merged.system, folder)])
        merged.write(old.join(new, same(old, new, key), "left_anti").unionByName(new))
        for file, target in self._targets(merged, WHOLE).items():
            self._check_alone(merged.system, target)
            merged.system.move(file, target)
        merged.remove()
        fresh.remove()

    @property
    def _name(self) -> str:
        return PurePosixPath(self.path).name

    def _targets(self, staged: _Staging, stem: str) -> dict[str, str]:
        """Each staged file with its place in the table. Raises when two files would get one place."""
        found: dict[str, str] = {}
        for folder, file in staged.files():
            target = _joined(self._name, folder, f"{stem}{_number(file)}{_suffix(file, self.format)}")
            if target in found.values():
                raise PenstockError(
                    f"two files of one micro-batch would both become {target} ({', '.join([*found, file])}): nothing "
                    "was moved; leave out the options of the sink that split files"
                )
            found[file] = target
        return found

    def _present(self, system: Files, folder: str) -> list[str]:
        """The file that holds the rows of a folder."""
        place = PurePosixPath(self._name, folder)
        paths = map(PurePosixPath, system.listed(str(place)))
        return [str(path) for path in paths if path.parent == place and path.name.startswith(f"{WHOLE}.")]

    def _check_alone(self, system: Files, target: str) -> None:
        """Raise when another file of other compression exists: it would hold the same rows again."""
        folder = str(PurePosixPath(target).parent.relative_to(self._name))
        if others := [file for file in self._present(system, folder) if file != target]:
            raise ConfigError(
                f"{self.path} has {others[0]}, which {target} would not replace: keep the `compression` with which the "
                "table was begun, or begin another one"
            )

    def _staging(self, rows: DataFrame, name: str, one_file: bool = False) -> _Staging:
        parent = str(PurePosixPath(self.path).parent) if "://" not in self.path else self.path.rsplit("/", 1)[0]
        return _Staging(self, files_at(rows.sparkSession, parent), f".staging-{self._name}-{name}", one_file)


@dataclass(frozen=True, slots=True)
class _Staging:
    """A folder beside the table, for files that are not yet complete."""

    table: Table
    system: Files
    """Its root is the folder that holds the table."""
    name: str
    one_file: bool = False
    """Each folder gets one file, whatever the options say."""

    @property
    def own(self) -> dict[str, str]:
        """Options that users cannot choose."""
        return {MARK_COMPLETE: "true", **({MAX_RECORDS: "0"} if self.one_file else {})}

    def is_complete(self) -> bool:
        """Whether an earlier try has written all files; some may have been moved since."""
        return self.system.exists(f"{self.name}/{COMPLETE}")

    def write(self, rows: DataFrame) -> None:
        """Write the files of each folder of the table; what an earlier try left is removed first."""
        self.remove()
        by = self.table.partition_by
        # A value of the partition columns is in exactly one task, so it becomes one file, or some with their numbers.
        spread = rows.repartition(*(F.col(f"`{column}`") for column in by)) if by else rows.repartition(1)
        writer = spread.write.format(self.table.format).options(**dict(self.table.options)).options(**self.own)
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


def _number(file: str) -> str:
    """What tells the files apart that one task has written into one folder; nothing for the first."""
    found = _NUMBER.search(PurePosixPath(file).name)
    number = int(found[1]) if found else 0
    return f"-{number:03}" if number else ""


def _suffix(file: str, form: str) -> str:
    """The end of a file's name that says how to read it, such as `.json.gz`."""
    name = PurePosixPath(file).name
    return name[name.index(f".{form}") :]


def _joined(*parts: str) -> str:
    return str(PurePosixPath(*parts))
