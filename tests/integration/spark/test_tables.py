"""Tables of files: each micro-batch once, whatever is run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError, PenstockError
from penstock.spark import tables
from penstock.spark.files import Files, HadoopFiles, LocalFiles
from penstock.spark.tables import Table

SCHEMA = "day string, k string, n bigint"
FIRST = [("2026-01-01", "a", 1), ("2026-01-01", "b", 2), ("2026-01-02", "a", 3), (None, "x", 4)]


def frame(spark: SparkSession, rows: list[Any], tasks: int = 3) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA).repartition(tasks)


def contents(path: Path) -> list[tuple[Any, ...]]:
    """The table as a reader that knows nothing of Spark sees it."""
    found = pyarrow.dataset.dataset(path, format="parquet", partitioning=None).to_table()
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=str)


class Crash(Exception):
    """Stands for the end of the process."""


def crash_after_moves(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    moved: list[str] = []
    move = LocalFiles.move

    def dying(self: LocalFiles, source: str, target: str) -> None:
        if len(moved) == count:
            raise Crash
        move(self, source, target)
        moved.append(target)

    monkeypatch.setattr(LocalFiles, "move", dying)


def test_a_batch_written_twice_is_there_once(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(str(tmp_path / "t"))
    table.append(frame(spark, FIRST), "q", 0)
    table.append(frame(spark, FIRST, tasks=1), "q", 0)
    table.append(frame(spark, [("2026-01-03", "c", 5)]), "q", 1)
    assert contents(tmp_path / "t") == sorted([*FIRST, ("2026-01-03", "c", 5)], key=str)
    assert sorted(file.name for file in (tmp_path / "t").iterdir()) == [
        "q-000000000.parquet",
        "q-000000001.parquet",
    ]


@pytest.mark.parametrize("moved", [0, 2])
def test_a_crash_between_folders_leaves_no_row_twice_and_the_next_run_completes_the_batch(
    spark: SparkSession, tmp_path: Path, moved: int
) -> None:
    table = Table(str(tmp_path / "t"), partition_by=("day",))
    with pytest.MonkeyPatch.context() as patch:
        crash_after_moves(patch, moved)
        with pytest.raises(Crash):
            table.append(frame(spark, FIRST), "q", 0)
    assert len(list((tmp_path / "t").rglob("*.parquet"))) == moved
    table.append(frame(spark, list(reversed(FIRST)), tasks=2), "q", 0)
    read = spark.read.schema(SCHEMA).parquet(str(tmp_path / "t")).select("day", "k", "n").collect()
    assert sorted((tuple(row) for row in read), key=str) == sorted(FIRST, key=str)
    assert not list(tmp_path.glob(".staging*"))


MANY = [(f"2026-01-0{n % 2 + 1}", f"k{n}", n) for n in range(100)]


@pytest.mark.parametrize("partition_by", [(), ("day",)])
def test_rows_in_several_files_are_all_there_also_after_a_crash_between_them(
    spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...]
) -> None:
    table = Table(str(tmp_path / "t"), partition_by=partition_by, options=(("maxRecordsPerFile", "10"),))
    with pytest.MonkeyPatch.context() as patch:
        crash_after_moves(patch, 3)
        with pytest.raises(Crash):
            table.append(frame(spark, MANY), "q", 0)
    for _ in range(2):  # in another order: the files that are not in place yet must not be written again
        table.append(frame(spark, list(reversed(MANY)), tasks=1), "q", 0)
    read = spark.read.schema(SCHEMA).parquet(str(tmp_path / "t")).select("day", "k", "n").collect()
    assert sorted(tuple(row) for row in read) == sorted(MANY)
    assert len(list((tmp_path / "t").rglob("*.parquet"))) == 10


@pytest.mark.parametrize(("form", "codec"), [("json", "gzip"), ("csv", "bzip2"), ("orc", "zlib"), ("parquet", "zstd")])
def test_compressed_files_keep_the_suffix_that_says_how_to_read_them(
    spark: SparkSession, tmp_path: Path, form: str, codec: str
) -> None:
    table = Table(str(tmp_path / "t"), form, options=(("compression", codec), ("maxRecordsPerFile", "40")))
    table.append(frame(spark, MANY), "q", 0)
    read = spark.read.format(form).schema(SCHEMA).load(str(tmp_path / "t")).collect()
    assert sorted(tuple(row) for row in read) == sorted(MANY)


def test_an_upserted_folder_stays_one_file_of_one_compression(spark: SparkSession, tmp_path: Path) -> None:
    plain = (("maxRecordsPerFile", "10"),)
    table = Table(str(tmp_path / "t"), "json", options=(*plain, ("compression", "gzip")))
    for batch in (0, 1):
        table.upsert(frame(spark, MANY), ["day", "k"], "q", batch)
    read = spark.read.schema(SCHEMA).json(str(tmp_path / "t")).collect()
    assert sorted(tuple(row) for row in read) == sorted(MANY)
    assert [file.name for file in (tmp_path / "t").iterdir()] == ["table.json.gz"]
    with pytest.raises(ConfigError, match="keep the `compression`"):
        Table(str(tmp_path / "t"), "json", options=plain).upsert(frame(spark, MANY[:5]), ["day", "k"], "q", 2)
    assert [file.name for file in (tmp_path / "t").iterdir()] == ["table.json.gz"]


def test_two_files_that_would_get_one_name_are_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_number", lambda file: "")
    table = Table(str(tmp_path / "t"), options=(("maxRecordsPerFile", "10"),))
    with pytest.raises(PenstockError, match="two files of one micro-batch would both become t/q-000000000"):
        table.append(frame(spark, MANY), "q", 0)
    assert not (tmp_path / "t").exists()


def test_upsert_keeps_one_row_a_key(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(str(tmp_path / "t"))
    changed = [("2026-01-01", "b", 20), (None, "x", 40), ("2026-01-03", "new", 5)]
    table.upsert(frame(spark, FIRST), ["day", "k"], "q", 0)
    for _ in range(2):  # the second time as after a crash
        table.upsert(frame(spark, changed), ["day", "k"], "q", 1)
    expected = [("2026-01-01", "a", 1), ("2026-01-02", "a", 3), *changed]
    assert contents(tmp_path / "t") == sorted(expected, key=str)


@pytest.mark.parametrize("moved", [1])
def test_upsert_rewrites_only_folders_with_changes_and_survives_a_crash(
    spark: SparkSession, tmp_path: Path, moved: int
) -> None:
    table = Table(str(tmp_path / "t"), partition_by=("day",))
    table.upsert(frame(spark, FIRST), ["day", "k"], "q", 0)
    untouched = tmp_path / "t" / "day=2026-01-02" / "table.parquet"
    before = untouched.stat().st_mtime_ns
    changed = [("2026-01-01", "a", 10), (None, "x", 40)]
    with pytest.MonkeyPatch.context() as patch:
        crash_after_moves(patch, moved)
        with pytest.raises(Crash):
            table.upsert(frame(spark, changed), ["day", "k"], "q", 1)
    table.upsert(frame(spark, changed), ["day", "k"], "q", 1)
    read = spark.read.schema(SCHEMA).parquet(str(tmp_path / "t")).select("day", "k", "n").collect()
    expected = [("2026-01-01", "b", 2), ("2026-01-02", "a", 3), *changed]
    assert sorted((tuple(row) for row in read), key=str) == sorted(expected, key=str)
    assert untouched.stat().st_mtime_ns == before


def test_a_partition_column_outside_the_key_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(str(tmp_path / "t"), partition_by=("day",))
    with pytest.raises(ConfigError, match="partition by columns of the key"):
        table.upsert(frame(spark, FIRST), ["k"], "q", 0)
    with pytest.raises(ConfigError, match="'kk' is not in the result"):
        table.upsert(frame(spark, FIRST), ["kk", "day"], "q", 0)


@pytest.mark.parametrize(
    "make", [lambda spark, root: LocalFiles(root), lambda spark, root: HadoopFiles(spark, root.as_uri())]
)
def test_every_file_system_does_the_same(
    spark: SparkSession, tmp_path: Path, make: Callable[[SparkSession, Path], Files]
) -> None:
    files = make(spark, tmp_path)
    assert files.listed("new") == []
    (tmp_path / "new" / "day=1").mkdir(parents=True)
    for name in ("a.parquet", "_SUCCESS", ".a.crc", "day=1/b.parquet"):
        (tmp_path / "new" / name).write_text(name)
    assert files.listed("new") == ["new/a.parquet", "new/day=1/b.parquet"]
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.parquet").write_text("old")
    files.move("new/a.parquet", "t/a.parquet")
    files.move("new/day=1/b.parquet", "t/day=1/b.parquet")
    assert (tmp_path / "t" / "a.parquet").read_text() == "a.parquet"
    assert files.exists("t/day=1/b.parquet")
    assert not files.exists("new/a.parquet")
    files.remove("new")
    files.remove("new")
    assert not (tmp_path / "new").exists()


def test_tables_work_through_hadoop_as_well(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "files_at", lambda spark, root: HadoopFiles(spark, Path(root).as_uri()))
    table = Table(str(tmp_path / "t"), partition_by=("day",))
    for batch in (0, 1):
        table.upsert(frame(spark, FIRST), ["day", "k"], "q", batch)
    read = spark.read.schema(SCHEMA).parquet(str(tmp_path / "t")).select("day", "k", "n").collect()
    assert sorted((tuple(row) for row in read), key=str) == sorted(FIRST, key=str)
