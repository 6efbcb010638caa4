"""The logs of the ledger as values, without I/O: the owner of a log, and the meaning of its entries."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Self

from penstock.jetstream.model import Json
from penstock.spark.digests import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Series:
    """Writes that are numbered together: a streaming query (its id), or a batch write, into one stream."""

    stream: str
    name: str
    created: str = ""
    """When the stream was created, in the server's words: a stream that was deleted and created again is another one.
    Empty in the keys of version 1."""

    @property
    def key(self) -> str:
        """The key of the record that says which batches are closed, and the prefix of the logs."""
        token = re.sub(r"\D", "", self.created)
        return ".".join(filter(None, (self.stream, token, key_token(self.name))))

    def version_1(self) -> Series:
        """The same series as version 1 of the ledger named it."""
        return replace(self, created="")

    def logs(self, batch: int) -> str:
        """The prefix of everything that is kept about one batch."""
        return f"{self.key}.{batch}"


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """Identifies a log: one partition of one batch of one series that goes into one stream."""

    stream: str
    series: str
    batch: int
    partition: int
    created: str = ""

    @property
    def of(self) -> Series:
        return Series(self.stream, self.series, self.created)

    @property
    def key(self) -> str:
        return f"{self.of.logs(self.batch)}.{self.partition}"


def key_token(text: str) -> str:
    """Any text as one token of a KV key; the same text gives the same token, different texts different ones."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", text)
    return safe if safe == text else f"{safe[:80]}-{blake2b(text.encode(), digest_size=6).hexdigest()}"


def packed(digests: Sequence[bytes]) -> str:
    """Row digests as text of an entry."""
    return base64.b64encode(b"".join(digests)).decode()


def unpacked(text: str) -> list[bytes]:
    """The row digests that `packed` was given."""
    raw = base64.b64decode(text)
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class Intent:
    """A chunk that was about to be written."""

    number: int
    digest: str
    rows: int
    after: int
    """The output stream's last sequence known at that moment: the chunk can only lie beyond it."""
    batch_id: str
    """The id of the atomic batch that carries it."""
    subject: str
    """A subject of the batch."""
    row_digests: str = field(default="", repr=False)
    """The digests of its rows as they were sent, `packed`; version 1 has none."""
    messages: int = 0
    """Messages that carry the rows, where that are not as many: packs."""


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk that lies in the output stream, or did once."""

    intent: Intent
    last: int
    """Sequence of its last message; 0 when that is not known."""
    run: int = 0
    """The run that wrote it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Rows that the server refused for their message id: they are in the stream already."""

    row_digests: tuple[bytes, ...]
    run: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """What earlier attempts of a task have written."""

    written: tuple[Written, ...] = ()
    """Chunk n is at position n."""
    doubtful: Intent | None = None
    """The chunk after them, if an attempt ended while writing it: it may lie in the stream or not."""
    doubtful_run: int = 0
    refused: tuple[Refused, ...] = ()

    def after(self, entry: Json) -> Self:
        """The history with one more entry of the log."""
        run = int(entry.get("run", 0))
        match entry["kind"]:
            case "chunk":
                settled = self._settled(entry["previous"])
                return replace(settled, doubtful=Intent(**entry["chunk"]), doubtful_run=run)
            case "done" | "end":
                return self._settled(entry["previous"])
            case "void":
                return replace(self, doubtful=None)
            case "refused":
                return replace(self, refused=(*self.refused, Refused(tuple(unpacked(entry["rows"])), run)))
            case _:
                return self

    def _settled(self, last: int) -> Self:
        if self.doubtful is None:
            return self
        written = Written(self.doubtful, last, self.doubtful_run)
        return replace(self, written=(*self.written, written), doubtful=None)


def history_of(entries: Iterable[Json]) -> History:
    """All of a log."""
    history = History()
    for entry in entries:
        history = history.after(entry)
    return history
