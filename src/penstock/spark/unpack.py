"""Messages as the rows that Spark gets: those of packs one by one, in columns from beginning to end. No I/O.

A message that is marked as a pack and cannot be read as one is returned as it is, with the header `Penstock-Pack`:
nothing is lost, the query continues, and decides what to do with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import packs
from penstock.packs.schemas import portable
from penstock.spark.compressed import decompressed
from penstock.wire.columns import constant, is_valid, numbers
from penstock.wire.scan import SCHEMA, matching

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 65_536
BYTES_AT_ONCE = 8 * 1024 * 1024
"""Packs are joined until they are as large as this: each batch costs Spark more than a pack does."""
PACK = constant(packs.HEADERS[0])
HEADERS = SCHEMA.field("headers").type
EVENT, ROW = "event", "row"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rows of a read look like."""

    schema: pa.Schema = SCHEMA
    """The columns: those of `scan.SCHEMA`, and `row` and `event` where they are asked for."""
    unpack: bool = True
    data: bool = True
    """Whether bodies are handed out."""
    decompress: bool = False
    subjects: tuple[str, ...] = ()
    """Filters. The server compares them with the subjects of messages, not with those of rows."""

    @property
    def typed(self) -> bool:
        """Whether events of typed packs come as columns."""
        return EVENT in self.schema.names

    @property
    def as_it_comes(self) -> bool:
        """Whether a batch without packs needs no change."""
        return self.data and len(self.schema) == len(SCHEMA)


def shaped(batches: Iterable[pa.RecordBatch], shape: Shape) -> Iterator[pa.RecordBatch]:
    """Batches of messages as rows of that shape."""
    for batch in batches:
        found = _unpacked(batch, shape) if shape.unpack and has_packs(batch) else [_plain(batch, shape)]
        yield from (decompressed(one) for one in found) if shape.decompress else found


def has_packs(batch: pa.RecordBatch) -> bool:
    """Whether a message of the batch says that it is a pack."""
    return bool(pc.index(batch.column("headers").keys, PACK).as_py() >= 0)


def _plain(batch: pa.RecordBatch, shape: Shape) -> pa.RecordBatch:
    """Messages, each of which is a row."""
    if shape.as_it_comes:
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not shape.data:
        columns["data"] = pa.nulls(batch.num_rows, pa.binary())
    return _made(columns, batch.num_rows, shape)


def _made(columns: dict[str, pa.Array], rows: int, shape: Shape) -> pa.RecordBatch:
    """The columns of the shape; what is missing is 0 for the place in a pack, and null for an event."""
    if ROW in shape.schema.names and ROW not in columns:
        columns[ROW] = numbers(np.zeros(rows, dtype=np.int32))
    made = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in shape.schema]
    return pa.RecordBatch.from_arrays(made, schema=shape.schema)


class _Segment(NamedTuple):
    """Messages that are rows, or one that is a pack."""

    place: int
    """Of the first message in its batch."""
    rows: int
    own: dict[str, pa.Array] | None = None
    """The columns that the rows of a pack contain; None: the messages are the rows."""


def _unpacked(batch: pa.RecordBatch, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Rows of packs and messages between them, in their order, joined to batches that are worth their way."""
    waiting: list[_Segment] = []
    rows = size = 0
    for segment in _segments(batch, shape):
        waiting.append(segment)
        rows += segment.rows
        size += sum(column.nbytes for column in segment.own.values()) if segment.own else 0
        if rows >= ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield _joined(batch, waiting, shape)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(batch, waiting, shape)


def _segments(batch: pa.RecordBatch, shape: Shape) -> Iterator[_Segment]:
    marks = pc.map_lookup(batch.column("headers"), PACK, "first")
    start = 0
    for place in np.flatnonzero(is_valid(marks)).tolist():
        own = _read(batch, place, shape)
        if own is None:
            continue
        if start < place:
            yield _Segment(start, place - start)
        yield _Segment(place, len(next(iter(own.values()))), own)
        start = place + 1
    if start < batch.num_rows:
        yield _Segment(start, batch.num_rows - start)


def _read(batch: pa.RecordBatch, place: int, shape: Shape) -> dict[str, pa.Array] | None:
    """The columns of the pack at this place of a batch; None when it cannot be read."""
    headers, data = batch.column("headers")[place], batch.column("data")[place]
    try:
        return _own_columns(packs.decode(dict(headers.as_py()), data.as_buffer()), shape)
    except (packs.MalformedPack, pa.ArrowException) as exc:
        stream, sequence = (batch.column(name)[place].as_py() for name in ("stream", "sequence"))
        log.warning("sequence %s of %s is handed out as it is: %s", sequence, stream, exc)
        return None


def _joined(batch: pa.RecordBatch, segments: list[_Segment], shape: Shape) -> pa.RecordBatch:
    """The rows of some segments as one batch: a few calls for all of them, not for each."""
    counts = np.array([segment.rows for segment in segments])
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    place_in_segment = np.arange(int(counts.sum())) - starts
    is_pack = np.repeat(np.array([segment.own is not None for segment in segments]), counts)
    places = np.repeat(np.array([segment.place for segment in segments]), counts)
    of_message = batch.select(["subject", "sequence", "timestamp"]).take(
        numbers(np.where(is_pack, places, places + place_in_segment))
    )
    columns = dict(zip(of_message.schema.names, of_message.columns, strict=True))
    columns["stream"] = pa.repeat(batch.column("stream")[0], len(starts))
    for name in ("subject", "timestamp"):
        if any(segment.own and name in segment.own for segment in segments):
            columns[name] = pc.coalesce(_concatenated(name, segments, columns[name].type), columns[name])
    columns["headers"] = pa.concat_arrays([_headers(batch, segment) for segment in segments])
    columns["data"] = _concatenated("data", segments, pa.binary(), batch)
    if shape.typed:
        columns[EVENT] = _concatenated(EVENT, segments, shape.schema.field(EVENT).type)
    if ROW in shape.schema.names:
        columns[ROW] = numbers(np.where(is_pack, place_in_segment, 0).astype(np.int32))
    made = pa.RecordBatch.from_arrays([columns[name] for name in shape.schema.names], schema=shape.schema)
    if shape.subjects and any(segment.own and "subject" in segment.own for segment in segments):
        return made.filter(matching(made.column("subject"), shape.subjects))
    return made


def _concatenated(
    name: str, segments: list[_Segment], kind: pa.DataType, batch: pa.RecordBatch | None = None
) -> pa.Array:
    """One column of all segments: of packs, and of messages where `batch` is given; else null."""
    parts = []
    for segment in segments:
        if segment.own is not None and name in segment.own:
            parts.append(segment.own[name])
        elif segment.own is None and batch is not None:
            parts.append(batch.column(name).slice(segment.place, segment.rows))
        else:
            parts.append(pa.nulls(segment.rows, kind))
    return pa.concat_arrays(parts)


def _headers(batch: pa.RecordBatch, segment: _Segment) -> pa.Array:
    if segment.own is None:
        return batch.column("headers").slice(segment.place, segment.rows)
    return segment.own["headers"] if "headers" in segment.own else _no_headers(segment.rows)


def _own_columns(pack: packs.Pack, shape: Shape) -> dict[str, pa.Array]:
    """Return the columns that the rows of a pack contain."""
    if pack.kind == packs.ROWS:
        found = dict(zip(pack.batch.schema.names, pack.batch.columns, strict=True))
        if "headers" in found:
            found["headers"] = _without_nulls(found["headers"])
        return found
    if shape.typed:
        return {EVENT: as_events(pack.batch, shape.schema.field(EVENT).type)}
    return {"data": pa.array(pack.documents, pa.binary())}


def as_events(batch: pa.RecordBatch, wanted: pa.StructType) -> pa.Array:
    """The columns of a typed pack as structs: columns by name, missing ones null. Raises when a type does not fit."""
    batch, columns = portable(batch), []
    for field in wanted:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    return pa.StructArray.from_arrays(columns, fields=list(wanted))


def _no_headers(count: int) -> pa.Array:
    offsets: Any = np.zeros(count + 1, dtype=np.int32)
    return pa.Array.from_buffers(HEADERS, count, [None, pa.py_buffer(offsets)], children=[_NO_ENTRIES])


def _without_nulls(column: pa.Array) -> pa.Array:
    """Rows without headers as empty maps, like messages without headers."""
    if not column.null_count:
        return column
    _, offsets, *_ = column.buffers()
    entries = pa.StructArray.from_arrays([column.keys, column.items], fields=[HEADERS.key_field, HEADERS.item_field])
    return pa.Array.from_buffers(HEADERS, len(column), [None, offsets], children=[entries], offset=column.offset)


_NO_ENTRIES = pa.StructArray.from_arrays(
    [pa.nulls(0, pa.string()), pa.nulls(0, HEADERS.item_type)], fields=[HEADERS.key_field, HEADERS.item_field]
)
