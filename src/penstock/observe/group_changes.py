"""What happened in a group between two looks: workers that came, went or were degraded, handoffs step by step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from penstock.workers.group.overview import GroupOverview, PartitionOverview, WorkerOverview

MOST = 200
"""Changes of one look that are told: the first assignment of a large group changes every partition."""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Something that happened to a worker, a partition, or the group."""

    at: datetime
    """When it was seen."""
    what: str
    text: str


def changes(before: GroupOverview, now: GroupOverview, at: datetime) -> list[GroupChange]:
    """What is different now."""
    found = (*_of_group(before, now), *_of_workers(before, now), *islice(_of_partitions(before, now), MOST))
    return [GroupChange(at, what, text) for what, text in found]


def _of_group(before: GroupOverview, now: GroupOverview) -> Iterator[tuple[str, str]]:
    if before.version != now.version:
        yield "assignment", f"version {now.version}, made by {now.leader or 'somebody who is gone'}"
    if before.leader != now.leader:
        yield now.leader or before.leader or "", "leads" if now.leader else "leads no more, and nobody does"
    if before.paused != now.paused:
        yield "group", "paused" if now.paused else "resumed"


def _of_workers(before: GroupOverview, now: GroupOverview) -> Iterator[tuple[str, str]]:
    known = {one.id: one for one in before.workers}
    there = {one.id: one for one in now.workers}
    for name in known.keys() - there.keys():
        yield name, "is gone"
    for name, one in there.items():
        if name not in known:
            yield name, f"came, is {_condition(one)}"
        elif _condition(known[name]) != _condition(one):
            yield name, f"was {_condition(known[name])}, is {_condition(one)}"


def _condition(worker: WorkerOverview) -> str:
    return worker.state if worker.state != "active" else worker.mode


def _of_partitions(before: GroupOverview, now: GroupOverview) -> Iterator[tuple[str, str]]:
    if before.partitions is now.partitions:
        return
    known = {one.id: one for one in before.partitions}
    for one in now.partitions:
        seen = known.pop(one.id, None)
        if seen is None or (seen.owner, seen.token, seen.move) != (one.owner, one.token, one.move):
            yield one.id, _step(one)
    for name in known:
        yield name, "is no partition any more"


def _step(one: PartitionOverview) -> str:
    if one.move:
        return one.move
    return f"{one.owner} has it, token {one.token}" if one.owner else "nobody has it"
