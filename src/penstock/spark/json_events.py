"""JSON events: Spark's own parser, told to accept all of a body or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

ALL_OR_NOTHING = ("spark.sql.json.enablePartialResults", "false")
"""The session setting without which Spark turns a field of the wrong type into a silent null."""


class JsonFormat:
    """One JSON object a message."""

    def __init__(self, schema: StructType) -> None:
        self.schema = schema

    def column(self, data: Column) -> Column:
        # Spark's parser reads the first value and passes over what follows it. As the first of exactly two elements
        # of an array, a body must end where its object ends.
        text = F.concat(F.lit("["), data.cast("string"), F.lit(",null]"))
        options = {"allowNonNumericNumbers": "false"}
        elements = F.from_json(text, ArrayType(self.schema), options)
        return F.when(F.is_valid_utf8(data) & (F.size(elements) == 2), elements[0])

    def explain(self, body: bytes) -> str | None:
        try:
            value = json.loads(bytes(body).decode())
        except UnicodeDecodeError:
            return "the body is not UTF-8"
        except ValueError as exc:
            return "the body is empty" if not body.strip() else f"the body is not JSON: {exc}"
        except RecursionError:
            return "the body is JSON that is nested too deeply"
        if not isinstance(value, dict):
            return f"the body is {_shown(value)}, not an object"
        return mismatch(value, self.schema)


def mismatch(value: Any, kind: DataType, path: str = "") -> str | None:
    """The first field whose value is not of its type, in words; None when there is none that we can see."""
    if value is None:
        return None
    if isinstance(kind, StructType):
        if not isinstance(value, dict):
            return _wrong(path, kind, value)
        inside = ((value.get(f.name), f.dataType, f"{path}.{f.name}" if path else f.name) for f in kind.fields)
        return next((found for one in inside if (found := mismatch(*one))), None)
    if isinstance(kind, ArrayType):
        if not isinstance(value, list):
            return _wrong(path, kind, value)
        items = ((item, kind.elementType, f"{path}[{n}]") for n, item in enumerate(value))
        return next((found for one in items if (found := mismatch(*one))), None)
    if isinstance(kind, MapType):
        if not isinstance(value, dict):
            return _wrong(path, kind, value)
        entries = ((item, kind.valueType, f"{path}.{name}") for name, item in value.items())
        return next((found for one in entries if (found := mismatch(*one))), None)
    return None if _fits(value, kind) else _wrong(path, kind, value)


def _fits(value: Any, kind: DataType) -> bool:
    for kinds, test in _TESTS:
        if isinstance(kind, kinds):
            return test(value)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_time(value: Any) -> bool:
    """Whether it looks like a time at all: Spark knows more forms than Python, so a number in front is enough."""
    return _is_number(value) or (isinstance(value, str) and value[:4].isdigit())


_TESTS: tuple[tuple[tuple[type[DataType], ...], Callable[[Any], bool]], ...] = (
    ((StringType,), lambda value: True),  # Spark takes any value as its text
    ((BooleanType,), lambda value: isinstance(value, bool)),
    ((IntegralType,), _is_whole),
    ((DoubleType, FloatType), _is_number),
    ((DecimalType,), lambda value: _is_number(value) or isinstance(value, str)),
    ((TimestampType, TimestampNTZType, DateType), _is_time),
)


def _wrong(path: str, kind: DataType, value: Any) -> str:
    return f"field {path} is {_shown(value)}, not {kind.simpleString()[:100]}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
