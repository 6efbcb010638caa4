"""Files of a table, on the local disk or any Hadoop file system: list, move into place, delete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession

FILE = "file:"


class Files(Protocol):
    """The file system of a table. Paths are below one root, with `/` between their parts."""

    root: str
    """The root as Spark takes it."""

    def listed(self, folder: str) -> list[str]:
        """The data files below `folder`, however deep; none when there is no such folder."""

    def exists(self, path: str) -> bool: ...

    def move(self, source: str, target: str) -> None:
        """Move a file into place atomically, replacing an existing one."""

    def remove(self, folder: str) -> None:
        """Delete a folder and all below it; no effect when there is none."""


def files_at(spark: SparkSession, root: str) -> Files:
    """The file system that holds `root`, which is an absolute path or a URI."""
    path = local_path(root)
    return LocalFiles(path) if path else HadoopFiles(spark, root)


def local_path(place: str) -> Path | None:
    """The path of a place on the local disk, which is an absolute path or a URI; None for any other place.

    Hadoop, and with it Spark, takes what follows the scheme as it is: `file:///a%20b` has a percent sign in its name.
    """
    if place.startswith(FILE):
        return Path("/" + place.removeprefix(FILE).lstrip("/"))
    return None if "://" in place else Path(place)


def local_uri(path: Path) -> str:
    """The URI of an absolute path, as Hadoop takes it: nothing in it is written as `%20`."""
    return f"{FILE}//{path}"


def is_data(name: str) -> bool:
    """Whether a file holds rows: Spark and its kin begin everything else with a dot or an underscore."""
    return not name.startswith(("_", "."))


class LocalFiles:
    """The local disk, or one that is mounted on all machines. A move is one atomic rename."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.root = local_uri(root)

    def listed(self, folder: str) -> list[str]:
        found = (self._root / folder).rglob("*")
        return sorted(
            path.relative_to(self._root).as_posix() for path in found if path.is_file() and is_data(path.name)
        )

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def move(self, source: str, target: str) -> None:
        destination = self._root / target
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._root / source, destination)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)


class HadoopFiles:
    """Any file system Hadoop knows, such as `hdfs://` and `s3a://`, through the driver's JVM.

    A move is atomic where the file system's rename is (HDFS); an object store copies the file, and meanwhile a file
    that is being replaced is missing.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.root = root.rstrip("/")
        jvm: Any = spark._jvm
        self._hadoop = jvm.org.apache.hadoop.fs
        self._configuration = spark._jsparkSession.sessionState().newHadoopConf()
        self._system = self._path("").getFileSystem(self._configuration)
        self._context = self._hadoop.FileContext.getFileContext(self._path("").toUri(), self._configuration)
        gateway: Any = spark.sparkContext._gateway
        self._overwrite = gateway.new_array(self._hadoop.Options.Rename, 1)
        self._overwrite[0] = self._hadoop.Options.Rename.OVERWRITE

    def _path(self, below: str) -> Any:
        return self._hadoop.Path(f"{self.root}/{below}" if below else self.root)

    def listed(self, folder: str) -> list[str]:
        return sorted(self._walk(folder))

    def _walk(self, folder: str) -> Iterator[str]:
        if not self.exists(folder):
            return
        for status in self._system.listStatus(self._path(folder)):
            name = status.getPath().getName()
            below = f"{folder}/{name}" if folder else name
            if status.isDirectory():
                yield from self._walk(below)
            elif is_data(name):
                yield below

    def exists(self, path: str) -> bool:
        return bool(self._system.exists(self._path(path)))

    def move(self, source: str, target: str) -> None:
        destination = self._path(target)
        self._system.mkdirs(destination.getParent())
        self._context.rename(self._path(source), destination, self._overwrite)

    def remove(self, folder: str) -> None:
        self._system.delete(self._path(folder), True)
