"""What a micro-batch writes, in order, each step such that doing it again changes nothing.

Spark runs a micro-batch again, from the same offsets, when the driver died before its commit log had it. So:

    1. bad records to their subject     the sink's ledger knows the batch: written once
    2. the sinks, in the order of the file
         files                          `tables`: a batch is there once, or a key has one row
         Delta, Iceberg                 `lakes`: the table's own log knows the batch
         streams                        the sink's ledger, as above
         console                        printed again; for eyes only

A crash after any of them leaves the ones before it done, and the next run of the batch does the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock import packs
from penstock.deadletter import headers
from penstock.errors import ConfigError, PenstockError
from penstock.spark import delta, lakes, steps
from penstock.spark.decode import MESSAGE
from penstock.spark.delta import JarDoesNotFit, JarTable
from penstock.spark.functions import load_function
from penstock.spark.lakes import DELTA, ICEBERG, Lake
from penstock.spark.options import DEAD_LETTERS, WRITE
from penstock.spark.pipelines import Pipeline, PipelinePlan
from penstock.spark.tables import FORMATS, Table
from penstock.subjects import matches
from penstock.topology.model import UNPACKED, PackingSpec, PipelineSink

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds between a query's first micro-batch and its id, which Spark says when the query has started."""
CONSOLE_ROWS = 20
MAX_WRITERS = 8
"""Tasks that write to one stream at the same time; its server orders what they write."""
REASON_LIMIT = 1000
"""Characters of a reason that fit into a header."""
MESSAGE_COLUMNS = ("subject", "data", "headers", "message_id")


class StopRequested(PenstockError):
    """A micro-batch was not begun because the pipeline is stopping; the next run begins with it."""

    def __init__(self, name: str, batch: int) -> None:
        super().__init__(name, batch)
        self.name = name
        self.batch = batch

    def __str__(self) -> str:
        return f"pipeline {self.name!r} stopped before micro-batch {self.batch}"


@dataclass(slots=True)
class OutputCounts:
    """What one run has written so far; rows of a micro-batch count once, not once a sink."""

    batches: int = 0
    rows: int = 0
    bad_records: int = 0


@dataclass(slots=True)
class Outputs:
    """Writes the micro-batches of one query: the function that `foreachBatch` takes."""

    flow: Pipeline
    plan: PipelinePlan
    query: Future[str] = field(default_factory=Future)
    """The query's id; known once it has started."""
    stopping: bool = False
    """Set to let the running micro-batch finish and begin no other."""
    error: BaseException | None = None
    """What ended the query, as it was before Spark wrapped it."""
    counts: OutputCounts = field(default_factory=OutputCounts)
    jar_fits: bool = True
    """Whether Delta's jar, where there is one, goes with this Spark, as far as is known."""

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write one micro-batch; called by Spark on the driver."""
        try:
            if self.stopping:
                raise StopRequested(self.flow.name, number)
            self._write(batch, number)
        except BaseException as exc:
            self.error = exc
            raise

    @property
    def _query_id(self) -> str:
        return self.query.result(START_TIMEOUT)

    def _write(self, batch: DataFrame, number: int) -> None:
        batch.persist()
        try:
            if batch.count():
                self._write_result(batch, number)
        finally:
            batch.unpersist()
        self.counts.batches += 1

    def _without_bad(self, batch: DataFrame, number: int) -> DataFrame:
        """The result of the micro-batch, after its bad records are written."""
        if self.plan.split is None:
            return batch
        result, bad = self.plan.split(batch)
        if count := bad.count():
            subject = self.flow.spec.bad_records
            assert subject is not None
            letters = dead_letters(bad, self.flow.name)
            into = stream_taking(self.flow, subject)  # one by one, as they are looked at and replayed
            sink = PipelineSink(stream=into, subject=subject, packing=PackingSpec(UNPACKED))
            self._publish(letters, sink, "bad", number, {DEAD_LETTERS: "true"})
            steps.reached(steps.LETTERS_WRITTEN)
            self.counts.bad_records += count
        return result

    def _write_result(self, batch: DataFrame, number: int) -> None:
        rows = self._without_bad(batch, number)
        if self.flow.spec.each_batch:
            rows = load_function(self.flow.spec.each_batch, self.flow.folder)(rows)
        if rows is not batch:
            rows.persist()  # every sink takes them
        try:
            if count := rows.count():
                for index, sink in enumerate(self.flow.spec.sinks):
                    self._write_to(sink, rows, index, number)
                self.counts.rows += count
                steps.reached(steps.BATCH_WRITTEN)
        finally:
            if rows is not batch:
                rows.unpersist()

    def _write_to(self, sink: PipelineSink, rows: DataFrame, index: int, number: int) -> None:
        if sink.stream:
            check_feedback(rows, sink, self.flow)
            packing = self.flow.platform.packing_of(sink)
            typed = packing is not None and packing.kind == packs.TYPED
            self._publish((as_events if typed else as_messages)(rows, sink), sink, str(index), number)
        elif sink.format == "console":
            print(f"-- {self.flow.name}, micro-batch {number}")
            rows.show(CONSOLE_ROWS, truncate=False)
        elif sink.format in (DELTA, ICEBERG):
            self._write_lake(sink, rows, index, number)
        else:
            self._write_files(sink, rows, number)

    def _write_files(self, sink: PipelineSink, rows: DataFrame, number: int) -> None:
        assert sink.path
        assert sink.format
        options = tuple(sink.options.items())
        table = Table(self.flow.located(sink.path), sink.format, sink.partition_by, options)
        self._add_to(table, sink, rows, self._query_id, number)

    def _write_lake(self, sink: PipelineSink, rows: DataFrame, index: int, number: int) -> None:
        assert sink.path
        assert sink.format
        path, query = self.flow.located(sink.path), f"{self._query_id}-{index}"
        if sink.format == DELTA and self.jar_fits and not delta.missing(rows.sparkSession):
            try:
                self._add_to(JarTable(path, sink.partition_by, sink.options), sink, rows, query, number)
            except JarDoesNotFit as exc:
                if lakes.missing(DELTA):
                    raise
                self.jar_fits = False
                log.warning("%s: %s; deltalake writes it instead", sink.path, exc)
            else:
                return
        self._add_to(Lake(path, sink.format, sink.partition_by, sink.options), sink, rows, query, number)

    def _add_to(
        self, table: Table | Lake | JarTable, sink: PipelineSink, rows: DataFrame, query: str, number: int
    ) -> None:
        if key := upsert_key(sink, self.flow, self.plan):
            if sink.key:
                _check_unique(rows, key, sink)
            table.upsert(rows, key, query, number)
        else:
            table.append(rows, query, number)
        steps.reached(steps.FILES_WRITTEN)

    def _publish(
        self, rows: DataFrame, sink: PipelineSink, part: str, number: int, more: Mapping[str, str] | None = None
    ) -> None:
        assert sink.stream
        once = {"txnAppId": f"{self._query_id}-{part}", "txnVersion": str(number)}
        # A run that ended between two sinks has closed the batch in the first one: it must not fail there for good, and
        # neither at a message whose headers cannot be published.
        going_on = {"onFinishedBatch": WRITE, "invalidHeaders": "replace"}
        given = {"stream": sink.stream, "delivery": sink.delivery, **once, **going_on, **self.flow.connection()}
        given |= packing_options(self.flow.platform.packing_of(sink)) | dict(more or {})
        if sink.subject:
            given["subject"] = sink.subject
        rows.write.format("jetstream").mode("append").options(**given).save()


def check(flow: Pipeline, plan: PipelinePlan) -> None:
    """What can be wrong with the sinks, found before the query starts."""
    if flow.spec.bad_records:
        stream_taking(flow, flow.spec.bad_records)
    for sink in flow.spec.sinks:
        if sink.format in (DELTA, ICEBERG):
            _check_lake(flow, plan, sink)
        elif sink.format and sink.format not in ("console", *FORMATS):
            raise ConfigError(
                f"pipeline {flow.name!r} cannot write format {sink.format!r}: "
                f"write {', '.join(FORMATS)}, {DELTA}, {ICEBERG}, console, or a stream"
            )
        if sink.format in FORMATS:
            upsert_key(sink, flow, plan)


def _check_lake(flow: Pipeline, plan: PipelinePlan, sink: PipelineSink) -> None:
    """The library must be there that writes the log; for Delta, its jar does without."""
    assert sink.format
    upsert_key(sink, flow, plan)
    if not (reason := lakes.missing(sink.format)):
        return
    if sink.format == DELTA and not delta.missing(plan.frame.sparkSession):
        return
    raise ConfigError(f"pipeline {flow.name!r} writes format {sink.format}, and {reason}; or write format parquet")


def stream_taking(flow: Pipeline, subject: str) -> str:
    """The declared stream that stores this subject."""
    for name, stream in flow.platform.streams.items():
        if any(matches(filter_, subject) for filter_ in stream.subjects):
            return name
    raise ConfigError(f"pipeline {flow.name!r}: no declared stream takes subject {subject!r}; declare one")


def check_feedback(rows: DataFrame, sink: PipelineSink, flow: Pipeline) -> None:
    """A pipeline that reads what it writes never comes to an end."""
    if sink.stream not in flow.streams:
        return
    subjects = [sink.subject] if sink.subject else [row[0] for row in rows.select("subject").distinct().collect()]
    for subject in subjects:
        for filter_ in flow.spec.source.subjects or (">",):
            if subject and matches(filter_, subject):
                raise ConfigError(
                    f"pipeline {flow.name!r} writes {subject!r} to stream {sink.stream!r} and reads it back through "
                    f"{filter_!r}, without end; write another subject, or read narrower `subjects`"
                )


def upsert_key(sink: PipelineSink, flow: Pipeline, plan: PipelinePlan) -> tuple[str, ...] | None:
    """The key by which rows are put in the place of older ones; None when rows are added."""
    upserts = sink.mode == "upsert" or (sink.mode is None and plan.aggregation is not None and not flow.spec.each_batch)
    if not upserts:
        return None
    key = sink.key or (plan.aggregation.key if plan.aggregation else None)
    if not key:
        raise ConfigError(
            f"pipeline {flow.name!r} upserts into {sink.path}, and what names a row is not clear from its plan: "
            "select all columns it groups by as they are, or name them with `key: [column, …]`"
        )
    return key


def _check_unique(rows: DataFrame, key: tuple[str, ...], sink: PipelineSink) -> None:
    """A declared key may be wrong, and then one of two rows would silently win."""
    twice = rows.groupBy(*(F.col(f"`{column}`") for column in key)).count().where("count > 1").first()
    if twice is not None:
        values = ", ".join(f"{column} {twice[column]!r}" for column in key)
        raise ConfigError(f"{sink.path}: several rows of one micro-batch have the key {values}; add a column to `key`")


# -- rows as messages and as events ----------------------------------------------------------------------------------


def as_messages(rows: DataFrame, sink: PipelineSink) -> DataFrame:
    """Rows as the sink takes them, in an order that is the same whenever the batch is written again.

    A row with a column `data` is a message as it is; any other becomes a JSON object of its columns, where `subject`,
    `headers`, `message_id` and `jetstream` keep their meaning and are left out of the body. The order is that of the
    stream read, where the rows still know it, else that of subject and body. It holds for the rows of each subject:
    those of different subjects may be written by different tasks.
    """
    kept = [name for name in MESSAGE_COLUMNS if name in rows.columns]
    if "data" not in kept:
        rows = rows.withColumn("data", F.to_json(_struct(_body(rows))))
        kept.append("data")
    content = [name for name in ("subject", "data", "message_id") if name in kept]
    return _in_order(rows, sink, content).select(*kept)


def as_events(rows: DataFrame, sink: PipelineSink) -> DataFrame:
    """Rows as the sink takes them for typed packs: an event of their columns, in the same order as messages."""
    if lost := [name for name in MESSAGE_COLUMNS if name != "subject" and name in rows.columns]:
        raise ConfigError(
            f"rows for stream {sink.stream!r} have the column `{lost[0]}`, which typed packs have no place for: leave "
            "it out or rename it, read events by a schema (`event:`), or write `packing: rows`"
        )
    body, types = _body(rows), dict(rows.dtypes)
    named = ["subject"] if "subject" in rows.columns else []
    ordered = _in_order(rows, sink, named + [name for name in body if "map<" not in types[name]])  # maps have no order
    return ordered.select(*named, _struct(body).alias("event"))


def packing_options(packing: PackingSpec | None) -> dict[str, str]:
    """The options of the sink that write these packs."""
    if packing is None:
        return {}
    given = {
        "pack": packing.kind,
        "packRows": packing.rows,
        "packBytes": packing.bytes,
        "packCodec": packing.codec,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _body(rows: DataFrame) -> list[str]:
    """The columns that are no part of a message beside its body."""
    return [name for name in rows.columns if name not in (*MESSAGE_COLUMNS, MESSAGE)]


def _struct(names: list[str]) -> Column:
    return F.struct(*(F.col(f"`{name}`") for name in names))


def _in_order(rows: DataFrame, sink: PipelineSink, content: Sequence[str]) -> DataFrame:
    """Rows by the tasks that write them, each in its order; `content` decides where the stream's order does not."""
    if sink.subject is None and "subject" not in rows.columns:
        raise ConfigError(f"rows for stream {sink.stream!r} have no column `subject`, and the sink has no `subject`")
    spread = rows.repartition(1) if sink.subject else rows.repartition(_writers(rows), "subject")
    return spread.sortWithinPartitions(*_order(rows), *(F.col(f"`{name}`") for name in content))


def _writers(rows: DataFrame) -> int:
    """How many tasks write to a stream: as many as shuffle, and no more than help."""
    return min(int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1), MAX_WRITERS)


def _order(rows: DataFrame) -> list[Column]:
    if MESSAGE in rows.columns:
        return [F.col(f"{MESSAGE}.stream"), F.col(f"{MESSAGE}.sequence")]
    return [F.col(name) for name in ("stream", "sequence") if name in rows.columns]


def dead_letters(bad: DataFrame, pipeline: str) -> DataFrame:
    """Bad records as messages: the body as it came, and headers that say from where and why."""
    added = {
        headers.STREAM: F.col("stream"),
        headers.SUBJECT: F.col("subject"),
        headers.SEQUENCE: F.col("sequence").cast("string"),
        headers.REASON: F.substring(F.regexp_replace("reason", r"[\r\n]+", " "), 1, REASON_LIMIT),
        headers.PIPELINE: F.lit(pipeline),
    }
    pairs = [item for name, value in added.items() for item in (F.lit(name), F.array(value))]
    own = F.coalesce(F.col("headers"), F.create_map().cast("map<string,array<string>>"))
    kept = F.map_filter(own, lambda name, _: ~name.isin(*added))
    ordered = bad.repartition(1).sortWithinPartitions("stream", "sequence")
    return ordered.select("data", F.map_concat(kept, F.create_map(*pairs)).alias("headers"))
