"""The worker's pull loop: runs one session after the other, routes messages to lanes, and does periodic maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta

from penstock import subjects
from penstock.consume import messages
from penstock.consume.dead_letters import GivenUpBy, keep
from penstock.consume.messages import Message, MessageContext
from penstock.consume.metrics import WorkerMetrics
from penstock.consume.verdicts import GiveUp
from penstock.deadletter import headers as deadletter_headers
from penstock.deadletter import letters
from penstock.errors import ConfigError, PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, Retention
from penstock.retry import Tries, always
from penstock.wire import aio
from penstock.workers.dispatch.dispatcher import Dispatcher, LongRunning
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.partitions import Partition
from penstock.workers.pull.consumer import WorkerConsumer
from penstock.workers.pull.session import (
    AVERAGE_DECAY,
    BATCH_SECONDS,
    MESSAGE_OVERHEAD_BYTES,
    BatchSize,
    DeliveriesMissing,
    PullSession,
    bounded,
    capacity,
    pending_needed,
)

log = logging.getLogger(__name__)


MAX_REMEMBERED_SUBJECTS = 100_000
"""Maximum number of subjects below wildcards whose lane is cached."""


class Routes:
    """Finds the lane of a message by its subject."""

    def __init__(self) -> None:
        self.literal: dict[str, Lane] = {}
        """Lanes of subjects without wildcards: most are found here."""
        self._wild: list[tuple[str, Lane]] = []
        self._found: dict[str, Lane | None] = {}

    def add(self, partition: Partition, lane: Lane) -> None:
        """Route the partition's subjects to this lane, except those that another one has."""
        for subject in partition.subjects:
            if subjects.is_literal(subject):
                self.literal.setdefault(subject, lane)
            else:
                self._wild.append((subject, lane))
        self._found.clear()

    def remove(self, partition: Partition, gone: Lane) -> None:
        """Remove the routes of a partition."""
        for subject in partition.subjects:
            if self.literal.get(subject) is gone:
                del self.literal[subject]
        self._wild = [(filter_, lane) for filter_, lane in self._wild if lane is not gone]
        self._found.clear()

    def lane(self, subject: str) -> Lane | None:
        """Return the lane of a subject; None when this worker does not handle it."""
        if (lane := self.literal.get(subject)) or not self._wild:
            return lane
        if subject not in self._found:
            if len(self._found) >= MAX_REMEMBERED_SUBJECTS:
                self._found.clear()
            self._found[subject] = _first(self._wild, subject)
        return self._found[subject]


def _first(wild: Iterable[tuple[str, Lane]], subject: str) -> Lane | None:
    return next((lane for filter_, lane in wild if subjects.matches(filter_, subject)), None)


class NoDeadLetters(ConfigError):
    """A message should be given up, and no dead-letter subject is configured."""


class SessionAnswers:
    """Answers over the current session; messages finished without one are acknowledged by the next."""

    def __init__(
        self,
        connection: aio.Connection,
        stream: str,
        reader: str,
        dlq: str | None,
        on_trial: Callable[[str, int], Awaitable[None]],
        worker: str | None = None,
    ) -> None:
        """`reader` names the whole group in dead letters: their replay goes to the current owner of the partition.

        `worker`: a worker without a group; it gives up for itself alone, whatever other worker has that name.
        """
        self.session: PullSession | None = None
        self._on_trial = on_trial
        self.acks: list[str] = []
        """Finished messages to be acknowledged; all sessions take from here, so none is lost with a session."""
        self._connection = connection
        self._stream = stream
        self._reader = reader
        self._dlq = dlq
        self._worker = worker

    def acked(self) -> None:
        if self.session:
            self.session.acked()

    def settled(self) -> None:
        if self.session:
            self.session.settled()

    def again(self, message: Message, delay: float) -> float:
        return delay

    async def on_trial(self, partition_id: str, sequence: int) -> None:
        await self._on_trial(partition_id, sequence)

    async def bury(self, message: Message, context: MessageContext, letter: GiveUp, error: BaseException) -> None:
        """Store the message with its reason below the dead-letter subject."""
        if self._dlq is None:
            raise NoDeadLetters(f"{letter.reason}; name a subject for dead letters (dlq) to get past such a message")
        reader = GivenUpBy(self._stream, self._reader, self._worker)
        await keep(self._connection, self._dlq, reader, message, context.delivery_count, letter, error)


LOOK_INTERVAL = 0.1
"""Seconds between two maintenance passes while messages wait in memory."""
IDLE_LOOK_INTERVAL = 0.5
"""The same while none wait: more wakeups would cost an idle worker more than its messages do."""
BUSY_MESSAGES = 500
"""Messages since the last pass after which the next one comes soon, so that batch sizes follow the handlers."""
EXTENSIONS_PER_ACK_WAIT = 3
"""How often the ack deadline of a waiting message is extended within one `ack_wait`."""


class Upkeep:
    """Periodic maintenance of a worker: extends ack deadlines, resumes reclaimed partitions, adjusts pull capacity."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        consumer: WorkerConsumer,
        options: WorkerOptions,
        read: Callable[[Lane, list[int]], object],
    ) -> None:
        """`read` starts to read a lane's parked messages from the stream."""
        self.batch = BatchSize(capacity(consumer.options.max_ack_pending))
        self._dispatcher = dispatcher
        self._consumer = consumer
        self._options = options
        self._read = read
        self._allowed = consumer.options.max_ack_pending
        self._touch_every = consumer.options.ack_wait / EXTENSIONS_PER_ACK_WAIT
        self._touched = self._observed = time.monotonic()
        self._handled = self._seen = 0
        self.long_running = LongRunning()
        self._message_size = 0.0
        """Approximate bytes of a message; rises at once to the size of received ones, and falls slowly."""

    def room(self) -> int:
        """Return how many more messages may be requested."""
        return self._most - self._dispatcher.held

    @property
    def _most(self) -> int:
        most = capacity(self._consumer.options.max_ack_pending)
        return bounded(most, self._options.max_bytes, self._message_size)

    @property
    def _kept(self) -> int:
        """Messages that a slow partition may hold: fewer if they are large, so that it leaves room for others."""
        large = self._most < capacity(self._consumer.options.max_ack_pending)
        return min(self._options.max_in_flight, max(1, self._most // 4)) if large else self._options.max_in_flight

    def request_bytes(self, max_payload: int) -> int:
        """Return `max_bytes` of one pull request: two may be open before the size of the messages is known.

        One message always fits, or the server would refuse every request.
        """
        return max(self._options.max_bytes // 4, max_payload + MESSAGE_OVERHEAD_BYTES)

    def came(self, batch: list[Message]) -> None:
        """Update the average message size."""
        size = sum([len(message.data) for message in batch]) / len(batch)
        self._message_size = max(size, AVERAGE_DECAY * self._message_size)

    def pause(self, session: PullSession | None) -> float:
        """Return the seconds until the next pass."""
        since, self._seen = self._dispatcher.handled - self._seen, self._dispatcher.handled
        waits = self._dispatcher.held or self._dispatcher.some_parked
        return LOOK_INTERVAL if waits or since > BUSY_MESSAGES or session is None else IDLE_LOOK_INTERVAL

    async def look(self, session: PullSession) -> None:
        """Do one maintenance pass. Raises when the server refuses a request."""
        self._dispatcher.owners_changed()
        self._observe()
        self.long_running.look(self._dispatcher.lanes.values())
        session.check()
        if session.stalled:
            self._dispatcher.relieve(self._kept)
        parked = self._dispatcher.parked
        if parked:
            self._bring_back()
        self._extend_ack_deadlines(session)
        session.top_up()
        await self._widen(parked)

    def _bring_back(self) -> None:
        for lane in self._dispatcher.lanes.values():
            if back := lane.wanted_back(self._kept):
                lane.reading = True
                self._read(lane, back)

    def _observe(self) -> None:
        """Adapt the batch size to the speed of the handlers."""
        now, handled = time.monotonic(), self._dispatcher.handled
        if now - self._observed >= BATCH_SECONDS / 2:
            self.batch.observe(handled - self._handled, now - self._observed, idle=self._dispatcher.held == 0)
            self._observed, self._handled = now, handled

    def _extend_ack_deadlines(self, session: PullSession) -> None:
        now = time.monotonic()
        if now - self._touched < self._touch_every:
            return
        self._touched = now
        old = datetime.now(UTC) - timedelta(seconds=self._touch_every / 2)
        waiting = [
            reply
            for lane in self._dispatcher.lanes.values()
            for reply, message in lane.replies()
            if message is None or message.received_at < old
        ]
        session.write(messages.in_progress(waiting))

    async def _widen(self, parked: int) -> None:
        """Raise `max_ack_pending` while messages of slow partitions wait at the server."""
        needed = pending_needed(parked, self._consumer.options.max_ack_pending, self._options.max_parked)
        if needed > self._allowed or (needed < self._allowed and not parked):
            self._allowed = needed
            await self._consumer.allow_pending(needed)


ONLY = deadletter_headers.ONLY.encode()
FOR_EVER = 10 * 365 * 86400.0  # seconds


MIN_SESSION_SECONDS = 1.0
"""A session that lasted this many seconds does not count as a failure to start."""


class Puller:
    """Pulls for as long as the worker runs."""

    def __init__(
        self,
        connection: aio.Connection,
        jetstream: JetStream,
        consumer: WorkerConsumer,
        dispatcher: Dispatcher,
        answers: SessionAnswers,
        upkeep: Upkeep,
        metrics: WorkerMetrics,
    ) -> None:
        self.connects = 0
        """Number of sessions started."""
        self.routes = Routes()
        """Maps a message to its lane."""
        self.settling = asyncio.Lock()
        """Held while the consumers to pull from, or the lanes of their messages, change."""
        self._connection = connection
        self._jetstream = jetstream
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._answers = answers
        self._upkeep = upkeep
        self._metrics = metrics
        self._inboxes: dict[str, str] = {}
        self.cursors: dict[str, int] = {}
        """The highest delivered sequence, by consumer."""

    async def serve(self) -> None:
        """Pull over one session after the other, for as long as the worker runs."""
        tries, clock = Tries(retry_on=always, tell=self._begins_anew), asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                if not self._connection.connected:
                    await self._connection.ready()
                    tries.succeeded()
                await self._pull()
            except PenstockError as exc:
                if isinstance(exc, DeliveriesMissing) and clock() - began > MIN_SESSION_SECONDS:
                    self._begins_anew(exc)
                    tries.succeeded()  # not one of many failures in a row: no delay needed
                else:
                    await tries.failed(exc)

    def _begins_anew(self, error: PenstockError) -> None:
        level = logging.INFO if isinstance(error, DeliveriesMissing) else logging.WARNING
        log.log(level, "%s begins anew: %s", self._consumer.options.consumer, error)

    async def _pull(self) -> None:
        """Run one session to its end."""
        options = self._consumer.options
        session = PullSession(
            self._connection,
            self._jetstream,
            options.stream,
            self._answers.acks,
            self._came,
            self._begin,
            self._inboxes,
            self.cursors,
            self._upkeep.room,
            lambda: self._upkeep.batch.size,
            self._upkeep.request_bytes(self._connection.info.max_payload),
        )
        # Nothing is ever received here: the task ends when the connection does.
        lost = asyncio.create_task(self._connection.receive(FOR_EVER))
        try:
            async with self.settling:
                await self._attach(session)
                self._answers.session = session
            self.connects += 1
            await asyncio.wait((session.ended, lost), return_when=asyncio.FIRST_COMPLETED)
            if session.ended.done():
                session.ended.result()
            await lost
        finally:
            self._answers.session = None
            session.close()
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def attach(self) -> None:
        """Pull from the current consumers; `settling` must be held."""
        if self._answers.session:
            await self._attach(self._answers.session)

    def leave(self, consumer: str) -> None:
        """Stop pulling from a consumer that will be deleted."""
        if self._answers.session:
            self._answers.session.close_consumer(consumer)

    def begin_anew(self, why: str) -> None:
        """Make a work queue deliver all its messages again, to a new session; `settling` is held."""
        if session := self._answers.session:
            self.cursors = {}  # subjects added since lie below them, undelivered; the session keeps the old ones
            session.fail(DeliveriesMissing(why))
        else:
            self.cursors.clear()

    def forget(self, consumer: str) -> None:
        """Drop the cursor of a consumer that is created again, maybe with other partitions: the position of the
        previous one says nothing about them."""
        if consumer in self.cursors:
            self._keep_what_is_done()
            self.begin_anew(f"consumer {consumer} is made again")

    @property
    def cursor(self) -> int:
        """Everything of our subjects up to this sequence was delivered, by whichever consumer."""
        return min((self.cursors.get(name, 0) for name in self._consumer.names), default=0)

    async def _begin(self, info: ConsumerInfo) -> None:
        """Reset a consumer to deliver everything not done, in order; finished messages that come again are only
        acknowledged."""
        self._keep_what_is_done()
        await self._consumer.reset(info.name, self._first())

    def _keep_what_is_done(self) -> None:
        if self._consumer.retention != Retention.WORKQUEUE:  # there only what is not done is left
            for lane in self._dispatcher.lanes.values():
                lane.floor = max(lane.floor, lane.done(self.cursor))

    def _first(self) -> int | None:
        """Return where the consumers resume; None: after their ack floor. What a work queue still has is usually not
        done, and must be acknowledged if it is."""
        if self._consumer.retention == Retention.WORKQUEUE:
            return 1
        needed = [lane.needs_from(self.cursor) for lane in self._dispatcher.lanes.values()]
        known = [sequence for sequence in needed if sequence is not None]
        return min(known) + 1 if known and len(known) == len(needed) else None

    async def _attach(self, session: PullSession) -> None:
        infos = await self._consumer.present()
        for name in session.consumers - infos.keys():
            session.close_consumer(name)
        for info in infos.values():
            await session.open(info)

    def _came(self, batch: list[Message], again: int) -> None:
        literal, deliver, options = self.routes.literal.get, self._dispatcher.deliver, self._consumer.options
        for message in batch:
            lane = literal(message.subject) or self.routes.lane(message.subject)
            if lane is None or (message.raw_headers and not _is_for(message, options)):
                self._foreign(message)
            else:
                deliver(lane, message)
        self._upkeep.came(batch)
        self._metrics.came(batch, again)

    def _foreign(self, message: Message) -> None:
        """Answer a message that another worker handles: our consumer must not wait for it. On a work queue an
        acknowledgement would remove it."""
        if self._consumer.retention != Retention.WORKQUEUE:
            self._answers.acks.append(message.reply)
            self._answers.acked()

    async def all_sent(self) -> None:
        """Return when the server has received every acknowledgement."""
        if session := self._answers.session:
            session.flush()
            await self._connection.flush()


def _is_for(message: Message, options: ConsumerOptions) -> bool:
    """Whether the message is for this group, or this worker: a dead letter may be replayed for one reader only."""
    if ONLY not in message.raw_headers:
        return True
    headers = message.headers
    return any(letters.is_for(headers, options.stream, reader) for reader in (options.prefix, options.consumer))
