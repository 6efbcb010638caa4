"""The worker's pull loop: one session after the other, where what they bring goes, and what keeps them going."""

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
from penstock.jetstream.model import ConsumerInfo
from penstock.retry import Tries, always
from penstock.wire import aio
from penstock.workers.dispatch.dispatcher import Dispatcher, LongRunning
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.partitions import Partition
from penstock.workers.pull.consumer import WORK_QUEUE, WorkerConsumer
from penstock.workers.pull.session import (
    AVERAGE_DECAY,
    BATCH_SECONDS,
    BatchSize,
    DeliveriesMissing,
    PullSession,
    bounded,
    capacity,
    pending_needed,
    request_bytes,
)

log = logging.getLogger(__name__)


MAX_REMEMBERED_SUBJECTS = 100_000
"""Subjects below wildcards that are remembered with their lane."""


class Routes:
    """Finds the lane of a message by its subject."""

    def __init__(self) -> None:
        self.literal: dict[str, Lane] = {}
        """Lanes of subjects without wildcards: most are found here."""
        self._wild: list[tuple[str, Lane]] = []
        self._found: dict[str, Lane | None] = {}

    def add(self, partition: Partition, lane: Lane) -> None:
        """Messages of the partition's subjects go to this lane."""
        for subject in partition.subjects:
            if subjects.is_literal(subject):
                self.literal[subject] = lane
            else:
                self._wild.append((subject, lane))
        self._found.clear()

    def remove(self, partition: Partition) -> None:
        """Its subjects lead nowhere."""
        for subject in partition.subjects:
            self.literal.pop(subject, None)
        self._wild = [(filter_, lane) for filter_, lane in self._wild if filter_ not in partition.subjects]
        self._found.clear()

    def lane(self, subject: str) -> Lane | None:
        """The lane of a subject; None when it belongs to nobody here."""
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
    """A message should be given up, and nobody said where to."""


class SessionAnswers:
    """Answers over the session of the moment; what is done without one is acknowledged by the next."""

    def __init__(
        self,
        connection: aio.Connection,
        stream: str,
        reader: str,
        dlq: str | None,
        on_trial: Callable[[str, int], Awaitable[None]],
        worker: str | None = None,
    ) -> None:
        """`reader` names the whole group on dead letters: their replay is for whichever worker has the partition.

        `worker` is one that belongs to no group: it gives up for itself alone, whoever else has that name.
        """
        self.session: PullSession | None = None
        self._on_trial = on_trial
        self.acks: list[str] = []
        """What is done and not yet acknowledged; every session takes from here, so none of them is lost with one."""
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
        """Store the message with its reason below the subject for dead letters."""
        if self._dlq is None:
            raise NoDeadLetters(f"{letter.reason}; name a subject for dead letters (dlq) to get past such a message")
        reader = GivenUpBy(self._stream, self._reader, self._worker)
        await keep(self._connection, self._dlq, reader, message, context.delivery_count, letter, error)


LOOK_INTERVAL = 0.1
"""Seconds between two maintenance passes while messages wait here."""
IDLE_LOOK_INTERVAL = 0.5
"""The same while none wait: waking up would cost an idle worker more than its messages do."""
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
        """`read` begins to read messages from the stream that a lane has put aside."""
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
        """Bytes of a message, about; at once as large as those that come, and only slowly less."""

    def room(self) -> int:
        """Messages that may still come, besides those that were asked for."""
        return self._most - self._dispatcher.held

    @property
    def _most(self) -> int:
        most = capacity(self._consumer.options.max_ack_pending)
        return bounded(most, self._options.max_bytes, self._message_size)

    @property
    def _kept(self) -> int:
        """Messages that a slow partition may hold: of large ones fewer, so that it leaves room for others."""
        large = self._most < capacity(self._consumer.options.max_ack_pending)
        return min(self._options.max_in_flight, max(1, self._most // 4)) if large else self._options.max_in_flight

    def request_bytes(self, max_payload: int) -> int:
        """Bytes that one request may bring."""
        return request_bytes(self._options.max_bytes, max_payload)

    def came(self, batch: list[Message]) -> None:
        """Learn how large messages are."""
        size = sum([len(message.data) for message in batch]) / len(batch)
        self._message_size = max(size, AVERAGE_DECAY * self._message_size)

    def pause(self, session: PullSession | None) -> float:
        """Seconds until the next look."""
        since, self._seen = self._dispatcher.handled - self._seen, self._dispatcher.handled
        waits = self._dispatcher.held or self._dispatcher.some_parked
        return LOOK_INTERVAL if waits or since > BUSY_MESSAGES or session is None else IDLE_LOOK_INTERVAL

    async def look(self, session: PullSession) -> None:
        """One look. Raises what the server refuses."""
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
        """Let the batches follow the handlers."""
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
        """Let the server have more out while messages of slow partitions wait there."""
        needed = pending_needed(parked, self._consumer.options.max_ack_pending, self._options.max_parked)
        if needed > self._allowed or (needed < self._allowed and not parked):
            self._allowed = needed
            await self._consumer.allow_pending(needed)


ONLY = deadletter_headers.ONLY.encode()
FOR_EVER = 10 * 365 * 86400.0  # seconds


MIN_SESSION_SECONDS = 1.0
"""Seconds after which a session that ends does not count as a failure to begin."""


class Puller:
    """Pulls for as long as the worker lives."""

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
        """How often it began to pull anew."""
        self.routes = Routes()
        """Which lane a message goes to."""
        self.settling = asyncio.Lock()
        """Held by whoever changes what is pulled from, or what is done with it."""
        self._connection = connection
        self._jetstream = jetstream
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._answers = answers
        self._upkeep = upkeep
        self._metrics = metrics
        self._inboxes: dict[str, str] = {}
        self.cursors: dict[str, int] = {}
        """The highest sequence that came, by consumer."""

    async def serve(self) -> None:
        """Pull over one connection after the other, for as long as the worker lives."""
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
                    tries.succeeded()  # not one of many in a row: there is no reason to wait
                else:
                    await tries.failed(exc)

    def _begins_anew(self, error: PenstockError) -> None:
        level = logging.INFO if isinstance(error, DeliveriesMissing) else logging.WARNING
        log.log(level, "%s begins anew: %s", self._consumer.options.consumer, error)

    async def _pull(self) -> None:
        """One session, to its end."""
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
        # Nothing is ever received there: it ends when the connection does.
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
        """Pull from the consumers that there are; `settling` must be held."""
        if self._answers.session:
            await self._attach(self._answers.session)

    def leave(self, consumer: str) -> None:
        """Pull no more from a consumer, since it is going to be removed."""
        if self._answers.session:
            self._answers.session.close_consumer(consumer)

    def begin_anew(self, why: str) -> None:
        """Have everything that a work queue still has delivered again, to a new session; `settling` is held."""
        if session := self._answers.session:
            self.cursors = {}  # what was added since lies below them, and has not come; the session keeps the old ones
            session.fail(DeliveriesMissing(why))
        else:
            self.cursors.clear()

    def forget(self, consumer: str) -> None:
        """A consumer is made again, maybe with partitions that the one before did not have: how far that one had come
        says nothing about them."""
        if consumer in self.cursors:
            self._keep_what_is_done()
            self.begin_anew(f"consumer {consumer} is made again")

    @property
    def cursor(self) -> int:
        """Everything of our subjects up to this sequence has come, whichever consumer has them."""
        return min((self.cursors.get(name, 0) for name in self._consumer.names), default=0)

    async def _begin(self, info: ConsumerInfo) -> None:
        """Have a consumer deliver whatever is not done, in order; what comes again of the rest is only acknowledged."""
        self._keep_what_is_done()
        await self._consumer.reset(info.name, self._first())

    def _keep_what_is_done(self) -> None:
        if self._consumer.retention != WORK_QUEUE:  # there what is done is gone, and what comes is not done
            for lane in self._dispatcher.lanes.values():
                lane.floor = max(lane.floor, lane.done(self.cursor))

    def _first(self) -> int | None:
        """Where the consumers go on; None: behind their ack floor. What a work queue still has is not done, as a rule,
        and has to be acknowledged if it is."""
        if self._consumer.retention == WORK_QUEUE:
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
        """Others' business: our consumer must not wait for it. On a work queue an acknowledgement would remove it."""
        if self._consumer.retention != WORK_QUEUE:
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
