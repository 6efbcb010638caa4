"""From a line of JSON to a message: where its subject, headers, id and data come from. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.publish.batch import literal_subject
from penstock.publish.rows import headers_of
from penstock.subjects import is_dead_letter
from penstock.wire.headers import Headers

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NO_TOKEN = re.compile(r"[\s.*>\0]|^$")


class BadLine(ConfigError):
    """A line of the input cannot become a message."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


class Numbered(NamedTuple):
    """A message and the line it came from; the fields after `line` are what bulk publishing takes."""

    line: int
    subject: str
    data: bytes
    headers: Headers | None
    message_id: str | None


@dataclass(frozen=True, kw_only=True)
class LineFormat:
    """How to read a line. Fields are named by their path in the JSON object, such as `payload.project_id`."""

    subject: str | None = None
    """The subject; `{field}` stands for the field's value, which must be a single token."""
    subject_field: str | None = None
    """A field that holds the whole subject."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header name to field; a field that is missing or null leaves the header out."""
    headers_field: str | None = None
    """A field that holds an object: header name to a string or to several."""
    message_id: str | None = None
    """A field that holds the message id."""
    data_field: str | None = None
    """A field that holds the data: a string as it is, anything else as JSON. Without it, the whole line is the data."""
    raw: bool = False
    """Take lines as they are, JSON or not; excludes everything that reads a field."""

    def __post_init__(self) -> None:
        if (self.subject is None) == (self.subject_field is None):
            raise ConfigError("say where messages go: a subject, or a field that holds it (not both)")
        fields = [self.subject_field, self.headers_field, self.message_id, self.data_field, *self.headers.values()]
        if self.raw and (any(fields) or self._placeholders):
            raise ConfigError("raw lines have no fields: leave out placeholders and field options, or leave out raw")
        if self.subject is not None:
            self._check_subject(self.subject)

    def _check_subject(self, subject: str) -> None:
        """Find what is wrong with the subject itself before any line is read."""
        rest = _PLACEHOLDER.sub("", subject)
        if "{" in rest or "}" in rest or "" in self._placeholders:
            raise ConfigError(f"subject {subject!r} has a brace that names no field: write a field as {{field}}")
        if not self._placeholders:
            literal_subject(self._allowed(subject))

    @property
    def _placeholders(self) -> list[str]:
        return _PLACEHOLDER.findall(self.subject or "")

    def message(self, number: int, line: bytes) -> Numbered:
        """The message of a line, fit to be sent but for its size. Raises `BadLine` with its number."""
        if self.raw:
            return Numbered(number, self._allowed(self.subject or ""), line, None, None)
        event = _parsed(number, line)
        try:
            made = self._made(number, event, line)
            literal_subject(made.subject)
            headers_of(made.headers, made.message_id)
        except BadLine:
            raise
        except ConfigError as exc:
            raise BadLine(number, str(exc)) from None
        except UnicodeEncodeError:
            raise BadLine(number, "it has half a surrogate pair, which is no text") from None
        return made

    def _made(self, number: int, event: dict[str, Any], line: bytes) -> Numbered:
        return Numbered(
            number,
            self._subject(number, event),
            line if self.data_field is None else self._data(number, event, self.data_field),
            self._headers(number, event),
            None if self.message_id is None else self._text(number, event, self.message_id),
        )

    def _subject(self, number: int, event: dict[str, Any]) -> str:
        if self.subject_field is not None:
            subject = self._text(number, event, self.subject_field)
        else:
            subject = _PLACEHOLDER.sub(lambda found: self._token(number, event, found[1]), self.subject or "")
        return self._allowed(subject)

    def _token(self, number: int, event: dict[str, Any], path: str) -> str:
        text = self._text(number, event, path)
        if _NO_TOKEN.search(text):
            raise BadLine(number, f"field {path!r} is {text!r}, which is no single token of a subject")
        return text

    def _allowed(self, subject: str) -> str:
        if is_dead_letter(subject):
            raise ConfigError(
                f"subject {subject!r} belongs to dead letters, which carry what replaying them needs; "
                "publish to another subject"
            )
        return subject

    def _headers(self, number: int, event: dict[str, Any]) -> Headers | None:
        made: dict[str, Any] = {}
        if self.headers_field is not None:
            made |= _header_object(number, self.headers_field, _at(event, self.headers_field))
        for name, path in self.headers.items():
            if _at(event, path) is not None:
                made[name] = self._text(number, event, path)
        return made or None

    def _data(self, number: int, event: dict[str, Any], path: str) -> bytes:
        value = _at(event, path)
        if value is None:
            raise BadLine(number, f"there is no field {path!r} to take the data from")
        return value.encode() if isinstance(value, str) else _compact(value)

    def _text(self, number: int, event: dict[str, Any], path: str) -> str:
        value = _at(event, path)
        if value is None:
            raise BadLine(number, f"there is no field {path!r}")
        if isinstance(value, dict | list):
            raise BadLine(number, f"field {path!r} must be a single value, not {_compact(value)[:60].decode()}")
        return value if isinstance(value, str) else _compact(value).decode()


def _parsed(number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except UnicodeDecodeError:
        raise BadLine(number, "it is not UTF-8") from None
    except ValueError as exc:
        raise BadLine(number, f"it is not JSON: {exc}") from None
    except RecursionError:
        raise BadLine(number, "its JSON is nested too deeply") from None
    if not isinstance(event, dict):
        raise BadLine(number, f"it is {type(event).__name__}, not a JSON object")
    return event


def _at(event: dict[str, Any], path: str) -> Any:
    """The value at a path; a key that itself contains dots is found too. None when it is not there."""
    if path in event:
        return event[path]
    value: Any = event
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _header_object(number: int, path: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    texts = isinstance(value, dict) and all(
        isinstance(one, str) or (isinstance(one, list) and all(isinstance(text, str) for text in one))
        for one in value.values()
    )
    if not texts:
        raise BadLine(number, f"field {path!r} must be an object of header names and strings")
    return dict(value)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
