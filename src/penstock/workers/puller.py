"""The worker's pull loop: one session after the other, and where what they bring goes."""

from __future__ import annotations

import asyncio
import logging

from penstock.broker.jetstream import JetStream
from penstock.deadletter import headers as deadletter_headers
from penstock.deadletter import letters
from penstock.errors import PenstockError
from penstock.retry import Backoff
from penstock.wire import aio
from penstock.workers import messages
from penstock.workers.answers import SessionAnswers
from penstock.workers.consumer import WORK_QUEUE, WorkerConsumer
from penstock.workers.dispatch import Dispatcher
from penstock.workers.messages import Message
from penstock.workers.metrics import WorkerMetrics
from penstock.workers.options import ConsumerOptions
from penstock.workers.routes import Routes
from penstock.workers.session import Session, WentElsewhere
from penstock.workers.upkeep import Upkeep

log = logging.getLogger(__name__)

ONLY = deadletter_headers.ONLY.encode()
FOR_EVER = 10 * 365 * 86400.0  # seconds
SETTLE_WITHIN = 1.0
"""Seconds that the server may take to count acknowledgements that it has received."""
LOOK_AGAIN = 0.01  # seconds


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
        self._rewound = False
        """Whether the next session begins with a consumer that knows of nothing that is here."""

    async def serve(self) -> None:
        """Pull over one connection after the other, for as long as the worker lives."""
        delays = Backoff().delays()
        while True:
            try:
                if not self._connection.connected:
                    await self._connection.reconnect()
                    delays = Backoff().delays()
                await self._pull()
            except WentElsewhere as exc:
                log.info("%s: %s", self._consumer.options.consumer, exc)
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
            self._nothing_here if self._rewound else self._here,
            self._upkeep.room,
            lambda: self._upkeep.batch.size,
            self._inboxes,
        )
        self._rewound = False
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
        """The consumers were reset: whatever is not acknowledged comes again, to a new session; `settling` is held."""
        self._rewound = True
        if self._answers.session:
            self._answers.session.fail(WentElsewhere(why))

    def _nothing_here(self, consumer: str, with_delayed: bool) -> set[int]:
        return set()

    async def _attach(self, session: Session) -> None:
        infos = await self._consumer.present()
        for name in session.consumers - infos.keys():
            session.close_consumer(name)
        for info in infos.values():
            await session.open(info)

    def _here(self, consumer: str, with_delayed: bool) -> set[int]:
        """What of a consumer has come and is not done. What is delayed has no place to answer to, so it is counted only
        where there is one consumer."""
        alone = len(self._consumer.names) == 1
        found = set[int]()
        for lane in self._dispatcher.lanes.values():
            found |= {s for s, reply in lane.out() if alone or messages.consumer_of(reply) == consumer}
            if with_delayed and alone:
                found |= lane.delayed
        return found

    def _came(self, batch: list[Message]) -> None:
        literal, deliver, options = self.routes.literal.get, self._dispatcher.deliver, self._consumer.options
        redelivered = 0
        for message in batch:
            if message.delivery_count > 1:
                redelivered += 1
            lane = literal(message.subject) or self.routes.lane(message.subject)
            if lane is None or (message.raw_headers and not _is_for(message, options)):
                self._foreign(message)
            else:
                deliver(lane, message)
        self._metrics.came(batch, redelivered)

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

    async def nothing_unknown(self) -> int | None:
        """None when everything that is out is here; else the highest sequence that is certainly acknowledged."""
        deadline = asyncio.get_running_loop().time() + SETTLE_WITHIN
        while True:
            infos = (await self._consumer.present()).values()
            here = sum(len(lane.items) for lane in self._dispatcher.lanes.values())
            if sum(info.ack_pending for info in infos) <= here:
                return None
            if asyncio.get_running_loop().time() > deadline:
                return min(info.ack_floor_stream_seq for info in infos)
            await asyncio.sleep(LOOK_AGAIN)


def _is_for(message: Message, options: ConsumerOptions) -> bool:
    """Whether the message is for this group, or this worker: a dead letter may be replayed for one reader only."""
    if ONLY not in message.raw_headers:
        return True
    headers = message.headers
    return any(letters.is_for(headers, options.stream, reader) for reader in (options.prefix, options.consumer))
