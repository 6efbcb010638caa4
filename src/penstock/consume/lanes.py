"""Schedules the messages in hand: a limited number at a time, those with one key in order, or gathered in batches."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Protocol

from penstock.consume.handlers import cancel
from penstock.consume.messages import Message

log = logging.getLogger(__name__)

Unit = Message | list[Message]
"""The argument of one handler call."""

MOMENT = 0.25
"""Seconds of work: about as many messages are kept in hand, so that other instances get their share."""
MOST = 4096


class Choices(Protocol):
    """The options that say how messages are handled."""

    @property
    def concurrency(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def within(self) -> float: ...
    @property
    def ordered_by(self) -> Callable[[Message], Hashable] | None: ...


class KeyLane:
    """Messages with one key; the first is being handled, or waits for its retry."""

    __slots__ = ("key", "waiting")

    def __init__(self, key: Hashable, first: Message) -> None:
        self.key = key
        self.waiting = deque([first])


class Lanes:
    """Calls the handler for the messages in hand."""

    def __init__(self, handle: Callable[[Unit], Awaitable[float | None]], choices: Choices) -> None:
        """`handle` returns the seconds after which a message must be retried before others with its key."""
        self.in_hand: dict[int, Message] = {}
        """Messages received and not answered, by sequence."""
        self._handle = handle
        self._choices = choices
        self._concurrency = choices.concurrency
        self._ready: deque[Unit | KeyLane] = deque()
        self._lanes: dict[Hashable, KeyLane] = {}
        self._gathered: list[Message] = []
        self._due: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        self._least = choices.concurrency * max(choices.batch, 1)
        self._window = self._least
        self._since = 0.0
        self._finished = 0

    def room(self) -> int:
        """Return how many more messages may be requested."""
        return self._window - len(self.in_hand)

    def add(self, message: Message) -> None:
        self.in_hand[message.sequence] = message
        if self._choices.batch:
            self._gather(message)
        elif key_of := self._choices.ordered_by:
            self._line_up(key_of(message), message)
        else:
            self._ready.append(message)
        self._start()

    def _line_up(self, key: Hashable, message: Message) -> None:
        if lane := self._lanes.get(key):
            lane.waiting.append(message)
        else:
            self._lanes[key] = lane = KeyLane(key, message)
            self._ready.append(lane)

    def _gather(self, message: Message) -> None:
        self._gathered.append(message)
        if len(self._gathered) >= self._choices.batch:
            self._hand_on()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._choices.within, self._hand_on)

    def _hand_on(self) -> None:
        if self._due:
            self._due.cancel()
            self._due = None
        if self._gathered:
            self._ready.append(self._gathered)
            self._gathered = []
            self._start()

    def _start(self) -> None:
        if not self._closed and self._ready and len(self._running) < self._concurrency:
            task = asyncio.create_task(self._work())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a handler's task ended", exc_info=error)
        self._start()

    async def _work(self) -> None:
        while self._ready:
            item = self._ready.popleft()
            self._start()
            if isinstance(item, KeyLane):
                await self._next_of(item)
            else:
                await self._handle(item)
                self._count(len(item) if isinstance(item, list) else 1)

    async def _next_of(self, lane: KeyLane) -> None:
        after = await self._handle(lane.waiting[0])
        if after is not None:
            asyncio.get_running_loop().call_later(after, self._again, lane)
            return
        lane.waiting.popleft()
        self._count(1)
        if lane.waiting:
            self._ready.append(lane)
        else:
            del self._lanes[lane.key]

    def _again(self, lane: KeyLane) -> None:
        self._ready.append(lane)
        self._start()

    def _count(self, finished: int) -> None:
        """Adapt the number of messages in hand to what is handled in `MOMENT` seconds."""
        self._finished += finished
        if self._finished < self._window:
            return
        now = asyncio.get_running_loop().time()
        took = now - self._since
        if took < MOMENT:
            self._window = min(self._window * 2, MOST)
        elif took > 4 * MOMENT:
            self._window = max(self._window // 2, self._least)
        self._since, self._finished = now, 0

    async def drained(self, within: float) -> None:
        """Finish running handlers; those that take longer are cancelled."""
        self._hand_on()
        try:
            async with asyncio.timeout(within):
                while self._running:
                    await asyncio.wait(self._running)
        except TimeoutError:
            log.warning("%d handlers did not finish within %g s, and are cancelled", len(self._running), within)
        self._closed = True  # no handler starts any more, not even for a retry
        await cancel(list(self._running))
