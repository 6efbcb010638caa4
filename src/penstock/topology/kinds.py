"""The kinds of value a platform file holds: how each is read, checked, and described in the reference.

A kind turns a node into the value the server takes (durations in nanoseconds, sizes in bytes). What is wrong is added
to the problems, and `None` is returned, which leaves the field out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Protocol

from penstock import subjects, units
from penstock.errors import ConfigError
from penstock.settings import check_url
from penstock.topology.document import Node, Problems, nearest

UNLIMITED = "unlimited"


class Kind(Protocol):
    """How a value is read and described."""

    def read(self, node: Node, problems: Problems) -> Any:
        """The value as the server takes it; None when it is wrong, after saying so."""

    def describe(self) -> str:
        """What to write, in a few words."""


def _wrong(node: Node, problems: Problems, expected: str) -> None:
    problems.add(node, f"expected {expected}, found {node.describe()}")


@dataclass(frozen=True, slots=True)
class TextKind:
    """Any text."""

    words: str = "text"

    def read(self, node: Node, problems: Problems) -> str | None:
        if isinstance(node.value, dict | list) or node.value is None:
            _wrong(node, problems, self.words)
            return None
        return node.text

    def describe(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Name:
    """A name of a stream or consumer, as the server accepts it."""

    what: str = "name"

    def read(self, node: Node, problems: Problems) -> str | None:
        if (text := TextKind(self.what).read(node, problems)) is None:
            return None
        if wrong := name_problem(text):
            problems.add(node, f"{text!r} cannot be a {self.what}: {wrong}")
            return None
        return text

    def describe(self) -> str:
        return self.what


def name_problem(name: str) -> str | None:
    """Why the server would refuse this as the name of a stream or consumer."""
    if not name:
        return "it is empty"
    if len(name) > 255:
        return f"it has {len(name)} characters, 255 are the limit"
    bad = sorted({c for c in name if c in ".*>\\/" or c.isspace()})
    return f"it contains {', '.join(map(repr, bad))}; use letters, digits, _ and -" if bad else None


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def read(self, node: Node, problems: Problems) -> bool | None:
        if isinstance(node.value, bool):
            return node.value
        _wrong(node, problems, "true or false")
        return None

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number, with an optional word for "no limit"."""

    least: int = 0
    most: int | None = None
    unlimited: int | None = None
    """What the server takes for no limit; None where there is no such thing."""

    def read(self, node: Node, problems: Problems) -> int | None:
        if self.unlimited is not None and node.value in (UNLIMITED, self.unlimited):
            return self.unlimited
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int):
            _wrong(node, problems, self.describe())
            return None
        if value < self.least or value > (units.INT64 if self.most is None else self.most):
            problems.add(node, f"expected {self.describe()}, found {node.text[: units.MAX_DIGITS]}")
            return None
        return value

    def describe(self) -> str:
        words = f"a whole number from {self.least}" + (f" to {self.most}" if self.most is not None else "")
        return f"{words}, or {UNLIMITED}" if self.unlimited is not None else words


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, with a unit."""

    unlimited: int | None = None
    most: int = units.INT64
    least: int = 0

    def read(self, node: Node, problems: Problems) -> int | None:
        if self.unlimited is not None and node.value in (UNLIMITED, self.unlimited):
            return self.unlimited
        if isinstance(node.value, bool | dict | list) or node.value is None:
            _wrong(node, problems, self.describe())
            return None
        try:
            size = units.parse_size(node.text)
        except ConfigError as exc:
            problems.add(node, str(exc))
            return None
        if size > self.most:
            problems.add(node, f"{node.text!r} is too large: the server counts at most {self.most} bytes here")
            return None
        if size < self.least:
            problems.add(node, f"{node.text!r} is too small: expected {units.counted(self.least, 'byte')} or more")
            return None
        return size

    def describe(self) -> str:
        return "a size such as 64MiB" + (f", or {UNLIMITED}" if self.unlimited is not None else "")


@dataclass(frozen=True, slots=True)
class Duration:
    """A time span, with a unit."""

    unlimited: int | None = None
    least: str = "0"

    def read(self, node: Node, problems: Problems) -> int | None:
        if self.unlimited is not None and node.value == UNLIMITED:
            return self.unlimited
        if isinstance(node.value, bool | dict | list) or node.value is None:
            _wrong(node, problems, self.describe())
            return None
        try:
            span = units.parse_duration(node.text)
        except ConfigError as exc:
            problems.add(node, str(exc))
            return None
        if span and span < units.parse_duration(self.least):
            problems.add(node, f"{node.text!r} is too short: the server takes {self.least} or more")
            return None
        return units.nanoseconds(span)

    def describe(self) -> str:
        return "a duration such as 30s" + (f", or {UNLIMITED}" if self.unlimited is not None else "")


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words; other spellings of a word may be accepted too."""

    words: tuple[str, ...]
    spellings: Mapping[str, str] | None = None

    def read(self, node: Node, problems: Problems) -> str | None:
        text = node.text.strip().lower().replace("-", "_")
        if self.spellings and text in self.spellings:
            return self.spellings[text]
        if text in self.words:
            return text
        hint = nearest(text, list(self.words), self.spellings)
        also = f"; {hint}" if hint.startswith("did you mean") else ""
        problems.add(node, f"expected {self.describe()}, found {node.describe()}{also}")
        return None

    def describe(self) -> str:
        return ", ".join(self.words[:-1]) + f" or {self.words[-1]}" if len(self.words) > 1 else self.words[0]


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject; with wildcards where they make sense."""

    literal: bool = False
    """Whether wildcards are refused."""

    def read(self, node: Node, problems: Problems) -> str | None:
        if (text := TextKind("a subject").read(node, problems)) is None:
            return None
        wrong = subjects.problem(text)
        if wrong is None and self.literal and not subjects.is_literal(text):
            wrong = "it must be one subject, without `*` or `>`"
        if wrong:
            problems.add(node, f"{text!r} is not usable here: {wrong}")
            return None
        return text

    def describe(self) -> str:
        return "a subject without wildcards" if self.literal else "a subject, wildcards allowed"


@dataclass(frozen=True, slots=True)
class Template:
    """The destination of a subject mapping: tokens, `{{…}}` functions and `>`; only the server can check all of it."""

    def read(self, node: Node, problems: Problems) -> str | None:
        return TextKind("a destination subject").read(node, problems)

    def describe(self) -> str:
        return "a destination subject, with `{{wildcard(1)}}` and its kin"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time, RFC 3339."""

    def read(self, node: Node, problems: Problems) -> str | None:
        value = node.value
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                value = None
        if not isinstance(value, datetime):
            problems.add(node, f"expected {self.describe()}, found {node.describe()}")
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return aware.astimezone(UTC).isoformat().replace("+00:00", "Z")

    def describe(self) -> str:
        return "a time such as 2026-01-31T12:00:00Z"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one kind; a single value counts as a list of one."""

    item: Kind
    least: int = 0

    def read(self, node: Node, problems: Problems) -> list[Any] | None:
        nodes = node.value if isinstance(node.value, list) else [node]
        if len(nodes) < self.least:
            problems.add(node, f"expected at least {self.least} in this list, found {len(nodes)}")
            return None
        return [value for child in nodes if (value := self.item.read(child, problems)) is not None]

    def describe(self) -> str:
        return f"a list: {self.item.describe()}"


@dataclass(frozen=True, slots=True)
class TextMap:
    """Names and texts."""

    reserved: tuple[str, ...] = ()
    """What no name may start with."""

    def read(self, node: Node, problems: Problems) -> dict[str, str] | None:
        if not node.is_map:
            _wrong(node, problems, self.describe())
            return None
        for key in node.value:
            if key.startswith(self.reserved):
                problems.add(
                    node.keys.get(key, node.place), f"{key!r} is not yours: {' and '.join(self.reserved)} are reserved"
                )
        read = {key: TextKind().read(child, problems) for key, child in node.value.items()}
        return {key: text for key, text in read.items() if text is not None}

    def describe(self) -> str:
        return "`name: text` pairs"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where a server listens."""

    def read(self, node: Node, problems: Problems) -> str | None:
        text = TextKind("a server URL").read(node, problems)
        if text is None or "${" in text:  # of an environment that was not chosen
            return text
        try:
            check_url(text)
        except ConfigError as exc:
            problems.add(node, str(exc))
            return None
        return text

    def describe(self) -> str:
        return "a server URL"


@dataclass(frozen=True, slots=True)
class Percent:
    """A share of messages to sample."""

    def read(self, node: Node, problems: Problems) -> str | None:
        digits = node.text.strip().removesuffix("%")
        if digits.isdecimal() and len(digits) <= 3 and int(digits) <= 100:
            return f"{int(digits)}%"
        _wrong(node, problems, self.describe())
        return None

    def describe(self) -> str:
        return "a percentage from 0% to 100%"


@dataclass(frozen=True, slots=True)
class Deliver:
    """Where a consumer starts: a word, or a start sequence or time."""

    words: OneOf

    def read(self, node: Node, problems: Problems) -> dict[str, Any] | None:
        if node.is_map:
            return self._start(node, problems)
        word = self.words.read(node, problems)
        return None if word is None else {"deliver_policy": word}

    def _start(self, node: Node, problems: Problems) -> dict[str, Any] | None:
        starts = (
            Field("start_sequence", Count(1), "", wire="opt_start_seq"),
            Field("start_time", Moment(), "", wire="opt_start_time"),
        )
        values = read_record(node, "deliver", starts, problems)
        if not values:
            return None
        if len(values) > 1:
            problems.add(node, "deliver starts at a start_sequence or at a start_time, not at both")
            return None
        policy = "by_start_sequence" if "opt_start_seq" in values else "by_start_time"
        return {"deliver_policy": policy, **values}

    def describe(self) -> str:
        return f"{self.words.describe()}; or `{{start_sequence: 42}}`, or `{{start_time: 2026-01-31T12:00:00Z}}`"


@dataclass(frozen=True, slots=True)
class RecordKind:
    """A mapping whose keys are fields of a table."""

    what: str
    fields: Sequence[Field]
    anchor: str
    """Where the reference describes these fields."""

    def read(self, node: Node, problems: Problems) -> dict[str, Any] | None:
        return read_record(node, self.what, self.fields, problems)

    def describe(self) -> str:
        return f"[{self.what}](#{self.anchor})"


@dataclass(frozen=True, slots=True)
class WordOr:
    """A mapping, or only the value of its first key."""

    record: RecordKind

    @property
    def first(self) -> Field:
        return self.record.fields[0]

    def read(self, node: Node, problems: Problems) -> dict[str, Any] | None:
        if node.is_map:
            return self.record.read(node, problems)
        word = self.first.kind.read(node, problems)
        return None if word is None else {self.first.key: word}

    def describe(self) -> str:
        return f"{self.first.kind.describe()}; or {self.record.describe()}"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the platform file: how it is written, and what the server calls it."""

    key: str
    """Its name in the platform file."""
    kind: Kind
    doc: str
    """What it does, for the reference."""
    wire: str | None = None
    """Its name in the server's configuration; None when it is the same as `key`."""
    default: Any = None
    """What the server assumes when it is left out, as the server shows it; None when it shows nothing."""
    change: str = "editable"
    """What changing it on a living resource costs: a word of `effects.py`."""
    since: str | None = None
    """The first nats-server version that knows it, where that matters."""
    required: bool = False
    sent: bool = True
    """Whether the server gets to see it; else it is Penstock's own."""
    spread: bool = False
    """Whether its kind reads a mapping of several server fields, which stand side by side on the wire."""

    @property
    def name(self) -> str:
        """The server's name, under which the value appears in a wire configuration."""
        return self.wire or self.key


def read_record(node: Node, what: str, fields: Sequence[Field], problems: Problems) -> dict[str, Any] | None:
    """The values of a mapping by the server's names. Unknown and missing keys are problems."""
    if not node.is_map:
        _wrong(node, problems, f"{what} as `name: value` pairs")
        return None
    known = {field.key: field for field in fields}
    aliases = {field.wire: field.key for field in fields if field.wire and field.wire not in known}
    values: dict[str, Any] = {}
    for key, child in node.value.items():
        if key not in known:
            problems.unknown_key(node.keys.get(key, child.place), what, key, known, aliases)
        elif (value := known[key].kind.read(child, problems)) is not None:
            values |= value if known[key].spread else {known[key].name: value}
    for field in fields:
        if field.required and field.key not in node.value:
            problems.add(node, f"{what} needs {field.key!r}: {field.kind.describe()}")
    return values
