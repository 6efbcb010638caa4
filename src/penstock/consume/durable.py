"""Runs a handler on a durable pull consumer; the consumer's own ack_wait, max_deliver and backoff apply.

Any number of instances may pull from one consumer; the server gives each message to one of them.

1. **Pull** (`pulling.py`): as many messages as are handled in a quarter of a second.
2. **Handle** (`lanes.py`): `concurrency` at a time. Meanwhile the server hears that each message is being worked on, so
   that a handler may take longer than `ack_wait`.
3. **Answer**: done, the message is acknowledged. Failed, it is delivered again after a delay. Failed `max_deliver`
   times or rejected, it is stored as a dead letter, and then acknowledged.

A crash before the acknowledgement: the server redelivers the message after `ack_wait`, to any instance. So at most the
messages that were in hand are handled twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock import subjects
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
"""Seconds: the server's default."""
ACK_FLUSH_INTERVAL = 0.005
"""Seconds that acknowledgements are buffered, unless there are `MAX_BUFFERED_ACKS` of them."""
MAX_BUFFERED_ACKS = 256
ONLY_BYTES = ONLY.encode()
UNLIMITED = 10**9
LONG = 30.0
"""Seconds after which a running handler counts as long-running."""
GIVE_BACK_AFTER = 0.1
"""Delay in seconds of the nak that returns unhandled messages to other instances when this one stops."""
BURY_AGAIN = 5.0
"""Seconds until a dead letter that could not be stored is retried."""

Handle = Callable[[Unit], Awaitable[object]]
"""Takes a message, or a list of them in batch mode. Returning acknowledges; raising causes a retry."""


@dataclass(slots=True)
class HandledCounts:
    """Counts of messages by outcome."""

    handled: int = 0
    """Messages acknowledged after their handler returned."""
    failed: int = 0
    """Attempts that raised."""
    dead: int = 0
    """Messages given up: stored as a dead letter, or left to the server's advisory when no `dlq` is configured."""


class GoneToOthers(Exception):
    """The server may have redelivered the message to another instance: it is neither answered nor retried here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DurableOptions:
    """Options for handling the messages of a consumer."""

    concurrency: int = 16
    """Maximum number of messages, or batches, handled at the same time."""
    ordered_by: Callable[[Message], Hashable] | None = None
    """The ordering key: messages with one key are handled one after the other here, also when one is retried."""
    batch: int = 0
    """If above 0, the handler takes lists of up to this many messages."""
    within: float = 1.0
    """Seconds that a list waits to become full."""
    dlq: str | None = None
    """Subject for dead letters. Without one the server's advisories report messages that are given up."""
    backoff: tuple[float, ...] | None = None
    """Seconds before each retry; None: the consumer's backoff, or 2, 5, then 15."""
    timeout: float | None = None
    """Seconds that a handler may take; then it is cancelled, and that counts as a failure."""
    stop_within: float = 60.0
    """Seconds that handlers have to finish on stop. Then they are cancelled, and their messages are redelivered."""

    def __post_init__(self) -> None:
        for name, least in {"concurrency": 1, "batch": 0, "within": 0, "stop_within": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name):g}")
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"timeout must be more than 0, got {self.timeout:g}")
        if self.dlq is not None and (subjects.problem(self.dlq) or not subjects.is_literal(self.dlq)):
            raise ConfigError(f"dlq {self.dlq!r} is no subject to store dead letters on: write dlq.<domain>.<event>")
        if self.batch and self.ordered_by:
            raise ConfigError("batch and ordered_by do not go together: a batch is handled as one")


class Durable:
    """Handles the messages of one durable consumer until `stop` is set."""

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
        """The consumer's backoff, as the server has it."""
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
        """Attempts not counted by the server, by sequence: in ordered mode a message waits in memory for its retry."""
        self._began: dict[int, float] = {}
        """When each running handler was called, by its first sequence."""
        self._beat = 0.0
        self.counts = HandledCounts()

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Handle messages until `stop` is set, then finish what runs.

        Raises `ConfigError` when there is no such consumer, or handlers cannot work on it.
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
                await self._pulling.drain(last_chance=self._retries.max_deliver == 1)
            tasks[0].cancel()
            await self._lanes.drained(self.options.stop_within)
            for message in list(self._lanes.in_hand.values()):  # queued or waiting for a retry: returned to the server
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
        """Connect and read the consumer; retries while the server is unavailable. False: stopped before."""
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
        """Return its metrics for `consume.metrics.serve`."""
        return [self._watch]

    def health(self) -> Health:
        """Return what it waits for before it can handle messages; it never needs a restart."""
        return Health(waiting="" if self._pulling and self._connection.connected else "has nothing to pull from yet")

    def _looked(self) -> WorkerSnapshot:
        """Return a snapshot for metrics; called from the thread of a scrape."""
        now, running = time.perf_counter(), list(self._began.values())
        long_running = sum(now - began >= LONG for began in running)
        held = len(self._lanes.in_hand)
        return WorkerSnapshot(
            outstanding=held, held=held, oldest=now - min(running, default=now), long_running=long_running
        )

    async def done(self) -> bool:
        """Whether all messages of the consumer are handled and acknowledged, by any instance."""
        info = await self._jetstream.consumer_info(self.stream, self.consumer)
        return not info.unprocessed and not self._lanes.in_hand

    async def _look(self) -> ConsumerInfo:
        """Read the consumer's configuration."""
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
        """Time since the server last certainly received `+WPI` for messages in hand, as a fraction of `ack_wait`: from
        1 on it may have redelivered them to other instances."""
        return (asyncio.get_running_loop().time() - self._beat) / self._ack_wait

    async def _keep_alive(self) -> None:
        """Periodically extend the ack deadlines of the messages in hand."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            with suppress(PenstockError):  # the connection is lost; `_pull` handles that
                self._connection.write(in_progress([message.reply for message in self._lanes.in_hand.values()]))
                await self._connection.flush()
                self._beat = began
            await asyncio.sleep(max(self._ack_wait / 3, 0.05))

    # -- messages --------------------------------------------------------------------------------------------------

    def _came(self, found: list[Message]) -> None:
        self._watch.came(found, sum(message.delivery_count > 1 for message in found))
        for message in found:
            if message.sequence in self._lanes.in_hand:  # redelivered after a lost connection: it is being handled
                self._watch.repeated()
            elif ONLY_BYTES in message.raw_headers and not letters.is_for(message.headers, self.stream, self.consumer):
                self._ack(message)
            else:
                self._lanes.add(message)

    async def _one(self, unit: Unit) -> float | None:
        """Handle a message, or a batch. Returns the seconds after which to retry it here; None: it is answered."""
        first = unit[0].sequence if isinstance(unit, list) else unit.sequence
        self._began[first] = began = time.perf_counter()
        try:
            if keyless := self._keyless.pop(first, None):
                raise Reject(f"ordered_by raised {verdicts.described(keyless)}") from keyless
            if self.options.timeout is None:  # without a timeout, skip its cost
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
        except FAILURES as exc:  # any exception of a handler decides the outcome of its message
            error = failure_of(exc)
            if isinstance(unit, list) and len(unit) > 1:  # one bad message must not fail the others
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
        """Handle the messages of a failed batch in lists of one; only that counts as an attempt of them."""
        for message in batch:
            await self._one([message])

    def _key(self, message: Message) -> Hashable:
        """Return the ordering key of a message; one without a key gets a separate lane, where it is rejected."""
        assert self.options.ordered_by
        try:
            key = self.options.ordered_by(message)
            hash(key)
        except Exception as exc:  # noqa: BLE001 -- a user's function: it must not end the pull loop
            self._keyless[message.sequence] = exc
            return ("no key", message.sequence)
        return key

    def _counted(self, unit: Unit) -> Unit:
        """Add the attempts that the server has not counted."""
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
        """Return the seconds that the server adds to the delay of a nak: it counts from the end of the first wait of
        its backoff, and then waits as long as the one of this delivery says."""
        own = self._backoff
        return own[min(deliveries, len(own)) - 1] - own[0] if own else 0.0

    async def _give_up(self, message: Message, attempt: int, letter: GiveUp, error: BaseException) -> None:
        if self.options.dlq is None:
            log.warning(
                "%s #%d was given up, and no dlq is named: %s", message.subject, message.sequence, letter.reason
            )
            self.counts.dead += 1
            self._tries.pop(message.sequence, None)
            self._lanes.in_hand.pop(message.sequence, None)
            self._write(b"PUB %s 5\r\n+TERM\r\n" % message.reply.encode())  # the server publishes an advisory
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
                    return  # it stays in hand, and is redelivered
        self.counts.dead += 1
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
        with suppress(PenstockError):  # the connection is lost: what was not answered is redelivered
            self._connection.write(data)
