"""Parses data into the type of a handler's annotation, and encodes values. Pure."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any
from uuid import UUID

from penstock.errors import ConfigError

Parse = Callable[[bytes], Any]
JSON_TYPES = (dict, list, int, float, bool)
FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}
"""Types of fields that are text in JSON."""


class BadPayload(ValueError):
    """The data does not match the handler's annotation."""


def parser(kind: Any) -> Parse | None:
    """How data becomes a value of this type; None for a type that data cannot become.

    `bytes` are the data, `str` its text, `dict` and other JSON types its JSON. Pydantic models, msgspec structs and
    dataclasses are made from its JSON. What cannot be made raises `BadPayload`.
    """
    origin = typing.get_origin(kind) or kind
    if kind is bytes:
        return bytes
    if kind is str:
        return _text
    if origin in (list, dict) and (many := _parser_of_many(kind)):
        return many
    if origin in JSON_TYPES or kind is Any:
        return _json_of(origin)
    if _is_pydantic(kind):
        return _guarded(kind.model_validate_json, kind)
    if _is_msgspec(kind):
        import msgspec

        return _guarded(msgspec.json.Decoder(kind).decode, kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _guarded(lambda data: made(kind, json.loads(data), kind.__name__), kind)
    return None


def _parser_of_many(kind: Any) -> Parse | None:
    """For a list, or a dict by name, of models, structs or dataclasses; None when it is of plain values."""
    inner = typing.get_args(kind)[-1:]
    if not inner:
        return None
    if _is_pydantic(inner[0]):
        import pydantic

        return _guarded(pydantic.TypeAdapter(kind).validate_json, kind)
    if _is_msgspec(inner[0]):
        import msgspec

        return _guarded(msgspec.json.Decoder(kind).decode, kind)
    if dataclasses.is_dataclass(inner[0]):
        return _guarded(lambda data: made(kind, json.loads(data), "it"), kind)
    return None


def encode(value: Any) -> bytes:
    """A value as the data of a message: bytes as they are, text in UTF-8, everything else as JSON.

    Raises `ConfigError` for what has no place in JSON, such as NaN.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if _is_pydantic(type(value)):
        return str(value.model_dump_json()).encode()
    if _is_msgspec(type(value)):
        import msgspec

        return bytes(msgspec.json.encode(value))
    try:
        return json.dumps(value, separators=(",", ":"), default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"a {type(value).__name__} cannot be the data of a message: {exc}") from exc


def _plain(value: Any) -> Any:
    """Return the JSON form of a value that JSON does not have."""
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    if _is_msgspec(type(value)):
        import msgspec

        return msgspec.to_builtins(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def made(kind: Any, value: Any, where: str) -> Any:
    """A dataclass, or a list, dict or optional of them, from JSON values. Raises `BadPayload` saying where it fails."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is typing.Annotated:
        return made(arguments[0], value, where)
    if origin is typing.Literal:
        return _member(value, arguments, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    if origin in (list, tuple, set, frozenset) and isinstance(value, list):
        return origin(_items(origin, arguments, value, where))
    if origin is dict and isinstance(value, dict):
        return {key: made(arguments[1], one, f"{where}.{key}") for key, one in value.items()}
    return _scalar(origin or kind, value, where)


def _items(origin: Any, kinds: tuple[Any, ...], values: list[Any], where: str) -> list[Any]:
    """The items of a list, set or tuple; a tuple without `...` has a type for each."""
    if origin is tuple and Ellipsis not in kinds:
        if len(kinds) != len(values):
            raise BadPayload(f"{where} has {len(values)} items, not {len(kinds)}")
    else:
        kinds = kinds[:1] * len(values)
    return [made(kind, one, f"{where}[{place}]") for place, (kind, one) in enumerate(zip(kinds, values, strict=True))]


def _member(value: Any, allowed: Collection[Any], where: str) -> Any:
    if value not in allowed:
        raise BadPayload(f"{where} is {_shown(value)}, not one of {', '.join(map(repr, allowed))}")
    return value


def _scalar(expected: Any, value: Any, where: str) -> Any:
    if not isinstance(expected, type):
        return value
    if issubclass(expected, Enum):
        return expected(_member(value, [one.value for one in expected], where))
    if (convert := FROM_TEXT.get(expected)) and isinstance(value, str):
        try:
            return convert(value)
        except (ValueError, InvalidOperation) as exc:
            raise BadPayload(f"{where} is {_shown(value)}, not a {expected.__name__}") from exc
    if expected is Decimal and isinstance(value, int | float) and not isinstance(value, bool):
        return Decimal(str(value))
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected in (set, frozenset, tuple) and isinstance(value, list):
        return expected(value)
    wrong = isinstance(value, bool) and expected in (int, float)
    if wrong or not isinstance(value, expected):
        raise BadPayload(f"{where} is {_shown(value)}, not {expected.__name__}")
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return made(kind, value, where)
            except BadPayload as exc:
                errors.append(str(exc))
    raise BadPayload("; ".join(errors) or f"{where} is not null")


def _dataclass(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise BadPayload(f"{where} is {_shown(value)}, not an object")
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = [field.name for field in fields if field.name not in value and _is_required(field)]
    if missing:
        raise BadPayload(f"{where} has no {', '.join(missing)}")
    given = [field.name for field in fields if field.name in value]
    return kind(**{name: made(hints[name], value[name], f"{where}.{name}") for name in given})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise BadPayload(f"the data is no UTF-8: {exc}") from exc


def _json_of(kind: Any) -> Parse:
    def parse(data: bytes) -> Any:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise BadPayload(f"the data is no JSON: {exc}") from exc
        if kind is not Any and not isinstance(value, kind):
            raise BadPayload(f"the data is JSON of another kind than {kind.__name__}: {data[:60]!r}")
        return value

    return parse


def _guarded(parse: Parse, kind: Any) -> Parse:
    def guarded(data: bytes) -> Any:
        try:
            return parse(data)
        except (ValueError, TypeError, RecursionError) as exc:  # pydantic's and msgspec's own errors are ValueErrors
            raise BadPayload(f"the data is no {_named(kind)}: {_said(exc)}") from exc

    return guarded


def _named(kind: Any) -> str:
    """A type as people write it."""
    inner = ", ".join(_named(one) for one in typing.get_args(kind))
    return f"{kind.__name__}[{inner}]" if inner else str(kind.__name__)


def _said(error: Exception) -> str:
    """Return the error in one line; pydantic's own text has many, with links."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in problems())


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate_json") and hasattr(kind, "model_fields")


def _is_msgspec(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__struct_fields__")
