"""The log of a Delta table, written by `deltalake` (delta-rs): a batch is an application transaction of the log."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.spark.files import local_path
from penstock.spark.lakes import Commit, DataFile, OtherWriter, Values, text_of

STORAGE = "storage."
"""Options with this prefix go to delta-rs, such as `storage.AWS_REGION`."""


class DeltaLog:
    """A Delta table, used for one micro-batch: it sees the table as it was at its first read."""

    def __init__(self, path: str, partition_by: Sequence[str], options: Mapping[str, str]) -> None:
        self._path = path
        self._by = tuple(partition_by)
        self._storage = {
            name.removeprefix(STORAGE): value for name, value in options.items() if name.startswith(STORAGE)
        }
        self._table: DeltaTable | None = None

    @property
    def _place(self) -> str:
        """The path as delta-rs takes it, which has its own names for Spark's file systems."""
        return str(local_path(self._path) or self._path.replace("s3a://", "s3://", 1))

    def _opened(self) -> DeltaTable | None:
        if self._table is None:
            try:
                self._table = DeltaTable(self._place, storage_options=self._storage or None)
            except TableNotFoundError:
                return None
        return self._table

    def last_batch(self, query: str) -> int | None:
        table = self._opened()
        return table.transaction_version(query) if table else None

    def check(self, schema: StructType) -> None:
        wanted = Schema.from_json(schema.json())
        table = self._opened()
        if table is None:
            # Creates a table without files; the batch is added by the next commit.
            self._table = DeltaTable.create(
                self._place, wanted, "ignore", list(self._by), storage_options=self._storage or None
            )
            table = self._table
        if table.schema().to_json() != wanted.to_json():
            raise ConfigError(
                f"the Delta table {self._path} has other columns than the result: {table.schema().to_json()}, not "
                f"{wanted.to_json()}; write to another table, or change its columns"
            )
        if tuple(table.metadata().partition_columns) != self._by:
            raise ConfigError(
                f"the Delta table {self._path} is partitioned by {table.metadata().partition_columns}, not "
                f"{list(self._by)}"
            )

    def files(self, touched: set[Values]) -> dict[str, str]:
        table = self._opened()
        assert table is not None
        found = {}
        for action in pa.table(table.get_add_actions(flatten=False)).to_pylist():
            values = tuple(text_of(action["partition"][column]) for column in self._by)
            if values in touched:
                path = unquote(action["path"])  # delta-rs takes names as they are, and says them as URLs
                found[path] = f"{self._path}/{path}"
        return found

    def commit(self, commit: Commit) -> None:
        table = self._opened()
        assert table is not None
        now = int(time.time() * 1000)
        added = [self._add(file, now) for file in commit.added]
        removed = [RemoveAction(path, True, now) for path in commit.removed]
        properties = CommitProperties(
            custom_metadata={"penstock.query": commit.query, "penstock.batch": str(commit.batch)},
            # For an upsert the table must not have changed since it was read.
            max_commit_retries=None if commit.is_blind else 0,
            app_transactions=[Transaction(commit.query, commit.batch)],
        )
        try:
            table.create_write_transaction(
                [*added, *removed], "append", table.schema(), list(self._by), commit_properties=properties
            )
        except CommitFailedError as exc:
            raise OtherWriter(self._path) from exc
        except DeltaError as exc:
            raise ConfigError(f"the Delta table {self._path} takes no commit: {exc}") from exc

    def _add(self, file: DataFile, now: int) -> AddAction:
        rows, size = self._measured(file.path)
        stats = {} if rows is None else {"numRecords": rows}
        return AddAction(
            file.path,
            size,
            dict(zip(self._by, file.values, strict=True)),
            now,
            True,
            json.dumps(stats),
        )

    def _measured(self, path: str) -> tuple[int | None, int]:
        """Rows and bytes of a file."""
        if root := local_path(self._path):
            file = root / path
            return pq.read_metadata(file).num_rows, file.stat().st_size
        system, below = fs.FileSystem.from_uri(self._path.replace("s3a://", "s3://", 1))
        info = system.get_file_info(f"{below}/{path}")
        return pq.read_metadata(f"{below}/{path}", filesystem=system).num_rows, info.size
