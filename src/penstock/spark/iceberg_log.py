"""The log of an Iceberg table, written by `pyiceberg`: snapshot and table properties name the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from pathlib import PurePosixPath
from typing import Any

from pyarrow import Schema
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.types import DateType
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from sqlalchemy import URL
from sqlalchemy.exc import IntegrityError, OperationalError

from penstock.errors import ConfigError
from penstock.spark.files import local_path, local_uri
from penstock.spark.lakes import Commit, OtherWriter, Values, text_of

CATALOG = "catalog."
"""Options with this prefix go to PyIceberg's catalog, such as `catalog.uri`."""
TABLE = "table"
"""The option that names the table in its catalog."""
NAMESPACE = "penstock"
NO_RETRIES = {TableProperties.COMMIT_NUM_RETRIES: "0"}
"""PyIceberg must not repeat a commit that another writer was ahead of: the other one may have been our own batch."""
EPOCH = date(1970, 1, 1)


class IcebergLog:
    """An Iceberg table. One of these lives for one micro-batch: it sees the table as it was at its first look."""

    def __init__(self, path: str, partition_by: Sequence[str], options: Mapping[str, str]) -> None:
        self._path = path
        self._by = tuple(partition_by)
        self._name = options.get(TABLE) or f"{NAMESPACE}.{PurePosixPath(path).name}"
        given = {name.removeprefix(CATALOG): value for name, value in options.items() if name.startswith(CATALOG)}
        self._catalog = _catalog(given or own_catalog(path))
        self._table: Table | None = None
        self._held: dict[str, IcebergFile] = {}

    def _opened(self) -> Table | None:
        if self._table is None:
            try:
                self._table = self._catalog.load_table(self._name)
            except NoSuchTableError:
                return None
        return self._table

    def last_batch(self, query: str) -> int | None:
        table = self._opened()
        last = table.properties.get(_property(query)) if table else None
        return None if last is None else int(last)

    def check(self, schema: StructType) -> None:
        wanted = to_arrow_schema(schema, timezone="UTC")
        table = self._opened()
        if table is None:
            table = self._table = self._created(wanted)
        if not table.metadata.snapshots and self._by and table.spec().is_unpartitioned():
            with table.update_spec() as spec:
                for column in self._by:
                    spec.add_identity(column)
        here, theirs = table.schema().as_arrow(), wanted
        if _shape(here) != _shape(theirs):
            raise ConfigError(
                f"the Iceberg table {self._name} has other columns than the result: {_shape(here)}, not "
                f"{_shape(theirs)}; write to another table, or change its columns"
            )
        if (columns := [field.name for field in table.spec().fields]) != list(self._by):
            raise ConfigError(f"the Iceberg table {self._name} is partitioned by {columns}, not {list(self._by)}")

    def _created(self, schema: Schema) -> Table:
        # IntegrityError: the catalog is in a database, and another pipeline was faster by a moment
        with suppress(NamespaceAlreadyExistsError, IntegrityError):
            self._catalog.create_namespace(self._name.rpartition(".")[0])
        try:
            return self._catalog.create_table(self._name, schema, location=self._path, properties=NO_RETRIES)
        except (TableAlreadyExistsError, IntegrityError):
            return self._catalog.load_table(self._name)

    def files(self, touched: set[Values]) -> dict[str, str]:
        table = self._opened()
        assert table is not None
        dates = [isinstance(table.schema().find_type(column), DateType) for column in self._by]
        for task in table.scan().plan_files():
            held = [task.file.partition[index] for index in range(len(self._by))]
            days = [_day(value) if is_date else value for value, is_date in zip(held, dates, strict=True)]
            if tuple(map(text_of, days)) in touched:
                self._held[task.file.file_path] = task.file
        return {path: path for path in self._held}

    def commit(self, commit: Commit) -> None:
        table = self._opened()
        assert table is not None
        about = {"penstock.query": commit.query, "penstock.batch": str(commit.batch)}
        try:
            with table.transaction() as change:
                marks = {_property(commit.query): str(commit.batch)}
                if change.table_metadata.name_mapping() is None:  # Spark's files have names, and no numbers, of columns
                    marks[TableProperties.DEFAULT_NAME_MAPPING] = table.schema().name_mapping.model_dump_json()
                change.set_properties(marks)
                update = change.update_snapshot(snapshot_properties=about)
                with update.overwrite() if commit.removed else update.fast_append() as snapshot:
                    for file in commit.added:
                        place = f"{self._path}/{file.path}"
                        snapshot.append_data_file(parquet_file_to_data_file(table.io, change.table_metadata, place))
                    for path in commit.removed:
                        snapshot.delete_data_file(self._held[path])
        except (CommitFailedException, ValidationException) as exc:
            raise OtherWriter(self._name) from exc


def _catalog(properties: Mapping[str, str]) -> Catalog:
    try:
        return load_catalog(NAMESPACE, **properties)
    except OperationalError:  # another pipeline has just made the tables of a catalog in a database
        return load_catalog(NAMESPACE, **properties)


def own_catalog(path: str) -> dict[str, str]:
    """The catalog of tables that have none: a file beside them."""
    if not (place := local_path(path)):
        raise ConfigError(
            f"an Iceberg table at {path} needs a catalog: give its properties as options, such as `catalog.type: rest` "
            "and `catalog.uri: …`"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    uri = URL.create("sqlite", database=str(place.parent / "iceberg.db"))
    return {"type": "sql", "uri": uri.render_as_string(), "warehouse": local_uri(place.parent)}


def _property(query: str) -> str:
    return f"penstock.batch.{query}"


def _shape(schema: Any) -> list[str]:
    """Names and types of columns, for comparison: a text is a text, however long."""
    return [f"{field.name} {field.type}".replace("large_", "") for field in schema]


def _day(value: Any) -> Any:
    return EPOCH + timedelta(days=value) if isinstance(value, int) else value
