"""Rules about groups of workers."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import subjects
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule


@rule(
    "G01",
    Severity.ERROR,
    "partitions outside the stream",
    "No message of the stream is of such a partition: the workers would wait for ever.",
)
def outside(case: Case) -> Iterator[Hit]:
    for group in case.platform.groups.values():
        stream = case.platform.streams[group.stream]
        if stream.origins:  # what comes from elsewhere may have any subject
            continue
        for one in group.filters:
            if not subjects.any_overlap([one], stream.subjects):
                message = f"group {group.name!r} shares {one!r}, which stream {stream.name!r} does not capture"
                yield at(group, "partitions", message, "correct the partitions, or the stream's subjects")


@rule(
    "G02",
    Severity.WARNING,
    "a group without dead letters",
    "A message that always fails is tried for ever, and nothing behind it in its partition is handled meanwhile.",
)
def no_letters(case: Case) -> Iterator[Hit]:
    for group in case.platform.groups.values():
        if not group.dlq:
            message = f"group {group.name!r} has no dlq"
            yield at(group, None, message, "add `dlq: dlq.<domain>.<event>`")


@rule(
    "G03",
    Severity.ERROR,
    "a consumer with a name of the group",
    "Workers of a group make consumers `<group>-<worker>`; a declared one of that name would be taken for theirs.",
)
def name_taken(case: Case) -> Iterator[Hit]:
    for group in case.platform.groups.values():
        for consumer in case.platform.consumers_of(group.stream):
            if consumer.name.startswith(f"{group.name}-"):
                message = f"consumer {consumer.name!r} has a name that group {group.name!r} gives to its own"
                yield at(consumer, None, message, "rename one of them")
