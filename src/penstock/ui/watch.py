"""One look at the server every few seconds, for all pages together, while somebody is looking."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.consume.metrics import Lag
from penstock.errors import PenstockError
from penstock.events.documents import Documents
from penstock.jetstream.model import StreamInfo
from penstock.observe import record
from penstock.observe.groups import GroupWatches
from penstock.observe.snapshot import Key, Rates, Snapshot, rates, take
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


@dataclass(frozen=True, slots=True)
class Point:
    """A consumer at one moment."""

    at: datetime
    lag: int
    seconds: float
    rate: float


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
        self.trends: dict[Key, deque[Point]] = defaultdict(lambda: deque(maxlen=TREND))
        self.counting = asyncio.Lock()
        """Held while something is counted again."""
        self._lags: dict[str, tuple[int, Mapping[str, Lag]]] = {}
        self._every = EVERY
        self._control: Control | None = None
        self._looked_at = -math.inf
        self._open = 0
        self._number = 0
        self._told = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._recorded = 0.0
        self.groups = GroupWatches()
        """Groups that we may not read."""
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
                found = await self.groups.of(await self.control(), group.group).lags(group)
            except PenstockError as exc:
                log.info("the lag of the partitions of %s could not be measured: %s", group.group, exc)
            self._lags[group.group] = (self._number, found)
        return found

    async def _look(self, raising: bool) -> None:
        async with self._looking:
            try:
                found = await take(await self.control(), self.platform, self.latest, self._number, self.groups)
            except PenstockError as exc:
                self.error = str(exc)
                if raising:
                    raise
            else:
                self.error = None
                self.rates = rates(self.latest, found)
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

    def _note(self, found: Snapshot) -> None:
        there = set()
        for one in found.status.consumers:
            key = (one.stream, one.name)
            there.add(key)
            rate = self.rates.settled.get(key, 0.0)
            self.trends[key].append(Point(found.taken_at, one.lag_messages, one.lag.total_seconds(), rate))
        for gone in self.trends.keys() - there:
            del self.trends[gone]
