"""Writes a chunk to the stream: as one atomic batch, or by fast ingest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from penstock.errors import OutcomeUnknown, Unavailable
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.publish.batch import Batch
from penstock.publish.blocking import BlockingPublisher, Flight
from penstock.publish.errors import BatchOutcomeUnknown, DuplicateId, Gap, NobodyListens, TimedOut
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.model import BatchAck, BatchRef
from penstock.publish.options import IngestOptions
from penstock.retry import is_retryable
from penstock.spark.chunks import ChunkRows, Limits
from penstock.spark.history import Intent, Written
from penstock.spark.link import Link
from penstock.spark.packing import Packing, packed_messages
from penstock.spark.stored import CHUNK_HEADER, MESSAGE_ID, stored_row_digest
from penstock.wire import headers as header_block

log = logging.getLogger(__name__)

FAST_LIMITS = Limits(rows=10_000, bytes=16 * 1024 * 1024)
"""What fast ingest may write twice after a crash is at most one chunk a task."""
GAP_RETRIES = 3
_ID_LINE = f"{MESSAGE_ID}: ".encode()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of a chunk, taken out of their columns, ready to be sent."""

    subjects: list[bytes]
    bodies: list[bytes]
    lines: list[bytes]
    """Each row's own header lines."""
    has_row_ids: bool
    """Whether a row carries a message id of its own, which the server compares."""

    @classmethod
    def of(cls, rows: ChunkRows, packing: Packing | None = None) -> Chunk:
        if packing:
            subjects, packed_lines, bodies = map(list, zip(*packed_messages(rows, packing), strict=True))
            return cls(subjects, bodies, packed_lines, has_row_ids=False)
        lines = [b""] * len(rows) if rows.headers is None else rows.headers.to_pylist()
        has_ids = rows.headers is not None and any(_ID_LINE in one for one in lines)
        return cls(rows.subjects.cast("binary").to_pylist(), rows.bodies.to_pylist(), lines, has_ids)


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk is in the stream, or the server refused it for the message id of a row."""

    last: int
    """Sequence of its last message; 0 when it is not known."""
    refused: bool = False


class ChunkDelivery(Protocol):
    """Writes chunks to the stream: `begin` each, then `finish` it before the next begins."""

    limits: Limits
    packing: Packing | None

    def begin(self, chunk: Chunk, intent: Intent, name: str) -> None:
        """Send the chunk; errors are raised by `finish`."""

    def finish(self) -> Stored:
        """Return when it is certain that the chunk begun last is stored."""

    def find(self, intent: Intent) -> int | None:
        """Return the last sequence of the chunk that an earlier attempt was writing; None when it is not stored."""

    def rows_of(self, written: Written) -> list[bytes]:
        """The digests of the rows of a chunk, read back from the stream."""

    def close(self) -> None: ...


Confirm = Callable[[], None]
"""Raises when another attempt has taken the task over."""


def delivery(kind: str, link: Link, stream: str, confirm: Confirm, *, packing: Packing | None = None) -> ChunkDelivery:
    """The delivery of that name."""
    if kind == "fast":
        return FastDelivery(link, stream, packing)
    return AtomicDelivery(link, stream, confirm, packing)


class AtomicDelivery:
    """Each chunk is one atomic batch: all of it is stored, or nothing."""

    def __init__(self, link: Link, stream: str, confirm: Confirm, packing: Packing | None = None) -> None:
        self.packing = packing
        self.limits = packing.within(Limits()) if packing else Limits()
        self._link = link
        self._stream = stream
        self._confirm = confirm
        self._publisher = BlockingPublisher(link.connection, patience=link.patience)
        self._batch: Batch | None = None
        self._intent: Intent | None = None
        self._flight: Flight | None = None
        self._row_ids = False

    def begin(self, chunk: Chunk, intent: Intent, name: str) -> None:
        self._intent, self._row_ids = intent, chunk.has_row_ids
        self._batch = named_batch(self._stream, chunk, intent.batch_id, name)
        try:
            self._flight = self._publisher.begin(self._batch)
        except (Unavailable, OutcomeUnknown):
            self._flight = None

    def finish(self) -> Stored:
        assert self._batch is not None
        assert self._intent is not None
        batch, intent, flight = self._batch, self._intent, self._flight
        try:
            try:
                if flight is not None:
                    return Stored(self._publisher.finish(flight).sequence)
            except (Unavailable, OutcomeUnknown, Gap):
                log.info("chunk %d: no answer, or not complete; looking for it", intent.number)
            return self._link.persistently(lambda: Stored(self._look_or_send(batch, intent)), retry_on=_is_passing())
        except DuplicateId:
            # The chunk's own id: an answer was lost, or another attempt was faster. A row's id: some other message.
            return Stored(0, refused=self._row_ids)

    def _look_or_send(self, batch: Batch, intent: Intent) -> int:
        if found := self._resolve(intent):
            return found.sequence
        self._confirm()  # the search may have taken long
        return self._publisher.finish(self._publisher.begin(batch)).sequence

    def find(self, intent: Intent) -> int | None:
        found = self._link.persistently(lambda: self._resolve(intent))
        return found.sequence if found else None

    def _resolve(self, intent: Intent) -> BatchAck | None:
        ref = BatchRef(self._stream, intent.batch_id, intent.messages or intent.rows, intent.subject, intent.after)
        try:
            return self._publisher.resolve(ref)
        except BatchOutcomeUnknown:
            # Consumers of a WorkQueue or Interest stream, or its limits, may have removed it. Writing it again loses
            # nothing, and inside the stream's duplicate window repeats nothing.
            log.warning("chunk %d may have been removed from %s already; writing it again", intent.number, self._stream)
            return None

    def rows_of(self, written: Written) -> list[bytes]:
        last = written.last or self.find(written.intent) or 0
        if not last:
            return []
        first = last - written.intent.rows + 1  # no packs: their rows have digests
        # A consumer would count for the retention of WorkQueue and Interest; direct get needs to be allowed.
        config = self._link.stream_info(self._stream).config
        if config.get("retention", "limits") != "limits" and not config.get("allow_direct"):
            return []
        wanted = Range(stream=self._stream, first=first, last=last, direct=config.get("retention") != "limits")
        batches = read_range(self._link.settings, wanted, self._link.patience)
        return [stored_row_digest(*row) for batch in batches for row in _stored_rows(batch)]

    def close(self) -> None:
        """No effect: the link owns the connection."""


class FastDelivery:
    """Fast ingest: faster, and not atomic. What was being sent at a crash may be written twice, never lost."""

    def __init__(self, link: Link, stream: str, packing: Packing | None = None) -> None:
        self.packing = packing
        self.limits = packing.within(FAST_LIMITS) if packing else FAST_LIMITS
        options = IngestOptions(on_gap="resend", patience=link.patience)
        self._ingest = BlockingFastIngest(link.settings, stream, options, on_lost=lambda _: None)
        self._ingest.__enter__()

    def begin(self, chunk: Chunk, intent: Intent, name: str) -> None:
        subjects = map(bytes.decode, chunk.subjects)
        blocks = (header_block.block(lines) if lines else b"" for lines in chunk.lines)
        self._ingest.add_prepared(zip(subjects, blocks, chunk.bodies, strict=True))

    def finish(self) -> Stored:
        self._ingest.flush()
        return Stored(self._ingest.sequence)

    def find(self, intent: Intent) -> int | None:
        """Return None: it is unknown how much was written."""
        return None

    def rows_of(self, written: Written) -> list[bytes]:
        """Not available: rows of other writers may be between them."""
        return []

    def close(self) -> None:
        self._ingest.__exit__(None)


def named_batch(stream: str, chunk: Chunk, batch_id: str, name: str) -> Batch:
    """The atomic batch of a chunk. Its last message carries the chunk's name, also as message id unless it has one."""
    batch = Batch(stream, batch_id)
    batch.subjects, batch.payloads = chunk.subjects, chunk.bodies
    last = chunk.lines[-1] + header_block.line(CHUNK_HEADER, name)
    if _ID_LINE not in last:
        last += header_block.line(MESSAGE_ID, name)
    batch.lines = [*chunk.lines[:-1], last]
    return batch


def _stored_rows(batch: pa.RecordBatch) -> Iterator[tuple[str, dict[str, list[str]], bytes]]:
    subjects, headers, data = (batch.column(name).to_pylist() for name in ("subject", "headers", "data"))
    return zip(subjects, (dict(one or ()) for one in headers), data, strict=True)


def _is_passing() -> Callable[[BaseException], bool]:
    """Return a check whether an error is transient; a batch that arrives incomplete gets a few retries."""
    gaps = 0

    def passing(error: BaseException) -> bool:
        nonlocal gaps
        gaps += isinstance(error, Gap | TimedOut)
        return is_retryable(error) or isinstance(error, BatchOutcomeUnknown | NobodyListens) or 0 < gaps <= GAP_RETRIES

    return passing
