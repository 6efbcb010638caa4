"""Splits the rows of one task by a column; a thread per value writes its rows as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError

T = TypeVar("T")
WAITING = 2
"""Maximum record batches queued for a slow writer."""
LOOK = 0.1  # seconds between two looks at whether a writer is still there

Writer = Callable[[str, Iterator[pa.RecordBatch]], T]


def write_apart(batches: Iterator[pa.RecordBatch], column: str, write: Writer[T]) -> list[T]:
    """Give each writer the rows with its value of the column, in order; returns the writers' results.

    Raises the error of the first writer that failed, after the others have ended.
    """
    lanes: dict[str, _Lane[T]] = {}
    try:
        for batch in batches:
            for value, rows in _by_value(batch, column):
                if value not in lanes:
                    lanes[value] = _Lane(value, write)
                lanes[value].put(rows)
    except BaseException:
        for lane in lanes.values():
            lane.give_up()
        raise
    for lane in lanes.values():
        lane.end()
    return [lane.result() for lane in lanes.values()]


def _by_value(batch: pa.RecordBatch, column: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    values = batch.column(column)
    if values.null_count:
        raise ConfigError(f"a row has no {column}: column `{column}` is null there; filter such rows, or fill it")
    for value in pc.unique(values).to_pylist():
        yield value, batch.filter(pc.equal(values, value))


class WriteAborted(Exception):
    """The rows end here because another writer, or the producer of the rows, has failed."""


class _Lane(threading.Thread, Generic[T]):
    """One writer, and the rows that wait for it."""

    def __init__(self, value: str, write: Writer[T]) -> None:
        super().__init__(name=f"write {value}", daemon=True)
        self._rows: Queue[pa.RecordBatch | BaseException | None] = Queue(WAITING)
        self._done: Future[T] = Future()
        self._value = value
        self._write = write
        self.start()

    def run(self) -> None:
        try:
            self._done.set_result(self._write(self._value, self._given()))
        except BaseException as exc:  # noqa: BLE001 - it is raised where the result is read
            self._done.set_exception(exc)

    def _given(self) -> Iterator[pa.RecordBatch]:
        while (rows := self._rows.get()) is not None:
            if isinstance(rows, BaseException):
                raise rows
            yield rows

    def put(self, rows: pa.RecordBatch | None) -> None:
        """Queue rows. Raises the writer's error once it has ended."""
        while True:
            if self._done.done():
                self._done.result()
            try:
                self._rows.put(rows, timeout=LOOK)
                return
            except Full:
                continue

    def end(self) -> None:
        self.put(None)

    def give_up(self) -> None:
        """Make the writer fail at its next rows, and wait until it has ended."""
        while not self._done.done():
            try:
                self._rows.put(WriteAborted(), timeout=LOOK)
            except Full:
                self._drop_one()
        self.join()

    def _drop_one(self) -> None:
        try:
            self._rows.get_nowait()
        except Empty:
            return

    def result(self) -> T:
        return self._done.result()
