"""The source of format `jetstream`: what Spark calls on the driver, and the read of a task."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, DataLoss, PenstockError
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.settings import Settings
from penstock.spark import admission, durable, loss, steps
from penstock.spark.commit import commit
from penstock.spark.link import PATIENCE, Link
from penstock.spark.offsets import Offset, TaskLimits, span, split, task_count
from penstock.spark.options import CONSUMER, EARLIEST, LATEST, PACKS_READ, SourceOptions
from penstock.spark.origin import Origin, check_readable, created, needs_direct_get
from penstock.spark.unpack import Shape, shaped
from penstock.wire import compiled
from penstock.wire.scan import SCHEMA

log = logging.getLogger(__name__)

LAST_TWO = 2
NAMELESS = "a checkpoint without owner of"
"""Names a query whose checkpoint was written before there were owners."""


class Part(InputPartition):
    """The range that one task reads."""

    def __init__(self, settings: Settings, wanted: Range, expected: loss.Expected | None = None) -> None:
        super().__init__(wanted)
        self.settings = settings
        self.expected = expected
        """What the range held when it was planned; None: what is missing does not matter."""


class TaskReader:
    """The executor's half: reads one part. It carries the driver's machine code, so that no executor compiles."""

    def __init__(self, shape: Shape | None = None) -> None:
        self._shape = shape or Shape()
        compiled.prepare()  # for the next query, if `register` was not called
        self._code = compiled.machine_code()
        self._code_name = compiled.file_name()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if self._code:
            compiled.offer(self._code_name, self._code)
        if isinstance(partition, Part):  # Spark adds an empty partition when there are none
            yield from shaped(read_part(partition), self._shape)


def row_shape(options: SourceOptions, schema: StructType) -> Shape:
    """What the rows of a read look like, for columns that Spark has parsed."""
    return Shape(
        schema=to_arrow_schema(schema, timezone="UTC") if len(schema) > len(SCHEMA) else SCHEMA,
        unpack=options.pack != PACKS_READ[-1] and options.include_data,
        data=options.include_data,
        decompress=options.decompress,
        subjects=options.subjects,
    )


def read_part(part: Part) -> Iterator[pa.RecordBatch]:
    """The messages of a part. Raises `MessagesGone` at its end when it held more when it was planned."""
    rows = first_row = 0
    in_worker = TaskContext.get() is not None  # whose process runs further tasks
    for batch in read_range(part.settings, part.value, keep=in_worker):
        first_row = first_row or batch.column("sequence")[0].as_py()
        rows += batch.num_rows
        yield batch
    if part.expected is not None and part.expected.short(rows, first_row):
        with Link(part.settings) as link:
            stream_first = link.stream_info(part.value.stream).state.first_seq
        if gone := part.expected.missed(rows, first_row, stream_first):
            raise gone


def parts(
    options: SourceOptions,
    origin: Origin,
    info: StreamInfo,
    span: tuple[int, int],
    tasks: int,
    open_start: bool,
    holes: loss.Holes | None = None,
) -> list[Part]:
    """The range as partitions for Spark, each with what it holds now. `open_start`: it begins at the oldest message."""
    holes = holes or origin.holes(info, bool(options.subjects))
    inside = loss.removes_inside(info.config)
    may_go = open_start and (inside or loss.removes_oldest(info.config))
    found = []
    for low, high in split(*span, tasks):
        wanted = Range(
            stream=options.stream,
            first=low,
            last=high,
            subjects=options.subjects,
            direct=needs_direct_get(info),
            invalid_text=options.invalid_text,
            headers_only=not options.include_data,
        )
        expected = None
        if options.fail_on_data_loss and holes.complete:
            count = high - low + 1 - holes.gone(low, high)
            expected = loss.Expected(info.name, low, high, rows=count, old_end_may_go=may_go)
        elif options.fail_on_data_loss and holes.first:
            first_row = origin.next_sequence(low)
            first_row = first_row if first_row <= high else 0
            expected = loss.Expected(
                info.name, low, high, first_row=first_row, old_end_may_go=may_go, inside_may_go=inside
            )
        found.append(Part(options.settings, wanted, expected))
    return found


def tasks_for(options: SourceOptions, info: StreamInfo, rows: int) -> int:
    """Into how many tasks to split that many messages of a stream; their size goes by the stream's mean."""
    mean = info.state.bytes / info.state.messages if info.state.messages else 0
    limits = TaskLimits(options.partitions, options.min_partitions, options.max_rows_per_partition)
    return task_count(max(rows, 0), rows * mean, limits, os.cpu_count() or 1)


# -- batch -------------------------------------------------------------------------------------------------------------


class JetStreamReader(TaskReader, DataSourceReader):
    """Reads a stream, or a part of it, once.

    It takes no filters of a query (`pushFilters`): Spark 4.3 keeps the partitions that are planned with them for all
    queries on one `load()`, so that the filters of one would cut the rows of another.
    """

    def __init__(self, options: SourceOptions, shape: Shape | None = None) -> None:
        super().__init__(shape)
        self._options = options

    def partitions(self) -> list[Part]:
        """Find where the read starts and ends. Everything that can be wrong is found here, before a job starts."""
        options = self._options
        with Link(options.settings, options.settings.timeout) as link:
            info, before, last = self._bounds(link)
            first = max(before + 1, info.state.first_seq)
            tasks = tasks_for(options, info, last - first + 1)
            open_start = options.starting == EARLIEST
            return parts(options, Origin(link, options), info, (first, last), tasks, open_start)

    def _bounds(self, link: Link) -> tuple[StreamInfo, int, int]:
        """The stream, the sequence before the first to read, and the last to read."""
        options, origin = self._options, Origin(link, self._options)
        info = origin.info()
        check_readable(info, options.consumer)
        origin.check_server(info, options, streaming=False)
        held = self._held(link, info)
        before, last = origin.before(options.starting, info, held), origin.last(options.ending, info, held)
        vanish = loss.is_sparse(info.config) or needs_direct_get(info)
        if before + 1 < info.state.first_seq and not vanish:
            gone = min(info.state.first_seq - 1, last) - before
            why = "expired, purged or discarded"
            _lost(options, loss.MessagesGone(options.stream, gone, before + 1, info.state.first_seq - 1, why))
        return info, before, last

    def _held(self, link: Link, info: StreamInfo) -> int:
        """What the durable has acknowledged. A batch read makes none, and moves none."""
        options = self._options
        found = durable.find(link, info, options.consumer) if options.consumer else None
        if found is not None:
            durable.check(found, info, options.subjects)
            return durable.floor(found)
        if CONSUMER in (options.starting, options.ending):
            raise durable.UnfitConsumer(
                f"stream {info.name!r} has no consumer {options.consumer!r} to take offsets from; a batch read makes "
                "none: name one that is there (`penstock consumer ls`), or another offset"
            )
        return 0


# -- streaming ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class News:
    """The messages of a stream after an offset."""

    start: dict[str, Any]
    """The offset as Spark gave it."""
    logged: Offset
    begin: Offset
    """Where to resume: the offset, or the closest position after a loss."""
    origin: Origin
    info: StreamInfo
    last: int
    """The last sequence that may be read."""

    @property
    def count(self) -> int:
        return max(self.last - self.begin.sequence, 0)


class JetStreamStreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream micro-batch by micro-batch. One instance exists per query, on the driver."""

    def __init__(self, options: SourceOptions, shape: Shape | None = None) -> None:
        super().__init__(shape)
        self._options = options
        self._link: Link | None = None
        self._target: int | None = None
        """With availableNow: where the query ends."""
        self._committed: int | None = None
        self._told: int | None = None
        """The last offset that Spark reported as committed."""
        self._handed_out: tuple[int, ...] = ()
        """The ends of the last two micro-batches planned in this process."""
        self._owner = ""
        """This query, as its durable names it."""
        self._is_new = False
        """The query began in this process."""
        self._verified: int | None = None
        """The offset whose message is known to be the one that was read."""
        self._end: int | None = None
        """With `asOf`: the last sequence that is read."""
        self._wait = admission.Wait(options.min_rows, options.max_delay)
        self._first_end: int | None = None
        """End of the first micro-batch, when it was planned in this process: not a re-run."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_link": None}

    # -- called by Spark, in this order ----------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts."""
        options = self._options
        origin, info = self._observed()
        if needs_direct_get(info) and options.starting not in (CONSUMER, EARLIEST):
            raise ConfigError(
                f"startingOffsets {options.starting} would leave messages of {info.name!r} behind that are never "
                "acknowledged, and so never deleted; start a WorkQueue or Interest stream at `consumer` or `earliest`"
            )
        # A query without a checkpoint resumes at the durable's position, and takes it over. Spark calls this more than
        # once before the first batch is committed, also after a crash.
        take, self._is_new = not self._is_new, True
        self._owner = self._owner or durable.new_owner()
        held = self._durable(info, take=take)
        before = origin.before(options.starting, info, durable.floor(held) if held else 0)
        if needs_direct_get(info):
            # A server that was killed may have forgotten acknowledgements, but not what they deleted.
            before = max(before, info.state.first_seq - 1)
        else:
            self._move(before, info)  # from now on the durable shows the query's position
        offset = self._offset(info, before, before, backlog=info.state.last_seq)
        return replace(offset, open_start=options.starting == EARLIEST).json()

    def prepareForTriggerAvailableNow(self) -> None:
        _, info = self._observed()
        self._target = info.state.last_seq

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends; `start` itself when there is nothing new, or not enough."""
        news = self.news(start)
        if self._wait.goes_on(news.count, at_once=self._target is not None):
            return start
        found = self.next_offset(news, limit)
        if found != start:
            self._wait.begin()
        return found

    def news(self, start: dict[str, Any]) -> News:
        """Return the messages after an offset, after the durable has been moved there."""
        logged = Offset.parse(start, self._options.stream)
        origin, info = self._observed()
        if needs_direct_get(info):
            self._check_synchronous(logged)
        self._adopt(logged, info)
        begin = self._checked(logged, origin, info)
        # Spark requests a new batch when the one before is committed, and reports that commit only with the next one.
        self._commit(begin, info)
        ends = [info.state.last_seq, self._as_of(origin, info), self._target]
        return News(start, logged, begin, origin, info, min(end for end in ends if end is not None))

    def next_offset(self, news: News, limit: ReadLimit) -> dict[str, Any]:
        """The end of the micro-batch; where it starts when there is nothing to read."""
        begin, info = news.begin, news.info
        rows = None if isinstance(limit, ReadAllAvailable) else self._rows_allowed(limit, info)
        end = admission.Admission(news.origin, self._options).end(begin.sequence, news.last, rows, info)
        if end <= begin.sequence and begin == news.logged:
            return news.start
        self._first_end = end if news.logged.open_start else None
        offset = self._offset(info, begin.sequence, max(end, begin.sequence), backlog=begin.backlog_end)
        self._verified = offset.sequence
        before = [end for end in self._handed_out if end <= begin.sequence]  # not a plan that was abandoned
        self._handed_out = (*before[-1:], offset.sequence)
        return replace(offset, stored_at=news.origin.stored_at(offset.sequence)).json()

    def _as_of(self, origin: Origin, info: StreamInfo) -> int | None:
        """Return where the query ends; queried once, since a time always stands for the same message."""
        if self._end is None and self._options.ending != LATEST:
            held = self._durable(info)
            self._end = origin.last(self._options.ending, info, durable.floor(held) if held else 0)
        return self._end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Part]:
        """The tasks between two offsets: a function of what was logged, also after a crash."""
        begin, stop = (Offset.parse(raw, self._options.stream) for raw in (start, end))
        origin, info = self._observed()
        if created(info) != stop.created:
            _lost(self._options, self._replaced(stop, info))
            return []
        self._adopt(stop, info)
        begin = replace(begin, open_start=begin.open_start and self._first_end == stop.sequence)
        holes = origin.holes(info, bool(self._options.subjects))
        if gone := loss.missing(begin, stop, holes):
            _lost(self._options, gone)
        return parts(self._options, origin, info, span(begin, stop), stop.tasks, begin.open_start, holes)

    def commit(self, end: dict[str, Any]) -> None:
        """The micro-batch up to `end` is in Spark's commit log."""
        steps.reached(steps.COMMITTING)
        _, info = self._observed()
        offset = Offset.parse(end, self._options.stream)
        self._told = offset.sequence
        self._commit(offset, info)

    def reportLatestOffset(self) -> dict[str, Any]:
        """The stream's end, for the query's progress: how far behind it is."""
        _, info = self._observed()
        return self._offset(info, info.state.last_seq, info.state.last_seq, backlog=0).json()

    def stop(self) -> None:
        if self._link is not None:
            self._link.close()

    # -- the server ------------------------------------------------------------------------------------------------

    def _observed(self) -> tuple[Origin, StreamInfo]:
        """Read the stream. The first read checks everything, and reports a wrong address at once."""
        if self._link is None:
            link = Link(self._options.settings, self._options.settings.timeout)
            try:
                self._check(link)
            except PenstockError:
                link.close()
                raise
            link.patience = PATIENCE
            self._link = link
        origin = Origin(self._link, self._options)
        return origin, origin.info()

    def _check(self, link: Link) -> None:
        """Check everything about the query before its first job."""
        origin = Origin(link, self._options)
        info = origin.info()
        check_readable(info, self._options.consumer)
        origin.check_server(info, self._options, streaming=True)
        if self._options.consumer:
            durable.ensure(link, info, self._options.consumer, self._options.subjects)

    def _durable(self, info: StreamInfo, take: bool = False) -> ConsumerInfo | None:
        """Return the query's durable; creates it again if it was deleted together with its stream.

        Raises `ConsumerTaken` when another query has taken it over, unless this one is to `take` it.
        """
        assert self._link
        if not (name := self._options.consumer):
            return None
        found = durable.ensure(self._link, info, name, self._options.subjects)
        theirs = durable.owner(found)
        if take or not theirs:
            return durable.take(self._link, found, self._owner)
        if theirs != self._owner:
            raise durable.ConsumerTaken(info.name, name, theirs, self._owner)
        return found

    def _adopt(self, offset: Offset, info: StreamInfo) -> None:
        """Use the owner in the checkpoint: Spark restarted after a batch was planned and before it was committed."""
        if self._is_new and self._options.consumer and offset.owner not in ("", self._owner):
            self._owner = offset.owner
            self._durable(info, take=True)

    def _commit(self, offset: Offset, info: StreamInfo) -> None:
        """Move the durable, unless it is there or belongs to another stream."""
        if self._options.consumer and self._committed != offset.sequence and offset.created == created(info):
            self._owner = self._owner or offset.owner or f"{NAMELESS} {info.name} {created(info)}"
            steps.reached(steps.COMMITTING)
            self._move(offset.sequence, info)

    def _move(self, sequence: int, info: StreamInfo) -> None:
        if found := self._durable(info):
            assert self._link
            commit(self._link, info, found, sequence)
        self._committed = sequence

    def _check_synchronous(self, begin: Offset) -> None:
        """Refuse asynchronous progress tracking where acknowledging deletes.

        Spark says that batch n is committed when it has logged the offsets of batch n + 1, before it runs that. With
        asynchronous progress tracking it says so after they are on disk, while batches go on: so it has not by the time
        it asks for batch n + 2. Then a batch that it asks to go on from may not be on disk either.
        """
        if len(self._handed_out) < LAST_TWO or begin.sequence != self._handed_out[1]:
            return
        if self._told is None or self._told < self._handed_out[0]:
            raise ConfigError(
                f"stream {self._options.stream!r} deletes what is acknowledged, and this query's checkpoint is written "
                "later (asyncProgressTrackingEnabled): after a crash messages would be missing; leave that option out"
            )

    # -- decisions -------------------------------------------------------------------------------------------------

    def _rows_allowed(self, limit: ReadLimit, info: StreamInfo) -> int | None:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return admission.rows_allowed(self._options, rows, info)

    def _offset(self, info: StreamInfo, begin: int, end: int, backlog: int) -> Offset:
        """An offset at `end` for the batch behind `begin`."""
        tasks = tasks_for(self._options, info, end - begin)
        missing = 0
        if end < backlog:
            assert self._link
            holes = Origin(self._link, self._options).holes(info, bool(self._options.subjects))
            missing = holes.inside(end + 1, backlog)
        return Offset(
            stream=info.name,
            created=created(info),
            sequence=end,
            tasks=tasks,
            backlog_end=backlog,
            backlog_missing=missing,
            owner=self._owner if self._options.consumer else "",
        )

    def _checked(self, logged: Offset, origin: Origin, info: StreamInfo) -> Offset:
        """Return where to resume: the logged offset, or, after a loss that is allowed, the closest position."""
        if logged.created != created(info):
            _lost(self._options, self._replaced(logged, info))
            return replace(logged, created=created(info), sequence=0, backlog_end=0, backlog_missing=0)
        if info.state.last_seq < logged.sequence:
            gone = logged.sequence - info.state.last_seq
            why = "the stream ends before them: it was restored from an older state"
            _lost(
                self._options,
                loss.MessagesGone(info.name, gone, info.state.last_seq + 1, logged.sequence, why),
            )
            return replace(logged, sequence=info.state.last_seq, backlog_end=0, backlog_missing=0)
        if logged.stored_at and self._verified != logged.sequence:
            now = origin.stored_at(logged.sequence)
            if now and now != logged.stored_at:
                _lost(self._options, loss.HistoryChanged(info.name, logged.sequence, now, logged.stored_at))
            self._verified = logged.sequence
        return logged

    def _replaced(self, offset: Offset, info: StreamInfo) -> loss.StreamReplaced:
        return loss.StreamReplaced(info.name, created(info), offset.created, offset.sequence)


def _lost(options: SourceOptions, error: DataLoss) -> None:
    """Raise the loss, or log it and continue."""
    if options.fail_on_data_loss:
        raise error
    log.warning("%s", error)
