"""Everything that is shown of a server at one moment, and how fast it moves between two moments.

The command line and the user interface both show what is computed here and in `status.py`, `pipelines.py` and the
overview of groups; neither counts by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock.errors import AccessDenied, PenstockError
from penstock.observe import pipelines
from penstock.observe.groups import GroupWatches
from penstock.observe.pipelines import Declared, PipelineStatus
from penstock.observe.status import ConsumerStatus, Status, StreamStatus, collect
from penstock.publish.control import Control
from penstock.topology.model import Platform
from penstock.workers.group.operations import Groups
from penstock.workers.group.overview import GroupOverview

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
    """How fast streams grew and consumers worked. What was recreated or reset in between counts as standing still."""
    seconds = (now.taken_at - before.taken_at).total_seconds() if before else 0.0
    if before is None or seconds <= 0:
        return Rates()
    ends = {one.name: one.last_seq for one in before.status.streams}
    sizes = {one.name: one.bytes for one in before.status.streams}
    done = {(one.stream, one.name): one.settled for one in before.status.consumers}
    return Rates(
        {one.name: max(0, one.last_seq - ends.get(one.name, one.last_seq)) / seconds for one in now.status.streams},
        {
            (one.stream, one.name): max(0, one.settled - done.get((one.stream, one.name), one.settled)) / seconds
            for one in now.status.consumers
        },
        {one.name: max(0, one.bytes - sizes.get(one.name, one.bytes)) / seconds for one in now.status.streams},
    )


def declared_pipelines(platform: Platform | None) -> list[Declared]:
    """The pipelines of a platform file, as they are looked for on a server."""
    if platform is None:
        return []
    return [Declared(one.name, platform.streams_read_by(one), one.consumer) for one in platform.pipelines.values()]


async def take(
    control: Control,
    platform: Platform | None = None,
    before: Snapshot | None = None,
    turn: int = 0,
    groups: GroupWatches | None = None,
) -> Snapshot:
    """Ask the server for everything, or for what has moved since `before` (see `collect`).

    Groups that cannot be read are left out. `groups` remembers what was read of them.
    """
    found = await pipelines.collect_pipelines(control.jetstream, declared_pipelines(platform))
    seen = before.status if before else None
    status = await collect(control.jetstream, seen, turn, pipelines.durables(found))
    return Snapshot(status, tuple(found), tuple([one async for one in _groups(control, groups or GroupWatches())]))


async def _groups(control: Control, groups: GroupWatches) -> AsyncIterator[GroupOverview]:
    names = await Groups(control).names()
    groups.keep_only(names)
    for name in names:
        if name in groups.denied:
            continue
        try:
            group = await groups.of(control, name).look()
        except AccessDenied:
            groups.denied.add(name)
        except PenstockError:
            continue  # it is being deleted, or is no group
        else:
            if group.stream or group.workers:
                yield group
