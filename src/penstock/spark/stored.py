"""Computes the digests of the rows that a stored message came from. Pure, and without Spark: checks of a write need it
too."""

from __future__ import annotations

from collections.abc import Mapping

from penstock import packs
from penstock.spark.digests import row_digest
from penstock.wire import headers as header_block

MESSAGE_ID = "Nats-Msg-Id"
CHUNK_HEADER = "Penstock-Chunk"
_OWN_PREFIXES = ("nats-batch-", "nats-expected-")
_OWN = frozenset({MESSAGE_ID.lower(), CHUNK_HEADER.lower(), "nats-sequence", "nats-stream", "nats-subject"})
_OWN |= {"nats-time-stamp", "nats-last-sequence", "nats-num-pending", "nats-msg-size"}


def is_own_header(name: str) -> bool:
    """Whether the header steers the transport, not the reader: rows that come from a stream still carry old ones."""
    lower = name.lower()
    return lower in _OWN or lower.startswith(_OWN_PREFIXES)


def stored_row_digests(subject: str, headers: Mapping[str, list[str]], data: bytes) -> list[bytes]:
    """The identity of each row that a stored message came from: those of a pack, or the only one."""
    if not packs.is_pack(headers):
        return [stored_row_digest(subject, headers, data)]
    pack = packs.decode(headers, data)
    if pack.kind == packs.TYPED:
        from penstock.spark.packing import identity  # needs Arrow, as the pack does

        return [row_digest(subject, b"", one) for one in identity(pack.batch.to_struct_array()).to_pylist()]
    return [stored_row_digest(subject, {k: [*v] for k, v in row.headers.items()}, row.data) for row in pack.rows()]


def stored_row_digest(subject: str, headers: Mapping[str, list[str]], data: bytes) -> bytes:
    """The identity of the row that a stored message came from."""
    lines = header_block.lines({key: values for key, values in headers.items() if not is_own_header(key)})
    ids = headers.get(MESSAGE_ID)
    if ids and ids != headers.get(CHUNK_HEADER):
        lines += header_block.line(MESSAGE_ID, ids[0])
    return row_digest(subject, lines, data)
