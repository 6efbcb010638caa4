"""Delta and Iceberg tables: each micro-batch once, read back by other engines than Spark."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.table import StaticTable
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError
from penstock.spark import lakes, steps
from penstock.spark.files import local_uri
from penstock.spark.iceberg_log import IcebergLog, own_catalog
from penstock.spark.lakes import DELTA, ICEBERG, Lake, OtherWriter

FORMATS = pytest.mark.parametrize("form", [DELTA, ICEBERG])
SCHEMA = (
    "day date, k string, n bigint NOT NULL, at timestamp, tags map<string, array<string>>, w struct<low: int>, "
    "small smallint"
)
AT = datetime.datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=datetime.UTC)
FIRST, SECOND = datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)


def row(day: datetime.date | None, k: str | None, n: int) -> tuple[Any, ...]:
    return day, k, n, AT, {"t": ["a", "b"]}, (n,), n


ROWS = [row(FIRST, "a", 1), row(FIRST, "b", 2), row(SECOND, "a", 3), row(None, "x/y: z%é " + "long" * 8, 4)]


def frame(spark: SparkSession, rows: list[Any], tasks: int = 3) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA).repartition(tasks)


def arrow(form: str, path: Path) -> pa.Table:
    """The table as delta-rs or PyIceberg reads it, each by the table's own log."""
    if form == DELTA:
        return DeltaTable(path).to_pyarrow_table()
    newest = max(path.glob("metadata/*.metadata.json"), key=lambda file: file.name)
    return StaticTable.from_metadata(str(newest)).scan().to_arrow()


def contents(form: str, path: Path) -> list[tuple[Any, ...]]:
    found = arrow(form, path).to_pylist()
    for one in found:
        one["tags"] = dict(one["tags"] or {})
        one["w"] = (one["w"]["low"],)
    return sorted(
        (tuple(one[name] for name in ("day", "k", "n", "at", "tags", "w", "small")) for one in found), key=str
    )


def expected(*rows: Any) -> list[tuple[Any, ...]]:
    return sorted(rows, key=str)


@FORMATS
@pytest.mark.parametrize("by", [(), ("day", "k")])
def test_a_batch_appended_twice_is_there_once(spark: SparkSession, tmp_path: Path, form: str, by: Any) -> None:
    lake = Lake((tmp_path / "t").as_uri(), form, by)
    lake.append(frame(spark, ROWS), "q", 0)
    lake.append(frame(spark, ROWS, tasks=1), "q", 0)
    lake.append(frame(spark, [row(SECOND, "c", 5)]), "q", 1)
    lake.append(frame(spark, [row(SECOND, "c", 5)]), "other", 0)
    assert contents(form, tmp_path / "t") == expected(*ROWS, row(SECOND, "c", 5), row(SECOND, "c", 5))


@FORMATS
@pytest.mark.parametrize("by", [(), ("day", "k")])
def test_an_upsert_replaces_rows_by_key_in_one_commit(spark: SparkSession, tmp_path: Path, form: str, by: Any) -> None:
    tmp_path /= "my files ü"
    lake = Lake(local_uri(tmp_path / "t"), form, by)
    lake.upsert(frame(spark, ROWS), ["day", "k"], "q", 0)
    changed = [row(FIRST, "b", 20), row(ROWS[3][0], ROWS[3][1], 40), row(SECOND, "new", 5)]
    for _ in range(2):
        lake.upsert(frame(spark, changed), ["day", "k"], "q", 1)
    assert contents(form, tmp_path / "t") == expected(ROWS[0], ROWS[2], *changed)
    lake.upsert(frame(spark, [row(FIRST, "a", 7)]), ["day", "k"], "q", 2)
    assert contents(form, tmp_path / "t") == expected(row(FIRST, "a", 7), ROWS[2], *changed)
    if form == DELTA:
        versions = [entry["version"] for entry in DeltaTable(tmp_path / "t").history()]
        assert versions == [3, 2, 1, 0]


class Crash(Exception):
    """Stands for the end of the process."""


@FORMATS
def test_a_crash_between_files_and_commit_leaves_nothing_to_see(
    spark: SparkSession, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake((tmp_path / "t").as_uri(), form, ("day",))
    lake.upsert(frame(spark, ROWS), ["day", "k"], "q", 0)

    def crash(step: str) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(steps, "reached", crash)
        with pytest.raises(Crash):
            lake.upsert(frame(spark, [row(FIRST, "a", 10)]), ["day", "k"], "q", 1)
    assert contents(form, tmp_path / "t") == expected(*ROWS)
    lake.upsert(frame(spark, [row(FIRST, "a", 10)]), ["day", "k"], "q", 1)
    assert contents(form, tmp_path / "t") == expected(row(FIRST, "a", 10), *ROWS[1:])


@FORMATS
@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.kills)])
def test_an_upsert_beside_another_writer_is_computed_anew_and_given_up_in_the_end(
    spark: SparkSession, tmp_path: Path, form: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer commits while our files are written: what was read for the upsert is no longer all there is."""
    lake = Lake((tmp_path / "t").as_uri(), form)
    lake.upsert(frame(spark, ROWS), ["day", "k"], "q", 0)
    others = iter(range(times))
    busy: list[int] = []

    def meanwhile(step: str) -> None:
        if not busy and (number := next(others, None)) is not None:
            busy.append(number)
            lake.append(frame(spark, [row(SECOND, f"other{number}", number)]), "other", number)
            busy.clear()

    monkeypatch.setattr(steps, "reached", meanwhile)
    if times == 1:
        lake.upsert(frame(spark, [row(FIRST, "a", 10)]), ["day", "k"], "q", 1)
        assert contents(form, tmp_path / "t") == expected(row(FIRST, "a", 10), *ROWS[1:], row(SECOND, "other0", 0))
    else:
        with pytest.raises(OtherWriter, match="another writer"):
            lake.upsert(frame(spark, [row(FIRST, "a", 10)]), ["day", "k"], "q", 1)
        assert (FIRST, "a", 1) in [one[:3] for one in contents(form, tmp_path / "t")]


@FORMATS
def test_another_schema_other_partitions_and_unfit_columns_are_refused(
    spark: SparkSession, tmp_path: Path, form: str
) -> None:
    path = (tmp_path / "t").as_uri()
    Lake(path, form).append(frame(spark, ROWS), "q", 0)
    with pytest.raises(ConfigError, match="has other columns than the result"):
        Lake(path, form).append(frame(spark, ROWS).drop("n"), "q", 1)
    with pytest.raises(ConfigError, match="is partitioned by"):
        Lake(path, form, ("day",)).append(frame(spark, ROWS), "q", 1)
    with pytest.raises(ConfigError, match="partition by text, whole"):
        Lake((tmp_path / "u").as_uri(), form, ("at",)).append(frame(spark, ROWS), "q", 0)
    with pytest.raises(ConfigError, match="partition by columns of the key"):
        Lake((tmp_path / "u").as_uri(), form, ("day",)).upsert(frame(spark, ROWS), ["k"], "q", 0)
    assert contents(form, tmp_path / "t") == expected(*ROWS)


def test_a_named_catalog_and_table_are_used(spark: SparkSession, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/elsewhere.db"
    options = {"catalog.type": "sql", "catalog.uri": uri, "catalog.warehouse": str(tmp_path), "table": "sales.orders"}
    Lake((tmp_path / "t").as_uri(), ICEBERG, (), options).append(frame(spark, ROWS), "q", 3)
    assert IcebergLog((tmp_path / "t").as_uri(), (), options).last_batch("q") == 3
    assert not (tmp_path / "iceberg.db").exists()
    with pytest.raises(ConfigError, match="needs a catalog"):
        own_catalog("s3a://bucket/t")


@FORMATS
def test_a_missing_library_is_told_with_the_command_that_brings_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lakes.missing(form) is None
    monkeypatch.setattr(lakes, "find_spec", lambda name: None)
    assert f"pip install 'penstock-nats[{form}]'" in (lakes.missing(form) or "")


def test_queries_that_append_to_one_iceberg_table_at_the_same_time_do_not_stop_each_other(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also at the very first batch, when both find that there is no table, and no catalog."""
    queries, batches = ("a", "b"), range(3)
    lake = Lake((tmp_path / "new" / "t").as_uri(), ICEBERG)

    def write(query: str) -> None:
        for batch in batches:
            lake.append(spark.createDataFrame([(query, batch)], "q string, n int"), query, batch)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, queries))
    found = sorted(tuple(one.values()) for one in arrow(ICEBERG, tmp_path / "new" / "t").to_pylist())
    assert found == [(query, batch) for query in queries for batch in batches]
