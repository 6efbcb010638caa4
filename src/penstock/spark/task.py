"""One task of a write: its rows into the stream, each once, whatever happened to earlier attempts.

1. Open the task's log in the ledger (crash after: nothing is written; the next attempt opens it again).
   Attempts before this one can append no more, so they write at most the chunk they are at.
2. Look whether the batch is closed (then everything is written, and this attempt writes nothing), and settle the
   chunk that an earlier attempt was at: is it in the stream? (crash after: the answer is in the log, or is found again)
3. For each chunk that is not written yet:
   a. say so in the log (crash after: the next attempt looks for the chunk in the stream, does not find it, writes it);
   b. write it, all or nothing (crash after: the next attempt looks for it, finds it, skips it).
4. Say in the log that all is written (crash after: the next attempt skips every chunk, without looking).
5. The driver closes the batch, then forgets the logs (crash between: they go with the next batch that is closed;
   crash after: Spark runs the batch again, and step 2 finds it closed).

Chunks are recognised by place and digest, so a task that gets the same rows in the same order skips what is there.
When the rows come in another order, the first chunk that differs says so: from there on the rows written earlier are
read back, and rows are compared one by one. That is exactly once as long as the same rows come to the same partition.
Rows with another content are other rows: a plan that computes something else each time writes both.

Two attempts at the same moment: the older one may still be writing the chunk it is at. The newer makes the server drop
that batch before it looks; should it be written after all, both carry the same message id, and the server refuses the
second one. Only this moment relies on the stream's duplicate window: an attempt that was held up for longer, frozen or
waiting for the server, asks whether it is still the one before it sends.
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
from penstock.spark.chunks import Rows, chunk_id, cut, without
from penstock.spark.delivery import Chunk, Confirm, Delivery
from penstock.spark.ledger import Intent, Ledger, Log, Place, Written
from penstock.spark.link import Link

log = logging.getLogger(__name__)

FRESH = 0.5
"""Seconds after which an attempt that has just appended to its log asks again whether it is still the one."""


@dataclass(slots=True)
class Tally:
    """What one attempt did."""

    written: int = 0
    skipped: int = 0
    """Rows that an earlier attempt, or an earlier run of the batch, has written."""
    duplicates: int = 0
    """Rows that the server refused because their `message_id` is in its duplicate window."""
    strays: int = 0
    """Rows that an earlier attempt has written and that this one did not get: the plan is not deterministic."""


class PartitionWrite:
    """The chunks of one task, in order, each announced in the log before it is written."""

    def __init__(self, place: Place, journal: Log, delivery: Delivery, last: int) -> None:
        self._place = place
        self._journal = journal
        self._delivery = delivery
        self._last = last
        """A sequence the stream has reached."""
        self._previous = 0
        self._number = len(journal.history.written)
        self.tally = Tally()

    def write(self, batches: Iterable[Rows]) -> Tally:
        """Steps 3 and 4. While the server stores a chunk, the next is read and cut."""
        under_way: Rows | None = None
        for rows in self._unwritten(cut(batches, self._delivery.limits)):
            chunk, digest = Chunk.of(rows), rows.digest()
            if under_way:
                self._finish(under_way)
            self._begin(chunk, digest)
            under_way = rows
        if under_way:
            self._finish(under_way)
        self._journal.end(self._previous)
        steps.reached(steps.ENDED)
        return self.tally

    def _unwritten(self, chunks: Iterator[Rows]) -> Iterator[Rows]:
        earlier = self._journal.history.written
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

    def _reordered(self, chunks: Iterator[Rows], earlier: tuple[Written, ...]) -> Iterator[Rows]:
        log.warning("%s: rows come in another order than before; comparing them one by one", self._place.key)
        stored: Counter[bytes] = Counter()
        for known in earlier:
            stored.update(self._delivery.rows_of(known))
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

    def _begin(self, chunk: Chunk, digest: str) -> None:
        """Step 3a, and the first half of 3b."""
        place = self._place
        intent = Intent(self._number, digest, len(chunk.bodies), self._last, new_id(), chunk.subjects[-1].decode())
        announced = time.time()
        self._journal.chunk(intent, self._previous)
        steps.reached(steps.INTENDED)
        if abs(time.time() - announced) > FRESH:
            self._journal.confirm()
        name = chunk_id(place.series, place.batch, place.partition, intent.number, digest)
        self._delivery.begin(chunk, intent, name)

    def _finish(self, rows: Rows) -> None:
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

    def _store_without_duplicates(self, rows: Rows) -> None:
        """The server does not say which message id is the duplicate: halve until it is alone."""
        if len(rows) == 1:
            self.tally.duplicates += 1
            return
        half = len(rows) // 2
        for part in (rows.slice(0, half), rows.slice(half, len(rows) - half)):
            self._begin(Chunk.of(part), part.digest())
            self._finish(part)


def write_partition(
    link: Link, place: Place, batches: Iterator[Rows], deliver: Callable[[Confirm], Delivery], ttl: str | None
) -> Tally:
    """All steps of a task. A partition without rows leaves no trace."""
    first = next(batches, None)
    if first is None:
        return Tally()
    ledger = Ledger(link)
    journal = ledger.open_log(place, ttl)
    steps.reached(steps.OPENED)
    if ledger.is_closed(place):
        return Tally()
    with closing(deliver(journal.confirm)) as delivery:
        settle(journal, delivery)
        write = PartitionWrite(place, journal, delivery, link.last_sequence(place.stream))
        return write.write(chain([first], batches))


def settle(journal: Log, delivery: Delivery) -> None:
    """Find out about the chunk that an earlier attempt was at, and write the answer down."""
    intent = journal.history.doubtful
    if intent is None:
        return
    found = delivery.find(intent)
    if found is None:
        journal.void()
    else:
        journal.done(found)
