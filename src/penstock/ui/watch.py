"""One look at the server every few seconds, for all pages together, while somebody is looking."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.consume.metrics import Lag
from penstock.errors import PenstockError
from penstock.events.documents import Documents
from penstock.jetstream.model import StreamInfo
from penstock.observe import record
from penstock.observe.flow import Edge, FlowNode, FlowPicture, FlowWatch
from penstock.observe.group_changes import GroupChange, changes
from penstock.observe.snapshot import Key, Observer, Rates, Snapshot, rates
from penstock.publish.control import Control
from penstock.settings import Settings
from penstock.topology.model import Platform
from penstock.workers.group.overview import GroupOverview

log = logging.getLogger(__name__)

EVERY = 1.5
"""Seconds between two looks: with the time that a look and a page take, what happens is shown within two."""
SHARE = 0.04
"""Of a core, at most, that looks may take: a server with very many consumers is looked at less often."""
LONGEST_PAUSE = 10.0
"""Seconds between two looks, at most: the first one takes much longer than those after it."""
RECORD_EVERY = 5.0
"""Seconds between two snapshots that are kept."""
LOOKED_FOR = 15.0
"""Seconds that a page counts as looked at after it was asked for without staying open."""
TREND = 200
"""Points of a trend: five minutes."""
HAPPENED = 200
"""Changes of a group that are remembered."""


@dataclass(frozen=True, slots=True)
class Point:
    """A consumer at one moment."""

    at: datetime
    lag: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DrawnFlow:
    """The picture of a graph, as it is on the page."""

    graph: FlowPicture
    attention: Sequence[tuple[FlowNode, list[Edge]]]
    html: str


def pause(took: float, used: float, every: float) -> float:
    """Seconds until the next look, after one that took so long and used so much of a core. Pure.

    Looking takes at most half of the time, for the server's sake.
    """
    return min(max(every - took, took, used / SHARE - took), LONGEST_PAUSE)


class Watch:
    """Keeps the latest snapshot, and what is needed to draw trends."""

    def __init__(self, settings: Settings, platform: Platform | None = None) -> None:
        self.settings = settings
        self.platform = platform
        self.documents = Documents.of(platform)
        """Reads bodies by the schemas of the platform."""
        self.latest: Snapshot | None = None
        self.rates = Rates()
        self.error: str | None = None
        """Why there is no newer snapshot; None while all is well."""
        self.history: StreamInfo | None = None
        """The stream of recorded snapshots at the latest look; None where nothing is recorded."""
        self.trends: dict[Key, deque[Point]] = {}
        """Of consumers; those where nothing has waited have none."""
        self.happened: dict[str, deque[GroupChange]] = defaultdict(lambda: deque(maxlen=HAPPENED))
        """What was seen to happen in groups, the newest last."""
        self._looks: deque[Point] = deque(maxlen=TREND)
        """What the trend of such a consumer would be."""
        self.counting = asyncio.Lock()
        """Held while something is counted again."""
        self._lags: dict[str, tuple[int, Mapping[str, Lag]]] = {}
        self._every = EVERY
        self._control: Control | None = None
        self._observer: Observer | None = None
        self._flow = FlowWatch(platform)
        self.drawn: DrawnFlow | None = None
        """The latest picture that somebody has asked for."""
        self._looked_at = -math.inf
        self._open = 0
        self._number = 0
        self._told = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._recorded = 0.0
        self._wanted = asyncio.Event()
        self._first_look_over = asyncio.Event()

    @property
    def keeps(self) -> timedelta | None:
        """How long what is seen is kept; None: it is not."""
        return self.platform.history if self.platform else None

    async def control(self) -> Control:
        """The connection to the server; opened again when it is lost."""
        if self._control is None:
            self._control = await Control.connect(self.settings)
        return self._control

    async def _observe(self) -> Observer:
        if self._observer is None:
            self._observer = Observer(await self.control(), self.platform)
        return self._observer

    async def close(self) -> None:
        if self._control is not None:
            await self._control.close()

    async def snapshot(self) -> Snapshot:
        """A snapshot that is not older than two looks, and new for whoever comes first. Raises why there is none."""
        now = time.monotonic()
        is_first, self._looked_at = not self._open and now - self._looked_at > 2 * self._every, now
        self._wanted.set()
        if is_first or self._age() > 2 * self._every:
            await self._look(raising=self.latest is None)
        assert self.latest is not None
        return self.latest

    def flow(self) -> FlowPicture:
        """The graph of the latest snapshot."""
        assert self.latest is not None
        return self._flow.of(self.latest, self.rates)

    def _age(self) -> float:
        """Seconds since the latest look that succeeded."""
        return (datetime.now(UTC) - self.latest.taken_at).total_seconds() if self.latest else math.inf

    async def run(self) -> None:
        """Look again and again, as long as a page is open or what is seen is kept."""
        self._wanted.set()  # the first look takes longest: it is not left to whoever opens the first page
        while True:
            await self._wanted.wait()
            began, used = time.monotonic(), time.process_time()
            await self._look(raising=False)
            took, used = time.monotonic() - began, time.process_time() - used
            await asyncio.sleep(pause(took, used, self._every))
            if not self.keeps and not self._open and time.monotonic() - self._looked_at > LOOKED_FOR:
                self._wanted.clear()

    async def first_look(self, within: float) -> None:
        """Wait until the server was looked at once, or could not be, or that many seconds are over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first_look_over.wait(), within)

    async def changes(self) -> AsyncIterator[int]:
        """A number for every look, as long as it is asked for."""
        self._open += 1
        self._wanted.set()
        try:
            seen = self._number
            while True:
                async with self._told:
                    while self._number == seen:
                        await self._told.wait()
                    seen = self._number
                yield seen
        finally:
            self._open -= 1
            self._looked_at = time.monotonic()

    async def lags(self, group: GroupOverview) -> Mapping[str, Lag]:
        """How far the partitions of a group are behind, measured at most once for every look.

        While the server does not answer, it is what was measured last.
        """
        number, found = self._lags.get(group.group, (-1, {}))
        if number != self._number:
            try:
                found = await (await self._observe()).groups.lags(group)
            except PenstockError as exc:
                log.info("the lag of the partitions of %s could not be measured: %s", group.group, exc)
            self._lags[group.group] = (self._number, found)
        return found

    async def _look(self, raising: bool) -> None:
        async with self._looking:
            try:
                found = await (await self._observe()).look()
            except PenstockError as exc:
                self.error = str(exc)
                if raising:
                    raise
            else:
                self.error = None
                self.rates = rates(self.latest, found)
                self._note_groups(self.latest, found)
                self.latest = found
                self._note(found)
                await self._record(found)
                await self._find_history()
        self._number += 1
        self._first_look_over.set()
        async with self._told:
            self._told.notify_all()

    async def _record(self, found: Snapshot) -> None:
        """Keep a snapshot now and then, where the platform file asks for it."""
        if not self.keeps or time.monotonic() - self._recorded < RECORD_EVERY:
            return
        control = await self.control()
        try:
            if not self._recorded:
                await record.ensure(control.jetstream, self.keeps)
            await control.connection.request(record.SUBJECT, record.encode(found))
            self._recorded = time.monotonic()
        except PenstockError as exc:
            log.warning("what was seen could not be kept: %s", exc)

    async def _find_history(self) -> None:
        """Ask how far back the records reach, once for all pages. If that fails, the last answer stands."""
        if not self.keeps:
            return
        try:
            self.history = await record.kept((await self.control()).jetstream)
        except PenstockError as exc:
            log.info("the recorded snapshots could not be found: %s", exc)

    def _note_groups(self, before: Snapshot | None, found: Snapshot) -> None:
        for group in found.groups:
            if before and (known := before.group(group.group)):
                self.happened[group.group].extend(changes(known, group, found.taken_at))
        for gone in self.happened.keys() - {group.group for group in found.groups}:
            del self.happened[gone]

    def _note(self, found: Snapshot) -> None:
        """Go on with the trends of consumers where messages wait, or have waited within the time of a trend."""
        there = {(one.stream, one.name): one for one in found.status.consumers if one.lag_messages}
        still = Point(found.taken_at, 0, 0.0)
        for key, points in list(self.trends.items()):
            if key not in there:
                points.append(still)
                if not any(point.lag for point in points):
                    del self.trends[key]
        for key, one in there.items():
            if key not in self.trends:
                self.trends[key] = deque(self._looks, TREND)
            self.trends[key].append(Point(found.taken_at, one.lag_messages, one.lag.total_seconds()))
        self._looks.append(still)
