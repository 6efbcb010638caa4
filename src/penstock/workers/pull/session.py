"""One connection's pull loop: requests that keep the server busy, messages in, acknowledgements out in few writes.

Nothing here waits for a single message. Messages come as the event loop reads them, many a read; acknowledgements are
collected for a few milliseconds and sent in one piece, together with the next pull requests.

A session begins with its consumers reset to behind what is done. From there on the server delivers everything once, in
the order of the stream, and counts from 1: a number that does not follow the last says that something went elsewhere.
Then the session ends, and the next one begins in the same way.
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
from penstock.jetstream.consumer import PullEvent, next_verb, pull_request, pull_status
from penstock.jetstream.model import ConsumerInfo
from penstock.wire import aio, deliveries, frames
from penstock.workers.dispatch.dispatcher import MAX_BUFFERED_ACKS

log = logging.getLogger(__name__)


MAX_HELD_SHARE = 0.8
"""Share of `max_ack_pending` that may wait here before pulling stops."""
BATCH_SECONDS = 0.5
"""Seconds of work that one batch should be."""
FIRST_BATCH = 50
MIN_BATCH = 4
MESSAGE_OVERHEAD_BYTES = 65_536
"""Bytes that a server counts besides a message's data: its subject, and where to acknowledge it."""
AVERAGE_DECAY = 0.7
"""Weight of the previous value in a moving average."""


class BatchSize:
    """Messages to ask for at once: as many as the handlers finish in `BATCH_SECONDS` seconds."""

    def __init__(self, most: int, first: int = FIRST_BATCH) -> None:
        self.most = max(most, 1)
        self.size = min(max(first, 1), self.most)
        self._rate: float | None = None

    def observe(self, handled: int, seconds: float, idle: bool) -> None:
        """So many were handled in so long. `idle`: there was nothing left to handle, so it could have been more."""
        if seconds <= 0 or (idle and not handled):
            return
        rate = handled / max(seconds, 0.001)
        if idle:  # a lull says nothing about how fast the handlers are
            rate = max(rate, self._rate or 0.0)
        self._rate = rate if self._rate is None else AVERAGE_DECAY * self._rate + (1 - AVERAGE_DECAY) * rate
        wanted = int(self._rate * BATCH_SECONDS)
        # At most doubled at a time: one lucky moment must not flood a slow handler.
        self.size = min(max(wanted, MIN_BATCH), 2 * self.size, self.most)
        self.size = max(self.size, min(MIN_BATCH, self.most))


def capacity(max_ack_pending: int) -> int:
    """Messages that may wait here or be under way to here."""
    return max(1, int(max_ack_pending * MAX_HELD_SHARE))


def bounded(most: int, max_bytes: int, size: float) -> int:
    """Messages of about that size that may wait here or be under way to here, so that they stay within `max_bytes`."""
    return max(1, min(most, int(max_bytes / size))) if size else most


def request_bytes(max_bytes: int, max_payload: int) -> int:
    """Bytes that one request may bring: two of them may be open before it is known how large the messages are.

    One message has room in any case, or the server would refuse every request.
    """
    return max(max_bytes // 4, max_payload + MESSAGE_OVERHEAD_BYTES)


def next_pull(size: int, asked: int, held: int, room: int) -> int:
    """How many messages to ask for now: 0 while enough are under way, or too many wait here.

    `asked`: asked for and not come yet. `held`: here and not finished. `room`: the most of both together.
    """
    if asked > size // 2:
        return 0
    return max(0, min(size - asked, room - held - asked))


def pending_needed(parked: int, max_ack_pending: int, most: int) -> int:
    """`max_ack_pending` for the server while `parked` messages wait there: they must not use up the others' budget.

    In powers of two, so that the consumer is seldom changed.
    """
    if parked * 2 <= max_ack_pending:
        return max_ack_pending
    extra = 1 << (2 * parked - 1).bit_length()
    return min(max_ack_pending + extra, max(most, max_ack_pending))


EXPIRES = 30.0  # seconds
HEARTBEAT = 5.0  # seconds


@dataclass(slots=True)
class OpenPull:
    """What was asked of one consumer."""

    name: str
    inbox: str
    sid: int = 0
    asked: int = 0
    """Messages asked for and not come yet."""
    heard: float = 0.0
    """When something last came."""
    delivery: int = 0
    """The number of the last delivery."""
    opening: list[Message] | None = field(default_factory=list)
    """What came before it was known that the consumer counts from 1; None once that is known."""

    def request(self, subject: str, count: int, max_bytes: int) -> bytes:
        """Ask for so many messages more, and for no more bytes than that."""
        ask = pull_request(count, max_bytes=max_bytes, expires=EXPIRES, heartbeat=HEARTBEAT)
        return frames.publish(subject, ask, reply=self.inbox)


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
    """Deliveries are missing; a new session has them delivered again, at once."""


class PullSession:
    """Pulls from the consumers of a worker over one connection, until that ends."""

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
        """`acks` are to be sent, and taken out. `deliver` takes messages, and how many of them have
        come before. It must not wait.

        `begin` has a consumer deliver whatever is not done, in order, and count from 1. `inboxes` are those of earlier
        sessions, by consumer: the server may still have requests with them, and what it sends there is for us.
        `cursors` are kept up to date: the highest sequence that came, by consumer. `room`: messages that may still
        come. `size`: of a batch. `max_bytes`: that one request may bring.
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
        """Whether pulling stopped because too much waits here."""

    # -- consumers -------------------------------------------------------------------------------------------------

    async def open(self, consumer: ConsumerInfo) -> None:
        """Begin to pull from a consumer, with the first message that is not done."""
        if consumer.name in self._pulls:
            return
        if consumer.name not in self._inboxes:
            await self._alone(consumer)
            self._inboxes[consumer.name] = self._connection.settings.new_inbox()
        pull = await self._subscribe(consumer.name)
        await self._begin(consumer)
        early, pull.opening = pull.opening or [], None
        firsts = [place for place, message in enumerate(early) if message.delivery == 1]
        if firsts:  # an earlier request of ours was answered already
            self._take(pull, early[firsts[-1] :])
        self.top_up()

    async def _alone(self, consumer: ConsumerInfo) -> None:
        """Wait until the server has forgotten the requests of whoever pulled before us, or for as long as that takes.

        A server takes a request for alive up to two seconds after its sender has gone, and goes on to send there what
        is then missing here.
        """
        deadline = self._now() + STALE_REQUEST_SECONDS
        while consumer.waiting and self._now() < deadline:
            await asyncio.sleep(STALE_REQUEST_SECONDS / 25)
            consumer = await self._jetstream.consumer_info(self._stream, consumer.name)

    async def _subscribe(self, name: str) -> OpenPull:
        inbox = self._inboxes[name]
        pull = self._pulls[name] = OpenPull(name, inbox, heard=self._now())
        pull.sid = await self._connection.subscribe(inbox, handler=lambda frame: self._came(pull, frame))
        self._by_sid[pull.sid] = pull
        return pull

    def close_consumer(self, name: str) -> None:
        """Pull no more from it; what was asked for is dropped by the server once the inbox is gone."""
        if pull := self._pulls.pop(name, None):
            self._by_sid.pop(pull.sid)
            self._write(frames.unsubscribe(pull.sid))

    @property
    def consumers(self) -> frozenset[str]:
        """Whom it pulls from."""
        return frozenset(self._pulls)

    # -- what comes ------------------------------------------------------------------------------------------------

    def _skim(self, buffer: bytearray, at: int) -> int:
        """Take the deliveries off what was received, many at a time."""
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
            pull.asked -= len(found)
            pull.delivery = last
            self._hand_on(pull, found)
        else:
            self._take_one_by_one(pull, found)
        pull.heard = self._now()
        if pull.asked <= self._size() // 2:
            self._soon()

    def _take_one_by_one(self, pull: OpenPull, found: list[Message]) -> None:
        """Somewhere the numbers of the deliveries do not follow each other: what comes before that is taken."""
        for message in found:
            pull.asked -= 1
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
        """Take whatever is not a usual delivery."""
        pull.heard = self._now()
        message = messages.delivered(frame, datetime.now(UTC))
        if message is None:
            self._status(pull, frame)
        else:
            self._take(pull, [message])
        self._soon()

    def _status(self, pull: OpenPull, frame: frames.Message) -> None:
        status = pull_status(frame)
        if status is None or not (status.is_over or status.event is PullEvent.HEARTBEAT):
            self.fail(PullInterrupted(f"consumer {pull.name!r} answers {status or frame.subject}"))
        elif status.is_over:
            refused = status.code == 409 and not status.left  # as a whole: nothing of it is open
            pull.asked = 0 if refused else max(0, pull.asked - status.left)

    def fail(self, error: PenstockError) -> None:
        """End the session."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def check(self) -> None:
        """Called from time to time: end the session when a request is open and nothing is heard."""
        now = self._now()
        for pull in self._pulls.values():
            if pull.asked > 0 and now - pull.heard > MAX_SILENCE:
                self.fail(PullInterrupted(f"consumer {pull.name!r} has been silent for {MAX_SILENCE:g} s"))
            elif pull.asked <= 0:
                pull.heard = now
        if not self._connection.connected:
            self.fail(PullInterrupted("the connection is lost"))

    # -- what is asked ---------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Ask for more once all that came with this read has been taken in."""
        if not self._topping_up:
            self._topping_up = True
            self._loop.call_soon(self._top_up_now)

    def _top_up_now(self) -> None:
        if self._topping_up:  # else acknowledgements were sent meanwhile, and the requests with them
            self.top_up()

    def top_up(self) -> None:
        """Ask each consumer for as much as there is room for."""
        if requests := self._requests():
            self._write(requests)

    def _requests(self) -> bytes:
        self._topping_up = False
        requests, room = b"", self._room() - sum(pull.asked for pull in self._pulls.values())
        for pull in [pull for pull in self._pulls.values() if pull.opening is None]:
            count = next_pull(self._size(), max(pull.asked, 0), 0, room + pull.asked)
            if count > 0:
                requests += self._request(pull, count)
                pull.asked += count
                room -= count
        self.stalled = room <= 0 and not requests
        return requests

    def _request(self, pull: OpenPull, count: int) -> bytes:
        subject = self._jetstream.subject(next_verb(self._stream, pull.name))
        return pull.request(subject, count, self._max_bytes)

    # -- what is answered ------------------------------------------------------------------------------------------

    def acked(self) -> None:
        """There are acknowledgements: send them, soon."""
        if len(self._acks) >= MAX_BUFFERED_ACKS:
            self.flush()
        elif self._flush_at is None:
            self._flush_at = self._loop.call_later(ACK_FLUSH_INTERVAL, self.flush)

    def settled(self) -> None:
        """Nothing more can be handled now: send what waits, unless it would be one of many small writes.

        To be woken for it later costs more than a write.
        """
        if len(self._acks) >= ACK_FLUSH_COUNT or self._now() - self._flushed >= ACK_FLUSH_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Send the acknowledgements that wait."""
        if self._flush_at:
            self._flush_at.cancel()
            self._flush_at = None
        if self._acks:
            self._flushed = self._now()
            data = messages.acks(self._acks) + self._requests()
            self._acks.clear()
            self._write(data)

    def write(self, data: bytes) -> None:
        """Send other answers, after the acknowledgements that wait."""
        self.flush()
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._connection.write(data)
        except PenstockError as exc:  # the connection has ended; what was not answered comes again
            self.fail(exc)

    def close(self) -> None:
        """Send what waits, and stop asking."""
        self.flush()
        for name in list(self._pulls):
            self.close_consumer(name)
        if not self.ended.done():
            self.ended.set_result(None)
        elif not self.ended.cancelled():
            self.ended.exception()  # seen, or nobody cares any more

    def _now(self) -> float:
        return self._loop.time()
