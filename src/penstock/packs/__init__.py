"""Packs: many rows in one message, as one Arrow record batch. Pure; `docs/packs.md` has the format for other clients.

    encoded = packs.encode_rows([PackedRow(b"one"), PackedRow(b"two", headers={"Kind": ["b"]})])
    await publisher.publish("orders.new", encoded.body, headers=encoded.headers)

    if packs.is_pack(message.headers):
        for row in packs.decode(message.headers, message.data).rows(message.subject, message.time):
            ...

Whether a message is a pack, and what its headers say, can be told without Arrow (`is_pack`, `mark_of`); to read or make
one takes pyarrow, which the extra `arrow` installs (`need_arrow` says so).
"""

from typing import TYPE_CHECKING

from penstock.exports import lazily
from penstock.packs.marks import (
    CODECS,
    HEADERS,
    LZ4,
    MAX_PLAIN_BYTES,
    MAX_ROWS,
    NONE,
    ROWS,
    TYPED,
    ZSTD,
    MalformedPack,
    PackedRow,
    PackMark,
    is_pack,
    mark_of,
    need_arrow,
    rows_of,
)

if TYPE_CHECKING:
    from penstock.packs.codec import EncodedPack, Pack, decode, encode_batch, encode_events, encode_rows
    from penstock.packs.documents import documents
    from penstock.packs.schemas import checked_schema, schema_id

__all__ = [
    "CODECS",
    "HEADERS",
    "LZ4",
    "MAX_PLAIN_BYTES",
    "MAX_ROWS",
    "NONE",
    "ROWS",
    "TYPED",
    "ZSTD",
    "EncodedPack",
    "MalformedPack",
    "Pack",
    "PackMark",
    "PackedRow",
    "checked_schema",
    "decode",
    "documents",
    "encode_batch",
    "encode_events",
    "encode_rows",
    "is_pack",
    "mark_of",
    "need_arrow",
    "rows_of",
    "schema_id",
]

__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(
            ("EncodedPack", "Pack", "decode", "encode_batch", "encode_events", "encode_rows"), f"{__name__}.codec"
        ),
        "documents": f"{__name__}.documents",
        **dict.fromkeys(("checked_schema", "schema_id"), f"{__name__}.schemas"),
    },
)
