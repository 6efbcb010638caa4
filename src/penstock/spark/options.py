"""The options of format `jetstream`: parsed and checked before anything is asked of a server. Pure.

Spark hands options over with names in any case and values as text; unknown names are errors that name the nearest
known one, so a typing error never goes unnoticed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

from penstock import subjects as subject_rules
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.units import parse_size
from penstock.wire import scan

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
}
"""Options that say how to reach the cluster, and the setting each stands for. Unset ones come from the environment."""
SOURCE = (
    "stream",
    "subjects",
    "consumer",
    "startingOffsets",
    "endingOffsets",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "partitions",
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
    "checkpointLocation",
)
"""`checkpointLocation` is Spark's own; it is handed to the sink of a streaming query too."""
DEAD_LETTERS = "penstockDeadLetters"
"""Says that rows are the bad records of a pipeline, which go among the dead letters. For pipelines, and no user."""
DELIVERIES = ("atomic", "fast")
FAIL, SKIP, WRITE = FINISHED = ("fail", "skip", "write")
"""What to do when a batch that is finished comes again with other rows."""
INVALID_TEXT = {"replace": scan.REPLACE, "escape": scan.ESCAPE}
"""How the source shows bytes in subjects and headers that are no UTF-8."""
INVALID_HEADERS = ("fail", "replace", "drop")
"""What the sink does with a header that a message cannot have."""
SERVER_HEADERS = ("drop", "keep")
"""What the sink does with headers that are orders to the server."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What a user wants to read, and how."""

    settings: Settings
    stream: str
    subjects: tuple[str, ...] = ()
    """Filters that do not overlap; none: all subjects."""
    consumer: str | None = None
    """The durable consumer that holds the committed position on the server."""
    starting: Position = EARLIEST
    ending: Position = LATEST
    """Batch reads only."""
    max_rows: int | None = None
    max_bytes: int | None = None
    """A soft limit: sizes are estimated from the stream's mean."""
    partitions: int | None = None
    fail_on_data_loss: bool = True
    keep_batches_whole: bool = False
    invalid_text: str = scan.REPLACE


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """What a user wants to write, and how."""

    settings: Settings
    stream: str
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
    """Rows are the bad records of a pipeline: they may go where nobody else writes."""


def check_source_names(options: Mapping[str, str]) -> None:
    """Raise when an option is unknown, or the stream is not named: what can be told before it is clear how to read."""
    _Given(options, SOURCE, "source").stream()


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """The options of a read."""
    given = _Given(options, SOURCE, "source")
    consumer = given.text("consumer")
    if streaming and given.text("endingOffsets"):
        raise ConfigError("endingOffsets is for batch reads; a streaming query ends by its trigger (availableNow=True)")
    if not streaming:
        _only_streaming(given)
    found = SourceOptions(
        settings=given.settings(),
        stream=given.stream(),
        subjects=given.read("subjects", _subjects, ()),
        consumer=_name(consumer, "consumer") if consumer else None,
        starting=given.read("startingOffsets", _position, CONSUMER if consumer and streaming else EARLIEST),
        ending=given.read("endingOffsets", _position, LATEST),
        max_rows=given.read("maxRowsPerTrigger", _positive, None),
        max_bytes=given.read("maxBytesPerTrigger", _size, None),
        partitions=given.read("partitions", _positive, None),
        fail_on_data_loss=given.read("failOnDataLoss", _boolean, True),
        keep_batches_whole=given.read("keepBatchesWhole", _boolean, False),
        invalid_text=INVALID_TEXT[given.choice("invalidText", tuple(INVALID_TEXT))],
    )
    _check_positions(found)
    return found


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """The options of a write."""
    given = _Given(options, SINK, "sink", (DEAD_LETTERS,))
    delivery = given.choice("delivery", DELIVERIES)
    if bool(given.text("txnAppId")) != bool(given.text("txnVersion")):
        raise ConfigError("txnAppId and txnVersion go together: give both, or neither")
    return SinkOptions(
        settings=given.settings(),
        stream=given.stream(),
        subject=given.text("subject"),
        delivery=delivery,
        txn_app_id=given.text("txnAppId"),
        txn_version=given.read("txnVersion", _whole, 0),
        finished=given.choice("onFinishedBatch", FINISHED),
        invalid_headers=given.choice("invalidHeaders", INVALID_HEADERS),
        server_headers=given.choice("serverHeaders", SERVER_HEADERS),
        dead_letters=given.read(DEAD_LETTERS, _boolean, False),
    )


def _only_streaming(given: _Given) -> None:
    for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "keepBatchesWhole"):
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
        """`own` are options that no user is told of."""
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
        value = self.text("stream")
        if value is None:
            raise ConfigError(
                "the option stream is missing: name the JetStream stream, such as .option('stream', 'ORDERS')"
            )
        return _name(value, "stream")

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
