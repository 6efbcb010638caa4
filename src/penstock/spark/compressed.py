"""Decompresses bodies that publishers have compressed, according to a header."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

HEADERS = ("Content-Encoding", "content-encoding")
MAX_BODY = 256 * 1024 * 1024
"""Bytes that a body may have after decompression; a message itself is 64 MiB at most."""


def _by_codec(name: str) -> Callable[[bytes], bytes]:
    def opened(body: bytes) -> bytes:
        with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
            plain: bytes = stream.read(MAX_BODY + 1)
            return plain

    return opened


def _deflated(body: bytes) -> bytes:
    return zlib.decompressobj().decompress(body, MAX_BODY + 1)


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": _by_codec("gzip"),
    "x-gzip": _by_codec("gzip"),
    "deflate": _deflated,
    "br": _by_codec("brotli"),
    "zstd": _by_codec("zstd"),
    "lz4": _by_codec("lz4"),
}


def decompressed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with the bodies decompressed that a header marks as compressed.

    A body that cannot be decompressed, or would become too large, is left unchanged: the query decides what to do.
    """
    encodings = [pc.map_lookup(batch.column("headers"), pa.scalar(name), "first") for name in HEADERS]
    if all(column.null_count == len(column) for column in encodings):
        return batch
    found = pc.coalesce(*encodings).to_pylist()
    bodies = batch.column("data").to_pylist()
    plain = [_plain(body, codec[0]) if codec else body for body, codec in zip(bodies, found, strict=True)]
    index = batch.schema.get_field_index("data")
    return batch.set_column(index, batch.schema.field(index), pa.array(plain, batch.schema.field(index).type))


def _plain(body: bytes, encoding: str) -> bytes:
    codec = CODECS.get(encoding.strip().lower())
    if codec is None:
        return body
    try:
        opened = codec(body)
    except (OSError, ValueError, pa.ArrowException, zlib.error):
        return body
    return opened if len(opened) <= MAX_BODY else body
