"""The sink of format `jetstream`: the driver's checks before a job and its commit after it, around `task`.

Streaming: a micro-batch is written exactly once for plans that give the same rows again, at least once otherwise, and
never lost. Batch: the same holds for the attempts of one job; running the job again writes again, unless `txnAppId`
and `txnVersion` say that it is the same write.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock import packs
from penstock.errors import ConfigError, FeatureMissing
from penstock.jetstream import features
from penstock.jetstream.model import StreamInfo
from penstock.settings import Settings
from penstock.spark import steps
from penstock.spark.apart import write_apart
from penstock.spark.delivery import delivery
from penstock.spark.history import LedgerPlace, Series
from penstock.spark.ledger import KEEP_BATCH_WRITES, Ledger
from penstock.spark.link import Link
from penstock.spark.misfits import LANE, LETTERS, Sorter
from penstock.spark.options import FAIL, SinkOptions
from penstock.spark.origin import created, existing
from penstock.spark.output import Columns, RowMaker, columns_of
from penstock.spark.packing import BYTES_TOGETHER, MESSAGE_HEADERS, Packing
from penstock.spark.task import write_partition

STREAMING_PATIENCE = 30.0
"""Seconds that the driver of a streaming query waits for an unavailable server."""


class SinkWritten(NamedTuple):
    """What a task has written to a stream."""

    stream: str
    created: str
    rows: int


@dataclass(frozen=True, slots=True)
class SinkWrite:
    """The driver's decisions for all tasks of a write."""

    settings: Settings
    columns: Columns
    delivery: str
    series: str | None = None
    """Names the write in the ledger; None for the streaming query whose task it is."""
    batch: int = 0
    once_only: bool = False
    """This write is never repeated: its log may expire."""
    created: str = ""
    """When the stream was created."""
    run_number: int = 0
    """Number of the run of a batch; 0 for a write that is never repeated."""
    finished: str = FAIL
    """What to do when a batch that is finished comes again with other rows."""
    letters: SinkWrite | None = None
    """Writes rows that cannot be messages, as dead letters; None: they fail the task."""
    packing: Packing | None = None
    """How rows are combined into packs; None: each is one message."""

    def named(self, series: str, batch: int = 0, once_only: bool = False) -> SinkWrite:
        """The same write under a name in the ledger."""
        letters = self.letters.named(series, batch, once_only) if self.letters else None
        return replace(self, series=series, batch=batch, once_only=once_only, letters=letters)

    @property
    def stream(self) -> str:
        return self.columns.stream

    def place(self, context: TaskContext) -> LedgerPlace:
        """Where the running task keeps its log."""
        series, batch = self.series, self.batch
        if series is None:
            series = _property(context, "sql.streaming.queryId")
            batch = int(_property(context, "streaming.sql.batchId"))
        return LedgerPlace(self.stream, series, batch, context.partitionId(), self.created)

    def run(self, batches: Iterator[pa.RecordBatch]) -> TaskReport:
        """One task."""
        context = TaskContext.get()
        assert context is not None, "a write runs in a task"
        if not self.stream:
            return self._run_several(context, batches)
        place = self.place(context)
        if self.letters:
            return TaskReport(place.series, place.batch, self._sorted(context, batches, self.letters))
        return TaskReport(place.series, place.batch, (self._written(place, batches),))

    def _sorted(
        self, context: TaskContext, batches: Iterator[pa.RecordBatch], letters: SinkWrite
    ) -> tuple[SinkWritten, ...]:
        """Write the rows that can be messages, and letters for the others."""
        sorter = Sorter(self.columns)

        def written(lane: str, some: Iterator[pa.RecordBatch]) -> SinkWritten:
            if lane == LETTERS:
                return letters._written(letters.place(context), map(sorter.letters, some))
            return self._written(self.place(context), some)

        return tuple(write_apart(map(sorter.marked, batches), LANE, written))

    def _written(self, place: LedgerPlace, batches: Iterator[pa.RecordBatch]) -> SinkWritten:
        maker = RowMaker(self.columns)
        rows = (maker.rows(batch) for batch in batches if batch.num_rows)
        with Link(self.settings) as link:
            ttl = KEEP_BATCH_WRITES if self.once_only else None
            deliver = partial(delivery, self.delivery, link, self.stream, packing=self.packing)
            tally = write_partition(link, place, rows, deliver, ttl, self.run_number, self.finished)
        return SinkWritten(self.stream, self.created, tally.rows)

    def _run_several(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> TaskReport:
        """One task whose rows say which stream they are for; each stream is written as if it were the only one."""
        place = self.place(context)

        def written(stream: str, some: Iterator[pa.RecordBatch]) -> SinkWritten:
            one = self._for(stream)
            return one._written(one.place(context), some)

        return TaskReport(place.series, place.batch, tuple(write_apart(batches, "stream", written)))

    def _for(self, stream: str) -> SinkWrite:
        """The write into one of the streams that rows name. Raises when it cannot be written to."""
        with Link(self.settings) as link:
            info = existing(link, stream)
            level = link.call(lambda api: api.account_info()).api_level
            check_delivery(self.delivery, info, level, link.connection.info.version)
            packing = fitted(self.packing, link, info)
        columns = replace(
            self.columns,
            stream=stream,
            accepted=tuple(info.config.get("subjects") or ()),
            ttl=bool(info.config.get("allow_msg_ttl")) and not packing,
        )
        if columns.subject is not None:
            columns.check_subject(columns.subject)
        return replace(self, columns=columns, created=created(info), packing=packing)

    def close(self, series: str, batch: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Close a batch that all tasks have written, in each of its streams."""
        rows: Counter[tuple[str, str]] = Counter({(self.stream, self.created): 0} if self.stream else {})
        for stream, made, count in _all_written(messages):
            rows[stream, made] += count
        with Link(self.settings) as link:
            for (stream, made), count in sorted(rows.items()):
                Ledger(link).close(Series(stream, series, made), batch, count, self.finished)

    def forget(self, series: str, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the logs of a write that is never repeated."""
        streams = {(one.stream, one.created) for one in (self, self.letters) if one and one.stream}
        streams |= {(stream, made) for stream, made, _ in _all_written(messages)}
        with Link(self.settings) as link:
            for stream, made in sorted(streams):
                Ledger(link).forget(Series(stream, series, made))


def _all_written(messages: Sequence[WriterCommitMessage | None]) -> Iterator[SinkWritten]:
    for report in messages:
        if isinstance(report, TaskReport):
            yield from report.written


def _property(context: TaskContext, name: str) -> str:
    value = context.getLocalProperty(name)
    if value is None:
        raise ConfigError(
            f"Spark does not say {name} to the tasks of this query, which the sink needs to tell batches apart"
        )
    return value


@dataclass(frozen=True, slots=True)
class TaskReport(WriterCommitMessage):
    """The report of a task to the driver."""

    series: str
    batch: int
    written: tuple[SinkWritten, ...]


# -- called by Spark -----------------------------------------------------------------------------------------------


class JetStreamStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of one streaming query."""

    def __init__(self, write: SinkWrite) -> None:
        self._write = write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Close the batch. Without tasks there is nothing to close, since nothing was written."""
        for report in messages:
            if isinstance(report, TaskReport):
                self._write.close(report.series, batchId, messages)
                steps.reached(steps.CLOSED)
                return

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Leave the batch open: what is written stays, and the next run of the batch continues from the logs."""


class JetStreamWriter(DataSourceArrowWriter):
    """Writes one DataFrame."""

    def __init__(self, write: SinkWrite) -> None:
        assert write.series is not None
        self._write = write
        self._series = write.series

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._write.once_only:
            self._write.forget(self._series, messages)
        else:
            self._write.close(self._series, self._write.batch, messages)
            steps.reached(steps.CLOSED)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What is written stays. With `txnAppId` the next run continues from the logs; otherwise none will."""
        if self._write.once_only:
            self._write.forget(self._series, messages)


def stream_writer(options: SinkOptions, schema: StructType) -> JetStreamStreamWriter:
    """Return the writer of a streaming query. Spark calls this twice per micro-batch: all of it may be repeated."""
    if options.txn_app_id is not None:
        raise ConfigError("txnAppId and txnVersion are for batch writes: a streaming query numbers its batches itself")
    return JetStreamStreamWriter(prepared(options, schema, STREAMING_PATIENCE))


def batch_writer(options: SinkOptions, schema: StructType, overwrite: bool) -> JetStreamWriter:
    """The writer of one DataFrame."""
    if overwrite:
        raise ConfigError(
            "a stream cannot be overwritten; use mode('append'), and purge the stream if it must be empty"
        )
    write = prepared(options, schema, options.settings.timeout, numbered=options.txn_app_id is not None)
    if options.txn_app_id is None:
        return JetStreamWriter(write.named(f"job-{secrets.token_hex(8)}", once_only=True))
    return JetStreamWriter(write.named(options.txn_app_id, options.txn_version))


# -- checks on the driver ------------------------------------------------------------------------------------------


def prepared(options: SinkOptions, schema: StructType, patience: float, numbered: bool = True) -> SinkWrite:
    """Check everything before a job starts; creates the ledger's bucket if it is missing.

    `numbered`: the write may be run again, so its run gets a number.
    """
    with Link(options.settings, patience) as link:
        level = link.call(lambda api: api.account_info()).api_level
        info = existing(link, options.stream) if options.stream else None
        if info:
            check_delivery(options.delivery, info, level, link.connection.info.version)
        config: dict[str, Any] = info.config if info else {}
        packing = fitted(asked_packing(options), link, info)
        accepted, typed = config.get("subjects") or (), options.pack == packs.TYPED
        columns = replace(
            columns_of(schema, options.stream, accepted, options.subject, options.dead_letters, typed),
            invalid_headers=options.invalid_headers,
            orders=options.server_headers == "keep",
            ttl=bool(config.get("allow_msg_ttl")) and not packing,
        )
        ledger = Ledger(link)
        ledger.create_bucket(int(config.get("num_replicas", 1)) if info else _most_replicas(link))
        run = ledger.next_run() if numbered else 0
        made = created(info) if info else ""
        write = SinkWrite(
            settings=options.settings,
            columns=columns,
            delivery=options.delivery,
            created=made,
            run_number=run,
            finished=options.finished,
            packing=packing,
        )
        return replace(write, letters=_letters(link, write, options.letters, level)) if options.letters else write


def _letters(link: Link, write: SinkWrite, subject: str, level: int) -> SinkWrite:
    """The write of dead letters to this subject, beside another write."""
    names = link.call(lambda api: api.stream_names(subject))
    if not names or write.stream in names:
        which = f"stream {write.stream!r} itself" if names else "no stream"
        raise ConfigError(f"deadLetters: {which} takes {subject!r}; create another stream for it, such as with dlq.>")
    info = existing(link, names[0])
    check_delivery(write.delivery, info, level, link.connection.info.version)
    columns = Columns(
        stream=info.name,
        accepted=tuple(info.config.get("subjects") or ()),
        subject=subject,
        headers=True,
        invalid_headers="replace",
        ttl=False,
        dead_letters=True,
    )
    return replace(write, columns=columns, created=created(info), packing=None)


def asked_packing(options: SinkOptions) -> Packing | None:
    """Return the packing that the options ask for."""
    if options.pack is None:
        return None
    given = {"rows": options.pack_rows, "bytes": options.pack_bytes}
    return Packing(options.pack, codec=options.pack_codec, **{name: one for name, one in given.items() if one})


def fitted(packing: Packing | None, link: Link, info: StreamInfo | None) -> Packing | None:
    """The packing with what server and stream take. Raises when `packBytes` is more than that."""
    if packing is None:
        return None
    limits = [link.connection.info.max_payload, int(info.config.get("max_msg_size", -1)) if info else -1]
    most = min(limit for limit in limits if limit > 0) - MESSAGE_HEADERS
    if packing.bytes > most and packing.bytes != BYTES_TOGETHER:
        raise ConfigError(
            f"packBytes is {packing.bytes}, and a message here may have {most} bytes besides its headers: lower it, or "
            "raise max_payload of the server (max_msg_size of the stream)"
        )
    if most < MESSAGE_HEADERS:
        raise ConfigError("messages here may not have 8 KiB, which is too little for packs: leave out the option pack")
    return replace(packing, bytes=min(packing.bytes, most), body_bytes=most)


def _most_replicas(link: Link) -> int:
    """Return the highest replica count of all streams: rows may name any of them."""
    return max((int(one.config.get("num_replicas", 1)) for one in link.call(lambda api: api.streams())), default=1)


def check_delivery(delivery: str, info: StreamInfo, level: int, version: str) -> None:
    """Raise unless the stream can be written to in this way."""
    config: dict[str, Any] = info.config
    if config.get("mirror"):
        raise ConfigError(f"stream {info.name!r} is a mirror: it takes messages only from its origin; write there")
    if config.get("sealed"):
        raise ConfigError(f"stream {info.name!r} is sealed: it takes no messages any more; write to another one")
    if config.get("no_ack"):
        raise ConfigError(
            f"stream {info.name!r} has no_ack set: nobody would learn whether a row is stored; take it off, or write "
            "to another stream"
        )
    if delivery == "fast":
        _need(level, features.FAST_INGEST, "delivery=fast", version)
        _need_flag(info, "allow_batched", "fast ingest", "delivery=atomic")
    else:
        _need(level, features.ATOMIC_BATCH, "delivery=atomic", version)
        _need_flag(info, "allow_atomic", "atomic batches", "delivery=fast")


def _need(level: int, feature: features.Feature, option: str, version: str) -> None:
    if level < feature.api_level:
        raise FeatureMissing(option, version, feature.version)


def _need_flag(info: StreamInfo, flag: str, what: str, otherwise: str) -> None:
    if not info.config.get(flag):
        raise ConfigError(
            f"stream {info.name!r} does not take {what}: set `{flag}: true` for it in penstock.yaml and run "
            f"`penstock apply`, or use {otherwise}"
        )
