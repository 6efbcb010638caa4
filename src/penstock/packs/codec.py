"""Rows and tables into the body of a message, and back. Pure; needs Arrow.

A body is an Arrow IPC stream with one schema and one record batch, whose buffers may be compressed with LZ4 frames or
ZSTD: any Arrow library reads it. Anybody may publish one. So before buffers are decompressed, the sizes that they
state are added up and bounded; then the batch is validated in full, since Arrow trusts offsets that it has read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import repeat
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.packs import marks
from penstock.packs.marks import CODECS, LZ4, NONE, ROWS, TYPED, Headers, MalformedPack, PackedRow, PackMark
from penstock.packs.schemas import ROW_FIELDS, check_read_schema, checked_schema, row_schema_problem, schema_id

_OPTIONS = {codec: pa.ipc.IpcWriteOptions(compression=None if codec == NONE else codec) for codec in CODECS}
_BATCH_FIELD, _BUFFERS_FIELD, _COMPRESSION_FIELD = 2, 2, 3
_BUFFER_BYTES = 16
"""A buffer in the metadata of a record batch: its offset and its length, 8 bytes each."""
_LENGTH_BYTES = 8
"""A compressed buffer begins with its length after decompression; -1: it is not compressed."""


@dataclass(frozen=True, slots=True)
class EncodedPack:
    """A pack, ready to be published."""

    mark: PackMark
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the message must have."""
        return self.mark.headers()

    @property
    def rows(self) -> int:
        return self.mark.rows


@dataclass(frozen=True)
class Pack:
    """A pack that was read and checked."""

    mark: PackMark
    batch: pa.RecordBatch
    """Columns of `ROW_FIELDS` for kind `rows`, the event's own for kind `typed`."""

    @property
    def kind(self) -> str:
        return self.mark.kind

    def __len__(self) -> int:
        return self.mark.rows

    def column(self, name: str) -> pa.Array | None:
        """A column; None when the pack has none of that name."""
        return self.batch.column(name) if name in self.batch.schema.names else None

    def rows(self, subject: str | None = None, timestamp: datetime | None = None) -> Iterator[PackedRow]:
        """The rows as messages. What a row does not say itself, its message does: give its subject and time.

        The events of a typed pack come as JSON documents.
        """
        if self.kind == TYPED:
            yield from (PackedRow(data, subject, {}, timestamp) for data in self.documents)
            return
        subjects, headers, times = (self._values(name) for name in ("subject", "headers", "timestamp"))
        for data, own, pairs, time in zip(self._values("data"), subjects, headers, times, strict=True):
            yield PackedRow(data, own or subject, dict(pairs or ()), time or timestamp)

    @cached_property
    def documents(self) -> list[bytes]:
        """The events of a typed pack as JSON, each as it would be in a message of its own."""
        from penstock.packs.documents import documents

        return documents(self.batch)

    def _values(self, name: str) -> Sequence[Any]:
        found = self.column(name)
        return [None] * len(self) if found is None else found.to_pylist()


# -- making packs ------------------------------------------------------------------------------------------------------


def encode_rows(rows: Iterable[PackedRow], codec: str = LZ4) -> EncodedPack:
    """A pack of messages. A column that no row has is left out."""
    given = list(rows)
    try:
        columns = [
            pa.array([row.data for row in given], pa.binary()),
            pa.array([row.subject for row in given], pa.string()),
            pa.array([_pairs(row.headers) for row in given], ROW_FIELDS[2].type),
            pa.array([row.timestamp for row in given], ROW_FIELDS[3].type),
        ]
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise ConfigError(f"these rows cannot be packed: {exc}; publish them as messages of their own") from None
    used = [index for index, column in enumerate(columns) if not index or column.null_count < len(column)]
    return encode_batch(_batch([ROW_FIELDS[index] for index in used], [columns[index] for index in used]), ROWS, codec)


def encode_events(events: pa.Table | pa.RecordBatch, codec: str = LZ4) -> EncodedPack:
    """A pack of events by their columns. Raises `ConfigError` for types that no pack may have (`checked_schema`)."""
    table = pa.Table.from_batches([events]) if isinstance(events, pa.RecordBatch) else events
    batches = table.replace_schema_metadata(None).combine_chunks().to_batches()
    if len(batches) != 1:
        raise ConfigError("a pack needs at least one row, and less than 2 GiB in a column")
    return encode_batch(batches[0], TYPED, codec)


def encode_batch(batch: pa.RecordBatch, kind: str, codec: str = LZ4) -> EncodedPack:
    """A pack of one record batch: with the columns of `ROW_FIELDS` for kind `rows`, or any for kind `typed`."""
    if codec not in CODECS:
        raise ConfigError(f"a pack cannot be compressed with {codec!r}; use {' or '.join(CODECS)}")
    if not 0 < batch.num_rows <= marks.MAX_ROWS:
        raise ConfigError(f"a pack has from 1 to {marks.MAX_ROWS} rows, not {batch.num_rows}")
    if batch.get_total_buffer_size() > marks.MAX_PLAIN_BYTES and batch.nbytes > marks.MAX_PLAIN_BYTES:
        raise ConfigError(f"a pack has at most {marks.MAX_PLAIN_BYTES} bytes, not {batch.nbytes}; make smaller ones")
    schema = checked_schema(batch.schema)
    if kind == ROWS and (problem := row_schema_problem(schema)):
        raise ConfigError(f"rows cannot be packed: {problem}; they must be {', '.join(map(str, ROW_FIELDS))}")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS[codec]) as writer:
        writer.write_batch(batch.replace_schema_metadata(None))
    return EncodedPack(PackMark(kind, batch.num_rows, codec, schema_id(schema)), sink.getvalue().to_pybytes())


def _batch(fields: Sequence[pa.Field], columns: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=pa.schema(list(fields)))


def _pairs(headers: Mapping[str, Sequence[str]] | None) -> list[tuple[str, list[str]]] | None:
    if not headers:
        return None
    return [(name, [value] if isinstance(value, str) else list(value)) for name, value in headers.items()]


# -- reading packs -----------------------------------------------------------------------------------------------------


def decode(headers: Headers, body: Any) -> Pack:
    """The pack that a message is; `body` is bytes, or a buffer that the batch then refers to.

    Raises `MalformedPack` when the message is none, or another one than its headers say.
    """
    mark = marks.mark_of(headers)
    if mark is None:
        raise MalformedPack(f"the message has no header {marks.PACK}")
    return decode_marked(mark, body)


def decode_marked(mark: PackMark, body: Any) -> Pack:
    """`decode` for headers that were read already."""
    try:
        batch = _read(mark, pa.py_buffer(body))
        batch.validate(full=True)
    except (pa.ArrowException, struct.error, OSError, IndexError, ValueError, OverflowError) as exc:
        raise MalformedPack(f"its body is no Arrow stream ({exc})") from None
    if batch.num_rows != mark.rows:
        raise MalformedPack(f"it says that it has {mark.rows} rows, and has {batch.num_rows}")
    return Pack(mark, batch)


def _read(mark: PackMark, body: pa.Buffer) -> pa.RecordBatch:
    messages = list(_messages(body))
    if [message.type for message in messages] != ["schema", "record batch"]:
        raise MalformedPack("its body must be a schema and one record batch")
    schema = pa.ipc.read_schema(messages[0]).remove_metadata()
    check_read_schema(schema)
    if mark.kind == ROWS and (problem := row_schema_problem(schema)):
        raise MalformedPack(problem)
    if (size := _plain_size(messages[1])) > marks.MAX_PLAIN_BYTES:
        raise MalformedPack(f"it would have {size} bytes after decompression; at most {marks.MAX_PLAIN_BYTES} are read")
    return pa.ipc.read_record_batch(messages[1], schema)


def _messages(body: pa.Buffer) -> Iterator[pa.Message]:
    """The messages of a stream; a third one is enough to know that it is no pack."""
    reader = pa.ipc.MessageReader.open_stream(body)
    for _ in repeat(None, 3):
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _plain_size(message: pa.Message) -> int:
    """Bytes of a record batch after decompression, as its buffers state them. Arrow has verified the metadata.

    The metadata is a flatbuffer: a `Message` whose `header` is a `RecordBatch` with the list `buffers`.
    """
    raw, body = message.metadata, message.body
    table = _followed(raw, 0)
    batch = _field(raw, table, _BATCH_FIELD)
    if not batch:
        return 0
    batch = _followed(raw, batch)
    if not _field(raw, batch, _COMPRESSION_FIELD):
        return int(body.size)
    at = _followed(raw, _field(raw, batch, _BUFFERS_FIELD))
    (count,) = struct.unpack_from("<I", raw, at)
    total = 0
    for index in range(count):
        offset, length = struct.unpack_from("<qq", raw, at + 4 + index * _BUFFER_BYTES)
        if length >= _LENGTH_BYTES:
            (plain,) = struct.unpack_from("<q", body, offset)
            total += max(plain, length)
    return total


def _followed(raw: pa.Buffer, at: int) -> int:
    """Where the reference at a position leads."""
    (offset,) = struct.unpack_from("<I", raw, at)
    return at + int(offset)


def _field(raw: pa.Buffer, table: int, number: int) -> int:
    """The position of a table's field; 0 when it is not there."""
    (back,) = struct.unpack_from("<i", raw, table)
    vtable = table - back
    (size,) = struct.unpack_from("<H", raw, vtable)
    slot = 4 + 2 * number
    if slot >= size:
        return 0
    (offset,) = struct.unpack_from("<H", raw, vtable + slot)
    return table + int(offset) if offset else 0
