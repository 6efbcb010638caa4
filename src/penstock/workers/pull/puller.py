"""The worker's pull loop: one session after the other, and where what they bring goes."""

from __future__ import annotations

import asyncio
import logging

from penstock.consume.messages import Message
from penstock.consume.metrics import WorkerMetrics
from penstock.deadletter import headers as deadletter_headers
from penstock.deadletter import letters
from penstock.errors import PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo
from penstock.retry import Backoff
from penstock.wire import aio
from penstock.workers.dispatch.dispatcher import Dispatcher
from penstock.workers.options import ConsumerOptions
from penstock.workers.pull.answers import SessionAnswers
from penstock.workers.pull.consumer import WORK_QUEUE, WorkerConsumer
from penstock.workers.pull.routes import Routes
from penstock.workers.pull.session import Session, WentElsewhere
from penstock.workers.pull.upkeep import Upkeep

log = logging.getLogger(__name__)

ONLY = deadletter_headers.ONLY.encode()
FOR_EVER = 10 * 365 * 86400.0  # seconds


LASTED = 1.0
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
        delays, clock = Backoff().delays(), asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                if not self._connection.connected:
                    await self._connection.reconnect()
                    delays = Backoff().delays()
                await self._pull()
            except WentElsewhere as exc:
                log.info("%s: %s", self._consumer.options.consumer, exc)
                if clock() - began > LASTED:  # not one of many in a row: there is no reason to wait
                    delays = Backoff().delays()
                    continue
            except PenstockError as exc:
                log.warning("%s begins anew: %s", self._consumer.options.consumer, exc)
            await asyncio.sleep(next(delays))

    async def _pull(self) -> None:
        """One session, to its end."""
        options = self._consumer.options
        session = Session(
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
            session.fail(WentElsewhere(why))
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

    async def _attach(self, session: Session) -> None:
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
