"""The rows of a chunk as packs: how many rows go together, and what names a typed row. Pure.

The ledger knows rows, not packs. A chunk is announced with the digest of each of its rows, as without packs, and which
of them go into one message is decided after that. So a second run of a batch may cut its rows into other packs, or get
them in another order or in other tasks: it compares rows, and leaves out those that are written, also when they lie in
a pack with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import packs
from penstock.errors import ConfigError
from penstock.packs.schemas import HEADERS_TYPE, ROW_FIELDS, portable
from penstock.spark.chunks import ChunkRows, Limits
from penstock.wire import headers as header_block
from penstock.wire.columns import values

ROWS_TOGETHER = 1000
BYTES_TOGETHER = 256 * 1024
"""Default bounds of a pack."""
PACKS_BY_ROWS, PACKS_BY_BYTES, PACKS_BY_SUBJECTS = 400, 100, 500
"""A chunk of rows becomes at most so many packs for each of its bounds: together a batch that the server takes."""
MAX_ANNOUNCED = 20_000
"""Rows of a chunk. The digests of all of them must fit into one entry of the ledger."""
ANNOUNCED_BYTES = 32
"""Of one row in the ledger, with room to spare."""
MESSAGE_HEADERS = 4096
"""Bytes of a message's limit that are left for headers: those of the pack, of the batch, and the chunk's name."""
_DATA, _HEADERS = ROW_FIELDS[0], ROW_FIELDS[2]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are combined into packs."""

    kind: str
    """`packs.ROWS` or `packs.TYPED`."""
    rows: int = ROWS_TOGETHER
    bytes: int = BYTES_TOGETHER
    codec: str = packs.NONE
    body_bytes: int = 1024 * 1024 - MESSAGE_HEADERS
    """What the body of a message may have on this server, and in this stream."""

    def within(self, limits: Limits) -> Limits:
        """The limits of a chunk whose rows are packed, at most those given."""
        rows = min(MAX_ANNOUNCED, PACKS_BY_ROWS * self.rows, self.body_bytes // ANNOUNCED_BYTES)
        return Limits(rows, min(limits.bytes, PACKS_BY_BYTES * self.bytes), PACKS_BY_SUBJECTS)


def packed_messages(rows: ChunkRows, packing: Packing) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Subject, header lines and body of each message: packs of one subject each, its rows in their order.

    A row that has only a body and is alone with its subject stays the message that it is without packs.
    """
    for subject, part in _by_subject(rows):
        for some in _cut(part, packing):
            yield from _messages(subject.encode(), some, packing)


def _messages(subject: bytes, rows: ChunkRows, packing: Packing) -> Iterator[tuple[bytes, bytes, bytes]]:
    if len(rows) == 1 and packing.kind == packs.ROWS and not _has_headers(rows):
        yield subject, b"", rows.bodies[0].as_py()
        return
    encoded = _encoded(rows, packing)
    if len(encoded.body) <= packing.body_bytes:
        yield subject, header_block.lines(encoded.headers), encoded.body
        return
    if len(rows) == 1:
        raise ConfigError(
            f"a row on {subject.decode()!r} makes a message of {len(encoded.body)} bytes, and the server takes "
            f"{packing.body_bytes}: raise max_payload of the server (max_msg_size of the stream), or split the row"
        )
    half = len(rows) // 2  # its bytes do not shrink as they usually do
    yield from _messages(subject, rows.slice(0, half), packing)
    yield from _messages(subject, rows.slice(half, len(rows) - half), packing)


def _encoded(rows: ChunkRows, packing: Packing) -> packs.EncodedPack:
    if rows.events is not None:
        return packs.encode_batch(pa.RecordBatch.from_struct_array(rows.events), packs.TYPED, packing.codec)
    fields, columns = [_DATA], [rows.bodies]
    if _has_headers(rows):
        fields.append(_HEADERS)
        columns.append(_header_maps(rows.headers))
    return packs.encode_batch(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)), packs.ROWS, packing.codec)


def _has_headers(rows: ChunkRows) -> bool:
    return rows.headers is not None and bool(pc.max(pc.binary_length(rows.headers)).as_py())


def _header_maps(lines: pa.Array) -> pa.Array:
    """Header lines as the column of a pack."""
    found = (header_block.parse(header_block.block(one)) if one else {} for one in lines.to_pylist())
    return pa.array([list(one.items()) for one in found], HEADERS_TYPE)


def _by_subject(rows: ChunkRows) -> Iterator[tuple[str, ChunkRows]]:
    """The rows of each subject, in the order in which subjects come first."""
    coded = rows.subjects.dictionary_encode()
    if len(coded.dictionary) == 1:
        yield coded.dictionary[0].as_py(), rows
        return
    codes = values(coded.indices)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes))
    start = 0
    for subject, end in zip(coded.dictionary.to_pylist(), ends.tolist(), strict=True):
        yield subject, rows.take(order[start:end])
        start = end


def _cut(rows: ChunkRows, packing: Packing) -> Iterator[ChunkRows]:
    ends = np.cumsum(rows.content_sizes())
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + packing.bytes, side="right"))
        stop = min(max(fit, start + 1), start + packing.rows)
        yield rows.slice(start, stop - start)
        start = stop


# -- typed rows --------------------------------------------------------------------------------------------------------


def typed_rows(subjects: pa.Array, events: pa.Array) -> ChunkRows:
    """Rows of typed packs. Their bodies are never sent: they are bytes that distinguish one event from another."""
    if events.null_count:
        raise ConfigError("a row has no event: column `event` is null there; filter such rows, or fill it")
    plain = portable(pa.RecordBatch.from_struct_array(events))
    packs.checked_schema(plain.schema)
    column = plain.to_struct_array()
    return ChunkRows(subjects, identity(column), None, column)


def identity(column: pa.Array) -> pa.Array:
    """Bytes for each value: equal for equal values of the type, and only for them."""
    valid = pc.if_else(pc.is_valid(column), b"\1", b"\0")
    return _joined([valid, pc.if_else(pc.is_valid(column), _content(column), b"")])


def _content(column: pa.Array) -> pa.Array:
    """The bytes of each value, whatever they are where it is null."""
    kind = column.type
    if pa.types.is_struct(kind):
        return _joined([identity(child) for child in column.flatten()])
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _listed(column)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        content = column.cast(pa.binary())
        return _joined([_fixed(pc.fill_null(pc.binary_length(content), 0)), pc.fill_null(content, b"")])
    return _fixed(column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column)


def _fixed(column: pa.Array) -> pa.Array:
    """Values of one width as their bytes in memory; nothing where they are null."""
    width = column.type.bit_width // 8
    return pc.fill_null(column.view(pa.binary(width)).cast(pa.binary()), b"")


def _listed(column: pa.Array) -> pa.Array:
    """The bytes of all elements of each list, one after another, behind their number."""
    offsets = column.offsets.to_numpy()
    elements = identity(column.values if pa.types.is_list(column.type) else _entries(column))
    _, edges, data = elements.buffers()
    ends: Array = np.frombuffer(edges, dtype=np.int32)[elements.offset :][offsets]
    content = pa.Array.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(ends.astype(np.int32)), data or pa.py_buffer(b"")]
    )
    return _joined([_fixed(pa.array(np.diff(offsets).astype(np.int32))), content])


def _entries(column: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])


def _joined(parts: list[pa.Array]) -> pa.Array:
    return pc.binary_join_element_wise(*parts, b"")
