"""The headers that mark a message as a pack, and the rows of one. Needs nothing but the standard library.

Penstock-Pack: 1                  the version of the format
Penstock-Pack-Kind: rows          or `typed`
Penstock-Pack-Rows: 500           how many rows it holds
Penstock-Pack-Codec: lz4          or `none` or `zstd`: how the buffers of the record batch are compressed
Penstock-Pack-Schema: 5f0c…       names the columns: equal for equal columns. The batch itself says what they are
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import NamedTuple

from penstock.errors import ConfigError

VERSION = 1
ROWS, TYPED = KINDS = ("rows", "typed")
"""Rows that are messages each, and rows that are events by their columns."""
NONE, LZ4, ZSTD = CODECS = ("none", "lz4", "zstd")
PACK = "Penstock-Pack"
KIND, COUNT, CODEC, SCHEMA = (f"{PACK}-{name}" for name in ("Kind", "Rows", "Codec", "Schema"))
HEADERS = (PACK, KIND, COUNT, CODEC, SCHEMA)
"""The headers of every pack."""
MAX_ROWS = 1_000_000
"""Rows that a pack may hold."""
MAX_PLAIN_BYTES = 256 * 1024 * 1024
"""Bytes that a pack may have after decompression; a message itself has 64 MiB at most."""
MAX_SCHEMA_ID = 64
MESSAGE_ID = "Nats-Msg-Id"

Headers = Mapping[str, str] | Mapping[str, Sequence[str]]
"""Headers of a message, with one value a name or with several."""


class MalformedPack(ConfigError):
    """A message is marked as a pack and cannot be read as one, or asks for more memory than a pack may have."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"malformed pack: {self.problem}; read the message as it is, or ask whoever publishes it"


class PackedRow(NamedTuple):
    """One row of a pack of kind `rows`: all that a message is."""

    data: bytes
    subject: str | None = None
    """None: the subject of the pack's message."""
    headers: Mapping[str, Sequence[str]] = {}
    timestamp: datetime | None = None
    """None: the time at which the pack's message was stored."""

    @property
    def message_id(self) -> str | None:
        """The row's own message id, which the server has not compared with others."""
        found = self.headers.get(MESSAGE_ID)
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class PackMark:
    """What the headers of a pack say about it."""

    kind: str
    rows: int
    codec: str
    schema: str

    def headers(self) -> dict[str, str]:
        """The headers that say it."""
        return dict(zip(HEADERS, (str(VERSION), self.kind, str(self.rows), self.codec, self.schema), strict=True))


def is_pack(headers: Headers | None) -> bool:
    """Whether a message with these headers says that it is a pack."""
    return bool(headers) and PACK in headers  # type: ignore[operator]  # no headers are false


def mark_of(headers: Headers | None) -> PackMark | None:
    """What the headers say; None for a message that is no pack. Raises `MalformedPack`."""
    if not headers or PACK not in headers:
        return None
    version, kind, rows, codec, schema = (_single(headers, name) for name in HEADERS)
    if version != str(VERSION):
        raise MalformedPack(f"its version is {version!r}, and this release of Penstock reads version {VERSION}")
    if kind not in KINDS or codec not in CODECS:
        raise MalformedPack(f"its kind is {kind!r} and its codec {codec!r}; known are {_words(KINDS + CODECS)}")
    if not rows.isdecimal() or not 0 < int(rows[:10]) <= MAX_ROWS:
        raise MalformedPack(f"{COUNT} is {rows[:20]!r}, and must be from 1 to {MAX_ROWS}")
    if not 0 < len(schema) <= MAX_SCHEMA_ID:
        raise MalformedPack(f"{SCHEMA} has {len(schema)} characters, and must have from 1 to {MAX_SCHEMA_ID}")
    return PackMark(kind, int(rows), codec, schema)


def _single(headers: Headers, name: str) -> str:
    value = headers.get(name)
    found = [value] if isinstance(value, str) else list(value or ())
    if len(found) != 1:
        raise MalformedPack(f"it has {len(found)} headers {name}, and must have one")
    return found[0]


def _words(names: Iterable[str]) -> str:
    return ", ".join(names)


def need_arrow(what: str) -> None:
    """Raise unless packs can be read and made here."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{what} needs pyarrow: pip install 'penstock-nats[arrow]'")


def rows_of(subject: str, data: bytes, headers: Headers, timestamp: datetime | None) -> Iterator[PackedRow]:
    """The rows of a message that is a pack; of any other, the message itself as one row.

    Raises `MalformedPack`, and `ConfigError` for a pack where pyarrow is missing.
    """
    if not is_pack(headers):
        own = {name: [one] if isinstance(one, str) else list(one) for name, one in headers.items()}
        yield PackedRow(data, subject, own, timestamp)
        return
    need_arrow("reading a pack")
    from penstock.packs.codec import decode

    yield from decode(headers, data).rows(subject, timestamp)
