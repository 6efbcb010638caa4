"""Lets two sides receive every message while only one of them handles it, for as long as both have to run.

Each message has a key `<subject>.<stream sequence>` in the bucket `penstock-overlap_<group>`. The first side creates
it, and every later write states the revision that it replaces, so that of two writers one is refused:

    begun   a side handles the message, and renews the key meanwhile
    open    an attempt has failed: either side may start at once
    done    the message is not handled again

A side that finds `begun` waits, so that each side keeps the order of its partitions. When the key is no longer renewed
it takes over, and is told of the earlier attempts: one that was killed may have had its effect.

Keys expire after the window. An older message cannot be decided, and is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from penstock.consume.handlers import AsyncHandler, Handler, HandlerRunner
from penstock.consume.messages import Message, MessageContext
from penstock.errors import OutcomeUnknown, PenstockError, Unavailable
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import Json, seconds
from penstock.publish.control import Control
from penstock.retry import Backoff
from penstock.settings import Settings
from penstock.workers.group import migration
from penstock.workers.group.identity import Sightings, clock
from penstock.workers.options import bucket_name, overlap_bucket

log = logging.getLogger(__name__)

BEGUN, OPEN, DONE = "begun", "open", "done"
WINDOW = 3600.0
LEASE = 10.0
RENEWALS = 3
"""Renewals of a key during one lease while its message is handled."""
SAFE = 0.9
"""Share of the window within which a key certainly exists, whatever the clocks say."""
LOOKS = Backoff(first=0.01, most=0.1)
"""Delays between two reads of a key while the other side handles its message."""


class WindowPassed(PenstockError):
    """A message is so old that its key may have expired."""

    def __init__(self, key: str, window: float) -> None:
        super().__init__(key, window)
        self.key = key
        self.window = window

    def __str__(self) -> str:
        return (
            f"whether the other side has handled {self.key} is no longer known: it is older than the window of the "
            f"overlap, {self.window:g} s; let one side end, or begin again with a longer window"
        )


class TurnLost(Unavailable):
    """The other side took over a message that this one still handled: it was suspended, or cut off, for too long."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to handle one message."""

    key: str
    """Subject and sequence: an idempotency key for the effect."""
    token: int
    """Larger for every later turn of the same message."""
    tries: int
    """Earlier attempts that did not report completion. One that was killed may have had its effect: check."""


@dataclass(slots=True)
class _Held:
    """A key that this process has written."""

    turn: Turn
    id: str
    revision: int = 0
    lost: bool = False
    ended: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class OverlapCounts:
    """Counters of one side."""

    handled: int = 0
    left: int = 0
    """Messages that the other side had done."""
    taken_over: int = 0
    """Messages that another process had started."""


class Overlap:
    """One process's part in an overlap, created by `open`. Old and new side do the same."""

    def __init__(self, control: Control, group: str, name: str, lease: float) -> None:
        self.counts = OverlapCounts()
        self._jetstream = control.jetstream
        self._bucket = Bucket(control, overlap_bucket(group))
        self._group = Bucket(control, bucket_name(group))
        self._name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._lease = lease
        self._since = datetime.now(UTC)
        self._window = WINDOW
        self._over = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, group: str, *, name: str = "", lease: float = LEASE, window: float = WINDOW
    ) -> AsyncIterator[Overlap]:
        """Join the overlap of the migration to this group, on a separate connection.

        `lease`: seconds after which a process that does not renew its keys counts as dead; shorter than the `ack_wait`
        of the old consumers. `window`: seconds that a key is kept; longer than either side can be behind. The
        first process to open the overlap sets the window. Once the migration is cleaned up, everything is handled as if
        there were no overlap.
        """
        control = await Control.connect(settings)
        try:
            made = cls(control, group, name, lease)
            await made._join(window)
            yield made
        finally:
            await control.close()

    async def _join(self, window: float) -> None:
        if await self._is_over():
            return
        await self._bucket.ensure(max_age=window)
        info = await self._jetstream.stream_info(self._bucket.stream)
        self._since = info.created or self._since
        self._window = seconds(info.config["max_age"])

    async def _is_over(self) -> bool:
        """Whether the migration is done, and its keys are deleted."""
        if not self._over and not await self._bucket.exists():
            there = await self._group.exists()
            self._over = there and await migration.phase(self._group) == migration.UNIFIED
            if self._over:
                log.warning("the overlap of %s is over: start without it", self._group.name)
        return self._over

    # -- one message ---------------------------------------------------------------------------------------------------

    def around(self, handler: Handler) -> AsyncHandler:
        """Return a handler for a group's worker that handles only what the other side has not.

        Attempts of the other side count: `delivery_count` includes them.
        """
        call = HandlerRunner(handler).call

        async def once(message: Message, context: MessageContext) -> None:
            async with self.turn(message.subject, message.sequence, message.timestamp) as turn:
                if turn:
                    await call(message, context._replace(delivery_count=context.delivery_count + turn.tries))

        return once

    @asynccontextmanager
    async def turn(self, subject: str, sequence: int, stored_at: datetime) -> AsyncIterator[Turn | None]:
        """Handle the message inside, and acknowledge it afterwards; None: it is done, only acknowledge it.

        1. the key says `begun` (crash after: the other side takes over once the lease has expired, and sees `tries`)
        2. the body of the `async with` has its effect (crash after: the same, and the effect may have happened)
        3. the key says `done` (crash after: it is delivered again, and found done)
        4. the message is acknowledged, outside

        An exception inside sets the key to `open` at once, and propagates. Raises `WindowPassed` for a message that is
        too old, and `TurnLost` at the end of one that was taken over meanwhile.
        """
        held = await self._begin(f"{subject}.{sequence}", stored_at)
        if held is None:
            self.counts.left += 1
            yield None
            return
        renewing = asyncio.create_task(self._renew(held))
        try:
            yield held.turn
            await self._done(held)
        except BaseException:
            await self._reopen(held)
            raise
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        self.counts.handled += 1
        self.counts.taken_over += held.turn.tries > 0

    async def _begin(self, key: str, stored_at: datetime) -> _Held | None:
        looks, waits, entry = Sightings(self._lease), LOOKS.delays(), None
        while True:
            if may_begin(entry, looks.silent(key)):
                with suppress(WrongRevision):  # the other side was first; the next read tells its state
                    return await self._take(key, entry, stored_at)
            elif entry and entry.value["state"] == DONE:
                return None
            else:
                await asyncio.sleep(next(waits))
            entry = await self._bucket.get(key)
            looks.look({key: entry.revision} if entry else {})

    async def _take(self, key: str, entry: Entry | None, stored_at: datetime) -> _Held:
        if entry is None and passed(stored_at, self._since, self._window, datetime.now(UTC)):
            raise WindowPassed(key, self._window)
        tries, id_ = int(entry.value["tries"]) if entry else 0, secrets.token_hex(6)
        token = await self._put(key, self._value(BEGUN, tries + 1, id_), entry.revision if entry else 0)
        return _Held(Turn(key, token, tries), id_, token)

    async def _renew(self, held: _Held) -> None:
        while not (held.lost or held.ended):
            await asyncio.sleep(self._lease / RENEWALS)
            async with held.writing:
                if not held.ended:
                    with suppress(Unavailable, OutcomeUnknown):  # the other side could not take it over either
                        await self._write(held, BEGUN)

    async def _done(self, held: _Held) -> None:
        """Write `done`, with retries for as long as the other side cannot have taken over."""
        waits, until = LOOKS.delays(), clock() + self._lease
        async with held.writing:
            held.ended = True
            while not held.lost:
                try:
                    if await self._write(held, DONE):
                        return
                except (Unavailable, OutcomeUnknown):
                    if clock() >= until:
                        raise
                    await asyncio.sleep(next(waits))
        raise TurnLost(f"{held.turn.key} was taken over by the other side; is it stopped or cut off for long?")

    async def _reopen(self, held: _Held) -> None:
        async with held.writing:
            held.ended = True
            if not held.lost:
                with suppress(PenstockError):  # the lease expires anyway
                    await self._write(held, OPEN)

    async def _write(self, held: _Held, state: str) -> bool:
        """Write the key; returns whether the message is still ours."""
        key, value = held.turn.key, self._value(state, held.turn.tries + 1, held.id)
        try:
            held.revision = await self._put(key, value, held.revision)
        except WrongRevision:
            found = await self._bucket.get(key)
            held.lost = found is None or found.value["id"] != held.id
            if found and not held.lost:  # our own write whose answer was lost
                held.revision = await self._put(key, value, found.revision)
        return not held.lost

    async def _put(self, key: str, value: Json, revision: int) -> int:
        """Write a key; returns its new revision, or 0 once the overlap is over and the bucket is gone."""
        if self._over:
            return 0
        try:
            return await self._bucket.put(key, value, revision)
        except Unavailable:
            if not await self._is_over():
                raise
            return 0

    def _value(self, state: str, tries: int, id_: str) -> Json:
        return {"v": 1, "state": state, "by": self._name, "tries": tries, "id": id_}


def may_begin(entry: Entry | None, silent: bool) -> bool:
    """Whether a message may be handled now, as its key says. Pure."""
    if entry is None:
        return True
    return entry.value["state"] == OPEN or (entry.value["state"] == BEGUN and silent)


def passed(stored_at: datetime, since: datetime, window: float, now: datetime) -> bool:
    """Whether a written key may have expired: no key is older than its message, or than the bucket. Pure."""
    return now - max(stored_at, since) > timedelta(seconds=SAFE * window)
