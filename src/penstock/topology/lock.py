"""The lock file next to the platform file: the names seen before, so that a rename is noticed.

A consumer's name is its position. The file is meant to be committed; it is written by `penstock apply`
and `penstock lint --update-lock`, and by nobody else's hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from penstock.errors import ConfigError
from penstock.topology.document import Node, Problems, read
from penstock.topology.kinds import Count, Field, ListOf, TextKind, read_record
from penstock.topology.model import Platform

SUFFIX = ".lock.yaml"
VERSION = 1
HEADER = """\
# Names that hold a position on a server: written by `penstock apply`, to be committed.
# A stream or consumer that is here and no longer in the platform file was renamed or removed.
"""


@dataclass(frozen=True, slots=True)
class LockedConsumer:
    """What a consumer was when it was last seen."""

    streams: tuple[str, ...]
    """One, or all that a pipeline reads through consumers of this name."""
    filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lock:
    """The names of a platform."""

    streams: tuple[str, ...] = ()
    consumers: Mapping[str, LockedConsumer] = field(default_factory=dict)


def lock_path(platform: Path) -> Path:
    """`penstock.yaml` has its lock in `penstock.lock.yaml`."""
    return platform.with_name(platform.stem + SUFFIX)


def lock_of(platform: Platform) -> Lock:
    """The names of this platform: streams, consumers, and the consumers that pipelines read through."""
    consumers = {name: LockedConsumer((spec.stream,), spec.filters) for name, spec in platform.consumers.items()}
    for flow in platform.pipelines.values():
        if flow.source.consumer:
            seen = LockedConsumer(platform.streams_read_by(flow), flow.source.subjects)
            consumers.setdefault(flow.source.consumer, seen)
    return Lock(tuple(sorted(platform.streams)), dict(sorted(consumers.items())))


def read_lock(path: Path) -> Lock | None:
    """The lock file, or None when there is none. Raises `ConfigError` when it is damaged."""
    if not path.exists():
        return None
    problems = Problems(path)
    root = read(path, problems)
    sections = (
        Field("version", Count(VERSION, VERSION), "", required=True),
        Field("streams", ListOf(TextKind()), "", required=True),
        Field("consumers", _Consumers(), "", required=True),
    )
    values = read_record(root, "the lock file", sections, problems)
    problems.raise_any()
    assert values is not None  # otherwise there was a problem
    return Lock(tuple(values["streams"]), values["consumers"])


class _Consumers:
    """Consumers by name, each with its streams and filters."""

    def read(self, node: Node, problems: Problems) -> dict[str, LockedConsumer] | None:
        fields = (Field("streams", ListOf(TextKind(), 1), "", required=True), Field("filters", ListOf(TextKind()), ""))
        if not node.is_map:
            problems.add(node, f"expected consumers by name, found {node.describe()}")
            return None
        found = {}
        for name, child in node.value.items():
            values = read_record(child, f"consumer {name!r}", fields, problems) or {}
            found[name] = LockedConsumer(tuple(values.get("streams", ())), tuple(values.get("filters", ())))
        return found

    def describe(self) -> str:
        return "consumers by name"


def write_lock(path: Path, lock: Lock) -> None:
    """Replace the lock file in one step: a crash leaves the old one or the new one."""
    document = {
        "version": VERSION,
        "streams": list(lock.streams),
        "consumers": {
            name: {"streams": list(one.streams), "filters": list(one.filters)} for name, one in lock.consumers.items()
        },
    }
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(HEADER + yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        os.replace(draft, path)
    except OSError as exc:
        raise ConfigError(f"the lock file {str(path)!r} cannot be written: {exc.strerror}") from exc
