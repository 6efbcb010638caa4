"""Rules about names: each one once, and the same one tomorrow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from penstock.topology.lock import LockedConsumer, lock_of
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule

ACCEPT = "rename it back, write `renamed_from: {}`, or accept the loss with `penstock lint --update-lock`"


def _gone(case: Case) -> Iterator[tuple[str, LockedConsumer, list[str]]]:
    """Consumers that were there and are not, each with the new consumers that look like it."""
    if case.lock is None:
        return
    now = lock_of(case.platform).consumers
    new: dict[LockedConsumer, list[str]] = defaultdict(list)
    for name, one in now.items():
        if name not in case.lock.consumers:
            new[one].append(name)
    renamed = {(one.stream, one.renamed_from) for one in case.platform.consumers.values() if one.renamed_from}
    for name, before in case.lock.consumers.items():
        if name not in now and not any((stream, name) in renamed for stream in before.streams):
            yield name, before, new.get(before, [])


def _streams(consumer: LockedConsumer) -> str:
    return ", ".join(map(repr, consumer.streams))


@rule(
    "N01",
    Severity.ERROR,
    "consumer renamed",
    "A consumer's name is its position: under a new name it reads everything again from its start.",
)
def renamed(case: Case) -> Iterator[Hit]:
    for name, before, likely in _gone(case):
        for other in likely:
            spec = case.platform.consumers.get(other)
            message = f"consumer {name!r} of stream {_streams(before)} looks renamed to {other!r}"
            line, ignore = (spec.line, spec.ignore) if spec else (1, {})
            yield Hit(message, ACCEPT.format(name), line, f"consumers.{other}", ignore)


@rule(
    "N02",
    Severity.ERROR,
    "consumer removed",
    "Its position is lost with it; on an interest stream so is every message that only it waited for.",
)
def removed(case: Case) -> Iterator[Hit]:
    for name, before, likely in _gone(case):
        if not likely:
            message = f"consumer {name!r} of stream {_streams(before)} is no longer declared"
            fix = "declare it again, or accept the loss with `penstock lint --update-lock`"
            yield Hit(message, fix, 1, f"consumers.{name}")


@rule(
    "N03",
    Severity.ERROR,
    "consumer moved to another stream",
    "A consumer belongs to its stream: on another one it is a new consumer that starts over.",
)
def moved(case: Case) -> Iterator[Hit]:
    for name, before in (case.lock.consumers if case.lock else {}).items():
        spec = case.platform.consumers.get(name)
        if spec and spec.stream not in before.streams:
            message = f"consumer {name!r} was on stream {_streams(before)} and is on {spec.stream!r} now"
            yield at(spec, "stream", message, "give the new one a new name, or accept with `--update-lock`")


@rule(
    "N04",
    Severity.ERROR,
    "stream renamed or removed",
    "A stream's messages live under its name: under another one it starts empty.",
)
def stream_gone(case: Case) -> Iterator[Hit]:
    for name in case.lock.streams if case.lock else ():
        if name not in case.platform.streams:
            message = f"stream {name!r} is no longer declared"
            fix = "declare it again, or accept the loss with `penstock lint --update-lock`"
            yield Hit(message, fix, 1, f"streams.{name}")


@rule(
    "N05",
    Severity.INFO,
    "not in the lock file",
    "A name that the lock file does not know cannot be missed when it changes.",
)
def unlocked(case: Case) -> Iterator[Hit]:
    now = lock_of(case.platform)
    if case.lock is None:
        if now.streams or now.consumers:
            message = "there is no lock file, so a renamed consumer would go unnoticed"
            yield Hit(message, "run `penstock lint --update-lock`, and commit the file", 1, "")
        return
    known = {*case.lock.streams, *case.lock.consumers}
    new = [name for name in (*now.streams, *now.consumers) if name not in known]
    if new:
        shown = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        yield Hit(f"not in the lock file yet: {shown}", "run `penstock lint --update-lock`", 1, "")


@rule(
    "N06",
    Severity.ERROR,
    "one consumer, two readers",
    "Two readers of one durable each get a part of the messages and move each other's position.",
)
def shared(case: Case) -> Iterator[Hit]:
    users: dict[str, str] = {}
    for flow in case.platform.pipelines.values():
        if not (name := flow.source.consumer):
            continue
        own = f"give the pipeline a consumer of its own, such as pipeline_{flow.name}"
        declared = case.platform.consumers.get(name)
        if declared and declared.stream not in case.platform.streams_read_by(flow):
            message = f"pipeline {flow.name!r} reads through {name!r}, a consumer of stream {declared.stream!r}"
            yield at(flow, "from", message, own)
        elif declared and declared.service:
            message = f"pipeline {flow.name!r} reads through {name!r}, which service {declared.service!r} uses"
            yield at(flow, "from", message, own)
        other = users.setdefault(name, flow.name)
        if other != flow.name:
            message = f"pipelines {other!r} and {flow.name!r} read through the same consumer {name!r}"
            yield at(flow, "from", message, "give each pipeline a consumer of its own")


@rule(
    "N07",
    Severity.ERROR,
    "name of a managed consumer taken",
    "A server-managed source keeps a consumer of its own on the origin; another one of that name is in its way.",
)
def managed_name(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        for origin in stream.origins:
            if not origin.server_managed or origin.is_external or origin.consumer is None:
                continue
            taken = case.platform.consumers.get(origin.consumer.name)
            if taken and taken.stream == origin.name:
                message = f"the managed consumer {taken.name!r} of source {origin.name!r} is declared by hand too"
                yield at(taken, None, message, "remove it here, or rename the one of the source")


@rule(
    "N08",
    Severity.ERROR,
    "renamed from a name that is in use",
    "A position can go on under one new name, and only when nothing is declared under the old one any more.",
)
def renamed_from_taken(case: Case) -> Iterator[Hit]:
    heirs: dict[tuple[str, str], str] = {}
    for spec in case.platform.consumers.values():
        if not spec.renamed_from:
            continue
        other = heirs.setdefault((spec.stream, spec.renamed_from), spec.name)
        declared = case.platform.consumers.get(spec.renamed_from)
        if declared and declared.stream == spec.stream:
            message = f"consumer {spec.name!r} is renamed from {spec.renamed_from!r}, which is still declared"
            yield at(spec, "renamed_from", message, "remove the old one, or the `renamed_from`")
        elif other != spec.name:
            message = f"consumers {other!r} and {spec.name!r} are both renamed from {spec.renamed_from!r}"
            yield at(spec, "renamed_from", message, "keep `renamed_from` at one of them")
