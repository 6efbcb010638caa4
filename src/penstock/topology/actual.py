"""Reads what the server has: streams by pages, consumers by stream, several streams at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.broker.jetstream import JetStream
from penstock.broker.model import ConsumerInfo, StreamInfo
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.topology import ownership
from penstock.topology.resource import Actual, Desired, Resource

AT_ONCE = 32
"""Requests in flight: enough to hide the round trip, too few to hurt a server."""

Progress = Callable[[int, int], None]
"""Called with how many streams were read, of how many."""


async def read(js: JetStream, desired: Desired, progress: Progress | None = None) -> Actual:
    """The state of everything this platform declares or owns.

    The number of requests is the pages of the stream list, plus one a stream that has consumers (or its pages): the
    server lists consumers only by stream.
    """
    names, listed = await asyncio.gather(js.stream_names(), js.streams())
    streams = {info.name: info for info in listed if _matters(info, desired)}
    consumers, silent = await _consumers(js, streams, desired, progress)
    # In a cluster, a stream without a leader is known by name, but missing in the list: it is not gone.
    silent |= {Resource(name) for name in set(names) - {info.name for info in listed}} & set(desired.configs)
    silent |= {r for r in desired.configs if r.consumer is not None and Resource(r.stream) in silent}
    return Actual(streams, consumers, frozenset(silent))


def require_answers(actual: Actual) -> None:
    """Raise when something exists, but nobody answers for it: a plan without it would be wrong."""
    if actual.unanswered:
        names = ", ".join(str(resource) for resource in sorted(actual.unanswered)[:5])
        raise Unavailable(f"nobody answers for {names}: has it lost its leader? Look with `penstock verify`")


def _matters(info: StreamInfo, desired: Desired) -> bool:
    return Resource(info.name) in desired.configs or ownership.owner(info.config) == desired.platform


async def _consumers(
    js: JetStream, streams: dict[str, StreamInfo], desired: Desired, progress: Progress | None
) -> tuple[dict[Resource, ConsumerInfo], set[Resource]]:
    gate = asyncio.Semaphore(AT_ONCE)
    busy = [info for info in streams.values() if info.state.consumers]
    found: dict[Resource, ConsumerInfo] = {}
    silent: set[Resource] = set()
    done = 0

    async def one(info: StreamInfo) -> None:
        nonlocal done
        async with gate:
            listed = {Resource(info.name, c.name): c for c in await js.consumers(info.name)}
            if len(listed) < info.state.consumers:
                listed |= await _asked_by_name(js, _wanted(info.name, desired) - set(listed), silent)
        found.update(listed)
        done += 1
        if progress:
            progress(done, len(busy))

    try:
        async with asyncio.TaskGroup() as group:
            for info in busy:
                group.create_task(one(info))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return found, silent


def _wanted(stream: str, desired: Desired) -> set[Resource]:
    return {r for r in desired.configs if r.consumer is not None and r.stream == stream}


async def _asked_by_name(
    js: JetStream, candidates: Iterable[Resource], silent: set[Resource]
) -> dict[Resource, ConsumerInfo]:
    """Those that are there after all. A consumer without a leader is left out of the list, and silent when asked."""
    found = {}
    for resource in candidates:
        try:
            found[resource] = await js.consumer_info(resource.stream, resource.name)
        except NotFound:
            continue
        except PenstockError:
            silent.add(resource)
    return found
