"""Order within a partition, partitions side by side: which message may be handled next. Pure, no clock.

Every partition has a lane: the messages that came and are not done, by stream sequence. Only its lowest one may be
handled. While that one waits for its next try, everything above it waits too. Where a lane holds too much, its highest
messages are put aside: they keep their places without their data, which is read from the stream again later.

A partition that is added to a consumer has a backlog below that consumer's cursor. It is read from the stream into the
lane, in order, and handled like everything else; what the consumer delivers waits above it until all of it is read.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator
from enum import Enum

from penstock.consume.messages import Message

REMEMBERED_SEQUENCES = 16_000
"""Sequences of finished messages that are remembered, at least: a lost acknowledgement brings them once more.

Up to 19,600 a set of numbers takes half a MiB; beyond, four times as much.
"""
SLOW_SECONDS = 1.0
"""Seconds of work in a lane beyond which it may have to put messages aside."""
NEGLIGIBLE_SECONDS = 50e-6
"""Seconds for a message that are not worth counting: however many wait, they do not wait for long."""
AVERAGE_DECAY = 0.8
"""Weight of the previous value in the average latency."""
NO_LIMIT = 1 << 63
"""Above every sequence."""


class Arrival(Enum):
    """What a delivery turned out to be."""

    NEW = "new"
    BACK = "back"
    """Its place was kept without its data: now it has both."""
    SAME = "same"
    """It was waiting here: only the newer delivery can be acknowledged."""
    DONE = "done"
    """It was finished before: only its acknowledgement is missing."""


class Finished:
    """Stream sequences that are done, the latest of them."""

    def __init__(self, remembered: int = REMEMBERED_SEQUENCES) -> None:
        self._size = remembered
        self.new: set[int] = set()
        self.old: set[int] = set()

    def add(self, sequence: int) -> None:
        self.new.add(sequence)
        self.turn()

    def __contains__(self, sequence: int) -> bool:
        return sequence in self.new or sequence in self.old

    def turn(self) -> None:
        """Forget the oldest, when there are enough."""
        if len(self.new) >= self._size:
            self.old, self.new = self.new, set()


class Lane:
    """The messages of one partition that came and are not done."""

    __slots__ = (
        "alone_through", "backlog", "busy", "floor", "handled", "held", "id", "items", "last_done", "latency", "limit",
        "order", "parked", "read_until", "reading", "rested", "started", "suspect", "tries", "unsure", "waits",
    )  # fmt: skip

    def __init__(self, id_: str, floor: int = 0) -> None:
        self.id = id_
        self.floor = floor
        """Everything of the partition up to this sequence is done, for certain."""
        self.last_done = floor
        self.handled = 0
        """Messages that are done."""
        self.limit = NO_LIMIT
        """Messages above this sequence wait: the backlog below them has not been read. 0: it has not begun."""
        self.read_until: int | None = None
        """The end of the backlog: what lies above comes from the consumer. None while that is not known."""
        self.backlog: set[int] = set()
        """Sequences that were read from the stream, and that the consumer has not delivered."""
        self.rested: asyncio.Event | None = None
        """Set when nobody is at work here any more: whoever reads the backlog waits for it."""
        self.held = False
        """Nothing is handled: the partition is being drained, or has not begun."""
        self.busy = False
        """Somebody handles a message of it, or it waits in line for that."""
        self.items: dict[int, Message | None] = {}
        """By sequence; None while only the place is kept."""
        self.parked: dict[int, str] = {}
        """Put aside for lack of room: where to acknowledge each."""
        self.reading = False
        """Whether messages that were put aside are being read from the stream."""
        self.tries: dict[int, int] = {}
        """Tries of a sequence that have ended badly."""
        self.suspect = False
        """The next message may be what killed the worker that had the partition before."""
        self.alone_through = 0
        """Up to there messages are handled by themselves, since a batch with them failed."""
        self.waits = False
        """The lowest message waits for its next try."""
        self.latency = 0.0
        """Seconds that a message takes here, on average."""
        self.started: float | None = None
        """When the handler that is running was called."""
        self.unsure: tuple[int, int] | None = None
        """Handled under a token while it became uncertain whether that still counts: the sequence, and the token."""
        self.order: list[int] = []
        """The sequences of `items`, as a heap: the lowest comes first."""

    # -- what comes ------------------------------------------------------------------------------------------------

    def offer(self, message: Message, finished: Finished) -> Arrival:
        """Take a delivery to its place."""
        sequence, items = message.sequence, self.items
        if sequence in items:
            known = items[sequence] is not None and sequence not in self.backlog
            items[sequence] = message
            self.parked.pop(sequence, None)
            self.backlog.discard(sequence)
            return Arrival.SAME if known else Arrival.BACK
        if sequence <= self.floor or sequence in finished.new or sequence in finished.old:
            return Arrival.DONE
        items[sequence] = message
        heapq.heappush(self.order, sequence)
        return Arrival.NEW

    # -- the backlog -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether everything that is not done comes from the consumer."""
        return self.limit == NO_LIMIT

    def begin_reading(self, done: int, until: int) -> None:
        """What lies between the two sequences is going to be read from the stream."""
        self.limit, self.read_until, self.rested = max(done, self.floor), until, asyncio.Event()

    def read(self, message: Message, finished: Finished) -> bool:
        """Take the next message of the backlog to its place. A delivery of it that came is kept: only that one can be
        acknowledged. Returns whether a message that was put aside has its data back."""
        sequence = self.limit = message.sequence
        if sequence in self.items:
            return self.bring_back(message)
        if self.offer(message, finished) is Arrival.NEW:
            self.backlog.add(sequence)
        return False

    def end_reading(self) -> None:
        """All of the backlog was read: what the consumer delivers follows."""
        self.last_done = max(self.last_done, self.read_until or 0)
        self.limit, self.rested = NO_LIMIT, None

    def has_done(self, through: int) -> bool:
        """Whether the backlog up to there was read, and is done."""
        return self.live and not (self.order and self.order[0] <= through)

    # -- what is next ----------------------------------------------------------------------------------------------

    def next(self) -> Message | None:
        """The message to handle now, if there is one."""
        if self.held or self.waits or not self.order or self.order[0] > self.limit:
            return None
        return self.items[self.order[0]]

    def batch(self, most: int) -> list[Message]:
        """The messages that may be handled together now, in order; none when the next has to be handled by itself."""
        if self.held or self.waits or self.suspect or self.unsure or not self.order:
            return []
        found: list[Message] = []
        for sequence in heapq.nsmallest(most, self.order):
            message = self.items[sequence]
            if message is None or sequence in self.tries or not self.alone_through < sequence <= self.limit:
                break
            found.append(message)
        return found

    def attempt(self, sequence: int) -> int:
        """Which try of the message the next one is."""
        return self.tries.get(sequence, 0) + 1

    # -- what became of it -----------------------------------------------------------------------------------------

    def finish(self, sequence: int) -> str:
        """It is done; returns where to acknowledge it, if that is known here."""
        if self.order and self.order[0] == sequence and not (self.parked or self.tries or self.backlog):
            heapq.heappop(self.order)
            message = self.items.pop(sequence)
        elif sequence in self.items:
            message = self._drop(sequence)
        else:
            return ""
        if sequence > self.last_done:
            self.last_done = sequence
        return message.reply if message else ""

    def forget(self, sequences: Iterable[int]) -> list[str]:
        """Let these go without having done them; returns where the server waits for an answer about each."""
        replies = []
        for sequence in list(sequences):
            if sequence not in self.items:
                continue
            parked = self.parked.get(sequence)
            message = self._drop(sequence)
            if reply := (message.reply if message else parked):
                replies.append(reply)
        return replies

    def advance(self, floor: int) -> list[str]:
        """Everything up to there is done elsewhere; returns where to acknowledge what came of it."""
        self.floor = max(self.floor, floor)
        self.last_done = max(self.last_done, floor)
        return self.forget([s for s in self.items if s <= floor])

    def _drop(self, sequence: int) -> Message | None:
        message = self.items.pop(sequence)
        if self.order[0] == sequence:
            heapq.heappop(self.order)
            self.waits = False
        else:
            self.order.remove(sequence)
            heapq.heapify(self.order)
        self.parked.pop(sequence, None)
        self.tries.pop(sequence, None)
        self.backlog.discard(sequence)
        return message

    def took(self, seconds: float) -> None:
        """A message took so long."""
        average = self.latency + (1 - AVERAGE_DECAY) * (seconds - self.latency) if self.latency else seconds
        self.latency = average if average > NEGLIGIBLE_SECONDS else 0.0

    # -- how far it is ---------------------------------------------------------------------------------------------

    @property
    def holding(self) -> int:
        """Messages here with their data that the consumer has delivered."""
        return len(self.items) - len(self.parked) - len(self.backlog)

    def done(self, cursor: int) -> int:
        """Everything of the partition up to this sequence is done.

        `cursor`: the last sequence that came from the consumer. Whatever lies below it has come, so a live lane that
        has nothing left is done up to there.
        """
        if self.limit != NO_LIMIT:  # what the consumer has passed over is not done
            return self.order[0] - 1 if self.order and self.order[0] <= self.limit else max(self.limit, self.floor)
        return self.order[0] - 1 if self.order else max(self.last_done, self.floor, cursor)

    def needs_from(self, cursor: int) -> int | None:
        """The consumer may go on behind this sequence, as far as this lane is concerned; None when that is unknown."""
        return self.done(cursor) if self.live else self.read_until

    def replies(self) -> Iterator[tuple[str, Message | None]]:
        """Where to ask the server for patience."""
        for sequence, message in self.items.items():
            if sequence not in self.backlog:
                yield (message.reply, message) if message is not None else (self.parked[sequence], None)

    # -- room ------------------------------------------------------------------------------------------------------

    def slow(self, now: float) -> bool:
        """Whether what waits here waits for long: for a redelivery, for its owner, or for a slow handler."""
        blocked = self.waits or (bool(self.order) and (self.order[0] > self.limit or self.items[self.order[0]] is None))
        stuck = self.started is not None and now - self.started > SLOW_SECONDS
        return self.held or blocked or stuck or self.holding * self.latency > SLOW_SECONDS

    def park(self, keep: int) -> int:
        """Put the highest messages aside, so that `keep` stay; says how many were. Each loses its data, not its place.

        The lowest one stays: it may be under way.
        """
        here = (s for s, m in self.items.items() if m is not None and s not in self.backlog)
        aside = sorted(here, reverse=True)[: -max(keep, 1)]
        for sequence in aside:
            message = self.items[sequence]
            if message is not None:
                self.parked[sequence] = message.reply
                self.items[sequence] = None
        return len(aside)

    def wanted_back(self, limit: int) -> list[int]:
        """Sequences that were put aside and may come back now that there is room: the lowest, in order."""
        if not self.parked or self.reading or self.holding > limit // 2:
            return []
        return sorted(self.parked)[: limit - self.holding]

    def bring_back(self, message: Message) -> bool:
        """A message that was put aside was read from the stream. False: nobody waits for it."""
        if (reply := self.parked.pop(message.sequence, None)) is None:
            return False
        self.items[message.sequence] = message._replace(reply=reply)
        return True


def relieve(lanes: Iterable[Lane], limit: int, now: float) -> int:
    """Make room: lanes that hold more than `limit` and are slow put messages aside. Says how many were."""
    return sum(lane.park(limit) for lane in lanes if lane.holding > limit and lane.slow(now))
