"""Chooses the end of the next micro-batch: by rows, by bytes, with atomic batches kept whole."""

from __future__ import annotations

import time
from datetime import timedelta

from penstock.jetstream.model import StreamInfo
from penstock.jetstream.pull import ConsumersUsedUp
from penstock.spark.options import SourceOptions
from penstock.spark.origin import Origin, needs_direct_get

BATCH_ID, BATCH_SEQUENCE = "Nats-Batch-Id", "Nats-Batch-Sequence"
MAX_BATCH = 1000
"""Maximum messages of an atomic batch; they are adjacent in the stream."""


def rows_allowed(options: SourceOptions, limit: int | None, info: StreamInfo) -> int | None:
    """Return the smaller of both limits, in rows; None: no limit. Bytes use the stream's mean message size."""
    allowed = [limit] if limit is not None else []
    if options.max_bytes is not None and info.state.messages:
        mean = max(info.state.bytes / info.state.messages, 1)
        allowed.append(max(int(options.max_bytes / mean), 1))
    return min(allowed, default=None)


class Wait:
    """Delays micro-batches until there are enough messages for one, or enough time has passed."""

    def __init__(self, rows: int | None, most: timedelta) -> None:
        self._rows = rows
        self._most = most.total_seconds()
        self.begin()

    def begin(self) -> None:
        """Note the start of a micro-batch, or of the query."""
        self._since = time.monotonic()

    def goes_on(self, count: int, at_once: bool) -> bool:
        """Whether to keep waiting with that many messages available; never with `at_once`, as for a query that ends."""
        if self._rows is None or at_once or count >= self._rows:
            return False
        return time.monotonic() - self._since < self._most


class Admission:
    """Chooses the end of a micro-batch that starts behind a sequence."""

    def __init__(self, origin: Origin, options: SourceOptions) -> None:
        self._origin = origin
        self._options = options

    def end(self, begin: int, last: int, rows: int | None, info: StreamInfo) -> int:
        """The sequence up to which the next micro-batch reads; `begin` when there is nothing to read."""
        first = self._first(begin, last, info)
        if not first:
            return last if self._falls_behind(begin, info) else begin
        end = last if rows is None else self._bounded(begin, first, last, rows, info)
        return self._whole(begin, end, last) if self._options.keep_batches_whole else end

    def _first(self, begin: int, last: int, info: StreamInfo) -> int:
        """The first message wanted behind `begin`, 0 when there is none up to `last`."""
        if not self._options.subjects and info.state.first_seq <= begin + 1 and not info.state.deleted:
            return begin + 1 if begin < last else 0
        found = self._origin.next_sequence(begin + 1)
        return found if found <= last else 0

    def _falls_behind(self, begin: int, info: StreamInfo) -> bool:
        """Whether to advance without rows: after long without messages the position would fall below the stream's first
        sequence and look like a loss."""
        return begin < (info.state.first_seq + info.state.last_seq) // 2

    def _bounded(self, begin: int, first: int, last: int, rows: int, info: StreamInfo) -> int:
        """The largest end that gives no more than `rows` rows, at least one."""
        dense = min(first + rows - 1, last)
        sparse = bool(self._options.subjects or info.state.deleted)
        if dense == last or not sparse or needs_direct_get(info):
            # Counting needs a consumer, which a WorkQueue or Interest stream must not get.
            return dense
        try:
            return self._searched(begin, dense, last, rows)
        except ConsumersUsedUp:
            return dense  # fewer rows than allowed, and never too many

    def _searched(self, begin: int, low: int, high: int, rows: int) -> int:
        """By bisection: `low` is known to be allowed."""
        while low < high:
            middle = (low + high + 1) // 2
            if self._rows(begin, middle) <= rows:
                low = middle
            else:
                high = middle - 1
        return low

    def _rows(self, begin: int, end: int) -> int:
        """Rows behind `begin` up to `end`. Messages that arrive meanwhile can only make it too many, never too few."""
        behind = self._origin.count_from(end + 1, self._options.subjects)
        return self._origin.count_from(begin + 1, self._options.subjects) - behind

    # -- atomic batches ------------------------------------------------------------------------------------------------

    def _whole(self, begin: int, end: int, last: int) -> int:
        """Do not end inside an atomic batch: end before it, or, when it is the first one, behind it."""
        headers = self._origin.headers(end)
        name = headers.get(BATCH_ID, [""])[0]
        if not name or not self._continues(name, end + 1):
            return end
        before = end - int(headers.get(BATCH_SEQUENCE, ["1"])[0])
        return before if before > begin else self._batch_end(name, end)

    def _continues(self, name: str, sequence: int) -> bool:
        return self._origin.headers(sequence).get(BATCH_ID) == [name]

    def _batch_end(self, name: str, inside: int) -> int:
        """The last message of the batch that `inside` belongs to, by bisection: its members have no gaps."""
        low, high = inside, inside + MAX_BATCH - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._continues(name, middle):
                low = middle
            else:
                high = middle - 1
        return low
