"""From a running server to a platform file: the way back of `load`. Pure.

What is written is what the server would not assume by itself. What the file cannot say is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from penstock.jetstream.metadata import DLQ, OWNER, PLATFORM, PURPOSE, READER, SERVICE
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.topology.fields import CONSUMER_FIELDS, RESERVED, STREAM_FIELDS
from penstock.topology.kinds import Deliver, Duration, Field, Kind, ListOf, RecordKind, Size, TextMap
from penstock.units import format_duration, format_size

TOLD = {"service": SERVICE, "owner": OWNER, "purpose": PURPOSE, "dlq": DLQ, "reader": READER}
"""What a platform that was applied before has left in a consumer's metadata, by its key in the file."""
OTHERS = ("KV_", "OBJ_")
"""Streams of buckets: whoever made the bucket looks after them."""
WORKERS = ("penstock.worker", "penstock.sourcing")
"""Marks of consumers that workers and sources make for themselves."""


@dataclass(slots=True)
class Imported:
    """The contents of a platform file, and what is not in it."""

    streams: dict[str, Json] = field(default_factory=dict)
    consumers: dict[str, Json] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def imported(
    streams: Iterable[StreamInfo], consumers: Iterable[ConsumerInfo], platform: str, buckets: bool = False
) -> Imported:
    """Everything on a server that no other platform owns, as a platform file declares it."""
    found = Imported()
    for stream in sorted(streams, key=lambda one: one.name):
        reason = _not_ours(stream.config, platform)
        if not buckets and stream.name.startswith(OTHERS):
            reason = "it belongs to a bucket; --buckets takes it in"
        if reason:
            found.left_out.append(f"stream {stream.name}: {reason}")
        else:
            found.streams[stream.name] = _written_record(STREAM_FIELDS, stream.config)
    for consumer in sorted(consumers, key=lambda one: (one.stream, one.name)):
        if reason := _consumer_left_out(consumer, found, platform):
            found.left_out.append(f"consumer {consumer.name} of {consumer.stream}: {reason}")
        else:
            found.consumers[consumer.name] = _consumer(consumer)
    return found


def _not_ours(config: Json, platform: str) -> str:
    owner = (config.get("metadata") or {}).get(PLATFORM)
    return f"platform {owner!r} owns it" if owner and owner != platform else ""


def _consumer_left_out(consumer: ConsumerInfo, found: Imported, platform: str) -> str:
    marks = consumer.config.get("metadata") or {}
    if consumer.stream not in found.streams:
        return "its stream is left out"
    if not consumer.config.get("durable_name"):
        return "it is not durable"
    if any(mark in marks for mark in WORKERS):
        return "a worker or a source has made it for itself"
    if consumer.name in found.consumers:
        other = found.consumers[consumer.name]["stream"]
        return f"a consumer of {other} has the same name, and a platform file has each name once"
    return _not_ours(consumer.config, platform)


def _consumer(info: ConsumerInfo) -> Json:
    marks = info.config.get("metadata") or {}
    told = {key: marks[mark] for key, mark in TOLD.items() if marks.get(mark)}
    written = _written_record(CONSUMER_FIELDS, info.config)
    if not info.config.get("filter_subjects"):
        written.pop("filters", None)
    return {"stream": info.stream, **told, **written}


def _written_record(fields: Sequence[Field], config: Mapping[str, Any]) -> Json:
    written: Json = {}
    for one in fields:
        if not one.sent:
            continue
        value = _start(config) if isinstance(one.kind, Deliver) else config.get(one.name)
        if value in (None, "", [], {}, one.default):
            continue
        shown = written_value(one.kind, value)
        if shown not in (None, {}, []):
            written[one.key] = shown
    return written


def _start(config: Mapping[str, Any]) -> Any:
    """Where a consumer begins, as the file says it; None for the beginning."""
    policy = config.get("deliver_policy", "all")
    if policy == "by_start_sequence":
        return {"start_sequence": config["opt_start_seq"]}
    if policy == "by_start_time":
        return {"start_time": config["opt_start_time"]}
    return None if policy == "all" else policy


def written_value(kind: Kind, value: Any) -> Any:
    """A value of the server as the file has it."""
    if isinstance(kind, Duration):
        return format_duration(timedelta(microseconds=value / 1000))
    if isinstance(kind, Size):
        return value if value < 0 else format_size(value)
    if isinstance(kind, ListOf):
        return [written_value(kind.item, one) for one in value]
    if isinstance(kind, RecordKind):
        return _written_record(kind.fields, value)
    if isinstance(kind, TextMap):
        return {key: text for key, text in value.items() if not key.startswith(RESERVED)}
    return value
