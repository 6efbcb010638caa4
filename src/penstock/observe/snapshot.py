"""Everything that is shown of a server at one moment, and how fast it moves between two moments.

The command line and the user interface both show what is computed here and in `status.py`, `pipelines.py` and the
overview of groups; neither counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from penstock.observe import pipelines
from penstock.observe.collecting import StatusWatch
from penstock.observe.groups import GroupWatches
from penstock.observe.pipelines import Declared, PipelineStatus
from penstock.observe.status import ConsumerStatus, Status, StreamStatus
from penstock.publish.control import Control
from penstock.topology.model import Platform
from penstock.workers.group.overview import GroupOverview

T = TypeVar("T")
Key = tuple[str, str]
"""Stream and consumer."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at one moment."""

    status: Status
    pipelines: tuple[PipelineStatus, ...] = ()
    groups: tuple[GroupOverview, ...] = ()

    @property
    def taken_at(self) -> datetime:
        return self.status.taken_at

    def stream(self, name: str) -> StreamStatus | None:
        return self.status.of_stream(name)

    def consumer(self, stream: str, name: str) -> ConsumerStatus | None:
        return next((one for one in self.status.consumers_of(stream) if one.name == name), None)

    def group(self, name: str) -> GroupOverview | None:
        return next((one for one in self.groups if one.group == name), None)

    def pipeline(self, name: str) -> PipelineStatus | None:
        return next((one for one in self.pipelines if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast things move between two snapshots: messages a second, unless said otherwise."""

    stored: Mapping[str, float] = field(default_factory=dict)
    """By stream."""
    settled: Mapping[Key, float] = field(default_factory=dict)
    """Acknowledged, by consumer."""
    grown: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second, by stream."""


def rates(before: Snapshot | None, now: Snapshot) -> Rates:
    """How fast streams grew and consumers worked. What was recreated or reset in between counts as standing still.

    What is the same object in both is left out: it stood still.
    """
    seconds = (now.taken_at - before.taken_at).total_seconds() if before else 0.0
    if before is None or seconds <= 0:
        return Rates()
    ends, sizes, done = dict[str, float](), dict[str, float](), dict[Key, float]()
    streams = {one.name: one for one in before.status.streams}
    consumers = {(one.stream, one.name): one for one in before.status.consumers}
    for stream in _changed(before.status.streams, now.status.streams):
        known = streams.get(stream.name, stream)
        ends[stream.name] = max(0, stream.last_seq - known.last_seq) / seconds
        sizes[stream.name] = max(0, stream.bytes - known.bytes) / seconds
    for one in _changed(before.status.consumers, now.status.consumers):
        seen = consumers.get((one.stream, one.name), one)
        done[one.stream, one.name] = max(0, one.settled - seen.settled) / seconds
    return Rates(ends, done, sizes)


def _changed(before: Iterable[T], now: Iterable[T]) -> Iterator[T]:
    known = set(map(id, before))
    return (one for one in now if id(one) not in known)


def declared_pipelines(platform: Platform | None) -> list[Declared]:
    """The pipelines of a platform file, as they are looked for on a server."""
    if platform is None:
        return []
    return [Declared(one.name, platform.streams_read_by(one), one.consumer) for one in platform.pipelines.values()]


class Observer:
    """Looks at a server again and again; what is known of the last look is not asked for anew (see `StatusWatch`)."""

    def __init__(self, control: Control, platform: Platform | None = None) -> None:
        self.groups = GroupWatches(control)
        self._js = control.jetstream
        self._platform = platform
        self._status = StatusWatch(control.jetstream)
        self._stirred: set[str] = set()
        """Streams of groups whose partitions have moved since their consumers were asked for."""

    async def look(self) -> Snapshot:
        """Everything now. Groups that cannot be read are left out."""
        streams = await self._status.streams()
        found = await pipelines.collect_pipelines(self._js, declared_pipelines(self._platform))
        self._stirred.update(await self.groups.read(streams))
        status = await self._status.look(streams, pipelines.durables(found), self._stirred)
        self._stirred.clear()
        return Snapshot(status, tuple(found), tuple(self.groups.overviews(self._status.consumers_of)))
