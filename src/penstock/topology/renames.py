"""Consumers that go on under another name (`renamed_from:`). Pure.

The new durable is created in one request with the old one's position as its start, and only then is the old one
deleted: a crash in between leaves both, and the next plan holds the deletion. On a WorkQueue stream, where two readers
of one subject are refused and acknowledged messages are gone, the old one goes first and the new one reads the rest.
"""

from __future__ import annotations

from penstock.jetstream.metadata import RENAMED_FROM
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.topology.resource import Resource

START = ("deliver_policy", "opt_start_seq", "opt_start_time")
"""The fields that say where a consumer starts."""


def predecessor(resource: Resource, config: Json) -> Resource | None:
    """The consumer that this one was called before, as its declaration says."""
    before = _mark(config)
    return Resource(resource.stream, before, resource.api) if resource.consumer and before else None


def successor_config(config: Json, old: ConsumerInfo | None, stream: StreamInfo | None) -> Json:
    """What to create: with the start at the old one's ack floor, where there is an old one."""
    if old is None or stream is None:
        return _with_mark(config, None)
    if stream.config.get("retention") == "workqueue":
        return config
    rest = {name: value for name, value in config.items() if name not in START}
    return {**rest, "deliver_policy": "by_start_sequence", "opt_start_seq": old.ack_floor_stream_seq + 1}


def as_continued(config: Json, found: Json) -> Json:
    """What to compare: a consumer that was created as a successor keeps its start, whatever the file says about one."""
    if (mark := _mark(found)) is None:
        return _with_mark(config, None)
    rest = {name: value for name, value in config.items() if name not in START}
    start = {name: found[name] for name in START if found.get(name) is not None}
    return _with_mark({**rest, **start}, mark)


def is_successor(found: Json | None, old: Resource) -> bool:
    """Whether the consumer was created with the position of the old one."""
    return _mark(found or {}) == old.consumer


def _mark(config: Json) -> str | None:
    return (config.get("metadata") or {}).get(RENAMED_FROM)


def _with_mark(config: Json, mark: str | None) -> Json:
    if _mark(config) == mark:
        return config
    others = {key: value for key, value in (config.get("metadata") or {}).items() if key != RENAMED_FROM}
    metadata = {**others, RENAMED_FROM: mark} if mark else others
    rest = {name: value for name, value in config.items() if name != "metadata"}
    return {**rest, "metadata": metadata} if metadata else rest
