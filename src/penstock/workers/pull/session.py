"""The pull loop of one connection: keeps pull requests open, takes messages in, and sends acknowledgements in few
writes.

Nothing here waits for a single message. Messages arrive as the event loop reads them, many per read; acknowledgements
are collected for a few milliseconds and sent in one write, together with the next pull requests.

A session starts by resetting its consumers to after what is done. From there on the server delivers everything once, in
stream order, with delivery counts from 1: a gap in the counts means that a delivery went elsewhere. Then the session
ends, and the next one starts in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.consume import messages
from penstock.consume.messages import Message
from penstock.errors import PenstockError, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import PullEvent
from penstock.jetstream.model import ConsumerInfo
from penstock.jetstream.requests import PullRequests
from penstock.wire import aio, deliveries, frames
from penstock.workers.dispatch.dispatcher import MAX_BUFFERED_ACKS

log = logging.getLogger(__name__)


MAX_HELD_SHARE = 0.8
"""Share of `max_ack_pending` that may be held before pulling stops."""
BATCH_SECONDS = 0.5
"""Seconds of handler work that one batch should contain."""
FIRST_BATCH = 50
MIN_BATCH = 4
MESSAGE_OVERHEAD_BYTES = 65_536
"""Bytes that a server counts besides a message's data: its subject, and where to acknowledge it."""
AVERAGE_DECAY = 0.7
"""Weight of the previous value in a moving average."""


class BatchSize:
    """Number of messages to request at once: as many as the handlers finish in `BATCH_SECONDS` seconds."""

    def __init__(self, most: int, first: int = FIRST_BATCH) -> None:
        self.most = max(most, 1)
        self.size = min(max(first, 1), self.most)
        self._rate: float | None = None

    def observe(self, handled: int, seconds: float, idle: bool) -> None:
        """Record how many were handled in `seconds`. `idle`: nothing was left, so it could have been more."""
        if seconds <= 0 or (idle and not handled):
            return
        rate = handled / max(seconds, 0.001)
        if idle:  # an idle period says nothing about the speed of the handlers
            rate = max(rate, self._rate or 0.0)
        self._rate = rate if self._rate is None else AVERAGE_DECAY * self._rate + (1 - AVERAGE_DECAY) * rate
        wanted = int(self._rate * BATCH_SECONDS)
        # At most doubled at a time: one fast measurement must not flood a slow handler.
        self.size = min(max(wanted, MIN_BATCH), 2 * self.size, self.most)
        self.size = max(self.size, min(MIN_BATCH, self.most))


def capacity(max_ack_pending: int) -> int:
    """Return how many messages may be held or requested."""
    return max(1, int(max_ack_pending * MAX_HELD_SHARE))


def bounded(most: int, max_bytes: int, size: float) -> int:
    """Return how many messages of about that size may be held or requested within `max_bytes`."""
    return max(1, min(most, int(max_bytes / size))) if size else most


def next_pull(size: int, asked: int, held: int, room: int) -> int:
    """Return how many messages to request now: 0 while enough are requested, or too many are held.

    `asked`: requested and not received yet. `held`: received and not finished. `room`: maximum of both together.
    """
    if asked > size // 2:
        return 0
    return max(0, min(size - asked, room - held - asked))


def pending_needed(parked: int, max_ack_pending: int, most: int) -> int:
    """Return `max_ack_pending` while `parked` messages wait at the server: they must not use up the others' limit.

    Rounded to powers of two, so that the consumer is rarely updated.
    """
    if parked * 2 <= max_ack_pending:
        return max_ack_pending
    extra = 1 << (2 * parked - 1).bit_length()
    return min(max_ack_pending + extra, max(most, max_ack_pending))


EXPIRES = 30.0  # seconds
HEARTBEAT = 5.0  # seconds


@dataclass(slots=True)
class OpenPull:
    """The pull requests to one consumer."""

    name: str
    requests: PullRequests
    sid: int = 0
    heard: float = 0.0
    """When a frame was last received."""
    delivery: int = 0
    """The consumer sequence of the last delivery."""
    opening: list[Message] | None = field(default_factory=list)
    """Messages received before it was known that the consumer counts from 1; None once that is known."""


MAX_SILENCE = 2.5 * HEARTBEAT
"""Seconds without any frame on an open request after which the request, or its consumer, counts as lost."""
STALE_REQUEST_SECONDS = 2.5
"""Seconds until a server has noticed that the sender of a request is gone."""
ACK_FLUSH_INTERVAL = 0.005
"""Maximum time in seconds that acknowledgements are buffered before they are written."""
ACK_FLUSH_COUNT = 64
"""Buffered acknowledgements are flushed at this count when no handler is runnable."""


class PullInterrupted(Unavailable):
    """The pull loop cannot go on with this connection or consumer; a new one can."""


class DeliveriesMissing(PullInterrupted):
    """Deliveries are missing; a new session gets them redelivered at once."""


class PullSession:
    """Pulls from the consumers of a worker over one connection, until the connection ends."""

    def __init__(
        self,
        connection: aio.Connection,
        jetstream: JetStream,
        stream: str,
        acks: list[str],
        deliver: Callable[[list[Message], int], None],
        begin: Callable[[ConsumerInfo], Awaitable[None]],
        inboxes: dict[str, str],
        cursors: dict[str, int],
        room: Callable[[], int],
        size: Callable[[], int],
        max_bytes: int,
    ) -> None:
        """`acks` are sent and removed from the list. `deliver` takes messages, and how many of them are redeliveries.
        It must not block.

        `begin` makes a consumer deliver everything not done, in order, and count from 1. `inboxes` are those of earlier
        sessions, by consumer: the server may still have requests with them, and what it sends there is for us.
        `cursors` are kept up to date: the highest delivered sequence, by consumer. `room`: messages that may still be
        requested. `size`: of a batch. `max_bytes`: of one request.
        """
        self._connection = connection
        self._jetstream = jetstream
        self._stream = stream
        self._deliver = deliver
        self._begin = begin
        self._inboxes = inboxes
        self._cursors = cursors
        self._room = room
        self._size = size
        self._max_bytes = max_bytes
        self._pulls: dict[str, OpenPull] = {}
        self._by_sid: dict[int, OpenPull] = {}
        connection.skim_with(self._skim)
        self._acks = acks
        self._flush_at: asyncio.TimerHandle | None = None
        self._flushed = 0.0
        self._topping_up = False
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Fails with `PullInterrupted`, or whatever ended the connection."""
        self.stalled = False
        """Whether pulling stopped because too many messages are held."""

    # -- consumers -------------------------------------------------------------------------------------------------

    async def open(self, consumer: ConsumerInfo) -> None:
        """Start pulling from a consumer, at the first message that is not done."""
        if consumer.name in self._pulls:
            return
        if consumer.name not in self._inboxes:
            await self._alone(consumer)
            self._inboxes[consumer.name] = self._connection.settings.new_inbox()
        pull = await self._subscribe(consumer.name)
        try:
            await self._begin(consumer)
        except PenstockError:  # not open: the next call begins again
            self.close_consumer(consumer.name)
            raise
        early, pull.opening = pull.opening or [], None
        firsts = [place for place, message in enumerate(early) if message.delivery == 1]
        if firsts:  # an earlier request of ours has been answered
            self._take(pull, early[firsts[-1] :])
        self.top_up()

    async def _alone(self, consumer: ConsumerInfo) -> None:
        """Wait until the server has dropped the requests of the process that pulled before us, or for as long as that
        can take.

        A server keeps a request up to two seconds after its sender has gone, and sends messages there that are then
        missing here.
        """
        deadline = self._now() + STALE_REQUEST_SECONDS
        while consumer.waiting and self._now() < deadline:
            await asyncio.sleep(STALE_REQUEST_SECONDS / 25)
            consumer = await self._jetstream.consumer_info(self._stream, consumer.name)

    async def _subscribe(self, name: str) -> OpenPull:
        inbox = self._inboxes[name]
        requests = PullRequests(self._jetstream, self._stream, name, inbox)
        pull = self._pulls[name] = OpenPull(name, requests, heard=self._now())
        pull.sid = await self._connection.subscribe(inbox, handler=lambda frame: self._came(pull, frame))
        self._by_sid[pull.sid] = pull
        return pull

    def close_consumer(self, name: str) -> None:
        """Stop pulling from a consumer; the server drops its requests once the inbox is gone."""
        if pull := self._pulls.pop(name, None):
            self._by_sid.pop(pull.sid)
            self._write(frames.unsubscribe(pull.sid))

    @property
    def consumers(self) -> frozenset[str]:
        """The consumers it pulls from."""
        return frozenset(self._pulls)

    # -- receiving -------------------------------------------------------------------------------------------------

    def _skim(self, buffer: bytearray, at: int) -> int:
        """Parse deliveries from the receive buffer, many at a time."""
        for sid, pull in self._by_sid.items():
            found, at = deliveries.take(buffer, at, sid, Message, datetime.now(UTC))
            if found:
                self._take(pull, found)
        return at

    def _take(self, pull: OpenPull, found: list[Message]) -> None:
        if self.ended.done():
            return
        if pull.opening is not None:
            pull.opening += found
            return
        first, last = found[0].delivery, found[-1].delivery
        if first == pull.delivery + 1 and last - first == len(found) - 1:
            pull.requests.received(len(found))
            pull.delivery = last
            self._hand_on(pull, found)
        else:
            self._take_one_by_one(pull, found)
        pull.heard = self._now()
        if pull.requests.asked <= self._size() // 2:
            self._soon()

    def _take_one_by_one(self, pull: OpenPull, found: list[Message]) -> None:
        """Take messages up to the first gap in the delivery counts."""
        for message in found:
            pull.requests.received(1)
            if message.delivery != pull.delivery + 1:
                missing = abs(message.delivery - pull.delivery - 1)
                self.fail(DeliveriesMissing(f"{missing} deliveries of consumer {pull.name!r} went elsewhere"))
                return
            pull.delivery = message.delivery
            self._hand_on(pull, [message])

    def _hand_on(self, pull: OpenPull, found: list[Message]) -> None:
        cursor = self._cursors.get(pull.name, 0)
        again = sum(message.sequence <= cursor for message in found) if found[0].sequence <= cursor else 0
        self._deliver(found, again)
        self._cursors[pull.name] = max(cursor, found[-1].sequence)

    def _came(self, pull: OpenPull, frame: frames.Message) -> None:
        """Handle a frame that is not a regular delivery."""
        pull.heard = self._now()
        message = messages.delivered(frame, datetime.now(UTC))
        if message is None:
            self._status(pull, frame)
        else:
            self._take(pull, [message])
        self._soon()

    def _status(self, pull: OpenPull, frame: frames.Message) -> None:
        status = pull.requests.status(frame)
        if status is None or not (status.is_over or status.event is PullEvent.HEARTBEAT):
            self.fail(PullInterrupted(f"consumer {pull.name!r} answers {status or frame.subject}"))

    def fail(self, error: PenstockError) -> None:
        """End the session."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def check(self) -> None:
        """Called periodically: end the session when a request is open and no frame arrives."""
        now = self._now()
        for pull in self._pulls.values():
            if pull.requests.asked and now - pull.heard > MAX_SILENCE:
                self.fail(PullInterrupted(f"consumer {pull.name!r} has been silent for {MAX_SILENCE:g} s"))
            elif not pull.requests.asked:
                pull.heard = now
        if not self._connection.connected:
            self.fail(PullInterrupted("the connection is lost"))

    # -- requesting ------------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Request more once everything from this read has been taken in."""
        if not self._topping_up:
            self._topping_up = True
            self._loop.call_soon(self._top_up_now)

    def _top_up_now(self) -> None:
        if self._topping_up:  # otherwise acknowledgements were sent meanwhile, with the requests
            self.top_up()

    def top_up(self) -> None:
        """Request as many messages from each consumer as there is room for."""
        if requests := self._requests():
            self._write(requests)

    def _requests(self) -> bytes:
        self._topping_up = False
        requests, room = b"", self._room() - sum(pull.requests.asked for pull in self._pulls.values())
        for pull in [pull for pull in self._pulls.values() if pull.opening is None]:
            asked = pull.requests.asked
            count = next_pull(self._size(), asked, 0, room + asked)
            if count > 0:
                requests += pull.requests.request(
                    count, max_bytes=self._max_bytes, expires=EXPIRES, heartbeat=HEARTBEAT
                )
                room -= count
        self.stalled = room <= 0 and not requests
        return requests

    # -- acknowledging ---------------------------------------------------------------------------------------------

    def acked(self) -> None:
        """Acknowledgements were buffered: send them soon."""
        if len(self._acks) >= MAX_BUFFERED_ACKS:
            self.flush()
        elif self._flush_at is None:
            self._flush_at = self._loop.call_later(ACK_FLUSH_INTERVAL, self.flush)

    def settled(self) -> None:
        """No message can be handled now: send buffered acknowledgements, unless it would be one of many small writes.

        A later wakeup costs more than a write.
        """
        if len(self._acks) >= ACK_FLUSH_COUNT or self._now() - self._flushed >= ACK_FLUSH_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Send the buffered acknowledgements."""
        if self._flush_at:
            self._flush_at.cancel()
            self._flush_at = None
        if self._acks:
            self._flushed = self._now()
            data = messages.acks(self._acks) + self._requests()
            self._acks.clear()
            self._write(data)

    def write(self, data: bytes) -> None:
        """Send other answers, after the buffered acknowledgements."""
        self.flush()
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._connection.write(data)
        except PenstockError as exc:  # the connection has ended; what was not answered is redelivered
            self.fail(exc)

    def close(self) -> None:
        """Send buffered acknowledgements, and stop requesting."""
        self.flush()
        for name in list(self._pulls):
            self.close_consumer(name)
        if not self.ended.done():
            self.ended.set_result(None)
        elif not self.ended.cancelled():
            self.ended.exception()  # mark the exception as retrieved

    def _now(self) -> float:
        return self._loop.time()
