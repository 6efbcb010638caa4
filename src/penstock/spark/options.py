"""The options of format `jetstream`: parsed and checked before anything is asked of a server. Pure.

Spark hands options over with names in any case and values as text; unknown names are errors that name the nearest
known one, so a typing error never goes unnoticed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, TypeVar

from penstock import packs
from penstock import subjects as subject_rules
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.units import parse_duration, parse_size
from penstock.wire import scanning

T = TypeVar("T")

CONNECTION = {
    "servers": "servers",
    "credentials": "credentials",
    "user": "user",
    "password": "password",
    "token": "token",
    "tlsCa": "tls_ca",
    "tlsCert": "tls_cert",
    "tlsKey": "tls_key",
    "tlsFirst": "tls_first",
    "domain": "domain",
    "timeout": "timeout",
    "inboxPrefix": "inbox_prefix",
}
"""Options that say how to reach the cluster, and the setting each stands for. Unset ones come from the environment."""
SOURCE = (
    "stream",
    "streams",
    "streamPattern",
    "subjects",
    "consumer",
    "startingOffsets",
    "endingOffsets",
    "asOf",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "partitions",
    "minPartitions",
    "maxRecordsPerPartition",
    "decompress",
    "pack",
    "eventSchema",
    "includeRow",
    "includeData",
    "failOnDataLoss",
    "keepBatchesWhole",
    "invalidText",
)
SINK = (
    "stream",
    "subject",
    "delivery",
    "txnAppId",
    "txnVersion",
    "onFinishedBatch",
    "invalidHeaders",
    "serverHeaders",
    "deadLetters",
    "pack",
    "packRows",
    "packBytes",
    "packCodec",
    "checkpointLocation",
)
"""`checkpointLocation` is Spark's own; it is handed to the sink of a streaming query too."""
ASYNC = "asyncProgressTrackingEnabled"
SPARKS_OWN = (
    "queryName",
    ASYNC,
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
"""Further options of a streaming query that Spark reads itself, and hands to the sink too."""
PROVIDER = "provider"
"""An option that Spark adds for CREATE TABLE."""
ONLY_STREAMING = (
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "keepBatchesWhole",
)
PATH = "path"
"""What `load("ORDERS")` gives; it names the stream."""
DEAD_LETTERS = "penstockDeadLetters"
"""Marks rows as the bad records of a pipeline, which go to dead-letter subjects. Internal, set by pipelines only."""
DELIVERIES = ("atomic", "fast")
FAIL, SKIP, WRITE = FINISHED = ("fail", "skip", "write")
"""What to do when a batch that is finished comes again with other rows."""
DECOMPRESS = ("none", "header")
"""Whether the source decompresses bodies: never, or where a header says that they are compressed."""
INVALID_TEXT = {"replace": scanning.REPLACE, "escape": scanning.ESCAPE}
"""How the source shows bytes in subjects and headers that are no UTF-8."""
INVALID_HEADERS = ("fail", "replace", "drop")
"""What the sink does with a header that a message cannot have."""
SERVER_HEADERS = ("drop", "keep")
"""What the sink does with headers that are orders to the server."""
PACKS_READ = (packs.ROWS, packs.TYPED, "none")
"""How packs are read: as rows, as rows with the events of typed packs as columns, or as plain messages."""
PACKS_WRITTEN = ("none", packs.ROWS, packs.TYPED)
"""What the sink writes: messages, packs of messages, or packs of events by their columns."""

_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:\d\d)")


class PositionKind(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    CONSUMER = "consumer"
    SEQUENCE = "sequence"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading starts or ends, as the user says it."""

    kind: PositionKind
    sequence: int = 0
    """The first message to read, or, as an end, the last."""
    time: datetime | None = None
    """Messages stored at that time or later are read, or, as an end, are not."""

    def __str__(self) -> str:
        if self.kind is PositionKind.SEQUENCE:
            return str(self.sequence)
        return self.time.isoformat() if self.time else self.kind.value


EARLIEST = Position(PositionKind.EARLIEST)
LATEST = Position(PositionKind.LATEST)
CONSUMER = Position(PositionKind.CONSUMER)
KAFKA = {"-2": "earliest", "-1": "latest"}
"""How Kafka's connector writes them in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """The options of a read."""

    settings: Settings
    stream: str = ""
    """The stream; empty when there may be several."""
    streams: tuple[str, ...] = ()
    pattern: str = ""
    """Streams whose whole name matches this regular expression."""
    subjects: tuple[str, ...] = ()
    """Filters that do not overlap; none: all subjects."""
    consumer: str | None = None
    """The durable consumer that holds the committed position on the server."""
    starting: Position = EARLIEST
    ending: Position = LATEST
    """Where a batch read ends; a streaming read ends there with `asOf`, else nowhere."""
    starting_by: Mapping[str, Position] = field(default_factory=dict)
    """Where the reads of some of several streams start."""
    ending_by: Mapping[str, Position] = field(default_factory=dict)
    max_rows: int | None = None
    max_bytes: int | None = None
    """A soft limit: sizes are estimated from the stream's mean."""
    min_rows: int | None = None
    """A micro-batch waits until there are this many messages,"""
    max_delay: timedelta = timedelta(minutes=15)
    """or until this much time has passed since the last one."""
    partitions: int | None = None
    min_partitions: int = 1
    max_rows_per_partition: int | None = None
    decompress: bool = False
    """Whether bodies are decompressed that the header `Content-Encoding` says are compressed."""
    pack: str = packs.ROWS
    """How packs are read: one of `PACKS_READ`."""
    event_schema: str = ""
    """The columns of typed packs, as Spark writes a schema."""
    include_row: bool = False
    """Whether there is a column with each row's place in its pack."""
    include_data: bool = True
    """Whether bodies are read; else only subjects and headers."""
    fail_on_data_loss: bool = True
    keep_batches_whole: bool = False
    invalid_text: str = scanning.REPLACE

    @property
    def is_several(self) -> bool:
        return not self.stream

    def of(self, stream: str) -> SourceOptions:
        """The options of one of several streams. What holds for all of them together is left out."""
        return replace(
            self,
            stream=stream,
            starting=self.starting_by.get(stream, self.starting),
            ending=self.ending_by.get(stream, self.ending),
            min_rows=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """The options of a write."""

    settings: Settings
    stream: str
    """The stream of all rows, whatever a column `stream` says; empty: the column says it."""
    subject: str | None = None
    """The subject of all rows, whatever a column `subject` says."""
    delivery: str = "atomic"
    txn_app_id: str | None = None
    """Names a series of batch writes; with `txn_version` it says which write this is, so that it happens once."""
    txn_version: int = 0
    finished: str = FAIL
    """What to do when a batch that is finished comes again with other rows: one of `FINISHED`."""
    invalid_headers: str = INVALID_HEADERS[0]
    server_headers: str = SERVER_HEADERS[0]
    dead_letters: bool = False
    """Rows are the bad records of a pipeline: they may go to reserved dead-letter subjects."""
    letters: str | None = None
    """The subject for rows that cannot be messages; None: they fail the write."""
    pack: str | None = None
    """The kind of packs that are written; None: a message a row."""
    pack_rows: int | None = None
    pack_bytes: int | None = None
    pack_codec: str = packs.NONE


def check_source_names(options: Mapping[str, str]) -> None:
    """Raise when an option is unknown, or the stream is not named: what can be checked before the kind of read is
    known."""
    if PROVIDER in options:
        raise ConfigError(
            "Spark (seen with 4.3) does not hand the options of a table to a Python source when the table is read: use "
            "CREATE TEMPORARY VIEW … USING jetstream OPTIONS (…)"
        )
    _Given(options, SOURCE, "source", (PATH,)).streams()


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """The options of a read."""
    given = _Given(options, SOURCE, "source", (PATH,))
    consumer = given.text("consumer")
    if streaming and given.text("endingOffsets"):
        raise ConfigError(
            "endingOffsets is for batch reads; a streaming query ends by its trigger (availableNow=True), or reads no "
            "further than `asOf`"
        )
    if given.text("asOf") and given.text("endingOffsets"):
        raise ConfigError("asOf and endingOffsets both say where a read ends: give one of them")
    if not streaming:
        _only_streaming(given)
    if given.text("partitions") and (given.text("minPartitions") or given.text("maxRecordsPerPartition")):
        raise ConfigError(
            "partitions is the number of tasks: leave out minPartitions and maxRecordsPerPartition, or it"
        )
    stream, streams, pattern = given.streams()
    default_start = CONSUMER if consumer and streaming else EARLIEST
    starting, starting_by = given.positions("startingOffsets", default_start, bool(stream))
    end = "asOf" if given.text("asOf") else "endingOffsets"
    ending, ending_by = given.positions(end, LATEST, bool(stream))
    found = SourceOptions(
        settings=given.settings(),
        stream=stream,
        streams=streams,
        pattern=pattern,
        subjects=given.read("subjects", _subjects, ()),
        consumer=_name(consumer, "consumer") if consumer else None,
        starting=starting,
        ending=ending,
        starting_by=starting_by,
        ending_by=ending_by,
        max_rows=given.read("maxRowsPerTrigger", _positive, None),
        max_bytes=given.read("maxBytesPerTrigger", _size, None),
        min_rows=given.read("minOffsetsPerTrigger", _positive, None),
        max_delay=given.read("maxTriggerDelay", _duration, timedelta(minutes=15)),
        partitions=given.read("partitions", _positive, None),
        min_partitions=given.read("minPartitions", _positive, 1),
        max_rows_per_partition=given.read("maxRecordsPerPartition", _positive, None),
        decompress=given.choice("decompress", DECOMPRESS) != DECOMPRESS[0],
        **_row_options(given),
        fail_on_data_loss=given.read("failOnDataLoss", _boolean, True),
        keep_batches_whole=given.read("keepBatchesWhole", _boolean, False),
        invalid_text=INVALID_TEXT[given.choice("invalidText", tuple(INVALID_TEXT))],
    )
    for name in {*starting_by, *ending_by} or {stream}:
        _check_positions(found.of(name))
    return found


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """The options of a write."""
    given = _Given(options, SINK, "sink", (DEAD_LETTERS, PATH, *SPARKS_OWN))
    delivery = given.choice("delivery", DELIVERIES)
    if bool(given.text("txnAppId")) != bool(given.text("txnVersion")):
        raise ConfigError("txnAppId and txnVersion go together: give both, or neither")
    stream = given.stream() if given.text("stream") or given.text(PATH) else ""
    if given.read(ASYNC, _boolean, False):
        raise ConfigError(
            f"{ASYNC}: after a crash Spark would repeat batches that were written long before, which this sink refuses "
            "so as not to write them twice; leave that option out"
        )
    if given.text("deadLetters") and not stream:
        raise ConfigError("deadLetters is for writes to one stream: name it with the option stream")
    pack = given.choice("pack", PACKS_WRITTEN)
    _check_packs(given, pack)
    return SinkOptions(
        settings=given.settings(),
        stream=stream,
        subject=given.text("subject"),
        delivery=delivery,
        txn_app_id=given.text("txnAppId"),
        txn_version=given.read("txnVersion", _whole, 0),
        finished=given.choice("onFinishedBatch", FINISHED),
        invalid_headers=given.choice("invalidHeaders", INVALID_HEADERS),
        server_headers=given.choice("serverHeaders", SERVER_HEADERS),
        dead_letters=given.read(DEAD_LETTERS, _boolean, False),
        letters=given.read("deadLetters", _letter_subject, None),
        pack=None if pack == PACKS_WRITTEN[0] else pack,
        pack_rows=given.read("packRows", _positive, None),
        pack_bytes=given.read("packBytes", _size, None),
        pack_codec=given.choice("packCodec", packs.CODECS),
    )


def _check_packs(given: _Given, pack: str) -> None:
    """Raise when options do not go with packs, or only with them."""
    if pack == PACKS_WRITTEN[0]:
        for name in ("packRows", "packBytes", "packCodec"):
            if given.text(name):
                raise ConfigError(f"{name} is for packs: give pack=rows or pack=typed too, or leave it out")
        return
    if given.choice("serverHeaders", SERVER_HEADERS) == "keep":
        raise ConfigError("serverHeaders=keep is for messages: the server does not see the headers of rows in a pack")
    if pack == packs.TYPED and given.text("deadLetters"):
        raise ConfigError("deadLetters is for rows with a body (`data`), which typed packs do not have")


def _row_options(given: _Given) -> dict[str, Any]:
    """What the rows of a read look like."""
    pack, schema = given.choice("pack", PACKS_READ), given.text("eventSchema") or ""
    include_data = given.read("includeData", _boolean, True)
    if bool(schema) != (pack == packs.TYPED):
        raise ConfigError(
            "pack=typed and eventSchema go together: give both, such as eventSchema='id string, amount double', or "
            "neither"
        )
    if not include_data and (schema or given.text("decompress")):
        raise ConfigError("includeData=false reads no bodies, and so no packs: leave out pack=typed and decompress")
    include_row = given.read("includeRow", _boolean, False)
    return {"pack": pack, "event_schema": schema, "include_row": include_row, "include_data": include_data}


def column_options(options: Mapping[str, str]) -> tuple[str, bool]:
    """The options that say which columns a read has: the schema of typed packs, and whether places are shown."""
    found = _row_options(_Given(options, SOURCE, "source", (PATH,)))
    return found["event_schema"], found["include_row"]


def _only_streaming(given: _Given) -> None:
    for name in ONLY_STREAMING:
        if given.text(name):
            raise ConfigError(f"{name} is for streaming reads; a batch read has startingOffsets and endingOffsets")


def _check_positions(options: SourceOptions) -> None:
    if CONSUMER in (options.starting, options.ending) and not options.consumer:
        raise ConfigError("offsets from a `consumer` need its name: give the option consumer=<durable name>")
    if options.ending == EARLIEST:
        raise ConfigError("endingOffsets cannot be `earliest`: nothing lies before that")
    start, end = options.starting, options.ending
    if start.kind is PositionKind.SEQUENCE and start.sequence == 0:
        raise ConfigError("startingOffsets cannot be 0: sequences begin with 1; `earliest` is the oldest that is kept")
    if start.kind is end.kind is PositionKind.SEQUENCE and end.sequence < start.sequence - 1:
        raise ConfigError(f"endingOffsets ({end}) lies before startingOffsets ({start})")


class _Given:
    """The options as given: names in any case, values as text; only known names."""

    def __init__(self, options: Mapping[str, str], known: Iterable[str], what: str, own: Iterable[str] = ()) -> None:
        """`own`: internal options, not shown to users."""
        told = (*known, *CONNECTION)
        names = {name.lower(): name for name in (*told, *own)}
        self._values: dict[str, str] = {}
        for key, value in options.items():
            if key.lower() not in names:
                hint = _near(key, told) or f"; known are {', '.join(told)}"
                raise ConfigError(f"the jetstream {what} has no option {key!r}{hint}")
            self._values[names[key.lower()]] = str(value).strip()

    def text(self, name: str) -> str | None:
        """The value, or None when it is missing or empty."""
        return self._values.get(name) or None

    def read(self, name: str, parse: Callable[[str, str], T], default: T) -> T:
        value = self.text(name)
        return default if value is None else parse(value, name)

    def choice(self, name: str, known: Sequence[str]) -> str:
        """One of these words; the first when it is missing."""
        value = self.text(name) or known[0]
        if value not in known:
            words = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
            raise ConfigError(f"{name} must be {words}, not {value!r}{_near(value, known)}")
        return value

    def stream(self) -> str:
        value = self.text("stream") or self.text(PATH)
        if value is None:
            raise ConfigError(
                "the option stream is missing: name the JetStream stream, such as .option('stream', 'ORDERS')"
            )
        return _name(value, "stream")

    def streams(self) -> tuple[str, tuple[str, ...], str]:
        """What to read: one stream, several, or a pattern of names."""
        several, pattern = self.text("streams"), self.text("streamPattern")
        if not several and not pattern:
            return self.stream(), (), ""
        if bool(several) + bool(pattern) + bool(self.text("stream") or self.text(PATH)) > 1:
            raise ConfigError("stream, streams and streamPattern each say what is read: give one of them")
        if pattern:
            try:
                re.compile(pattern)
            except re.error as exc:
                raise ConfigError(f"streamPattern {pattern!r} is no regular expression: {exc}") from None
        names = [name.strip() for name in (several or "").split(",") if name.strip()]
        return "", tuple(dict.fromkeys(_name(name, "streams") for name in names)), pattern or ""

    def positions(self, name: str, default: Position, single: bool) -> tuple[Position, dict[str, Position]]:
        """A position for all streams, and those that are given by stream, as JSON."""
        value = self.text(name)
        if value is None or not value.startswith("{"):
            return self.read(name, _position, default), {}
        if single:
            raise ConfigError(f"{name} by stream is for several streams (the options streams and streamPattern)")
        try:
            found = json.loads(value)
        except ValueError as exc:
            raise ConfigError(f"{name} {value!r} is no JSON: {exc}") from None
        texts = {stream: KAFKA.get(str(position), str(position)) for stream, position in found.items()}
        return default, {stream: _position(text, f"{name} of {stream}") for stream, text in texts.items()}

    def settings(self) -> Settings:
        overrides: dict[str, Any] = {setting: self.text(name) for name, setting in CONNECTION.items()}
        return Settings.load(**overrides)


def _near(name: str, known: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _name(value: str, option: str) -> str:
    if re.search(r"[\s.*>/\\]", value):
        raise ConfigError(f"{option} {value!r} is not a name: dots, wildcards, slashes and white space cannot be in it")
    return value


def _subjects(value: str, option: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    for subject in found:
        if problem := subject_rules.problem(subject):
            raise ConfigError(f"{option}: {subject!r} is no filter: {problem}")
    for index, subject in enumerate(found):
        if pair := subject_rules.any_overlap([subject], found[index + 1 :]):
            raise ConfigError(f"{option}: {pair[0]!r} and {pair[1]!r} overlap; a message would match both: keep one")
    return () if found == (subject_rules.REST,) else found


def _letter_subject(value: str, option: str) -> str:
    problem = subject_rules.problem(value) or ("" if subject_rules.is_literal(value) else "it has a wildcard")
    if problem or not subject_rules.is_dead_letter(value):
        raise ConfigError(
            f"{option} {value!r} is no subject for dead letters, such as dlq.copy{': ' + problem if problem else ''}"
        )
    return value


def _position(value: str, option: str) -> Position:
    for position in (EARLIEST, LATEST, CONSUMER):
        if value.lower() == position.kind.value:
            return position
    if value.isdecimal():
        return Position(PositionKind.SEQUENCE, sequence=int(value))
    if _TIME.fullmatch(value):
        return Position(PositionKind.TIME, time=_time(value, option))
    raise ConfigError(
        f"{option} {value!r} is none of earliest, latest, consumer, a sequence, or a time with its offset from UTC "
        "such as 2026-03-01T12:00:00Z"
    )


def _time(value: str, option: str) -> datetime:
    try:
        return datetime.fromisoformat(value.upper()).astimezone(UTC)
    except ValueError as exc:
        raise ConfigError(f"{option} {value!r} is no time: {exc}") from None


def _duration(value: str, option: str) -> timedelta:
    try:
        return parse_duration(value)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None


def _whole(value: str, option: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"{option} must be a whole number, not {value!r}")
    return int(value)


def _positive(value: str, option: str) -> int:
    number = _whole(value, option)
    if number < 1:
        raise ConfigError(f"{option} must be 1 or more, not {value}")
    return number


def _size(value: str, option: str) -> int:
    try:
        size = parse_size(value)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    if size < 1:
        raise ConfigError(f"{option} must be more than nothing")
    return size


def _boolean(value: str, option: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{option} must be true or false, not {value!r}")
    return value.lower() == "true"
