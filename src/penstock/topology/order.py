"""The order in which changes can be made. Pure.

Streams come before their consumers, an origin before the streams that source from it, deletions last and in the
reverse order. What gives up a subject (or, on a WorkQueue stream, a filter) goes before what takes it over: the server
refuses two owners of one subject.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock import subjects
from penstock.jetstream.model import Json
from penstock.topology import renames
from penstock.topology.model import filters_of
from penstock.topology.resource import Actual, Resource

if TYPE_CHECKING:
    from penstock.topology.plan import Change

Edge = tuple[Resource, Resource]
"""The first goes before the second."""


def ordered(changes: Sequence[Change], actual: Actual) -> list[Change]:
    """The changes in an order that can be carried out; otherwise as given.

    Where they depend on each other in a circle, such as two streams that swap subjects, the circle is cut: the server
    will refuse one of them and say why.
    """
    by_resource = {change.resource: change for change in changes}
    rank = {change.resource: (_phase(change), place) for place, change in enumerate(changes)}
    after: dict[Resource, set[Resource]] = defaultdict(set)
    for first, second in _edges(changes, actual):
        if first in by_resource and second in by_resource and first != second:
            after[first].add(second)
    return [by_resource[resource] for resource in _sorted(rank, after)]


def _sorted(rank: dict[Resource, tuple[int, int]], after: dict[Resource, set[Resource]]) -> Iterator[Resource]:
    waits_for = dict.fromkeys(rank, 0)
    for followers in after.values():
        for follower in followers:
            waits_for[follower] += 1
    heap = [(rank[resource], resource) for resource, count in waits_for.items() if not count]
    heapq.heapify(heap)
    while waits_for:
        _, resource = heapq.heappop(heap) if heap else min((rank[r], r) for r in waits_for)
        if waits_for.pop(resource, None) is None:
            continue
        yield resource
        for follower in after[resource]:
            if follower in waits_for:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heapq.heappush(heap, (rank[follower], follower))


def _phase(change: Change) -> int:
    is_consumer = change.resource.consumer is not None
    return (2 if is_consumer else 3) if change.config is None else (1 if is_consumer else 0)


def _edges(changes: Sequence[Change], actual: Actual) -> Iterator[Edge]:
    deleted = {change.resource for change in changes if change.config is None}
    for change in changes:
        for needed in needs(change.resource, change.config or actual.config(change.resource) or {}):
            if change.resource not in deleted:
                yield needed, change.resource
            elif needed in deleted:
                yield change.resource, needed
    yield from _handovers(changes, actual)


def needs(resource: Resource, config: Json) -> Iterator[Resource]:
    """What has to exist for this one to work."""
    if resource.consumer is not None:
        yield resource.its_stream
    for origin in [config.get("mirror"), *(config.get("sources") or ())]:
        if not origin:
            continue
        api = (origin.get("external") or {}).get("api")
        yield Resource(origin["name"], None, api)
        if consumer := origin.get("consumer"):
            yield Resource(origin["name"], consumer["name"], api)


def _handovers(changes: Sequence[Change], actual: Actual) -> Iterator[Edge]:
    givers = [(change.resource, given) for change in changes if (given := _given_up(change, actual))]
    for change in changes if givers else ():
        taken = _claims(change.resource, change.config or {})
        for giver, given in givers:
            if _goes_on(change, giver, actual):
                continue  # the new one is created with the position of the old one, which is deleted afterwards
            if _rivals(giver, change.resource) and subjects.any_overlap(taken, given):
                yield giver, change.resource


def _goes_on(change: Change, giver: Resource, actual: Actual) -> bool:
    """Whether the change creates a consumer that goes on for the giver. On a WorkQueue both cannot be there."""
    stream = actual.stream_of(giver)
    return (
        giver == renames.predecessor(change.resource, change.config or {})
        and stream is not None
        and stream.config.get("retention") != "workqueue"
    )


def _rivals(one: Resource, other: Resource) -> bool:
    """Whether two resources may not have the same subject: two streams, or two consumers of one stream."""
    return (
        one != other
        and (one.consumer is None) == (other.consumer is None)
        and (one.consumer is None or one.its_stream == other.its_stream)
    )


def _given_up(change: Change, actual: Actual) -> list[str]:
    held = _claims(change.resource, actual.config(change.resource) or {})
    kept = _claims(change.resource, change.config or {})
    return [subject for subject in held if not subjects.covered(subject, kept)]


def _claims(resource: Resource, config: Json) -> list[str]:
    if not config:
        return []
    return config.get("subjects") or [] if resource.consumer is None else list(filters_of(config)) or [">"]
