"""Reads what the server has: streams by pages, consumers by stream, several streams at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from penstock.errors import ApiError, BrokerUnreachable, NotFound, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.topology import ownership
from penstock.topology.resource import Actual, Desired, Resource

AT_ONCE = 32
"""Requests in flight: enough to hide the round trip, too few to hurt a server."""

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with how many streams were read, of how many."""


async def read(js: JetStream, desired: Desired, progress: Progress | None = None) -> Actual:
    """The state of everything this platform declares or owns.

    The number of requests is the pages of the stream list, plus one a stream that has consumers (or its pages): the
    server lists consumers only by stream. A cluster that cannot list all of them, since some have no leader, is asked
    for each declared one by name instead.
    """
    silent: set[Resource] = set()
    streams = await _streams(js, desired, silent)
    elsewhere = await _elsewhere(js, desired, streams, silent)
    busy = [info.name for info in streams.values() if info.state.consumers]
    consumers: dict[Resource, ConsumerInfo] = dict(elsewhere.consumers)

    async def one(name: str) -> None:
        found = await _consumers(js, name, desired, silent)
        consumers.update(found)

    await _each(busy, one, progress)
    silent |= {r for r in desired.configs if r.consumer is not None and r.its_stream in silent}
    return Actual(streams, consumers, frozenset(silent), elsewhere.origins)


def require_answers(actual: Actual) -> None:
    """Raise when something of this server exists, but nobody answers for it: a plan without it would be wrong.

    What lives elsewhere is not asked for: `Plan.unreached` tells of it.
    """
    here = sorted((resource for resource in actual.unanswered if not resource.api), key=str)
    if here:
        names = ", ".join(map(str, here[:5]))
        raise Unavailable(f"nobody answers for {names}: has it lost its leader? Look with `penstock verify`")


async def _elsewhere(js: JetStream, desired: Desired, streams: dict[str, StreamInfo], silent: set[Resource]) -> Actual:
    """The consumers of sources whose origins live in another domain or account: declared ones, and those in use."""
    wanted = {resource for resource in desired.configs if resource.api}
    in_use = {resource for info in streams.values() for resource in _bound_elsewhere(info.config)}
    missing: set[Resource] = set()
    streams_there = {resource.its_stream for resource in wanted | in_use}
    origins = await _by_name(streams_there, lambda r: _at(js, r).stream_info(r.stream), missing)
    there = {resource for resource in wanted | in_use if resource.its_stream in origins}
    consumers = await _by_name(there, lambda r: _at(js, r).consumer_info(r.stream, r.name), missing)
    silent |= {one for one in wanted | in_use if one in missing or one.its_stream in missing}
    return Actual(consumers=consumers, origins=origins)


def _at(js: JetStream, resource: Resource) -> JetStream:
    return js.at_prefix(resource.api) if resource.api else js


def _bound_elsewhere(config: Json) -> list[Resource]:
    """The consumers through which a stream reads origins that live elsewhere."""
    origins = [config.get("mirror") or {}, *(config.get("sources") or ())]
    return [
        Resource(origin["name"], origin["consumer"]["name"], origin["external"]["api"])
        for origin in origins
        if origin.get("external") and origin.get("consumer")
    ]


async def _streams(js: JetStream, desired: Desired, silent: set[Resource]) -> dict[str, StreamInfo]:
    try:
        return {info.name: info for info in await js.streams() if _matters(info, desired)}
    except Unavailable:
        known = set(await js.stream_names())
    asked = [r for r in desired.configs if r.consumer is None and r.stream in known]
    found = await _by_name(asked, lambda resource: js.stream_info(resource.stream), silent)
    return {resource.stream: info for resource, info in found.items()}


def _matters(info: StreamInfo, desired: Desired) -> bool:
    return Resource(info.name) in desired.configs or ownership.owner(info.config) == desired.platform


async def _consumers(
    js: JetStream, stream: str, desired: Desired, silent: set[Resource]
) -> dict[Resource, ConsumerInfo]:
    try:
        return {Resource(stream, info.name): info for info in await js.consumers(stream)}
    except Unavailable:
        asked = [r for r in desired.configs if r.consumer is not None and r.stream == stream]
        return await _by_name(asked, lambda resource: js.consumer_info(stream, resource.name), silent)


async def _by_name(
    resources: Collection[Resource], ask: Callable[[Resource], Awaitable[T]], silent: set[Resource]
) -> dict[Resource, T]:
    """Those that exist; those that exist and have nobody to answer for them are added to `silent`."""
    found: dict[Resource, T] = {}

    async def one(resource: Resource) -> None:
        try:
            found[resource] = await ask(resource)
        except NotFound:
            return
        except BrokerUnreachable:
            raise
        except (ApiError, Unavailable):
            silent.add(resource)

    await _each(resources, one)
    return found


async def _each(items: Collection[T], work: Callable[[T], Awaitable[None]], progress: Progress | None = None) -> None:
    """Do the work for all, some at a time; the first error stops the rest."""
    gate, done = asyncio.Semaphore(AT_ONCE), 0

    async def gated(item: T) -> None:
        nonlocal done
        async with gate:
            await work(item)
        done += 1
        if progress:
            progress(done, len(items))

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(gated(item))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
