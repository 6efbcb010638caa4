"""Dataclasses as JSON and back, for what is kept on a server."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Union, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    """Dataclasses, times and collections as JSON has them. Mappings become lists of pairs."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return [[plain(key), plain(one)] for key, one in value.items()]
    return [plain(one) for one in value] if isinstance(value, list | tuple | frozenset) else value


def typed(kind: Any, value: Any) -> Any:
    """A plain value as the type that it was. Fields that a dataclass does not have are ignored."""
    if value is None:
        return None
    if kind is datetime:
        return datetime.fromisoformat(value)
    if kind is timedelta:
        return timedelta(seconds=value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind) if field.init}
        return kind(**{name: typed(hints[name], value[name]) for name in known if name in value})  # type: ignore[operator]  # a class
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return typed(next(part for part in parts if part is not type(None)), value)
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(typed(parts[0], one) for one in value)
        return tuple(typed(part, one) for part, one in zip(parts, value, strict=True))
    if origin is frozenset:
        return frozenset(typed(parts[0], one) for one in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {typed(parts[0], key): typed(parts[1], one) for key, one in value}
    return value
