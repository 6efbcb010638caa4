"""Cuts rows to publish into chunks that are the same whenever the same rows arrive in the same order. Pure.

A chunk is what the sink writes as one atomic batch. Where it begins and ends depends on the rows alone, never on how
Spark happened to group them into record batches, so that a second run of a task cuts where the first one cut.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.digests import DIGEST_BYTES, begun, ended, row_digest
from penstock.wire.columns import numbers, values

MAX_ROWS = 1000
"""The server takes no atomic batch with more messages."""
MAX_BYTES = 4 * 1024 * 1024
"""A chunk ends before it grows beyond this, unless a single row is larger. The server keeps open batches in memory."""
ROW_OVERHEAD = 128
"""Approximate bytes of a message on the wire besides subject, headers and body: control line and batch headers."""
NO_LENGTH = numbers(np.zeros(1, dtype=np.int32))[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a chunk may become."""

    rows: int = MAX_ROWS
    bytes: int = MAX_BYTES
    subjects: int | None = None
    """Different subjects among the rows, where that counts."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Messages to publish, as columns. A chunk is a `ChunkRows` too."""

    subjects: pa.Array
    """UTF-8, without nulls."""
    bodies: pa.Array
    """Binary, without nulls."""
    headers: pa.Array | None = None
    """Binary: each row's own header lines, ready for the wire, or null; None when no row has any."""
    events: pa.Array | None = None
    """Structs: what is written instead of the bodies, which only tell one event from another (`packing`)."""

    def __len__(self) -> int:
        return len(self.bodies)

    def slice(self, start: int, length: int) -> ChunkRows:
        return self._each(lambda column: column.slice(start, length))

    def take(self, indices: Any) -> ChunkRows:
        """The rows at these positions, in this order."""
        return self._each(lambda column: column.take(numbers(np.asarray(indices, dtype=np.int64))))

    def _each(self, change: Any) -> ChunkRows:
        headers, events = (None if column is None else change(column) for column in (self.headers, self.events))
        return ChunkRows(change(self.subjects), change(self.bodies), headers, events)

    def columns(self) -> list[pa.Array]:
        return [self.subjects, self.bodies] if self.headers is None else [self.subjects, self.bodies, self.headers]

    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of each row on the wire, roughly."""
        return self.content_sizes() + ROW_OVERHEAD

    def content_sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of each row by itself."""
        total = np.zeros(len(self), dtype=np.int64)
        for column in self.columns():
            total += _lengths(column)
        return total

    def digest(self) -> str:
        """Names the content and its order: equal for equal rows, however they were grouped on the way here."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for column in self.columns():
            digest.update(_lengths(column).astype("<i8").tobytes())
            digest.update(_content(column))
        return digest.hexdigest()

    def row_digests(self) -> list[bytes]:
        """The identity of every row by itself."""
        if self.headers is None and len(self.subjects.unique()) == 1:
            start = begun(self.subjects[0].as_py(), b"")  # what all rows have in common is hashed once
            return [ended(start, body) for body in self.bodies.to_pylist()]
        texts = self.headers.to_pylist() if self.headers is not None else [b""] * len(self)
        triples = zip(self.subjects.to_pylist(), texts, self.bodies.to_pylist(), strict=True)
        return [row_digest(subject, headers or b"", body) for subject, headers, body in triples]


def chunk_id(series: str, batch: int, partition: int, number: int, digest: str) -> str:
    """The name of a chunk in the output stream."""
    return f"{series}.{batch}.{partition}.{number}.{digest}"


def cut(batches: Iterable[ChunkRows], limits: Limits | None = None) -> Iterator[ChunkRows]:
    """The same rows in chunks: as many rows as fit into the limits, a row that alone is too large by itself."""
    limits = limits or Limits()
    pending: list[ChunkRows] = []
    rows = size = 0
    for batch in batches:
        ends = np.cumsum(batch.sizes())
        start = 0
        while start < len(batch):
            before = int(ends[start - 1]) if start else 0
            fit = int(np.searchsorted(ends, before + limits.bytes - size, side="right"))
            take = min(fit - start, limits.rows - rows)
            if take <= 0 and not pending:
                take = 1
            if take > 0:
                pending.append(batch.slice(start, take))
                start += take
                rows += take
                size += int(ends[start - 1]) - before
            if start < len(batch) or rows == limits.rows:
                yield from _halved(joined(pending), limits)
                pending, rows, size = [], 0, 0
    if pending:
        yield from _halved(joined(pending), limits)


def _halved(rows: ChunkRows, limits: Limits) -> Iterator[ChunkRows]:
    """The rows, halved until none of the parts has too many subjects."""
    if limits.subjects is None or len(rows) <= limits.subjects or len(pc.unique(rows.subjects)) <= limits.subjects:
        yield rows
        return
    half = len(rows) // 2
    yield from _halved(rows.slice(0, half), limits)
    yield from _halved(rows.slice(half, len(rows) - half), limits)


def joined(parts: list[ChunkRows]) -> ChunkRows:
    """Several groups of rows as one."""
    if len(parts) == 1:
        return parts[0]
    headers = events = None
    if any(part.headers is not None for part in parts):
        headers = pa.concat_arrays([_headers_or_nulls(part) for part in parts])
    if all(part.events is not None for part in parts):
        events = pa.concat_arrays([part.events for part in parts])
    subjects, bodies = ([getattr(part, name) for part in parts] for name in ("subjects", "bodies"))
    return ChunkRows(pa.concat_arrays(subjects), pa.concat_arrays(bodies), headers, events)


def without(batches: Iterable[ChunkRows], stored: Counter[bytes]) -> Iterator[ChunkRows]:
    """Yield the rows that are not in `stored`, each occurrence counting once; found rows are removed from `stored`."""
    for batch in batches:
        missing = [index for index, digest in enumerate(batch.row_digests()) if not _taken(stored, digest)]
        if missing:
            yield batch if len(missing) == len(batch) else batch.take(missing)


def _taken(stored: Counter[bytes], digest: bytes) -> bool:
    if not stored.get(digest):
        return False
    stored[digest] -= 1
    return True


def _headers_or_nulls(part: ChunkRows) -> pa.Array:
    return pa.nulls(len(part), pa.binary()) if part.headers is None else part.headers


def _lengths(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = pc.fill_null(pc.binary_length(column), NO_LENGTH)
    return values(lengths).astype(np.int64)


def _content(column: pa.Array) -> Any:
    """All bytes of a binary or string column, one row after another, without copying them."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return b""
    width = np.int64 if pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type) else np.int32
    edges = np.frombuffer(offsets, dtype=width)
    return memoryview(data)[int(edges[column.offset]) : int(edges[column.offset + len(column)])]
