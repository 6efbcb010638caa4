"""A declared pipeline as a streaming query: read, decode, dedupe, compute; what it writes is in `outputs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import subjects
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.spark import plans
from penstock.spark.decode import ARRIVED, WHOLE_STRUCTS, Decoded, Halves, Undivided, decode
from penstock.spark.failures import readable
from penstock.spark.files import local_uri
from penstock.spark.functions import load_function, module_files
from penstock.spark.options import CONNECTION
from penstock.topology.model import PipelineSpec, Platform

CHECKPOINTS = ".penstock/checkpoints"
EVENTS_VIEW = "events"
ROW = "row"
BAD = "bad"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A declared pipeline and where it runs."""

    spec: PipelineSpec
    platform: Platform
    settings: Settings
    base: Path
    """Relative paths of sinks and the checkpoint start here."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def folder(self) -> Path:
        """Where the platform file lies, and with it schemas and Python modules."""
        return self.platform.path.parent

    @property
    def consumer(self) -> str:
        return self.spec.consumer

    @property
    def streams(self) -> tuple[str, ...]:
        return self.platform.streams_read_by(self.spec)

    @property
    def checkpoint(self) -> str:
        return self.located(self.spec.checkpoint or f"{CHECKPOINTS}/{self.name}")

    def located(self, path: str) -> str:
        """Return a path of the platform file in Spark's form: a URI stays, anything else is below the base folder."""
        return path if "://" in path else local_uri(self.base.resolve() / path)

    def modules(self) -> list[Path]:
        """The Python files and folders beside the platform file that its functions live in."""
        references = [reference for reference in (self.spec.function, self.spec.each_batch) if reference]
        # absolute, since Spark's JVM may have another working directory
        return [path.resolve() for reference in references if (path := module_files(reference, self.folder))]

    def connection(self) -> dict[str, str]:
        """The options of format `jetstream` that reach the cluster."""
        values = {option: getattr(self.settings, field) for option, field in CONNECTION.items()}
        values["servers"] = ",".join(self.settings.servers)
        return {option: str(value) for option, value in values.items() if value is not None}


def pipeline(platform: Platform, name: str, settings: Settings, base: Path | None = None) -> Pipeline:
    """The pipeline of that name; relative paths start at `base`, or at the platform file when it is left out."""
    spec = platform.pipelines.get(name)
    if spec is None:
        known = ", ".join(platform.pipelines) or "none"
        raise ConfigError(f"{platform.path} declares no pipeline {name!r}; it declares {known}")
    return Pipeline(spec, platform, settings, base or platform.path.parent)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What the streaming query computes."""

    frame: DataFrame
    """The output of the query: the result, or rows that `split` divides into result and bad records."""
    aggregation: plans.Aggregation | None
    split: Callable[[DataFrame], Halves] | None
    """Divides a micro-batch into result and bad records; None when nothing can be bad."""
    reads: int
    """How often it reads each message: again wherever a function uses the events twice, unless bad records are split
    off."""

    @property
    def output_mode(self) -> str:
        """Rows of an aggregation change; all others are final."""
        return "update" if self.aggregation else "append"


def planned(spark: SparkSession, flow: Pipeline) -> PipelinePlan:
    """The plan of a pipeline in a session of its own. Raises `ConfigError` for what Spark refuses."""
    try:
        return _planned(spark, flow)
    except PySparkException as exc:
        raise ConfigError(f"pipeline {flow.name!r}: {readable(exc)}") from exc


def _planned(spark: SparkSession, flow: Pipeline) -> PipelinePlan:
    spec = flow.spec
    key = spec.dedupe.key if spec.dedupe else None
    decoded = decode(messages(spark, flow), spec.event, flow.folder, key, refuse=spec.bad_records is None)
    if decoded.whole and plans.is_stateless(_computed(flow, decoded.events.drop(ARRIVED))):
        whole = decoded.whole
        frame = whole.deduped(spec.dedupe.key) if spec.dedupe else whole.frame
        return PipelinePlan(frame, None, partial(_split, flow, whole), _reads(frame, flow))
    result = _computed(flow, _deduped(decoded, flow))
    aggregation = plans.aggregation(result)
    if decoded.bad is None:
        return PipelinePlan(result, aggregation, None, _reads(result, flow))
    assert decoded.whole
    spark.conf.set(*WHOLE_STRUCTS)
    return PipelinePlan(_together(result, decoded.bad), aggregation, _apart, _reads(decoded.whole.frame, flow))


def _reads(frame: DataFrame, flow: Pipeline) -> int:
    return plans.scans(frame) // len(flow.streams)


def _split(flow: Pipeline, whole: Undivided, batch: DataFrame) -> Halves:
    """Split a micro-batch of what was read, and compute the result of its events: they need no state."""
    events, bad = whole.split(batch)
    return _computed(flow, events.drop(ARRIVED)), bad


# -- reading -------------------------------------------------------------------------------------------------------


def messages(spark: SparkSession, flow: Pipeline) -> DataFrame:
    """The messages of all its streams, as format `jetstream` gives them."""
    frames = [_stream(spark, flow, name) for name in flow.streams]
    return reduce(DataFrame.unionByName, frames)


def _stream(spark: SparkSession, flow: Pipeline, stream: str) -> DataFrame:
    options = {**source_options(flow, stream), **flow.connection()}
    frame = spark.readStream.format("jetstream").options(**options).load()
    if flow.spec.dedupe is None:
        return frame
    # By the stream's own clock no message is ever late, so that dedupe never drops one for coming late. Each stream
    # has its own watermark, and Spark goes by the one that is furthest behind.
    return frame.withWatermark("timestamp", _spark_interval(flow))


def source_options(flow: Pipeline, stream: str) -> dict[str, str]:
    """The source's options for one of the streams, without those of the connection."""
    source = flow.spec.source
    # Replaying or discarding a dead letter deletes it: a hole between letters is no loss.
    holes_are_losses = source.fail_on_data_loss and not flow.platform.streams[stream].is_dead_letters
    given = {
        "stream": stream,
        "consumer": flow.consumer,
        "subjects": ",".join(_filters(flow, stream)),
        "startingOffsets": source.start,
        "maxRowsPerTrigger": source.max_rows,
        "maxBytesPerTrigger": source.max_bytes,
        "partitions": source.partitions,
        "failOnDataLoss": str(holes_are_losses).lower(),
        "keepBatchesWhole": str(source.keep_batches_whole).lower(),
    }
    return {name: str(value) for name, value in given.items() if value}


def _filters(flow: Pipeline, stream: str) -> tuple[str, ...]:
    """Those filters of the pipeline that this stream can have messages for."""
    wanted = flow.spec.source.subjects
    spec = flow.platform.streams.get(stream)
    captured = spec.subjects if spec else ()
    if not wanted or not captured:
        return wanted
    some = tuple(filter_ for filter_ in wanted if subjects.any_overlap([filter_], captured))
    if not some:
        raise ConfigError(f"pipeline {flow.name!r}: no message of stream {stream!r} passes {', '.join(wanted)}")
    return some


def _spark_interval(flow: Pipeline) -> str:
    assert flow.spec.dedupe is not None
    return f"{round(flow.spec.dedupe.within.total_seconds() * 1000)} milliseconds"


# -- computing -----------------------------------------------------------------------------------------------------


def _deduped(decoded: Decoded, flow: Pipeline) -> DataFrame:
    events = decoded.events
    if flow.spec.dedupe is None:
        return events.drop(ARRIVED)
    key = "__key"
    keyed = events.withColumn(key, F.col(flow.spec.dedupe.key))
    return keyed.dropDuplicatesWithinWatermark([key]).drop(key, ARRIVED)


def _computed(flow: Pipeline, events: DataFrame) -> DataFrame:
    """The result of the events, streaming or those of a micro-batch."""
    if flow.spec.function:
        result = load_function(flow.spec.function, flow.folder)(events)
        if not isinstance(result, DataFrame) or result.isStreaming != events.isStreaming:
            raise ConfigError(f"{flow.spec.function} must return a DataFrame made from the one it was given")
        return result
    if flow.spec.sql is None:
        return events
    events.createOrReplaceTempView(EVENTS_VIEW)
    result = events.sparkSession.sql(flow.spec.sql)
    if events.isStreaming and not result.isStreaming:
        raise ConfigError(f"pipeline {flow.name!r}: its sql does not read from `{EVENTS_VIEW}`")
    return result


def _together(result: DataFrame, bad: DataFrame) -> DataFrame:
    """Result and bad records in one plan, for a query has one output: a struct `row` or a struct `bad` a row."""
    row, record = _packed(result), _packed(bad)
    good_rows = result.select(row.alias(ROW), _nothing_like(bad).alias(BAD))
    return good_rows.unionByName(bad.select(_nothing_like(result).alias(ROW), record.alias(BAD)))


def _apart(batch: DataFrame) -> Halves:
    """Return the two frames that `_together` has combined."""
    is_bad = F.col(BAD).isNotNull()
    return batch.where(~is_bad).select(f"{ROW}.*"), batch.where(is_bad).select(f"{BAD}.*")


def _packed(frame: DataFrame) -> Column:
    return F.struct(*(F.col(f"`{name}`") for name in frame.columns))


def _nothing_like(frame: DataFrame) -> Column:
    return F.lit(None).cast(frame.schema)
