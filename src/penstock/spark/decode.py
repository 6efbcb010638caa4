"""Decodes messages into typed events, and unreadable ones into bad records with the reason.

A record is bad when its body does not parse, holds a value of another type than the schema says, lacks a field that the
schema declares `NOT NULL` or that the pipeline needs as its dedupe key, or fails the `check` of the file. A field that
the schema does not have is ignored, so that producers may add fields; a nullable field that is absent is null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType

from penstock.errors import ConfigError
from penstock.events.documents import schema_file
from penstock.topology.model import PipelineEvent

MESSAGE = "jetstream"
"""The struct column beside an event's own ones: the stream, subject, sequence, timestamp and headers it came with."""
ARRIVED = "__arrived"
"""The stream's timestamp as a column of its own while it carries the watermark."""
EVENT = "__event"
SOURCE = "__message"
IS_GOOD = "__is_good"
SHARED = "__shared"
NO_CHOICE = "__no_choice"
WHOLE_STRUCTS = ("spark.sql.optimizer.expression.nestedPruning.enabled", "false")
"""With this, Spark's optimizer takes no fields out of `SHARED` before the shuffle: see `Undivided.read_once`."""
REFUSAL = (
    " cannot be read by the pipeline's schema, and no `bad_records` subject says where to put it; "
    "add one, and the reason will be in its headers"
)


class Format(Protocol):
    """One way to write an event as bytes."""

    schema: StructType

    def column(self, data: Column) -> Column:
        """The event as a struct; null when the body cannot be read as one."""

    def explain(self, body: bytes) -> str | None:
        """Why the body cannot be read; None when it can. Runs on executors, for bad records only."""


Halves = tuple[DataFrame, DataFrame]
"""Events and bad records: every message is in exactly one of them."""


@dataclass(frozen=True, slots=True)
class Undivided:
    """The decoded frame of one scan, before it is split."""

    frame: DataFrame
    """The message as a struct, the event, `__arrived`, and whether it is good."""
    split: Callable[[DataFrame], Halves]
    """Splits the frame, or what a micro-batch of it holds."""
    fields: str
    """The struct that has the fields of the event."""

    def deduped(self, key: str) -> DataFrame:
        """Return the frame with each event once; bad records are never duplicates of each other."""
        good = F.col(IS_GOOD)
        place = F.struct(f"{SOURCE}.stream", f"{SOURCE}.sequence")
        keys = {"__key": F.when(good, F.col(f"{self.fields}.{key}")), "__place": F.when(~good, place)}
        return self.frame.withColumns(keys).dropDuplicatesWithinWatermark(list(keys)).drop(*keys)

    def read_once(self) -> DataFrame:
        """The frame behind a shuffle that all plans of one query share, so that what they are made of is read once.

        Spark executes an identical shuffle once in a plan. It is identical only as long as the optimizer moves no
        filter and no projection before it. So all columns are in one struct, and a random column without meaning, which
        must not be moved, is added after the shuffle.
        """
        rest = [name for name in self.frame.columns if name != ARRIVED]
        shared = self.frame.select(ARRIVED, F.struct(*rest).alias(SHARED)).repartition(f"{SHARED}.{SOURCE}.sequence")
        needs_all = F.col(ARRIVED).isNotNull() & (F.col(NO_CHOICE) >= 0)  # true of every row
        return shared.withColumn(NO_CHOICE, F.rand()).where(needs_all).select(ARRIVED, f"{SHARED}.*")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Events and bad records: every message is in exactly one of them."""

    events: DataFrame
    """The event's columns, `jetstream`, and `__arrived`."""
    bad: DataFrame | None
    """The columns of the source and `reason`; None when nothing can be bad."""
    whole: Undivided | None = None
    """Both together; None when nothing can be bad."""


def decode(
    messages: DataFrame, event: PipelineEvent, folder: Path, key: str | None = None, refuse: bool = False
) -> Decoded:
    """Split messages (the columns of format `jetstream`) into events and bad records.

    `folder` is where schema files lie; `key` is a field without which an event is bad. Without a schema the events are
    the messages as they are, with `data` as text for format `text`. With `refuse` nothing is split off: the job fails
    at the first bad record.
    """
    if event.format == "text":
        return _text(messages, refuse)
    if event.schema is None or event.format == "binary":
        return Decoded(messages.withColumn(ARRIVED, F.col("timestamp")), None)
    return _typed(messages, format_of(event, folder), event, key, refuse)


def format_of(event: PipelineEvent, folder: Path) -> Format:
    """The format an `event:` block asks for, with its schema read."""
    assert event.schema is not None, "decode() takes messages without a schema as they are"
    match event.format:
        case "json":
            from penstock.spark.json_events import JsonFormat

            return JsonFormat(_json_schema(event.schema, folder))
        case "avro":
            from penstock.spark.avro_events import AvroFormat

            return AvroFormat(schema_file(event.schema, folder).read_text(encoding="utf-8"))
        case "protobuf":
            from penstock.spark.protobuf_events import ProtobufFormat

            return ProtobufFormat(schema_file(event.schema, folder).read_bytes(), event.message)
    raise ConfigError(f"event format {event.format!r} is not known; write json, avro, protobuf, text or binary")


def _typed(messages: DataFrame, form: Format, event: PipelineEvent, key: str | None, refuse: bool) -> Decoded:
    names = form.schema.names
    if MESSAGE in names:
        raise ConfigError(f"the schema has a field {MESSAGE!r}, which is where the message's own columns go; rename it")
    about = F.struct(*messages.columns).alias(SOURCE)
    decoded = messages.select(about, F.col("timestamp").alias(ARRIVED), form.column(F.col("data")).alias(EVENT))
    read = decoded.select("*", f"{EVENT}.*")
    faults = _faults(form, event, key)
    is_good = F.col(EVENT).isNotNull()
    for is_wrong, _ in faults:
        is_good &= ~is_wrong
    own = F.struct(*(F.col(f"{SOURCE}.{name}") for name in messages.columns if name != "data")).alias(MESSAGE)

    def events(good: DataFrame) -> DataFrame:
        return good.select(*(F.col(f"{EVENT}.`{name}`") for name in names), own, ARRIVED)

    def split(whole: DataFrame) -> Halves:
        bad = whole.where(~F.col(IS_GOOD)).select("*", f"{EVENT}.*")
        return events(whole.where(IS_GOOD)), bad.select(f"{SOURCE}.*", _reason(form, faults))

    if refuse:
        return Decoded(events(_refusing(read, is_good)), None)
    # the body of an event is in its columns
    body = F.when(is_good, F.lit(None)).otherwise(F.col(f"{SOURCE}.data"))
    source = F.col(SOURCE).withField("data", body).alias(SOURCE)
    return _divided(Undivided(read.select(source, ARRIVED, EVENT, is_good.alias(IS_GOOD)), split, EVENT))


def _divided(whole: Undivided) -> Decoded:
    events, bad = whole.split(whole.read_once())
    return Decoded(events, bad, whole)


Fault = tuple[Column, str]
"""A condition under which a decoded record is bad, and the reason."""


def _faults(form: Format, event: PipelineEvent, key: str | None) -> list[Fault]:
    required = [*required_fields(form.schema), *([key] if key else [])]
    faults: list[Fault] = [(F.col(path).isNull(), f"field {path} is missing") for path in required]
    if event.check:
        faults.append((~F.coalesce(F.expr(event.check), F.lit(False)), f"it is not true that {event.check}"))
    return faults


def _refusing(read: DataFrame, is_good: Column) -> DataFrame:
    """The good rows; the job fails at the first one that is not."""
    place = [F.col(f"{SOURCE}.{name}") for name in ("sequence", "stream", "subject")]
    words = F.concat_ws(" ", F.lit("message"), place[0], F.lit("of stream"), place[1], F.lit("on"), place[2])
    failure = F.raise_error(F.concat(words, F.lit(REFUSAL))).cast("boolean")
    return read.where(F.when(is_good, F.lit(True)).otherwise(failure))


def _reason(form: Format, faults: list[Fault]) -> Column:
    """Return the reason; computed in Python where the body could not be read: only bad records pay for it."""
    reason: Column = F.lit(f"the body does not fit the schema {form.schema.simpleString()[:500]}")
    explain = F.udf(form.explain, StringType(), useArrow=False)
    unreadable = F.coalesce(explain(F.col(f"{SOURCE}.data")), reason)
    for is_wrong, words in reversed(faults):
        reason = F.when(is_wrong, F.lit(words)).otherwise(reason)
    return F.when(F.col(EVENT).isNull(), unreadable).otherwise(reason).alias("reason")


def _text(messages: DataFrame, refuse: bool) -> Decoded:
    packed = messages.select(F.struct(*messages.columns).alias(SOURCE), F.col("timestamp").alias(ARRIVED))
    is_good = F.is_valid_utf8(F.col(f"{SOURCE}.data"))

    def events(good: DataFrame) -> DataFrame:
        return good.select(f"{SOURCE}.*", ARRIVED).withColumn("data", F.col("data").cast("string"))

    def split(whole: DataFrame) -> Halves:
        reason = F.lit("the body is not UTF-8").alias("reason")
        return events(whole.where(IS_GOOD)), whole.where(~F.col(IS_GOOD)).select(f"{SOURCE}.*", reason)

    if refuse:
        return Decoded(events(_refusing(packed, is_good)), None)
    return _divided(Undivided(packed.withColumn(IS_GOOD, is_good), split, SOURCE))


def required_fields(schema: StructType, prefix: str = "") -> Iterator[str]:
    """The paths of the fields that are `NOT NULL`, outermost first."""
    for field in schema.fields:
        path = f"{prefix}`{field.name}`" if "." in field.name else f"{prefix}{field.name}"
        if not field.nullable:
            yield path
        if isinstance(field.dataType, StructType):
            yield from required_fields(field.dataType, f"{path}.")
        elif _requires_inside(field.dataType):
            raise ConfigError(f"field {path}: NOT NULL inside an array or a map is not checked; leave it out there")


def _requires_inside(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(not field.nullable or _requires_inside(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _requires_inside(kind.elementType)
    return isinstance(kind, MapType) and _requires_inside(kind.valueType)


def _json_schema(schema: str, folder: Path) -> StructType:
    """A schema written as Spark writes columns, in place or in a file; or Spark's own JSON form in a file."""
    text = schema if _is_ddl(schema) else schema_file(schema, folder).read_text(encoding="utf-8")
    if text.lstrip().startswith("{"):
        import json

        return StructType.fromJson(json.loads(text))
    return _parsed(text)


def _parsed(ddl: str) -> StructType:
    from pyspark.errors import PySparkException

    try:
        parsed: Any = StructType.fromDDL(ddl)
    except PySparkException as exc:
        raise ConfigError(f"event schema {ddl!r} is not a Spark schema: {exc.getCondition() or exc}") from exc
    if not isinstance(parsed, StructType):
        raise ConfigError(f"event schema {ddl!r}: write columns, such as `event_id string, amount double`")
    return parsed


def _is_ddl(schema: str) -> bool:
    """A column has a name and a type, so a schema has a space; a file name is one word."""
    return len(schema.split()) > 1
