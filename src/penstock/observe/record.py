"""Snapshots as bytes, and a stream that keeps those of the last day.

The stream is small: snapshots are compressed, and its limits let the oldest go.
"""

from __future__ import annotations

import dataclasses
import json
import types
import zlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import AlreadyExists, MessageNotFound, StreamNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import NANOSECONDS, Json, StreamInfo
from penstock.observe.snapshot import Snapshot

STREAM = "PENSTOCK_HISTORY"
SUBJECT = "penstock.history"
VERSION = 1
MAX_BYTES = 64 * 2**20

T = TypeVar("T")


def encode(snapshot: Snapshot) -> bytes:
    """A snapshot for the stream."""
    return zlib.compress(json.dumps({"version": VERSION, **_plain(snapshot)}, separators=(",", ":")).encode(), 6)


def decode(data: bytes) -> Snapshot:
    """A snapshot from the stream; fields of a later version are passed over."""
    found: Snapshot = _typed(Snapshot, json.loads(zlib.decompress(data)))
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    return [_plain(one) for one in value] if isinstance(value, list | tuple | frozenset) else value


def _typed(kind: Any, value: Any) -> Any:
    """A plain value as the type that it was."""
    if value is None:
        return None
    if kind is datetime:
        return datetime.fromisoformat(value)
    if kind is timedelta:
        return timedelta(seconds=value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind) if field.init}
        return kind(**{name: _typed(hints[name], value[name]) for name in known if name in value})  # type: ignore[operator]  # a class
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _typed(next(part for part in parts if part is not type(None)), value)
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_typed(parts[0], one) for one in value)
        return tuple(_typed(part, one) for part, one in zip(parts, value, strict=True))
    if origin is frozenset:
        return frozenset(_typed(parts[0], one) for one in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_typed(parts[0], key): _typed(parts[1], one) for key, one in value}
    return value


def config(keep: timedelta) -> Json:
    """The stream of snapshots, which are kept for so long."""
    return {
        "name": STREAM,
        "description": "Penstock: what `penstock ui` saw, for its time machine",
        "subjects": [SUBJECT],
        "max_age": int(keep.total_seconds() * NANOSECONDS),
        "max_bytes": MAX_BYTES,
        "discard": "old",
        "allow_direct": True,
    }


async def ensure(js: JetStream, keep: timedelta) -> None:
    """Make the stream, if it is not there."""
    try:
        await js.create_stream(config(keep))
    except AlreadyExists:
        return


async def kept(js: JetStream) -> StreamInfo | None:
    """The stream; None when nothing is recorded."""
    try:
        info = await js.stream_info(STREAM)
    except StreamNotFound:
        return None
    return info if info.state.messages else None


async def at(js: JetStream, moment: datetime) -> tuple[Snapshot | None, Snapshot]:
    """What was seen at that moment or next after it, and what was seen before that, where that is kept.

    Raises `MessageNotFound` when nothing was seen since.
    """
    found = await js.get_message(STREAM, since=moment)
    try:
        before = decode((await js.get_message(STREAM, found.sequence - 1)).data) if found.sequence > 1 else None
    except MessageNotFound:
        before = None
    return before, decode(found.data)
