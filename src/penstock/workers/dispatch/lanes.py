"""Decides which message of a partition may be handled next. Pure, no clock.

Every partition has a lane: its delivered, unfinished messages by stream sequence. Only the lowest one may be handled.
While that one waits for its next attempt, everything above it waits too. When a lane holds too much, its highest
messages are parked: they keep their places without their data, which is read from the stream again later.

A partition that is added to a consumer has a backlog below that consumer's cursor. The backlog is read from the stream
into the lane, in order, and handled like everything else; deliveries of the consumer wait above it until all of it is
read.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from penstock.consume.messages import Message
from penstock.consume.verdicts import GiveUp

REMEMBERED_SEQUENCES = 16_000
"""Minimum number of sequences of finished messages that are remembered: a lost acknowledgement causes redelivery.

A set of up to 19,600 numbers takes half a MiB; beyond, four times as much.
"""
SLOW_SECONDS = 1.0
"""A lane with more seconds of work than this may have to park messages."""
NEGLIGIBLE_SECONDS = 50e-6
"""Handling times below this are ignored: messages this fast never wait for long, however many there are."""
AVERAGE_DECAY = 0.8
"""Weight of the previous value in the average latency."""
NO_LIMIT = 1 << 63
"""Above every sequence."""


class Arrival(Enum):
    """The kind of a delivery."""

    NEW = "new"
    BACK = "back"
    """The message was parked: now its data is back."""
    SAME = "same"
    """The message was waiting in the lane: only the newer delivery can be acknowledged."""
    DONE = "done"
    """The message was finished before: only its acknowledgement is missing."""


class Finished:
    """The latest stream sequences that are done."""

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
        """Drop the oldest sequences when there are too many."""
        if len(self.new) >= self._size:
            self.old, self.new = self.new, set()


class Unburied(NamedTuple):
    """A message that was given up and whose dead letter is not stored yet: its handler is not called again for that."""

    sequence: int
    token: int
    """Fencing token of the owner that gave it up."""
    attempt: int
    letter: GiveUp
    error: BaseException


class Lane:
    """The delivered, unfinished messages of one partition."""

    __slots__ = (
        "alone_through", "backlog", "busy", "floor", "handled", "held", "id", "items", "last_done", "latency", "limit",
        "order", "parked", "read_until", "reading", "rested", "runner", "started", "suspect", "tries", "unburied",
        "unsure", "waits",
    )  # fmt: skip

    def __init__(self, id_: str, floor: int = 0) -> None:
        self.id = id_
        self.floor = floor
        """Everything of the partition up to this sequence is certainly done."""
        self.last_done = floor
        self.handled = 0
        """Messages that are done."""
        self.limit = NO_LIMIT
        """Messages above this sequence wait: the backlog below them was not read yet. 0: reading has not started."""
        self.read_until: int | None = None
        """The end of the backlog: messages above it come from the consumer. None while that is not known."""
        self.backlog: set[int] = set()
        """Sequences that were read from the stream, and that the consumer has not delivered."""
        self.rested: asyncio.Event | None = None
        """Set when no handler of the lane runs any more: the reader of the backlog waits for it."""
        self.held = False
        """Nothing is handled: the partition is being drained, or has not started."""
        self.busy = False
        """A runner handles a message of the lane, or the lane is queued for one."""
        self.runner: asyncio.Task[None] | None = None
        """The runner that handles a message of the lane now."""
        self.items: dict[int, Message | None] = {}
        """Messages by sequence; None for a parked one."""
        self.parked: dict[int, str] = {}
        """Parked messages, by sequence: the reply subject of each."""
        self.reading = False
        """Whether parked messages are being read from the stream."""
        self.tries: dict[int, int] = {}
        """Failed attempts by sequence."""
        self.suspect = False
        """The next message may be what killed the worker that had the partition before."""
        self.alone_through = 0
        """Messages up to this sequence are handled alone, since a batch with them failed."""
        self.waits = False
        """The lowest message waits for its next attempt."""
        self.latency = 0.0
        """Average seconds that a message takes to be handled."""
        self.started: float | None = None
        """When the running handler was called."""
        self.unsure: tuple[int, int] | None = None
        """Sequence and token of a message that was handled while its token became uncertain."""
        self.unburied: Unburied | None = None
        """The lowest message, when it was given up and its dead letter could not be stored."""
        self.order: list[int] = []
        """The sequences of `items` as a heap, lowest first."""

    # -- deliveries ------------------------------------------------------------------------------------------------

    def offer(self, message: Message, finished: Finished) -> Arrival:
        """Add a delivery to the lane."""
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
        """Whether the consumer delivers everything that is not done."""
        return self.limit == NO_LIMIT

    def begin_reading(self, done: int, until: int) -> None:
        """Start reading the backlog between the two sequences from the stream."""
        self.limit, self.read_until, self.rested = max(done, self.floor), until, asyncio.Event()

    def read(self, message: Message, finished: Finished) -> bool:
        """Add the next message of the backlog. If it was also delivered, the delivery is kept: only that one can be
        acknowledged. Returns whether a parked message has its data back."""
        sequence = self.limit = message.sequence
        if sequence in self.items:
            return self.bring_back(message)
        if self.offer(message, finished) is Arrival.NEW:
            self.backlog.add(sequence)
        return False

    def end_reading(self) -> None:
        """Note that all of the backlog was read: deliveries of the consumer follow."""
        self.last_done = max(self.last_done, self.read_until or 0)
        self.limit, self.rested = NO_LIMIT, None

    def has_done(self, through: int) -> bool:
        """Whether the backlog up to this sequence was read, and is done."""
        return self.live and not (self.order and self.order[0] <= through)

    # -- next message ----------------------------------------------------------------------------------------------

    def next(self) -> Message | None:
        """Return the message to handle now, or None."""
        if self.held or self.waits or not self.order or self.order[0] > self.limit:
            return None
        return self.items[self.order[0]]

    def batch(self, most: int) -> list[Message]:
        """Return the messages that may be handled together now, in order; empty when the next must be handled alone."""
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
        """Return the number of the next attempt of a message."""
        return self.tries.get(sequence, 0) + 1

    # -- outcome ---------------------------------------------------------------------------------------------------

    def finish(self, sequence: int) -> str:
        """Mark a message as done; returns its reply subject, if that is known here."""
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
        """Drop messages that are not done; returns the reply subjects of those the server waits for."""
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
        """Drop everything up to `floor`, done by another worker; returns the reply subjects of delivered messages."""
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
        """Record how long a message took."""
        average = self.latency + (1 - AVERAGE_DECAY) * (seconds - self.latency) if self.latency else seconds
        self.latency = average if average > NEGLIGIBLE_SECONDS else 0.0

    # -- progress --------------------------------------------------------------------------------------------------

    @property
    def holding(self) -> int:
        """Number of messages in memory that the consumer has delivered."""
        return len(self.items) - len(self.parked) - len(self.backlog)

    def done(self, cursor: int) -> int:
        """Return the sequence up to which everything of the partition is done.

        `cursor`: the last sequence that the consumer delivered. Everything below it was delivered, so a live lane
        without messages is done up to there.
        """
        if self.limit != NO_LIMIT:  # what the consumer skipped is not done
            return self.order[0] - 1 if self.order and self.order[0] <= self.limit else max(self.limit, self.floor)
        return self.order[0] - 1 if self.order else max(self.last_done, self.floor, cursor)

    def needs_from(self, cursor: int) -> int | None:
        """Return the sequence after which the consumer may resume for this lane; None when that is unknown."""
        return self.done(cursor) if self.live else self.read_until

    def replies(self) -> Iterator[tuple[str, Message | None]]:
        """Yield the reply subjects whose ack deadlines must be extended."""
        for sequence, message in self.items.items():
            if sequence not in self.backlog:
                yield (message.reply, message) if message is not None else (self.parked[sequence], None)

    # -- memory ----------------------------------------------------------------------------------------------------

    def slow(self, now: float) -> bool:
        """Whether messages wait for long here: for a redelivery, for ownership, or for a slow handler."""
        blocked = self.waits or (bool(self.order) and (self.order[0] > self.limit or self.items[self.order[0]] is None))
        stuck = self.started is not None and now - self.started > SLOW_SECONDS
        return self.held or blocked or stuck or self.holding * self.latency > SLOW_SECONDS

    def park(self, keep: int) -> int:
        """Park the highest messages, so that `keep` stay; returns how many. Each loses its data, not its place.

        The lowest one stays: its handler may be running.
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
        """Return the lowest parked sequences, in order, when few are left to handle before them; later ones wait."""
        if not self.parked or self.reading:
            return []
        lowest = min(self.parked)
        before = sum(sequence < lowest for sequence in self.items)
        return sorted(self.parked)[: limit - before] if before <= limit // 2 else []

    def bring_back(self, message: Message) -> bool:
        """Restore a parked message that was read from the stream. False: the lane does not wait for it."""
        if (reply := self.parked.pop(message.sequence, None)) is None:
            return False
        self.items[message.sequence] = message._replace(reply=reply)
        return True


def relieve(lanes: Iterable[Lane], limit: int, now: float) -> int:
    """Free memory: slow lanes that hold more than `limit` messages park some. Returns how many."""
    return sum(lane.park(limit) for lane in lanes if lane.holding > limit and lane.slow(now))
