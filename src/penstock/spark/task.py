"""One task of a write: its rows into the stream, each once, whatever happened to earlier attempts.

1. Open the task's log in the ledger (crash after: nothing is written; the next attempt opens it again).
   Attempts before this one can append no more, so they write at most the chunk they are at.
2. Look whether the batch is closed (then everything is written, and this attempt only compares), and settle the
   chunk that an earlier attempt was at: is it in the stream? (crash after: the answer is in the log, or is found again)
   Look whether an earlier run of the batch has left logs: `earlier` has the steps for that.
3. For each chunk that is not written yet:
   a. say so in the log (crash after: the next attempt looks for the chunk in the stream, does not find it, writes it);
   b. write it, all or nothing (crash after: the next attempt looks for it, finds it, skips it).
4. Say in the log that all is written (crash after: the next attempt skips every chunk, without looking).
5. The driver closes the batch, seals its logs and forgets those of the batch before (crash after: Spark runs the batch
   again, and step 2 finds it closed).

Within a run, chunks are recognised by place and digest, so a task that gets the same rows in the same order skips what
is there. When the rows come in another order, the first chunk that differs says so: from there on rows are compared
one by one, by the digests of what was sent, which the log has. The rows of a new run are compared one by one with those
of all tasks of earlier runs. Rows with another content are other rows: a plan that computes something else each time
writes both. A batch that is closed must come with the same rows, or it fails (`onFinishedBatch` says what else to do).

Two attempts at the same moment: the older one may still be writing its chunk. The newer makes the server drop that
batch before it checks; if it is written after all, both carry the same message id, and the server refuses the second
one. Only this moment relies on the stream's duplicate window: an attempt that was delayed for longer, suspended or
waiting for the server, checks whether it is still the current one before it sends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from penstock.publish.batch import new_id
from penstock.spark import steps
from penstock.spark.chunks import ChunkRows, Limits, chunk_id, cut, without
from penstock.spark.delivery import Chunk, ChunkDelivery, Confirm
from penstock.spark.earlier import CLAIMED_AT_ONCE, EarlierRuns, begin_run, row_digests
from penstock.spark.history import Intent, LedgerPlace, Written, packed
from penstock.spark.ledger import Ledger, Log, OtherRows
from penstock.spark.link import Link
from penstock.spark.options import FAIL, SKIP

log = logging.getLogger(__name__)

COMPARED_AT_ONCE = Limits(rows=CLAIMED_AT_ONCE, bytes=16 * 1024 * 1024)
"""Rows that are held while they are compared with those of earlier runs."""
FRESH = 0.5
"""Seconds after an append after which an attempt checks again whether it is still the current one."""


@dataclass(slots=True)
class TaskTally:
    """Counters of one attempt."""

    written: int = 0
    skipped: int = 0
    """Rows that an earlier attempt, or an earlier run of the batch, has written."""
    duplicates: int = 0
    """Rows that the server refused because their `message_id` is in its duplicate window."""
    strays: int = 0
    """Rows that an earlier attempt has written and that this one did not get: the plan is not deterministic."""

    @property
    def rows(self) -> int:
        """All rows that the attempt got."""
        return self.written + self.skipped + self.duplicates


class PartitionWrite:
    """The chunks of one task, in order, each announced in the log before it is written."""

    def __init__(
        self, place: LedgerPlace, journal: Log, delivery: ChunkDelivery, last: int, earlier: EarlierRuns | None = None
    ) -> None:
        self._place = place
        self._journal = journal
        self._delivery = delivery
        self._earlier = earlier
        self._last = last
        """A sequence the stream has reached."""
        self._previous = 0
        self._number = len(journal.history.written)
        self.tally = TaskTally()

    def write(self, batches: Iterable[ChunkRows]) -> TaskTally:
        """Steps 3 and 4. While the server stores a chunk, the next is read and cut."""
        under_way: ChunkRows | None = None
        for rows in self.unwritten(batches):
            chunk, digest, digests = Chunk.of(rows, self._delivery.packing), rows.digest(), rows.row_digests()
            if under_way:
                self._finish(under_way)
            self._begin(chunk, digest, digests)
            under_way = rows
        if under_way:
            self._finish(under_way)
        self._journal.end(self._previous)
        steps.reached(steps.ENDED)
        return self.tally

    def compare(self, batches: Iterable[ChunkRows]) -> TaskTally:
        """Make sure that all rows of a closed batch are written. Raises `OtherRows` at the first that is not."""
        for rows in self.unwritten(batches):
            example = rows.subjects[0].as_py()
            raise OtherRows(self._place.series, self._place.batch, f"one on {example!r} was not written")
        return self.tally

    def unwritten(self, batches: Iterable[ChunkRows]) -> Iterator[ChunkRows]:
        """The rows that are not in the stream, as chunks."""
        if self._earlier is not None:
            return cut(self._compared(batches, self._earlier), self._delivery.limits)
        return self._unwritten(cut(batches, self._delivery.limits))

    def _compared(self, batches: Iterable[ChunkRows], earlier: EarlierRuns) -> Iterator[ChunkRows]:
        """The rows that no earlier run has written."""
        for group in cut(batches, COMPARED_AT_ONCE):
            found = earlier.take(group.row_digests())
            self.tally.skipped += found.total()
            yield from without([group], found)
        self._count_strays(earlier.unused)

    def _unwritten(self, chunks: Iterator[ChunkRows]) -> Iterator[ChunkRows]:
        earlier = self._journal.history.written
        if self._journal.history.refused:  # the chunks around them have other borders
            yield from self._reordered(chunks, earlier)
            return
        for position, known in enumerate(earlier):
            chunk = next(chunks, None)
            if chunk is None:
                self._count_strays(sum(other.intent.rows for other in earlier[position:]))
                return
            if chunk.digest() != known.intent.digest:
                yield from self._reordered(chain([chunk], chunks), earlier[position:])
                return
            self.tally.skipped += len(chunk)
        yield from chunks

    def _reordered(self, chunks: Iterator[ChunkRows], earlier: tuple[Written, ...]) -> Iterator[ChunkRows]:
        log.warning("%s: rows come in another order than before; comparing them one by one", self._place.key)
        stored: Counter[bytes] = Counter()
        for known in earlier:
            stored.update(row_digests(known, self._delivery.rows_of))
        for refused in self._journal.history.refused:
            stored.update(refused.row_digests)
        before = stored.total()
        yield from cut(without(chunks, stored), self._delivery.limits)
        self._count_strays(stored.total())
        self.tally.skipped += before - stored.total()

    def _count_strays(self, rows: int) -> None:
        self.tally.strays += rows
        if rows:
            log.warning(
                "%s: %d rows of an earlier attempt did not come again: the plan is not deterministic, and they stay",
                self._place.key,
                rows,
            )

    def _begin(self, chunk: Chunk, digest: str, digests: list[bytes]) -> None:
        """Step 3a, and the first half of 3b."""
        place = self._place
        intent = Intent(
            number=self._number,
            digest=digest,
            rows=len(digests),
            after=self._last,
            batch_id=new_id(),
            subject=chunk.subjects[-1].decode(),
            row_digests=packed(digests),
            messages=len(chunk.bodies) if self._delivery.packing else 0,
        )
        announced = time.time()
        self._journal.chunk(intent, self._previous)
        steps.reached(steps.INTENDED)
        if abs(time.time() - announced) > FRESH:
            self._journal.confirm()
        name = chunk_id(place.series, place.batch, place.partition, intent.number, digest)
        self._delivery.begin(chunk, intent, name)

    def _finish(self, rows: ChunkRows) -> None:
        """The second half of step 3b."""
        stored = self._delivery.finish()
        if stored.refused:
            self._journal.void()
            self._store_without_duplicates(rows)
            return
        steps.reached(steps.STORED)
        self._number += 1
        self._previous = stored.last
        self._last = max(self._last, stored.last)
        self.tally.written += len(rows)

    def _store_without_duplicates(self, rows: ChunkRows) -> None:
        """The server does not say which message id is the duplicate: halve until it is alone."""
        if len(rows) == 1:
            self._journal.refused(rows.row_digests())
            self.tally.duplicates += 1
            return
        half = len(rows) // 2
        for part in (rows.slice(0, half), rows.slice(half, len(rows) - half)):
            self._begin(Chunk.of(part, self._delivery.packing), part.digest(), part.row_digests())
            self._finish(part)


def write_partition(
    link: Link,
    place: LedgerPlace,
    batches: Iterator[ChunkRows],
    deliver: Callable[[Confirm], ChunkDelivery],
    ttl: str | None = None,
    run: int = 0,
    finished: str = FAIL,
) -> TaskTally:
    """All steps of a task. A partition without rows leaves no trace.

    `run` is the number of the write's run; 0: it is never repeated. `finished` says what to do when the batch is closed
    already, and the rows are not those that were written.
    """
    first = next(batches, None)
    if first is None:
        return TaskTally()
    ledger = Ledger(link)
    journal = ledger.open_log(place, ttl, run)
    steps.reached(steps.OPENED)
    closed = ledger.finished(place)
    if closed and (closed.rows is None or finished == SKIP):
        return TaskTally()
    again = begin_run(ledger, place, run) if run else False
    # Claims need their own connection: they are written while a chunk is being sent on the other one.
    with closing(deliver(journal.confirm)) as delivery, Link(link.settings, link.patience) as second:
        settle(journal, delivery)
        earlier = EarlierRuns(Ledger(second), place, run, delivery) if again or closed else None
        write = PartitionWrite(place, journal, delivery, link.last_sequence(place.stream), earlier)
        rows = chain([first], batches)
        return write.compare(rows) if closed and finished == FAIL else write.write(rows)


def settle(journal: Log, delivery: ChunkDelivery) -> None:
    """Find out whether the chunk that an earlier attempt was writing is stored, and record the answer."""
    intent = journal.history.doubtful
    if intent is None:
        return
    found = delivery.find(intent)
    if found is None:
        journal.void()
    else:
        journal.done(found)
