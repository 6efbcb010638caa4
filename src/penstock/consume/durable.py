"""A handler on a durable pull consumer, as it is declared: its own ack_wait, max_deliver and backoff hold.

Any number of instances may pull from one consumer; the server gives each message to one of them.

1. **Pull** (`pulling.py`): as many messages as are handled in a moment.
2. **Handle** (`lanes.py`): `concurrency` at a time. Meanwhile the server hears that each message is being worked on, so
   that a handler may take longer than `ack_wait`.
3. **Answer**: done, the message is acknowledged. Failed, it is delivered again after a delay. Failed `max_deliver`
   times or rejected, it is stored as a dead letter, and then acknowledged.

A crash before the acknowledgement: the server delivers the message again after `ack_wait`, to any instance. So what is
handled twice is at most what was in hand.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.consume import verdicts
from penstock.consume.dead_letters import GivenUpBy, keep
from penstock.consume.failures import FailureLog
from penstock.consume.handlers import FAILURES, failure_of, in_time
from penstock.consume.instance import new_instance
from penstock.consume.lanes import Lanes, Unit
from penstock.consume.messages import Message, MessageContext, acks, in_progress
from penstock.consume.metrics import WorkerMetrics, WorkerSnapshot
from penstock.consume.pulling import Pulling
from penstock.consume.verdicts import BACKOFF, GiveUp, Redeliver, Reject, Retries
from penstock.deadletter import letters
from penstock.deadletter.headers import ONLY
from penstock.errors import ConfigError, ConsumerNotFound, PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import NANOSECONDS, ConsumerInfo
from penstock.metrics.endpoint import Health
from penstock.retry import Tries, always, is_away
from penstock.settings import Settings
from penstock.wire import aio

log = logging.getLogger(__name__)

ACK_WAIT = 30.0
"""Seconds, the server's own."""
ACK_FLUSH_INTERVAL = 0.005
"""Seconds until acknowledgements are sent, unless there are `MAX_BUFFERED_ACKS` of them."""
MAX_BUFFERED_ACKS = 256
ONLY_BYTES = ONLY.encode()
UNLIMITED = 10**9
LONG = 30.0
"""Seconds from which on a handler that runs is counted as long-running."""
GIVE_BACK_AFTER = 0.1
"""Seconds after which the server delivers to others what an instance that stops has not handled."""
BURY_AGAIN = 5.0
"""Seconds until a dead letter is tried again that could not be stored."""

Handle = Callable[[Unit], Awaitable[object]]
"""Takes a message, or a list of them where they are handled in batches. Returning acknowledges, raising tries again."""


@dataclass(slots=True)
class HandledCounts:
    """What has become of messages."""

    handled: int = 0
    """Acknowledged after their handler returned."""
    failed: int = 0
    """Tries that raised."""
    dead: int = 0
    """Given up."""


class GoneToOthers(Exception):
    """The server may have given the message to another instance meanwhile: it is neither answered nor tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DurableOptions:
    """How the messages of a consumer are handled."""

    concurrency: int = 16
    """Messages, or batches of them, that are handled at the same time."""
    ordered_by: Callable[[Message], Hashable] | None = None
    """Messages with the same key are handled one after the other by this instance, also when one is tried again."""
    batch: int = 0
    """More than 0: messages go to the handler in lists of up to so many."""
    within: float = 1.0
    """Seconds that a list waits to become full."""
    dlq: str | None = None
    """Subject for messages that are given up. Without one the server's advisories tell of them."""
    backoff: tuple[float, ...] | None = None
    """Seconds before each further try; None: as the consumer has it, or 2, 5, then 15."""
    timeout: float | None = None
    """Seconds that a handler may take; then it is cancelled, and that counts as a failure."""
    stop_within: float = 60.0
    """Seconds that handlers have to finish when it stops. Then they are cancelled, and their messages come again."""

    def __post_init__(self) -> None:
        for name, least in {"concurrency": 1, "batch": 0, "within": 0, "stop_within": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name):g}")
        if self.batch and self.ordered_by:
            raise ConfigError("batch and ordered_by do not go together: a batch is handled as one")


class Durable:
    """Handles the messages of one durable consumer until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        stream: str,
        consumer: str,
        handle: Handle,
        options: DurableOptions | None = None,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self.options = options or DurableOptions()
        self._handle = handle
        self._watch = WorkerMetrics(new_instance(), consumer)
        self._watch.look = self._looked
        self._connection = aio.Connection(settings, name=f"penstock {consumer}")
        self._jetstream = JetStream(self._connection.requester(), settings.domain, settings.timeout)
        self._retries = Retries()
        self._ack_wait = ACK_WAIT
        self._backoff: tuple[float, ...] = ()
        """Of the consumer, as the server has it."""
        self._failures = FailureLog(self._retries)
        choices = replace(self.options, ordered_by=self._key) if self.options.ordered_by else self.options
        self._lanes = Lanes(self._one, choices)
        self._keyless: dict[int, Exception] = {}
        """What `ordered_by` raised, by sequence."""
        self._stopping = asyncio.Event()
        self._pulling: Pulling | None = None
        self._acks: list[str] = []
        self._flush_at: asyncio.TimerHandle | None = None
        self._tries: dict[int, int] = {}
        """Tries that the server has not counted, by sequence: in order, a message waits here for the next one."""
        self._began: dict[int, float] = {}
        """When each handler that runs was called, by its first sequence."""
        self._beat = 0.0
        self.counts = HandledCounts()

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Handle messages until `stop` is set, then finish what runs.

        Raises `ConfigError` when there is no such consumer, or it is none that handlers can work on.
        """
        try:
            if not await self._begin(stop):
                return
            stopped = asyncio.create_task(stop.wait())
            tasks = [asyncio.create_task(self._pull()), asyncio.create_task(self._keep_alive())]
            await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in (stopped, *tasks):
                if task.done() and task is not stopped:
                    task.result()
            self._stopping.set()
            if self._pulling:
                self._pulling.stop()
            tasks[0].cancel()
            await self._lanes.drained(self.options.stop_within)
            for message in list(self._lanes.in_hand.values()):  # waits for its turn or its next try: for others now
                self._give_back(message, GIVE_BACK_AFTER)
            for task in (stopped, *tasks):
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)
        finally:
            self._failures.close()
            with suppress(PenstockError):
                self._flush()
                await self._connection.flush()
            await self._connection.close()

    async def _begin(self, stop: asyncio.Event) -> bool:
        """Connect, and learn how the consumer is configured; again while the server is away. False: stopped before."""
        tries = Tries(retry_on=is_away, tell=lambda exc: log.warning("%s cannot begin yet: %s", self.consumer, exc))
        while not stop.is_set():
            try:
                await self._connection.ready()
                await self._look()
                return True
            except PenstockError as exc:
                await tries.failed(exc, stop)
        return False

    def metrics(self) -> list[WorkerMetrics]:
        """Its numbers for `consume.metrics.serve`."""
        return [self._watch]

    def health(self) -> Health:
        """What it waits for before it can handle messages; it is never beyond repair."""
        return Health(waiting="" if self._pulling and self._connection.connected else "has nothing to pull from yet")

    def _looked(self) -> WorkerSnapshot:
        """How it stands; a scrape asks from a thread of its own."""
        now, running = time.perf_counter(), list(self._began.values())
        long_running = sum(now - began >= LONG for began in running)
        held = len(self._lanes.in_hand)
        return WorkerSnapshot(
            outstanding=held, held=held, oldest=now - min(running, default=now), long_running=long_running
        )

    async def done(self) -> bool:
        """Whether everything that the consumer has is handled and acknowledged, by whatever instance."""
        info = await self._jetstream.consumer_info(self.stream, self.consumer)
        return not info.unprocessed and not self._lanes.in_hand

    async def _look(self) -> ConsumerInfo:
        """Learn how the consumer is configured."""
        try:
            info = await self._jetstream.consumer_info(self.stream, self.consumer)
        except ConsumerNotFound as exc:
            raise ConfigError(
                f"there is no consumer {self.consumer!r} on stream {self.stream!r}: declare it in penstock.yaml and "
                "run `penstock apply`, or make it with a tool of yours"
            ) from exc
        config = info.config
        if config.get("deliver_subject"):
            raise ConfigError(
                f"consumer {self.consumer!r} is a push consumer: handlers pull; declare it without deliver"
            )
        if config.get("ack_policy") != "explicit":
            raise ConfigError(f"consumer {self.consumer!r} has ack_policy {config.get('ack_policy')}, not explicit")
        own = self._backoff = tuple(nanoseconds / NANOSECONDS for nanoseconds in config.get("backoff") or ())
        limit = config.get("max_deliver", -1)
        self._retries = Retries(
            max_deliver=limit if limit > 0 else UNLIMITED, backoff=self.options.backoff or own or BACKOFF
        )
        self._failures = FailureLog(self._retries)
        self._ack_wait = min((config.get("ack_wait") or ACK_WAIT * NANOSECONDS) / NANOSECONDS, *own, ACK_WAIT * 10)
        return info

    async def _pull(self) -> None:
        tries = Tries(retry_on=always, tell=lambda exc: log.warning("%s pulls again: %s", self.consumer, exc))
        while True:
            try:
                await self._connection.ready()
                info = await self._look()
                self._pulling = Pulling(self._connection, self._jetstream, info, self._came, self._lanes.room)
                tries.succeeded()
                self._flush()
                await self._pulling.run()
            except PenstockError as exc:
                await tries.failed(exc)

    @property
    def stood_still(self) -> float:
        """Time since the server was last sure to hear that messages are worked on, in parts of `ack_wait`: from 1 on it
        may have given them to others."""
        return (asyncio.get_running_loop().time() - self._beat) / self._ack_wait

    async def _keep_alive(self) -> None:
        """Tell the server now and then that the messages in hand are being worked on."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            with suppress(PenstockError):  # the connection is lost; `_pull` sees to that
                self._connection.write(in_progress([message.reply for message in self._lanes.in_hand.values()]))
                await self._connection.flush()
                self._beat = began
            await asyncio.sleep(max(self._ack_wait / 3, 0.05))

    # -- messages --------------------------------------------------------------------------------------------------

    def _came(self, found: list[Message]) -> None:
        self._watch.came(found, sum(message.delivery_count > 1 for message in found))
        for message in found:
            if message.sequence in self._lanes.in_hand:  # a connection was lost meanwhile: it is being handled
                self._watch.repeated()
            elif ONLY_BYTES in message.raw_headers and not letters.is_for(message.headers, self.stream, self.consumer):
                self._ack(message)
            else:
                self._lanes.add(message)

    async def _one(self, unit: Unit) -> float | None:
        """Handle a message, or a batch. Returns the seconds after which to try it again here; None: it is answered."""
        first = unit[0].sequence if isinstance(unit, list) else unit.sequence
        self._began[first] = began = time.perf_counter()
        try:
            if keyless := self._keyless.pop(first, None):
                raise Reject(f"ordered_by raised {verdicts.described(keyless)}") from keyless
            if self.options.timeout is None:  # what nobody asked for should cost nothing
                await self._handle(self._counted(unit))
            else:
                async with in_time(self.options.timeout):
                    await self._handle(self._counted(unit))
        except GoneToOthers as exc:
            log.warning("%s: %s", self.consumer, exc)
            for message in unit if isinstance(unit, list) else [unit]:
                self._tries.pop(message.sequence, None)
                self._lanes.in_hand.pop(message.sequence, None)
            self._ask_soon()
            return None
        except FAILURES as exc:  # whatever a handler raises is the verdict on its message
            error = failure_of(exc)
            if isinstance(unit, list) and len(unit) > 1:  # one bad message is not to give up the others
                await self._one_by_one(unit)
                return None
            self._watch.failed(error)
            self.counts.failed += 1
            return await self._failed(unit[0] if isinstance(unit, list) else unit, error)
        finally:
            self._began.pop(first, None)
        messages = unit if isinstance(unit, list) else [unit]
        for message in messages:
            self._done(message)
        self.counts.handled += len(messages)
        self._watch.handled([time.perf_counter() - began] * len(messages))
        return None

    async def _one_by_one(self, batch: list[Message]) -> None:
        """Handle the messages of a batch that has failed in lists of one; only that counts as a try of them."""
        for message in batch:
            await self._one([message])

    def _key(self, message: Message) -> Hashable:
        """The key of a message; one that has none has a lane of its own, where it is rejected."""
        assert self.options.ordered_by
        try:
            key = self.options.ordered_by(message)
            hash(key)
        except Exception as exc:  # noqa: BLE001 -- a function of the user's: it must not end the reading
            self._keyless[message.sequence] = exc
            return ("no key", message.sequence)
        return key

    def _counted(self, unit: Unit) -> Unit:
        """With the tries that the server does not know of."""
        if isinstance(unit, list) or not (tries := self._tries.get(unit.sequence)):
            return unit
        return unit._replace(delivery_count=unit.delivery_count + tries)

    def _done(self, message: Message) -> None:
        self._tries.pop(message.sequence, None)
        self._lanes.in_hand.pop(message.sequence, None)
        self._ack(message)

    async def _failed(self, message: Message, error: BaseException) -> float | None:
        attempt = message.delivery_count + self._tries.get(message.sequence, 0)
        verdict = verdicts.after_failure(error, attempt, self._retries)
        self.counts.dead += isinstance(verdict, GiveUp)
        if isinstance(verdict, Redeliver):
            self._failures.again(message, self._context(message, attempt), error, verdict.after)
            if self.options.ordered_by:
                self._tries[message.sequence] = self._tries.get(message.sequence, 0) + 1
                return verdict.after
            self._give_back(message, verdict.after)
        else:
            await self._give_up(message, attempt, verdict, error)
        return None

    def _give_back(self, message: Message, after: float) -> None:
        self._lanes.in_hand.pop(message.sequence, None)
        body = b'-NAK {"delay": %d}' % int((after - self._added_wait(message.delivery_count)) * NANOSECONDS)
        self._write(b"PUB %s %d\r\n%s\r\n" % (message.reply.encode(), len(body), body))
        self._ask_soon()

    def _added_wait(self, deliveries: int) -> float:
        """Seconds that the server adds to the delay of a nak: it counts from the end of the first wait of its backoff,
        and then waits as long as the one of this delivery says."""
        own = self._backoff
        return own[min(deliveries, len(own)) - 1] - own[0] if own else 0.0

    async def _give_up(self, message: Message, attempt: int, letter: GiveUp, error: BaseException) -> None:
        if self.options.dlq is None:
            log.warning(
                "%s #%d was given up, and no dlq is named: %s", message.subject, message.sequence, letter.reason
            )
            self._tries.pop(message.sequence, None)
            self._lanes.in_hand.pop(message.sequence, None)
            self._write(b"PUB %s 5\r\n+TERM\r\n" % message.reply.encode())  # the server's advisory tells of it
            self._ask_soon()
            return
        while True:
            try:
                reader = GivenUpBy(self.stream, self.consumer)
                await keep(self._connection, self.options.dlq, reader, message, attempt, letter, error)
                break
            except PenstockError as exc:
                log.error("%s #%d could not be kept as a dead letter: %s", message.subject, message.sequence, exc)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), BURY_AGAIN)
                    return  # it stays in hand, and comes again
        self._watch.dead()
        self._failures.buried(message, letter, error)
        self._done(message)

    def _context(self, message: Message, attempt: int) -> MessageContext:
        return MessageContext(message.subject, message.subject, self.consumer, message.received_at, attempt, 0)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _ack(self, message: Message) -> None:
        self._acks.append(message.reply)
        if len(self._acks) >= MAX_BUFFERED_ACKS:
            self._flush()
        elif self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(ACK_FLUSH_INTERVAL, self._flush)
        self._ask_soon()

    def _ask_soon(self) -> None:
        if self._pulling:
            self._pulling.soon()

    def _flush(self) -> None:
        if self._flush_at:
            self._flush_at.cancel()
            self._flush_at = None
        if self._acks and self._connection.connected:
            self._write(acks(self._acks))
            self._acks.clear()

    def _write(self, data: bytes) -> None:
        with suppress(PenstockError):  # the connection is lost: what was not answered comes again
            self._connection.write(data)
