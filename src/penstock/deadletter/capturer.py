"""The service that turns the server's advisories into dead letters, for consumers that could not store them: a worker
that was killed, or a consumer without Penstock.

What happens, in order, for each advisory; it stays unacknowledged in its stream until the end, so that a crash anywhere
starts again, and every step is idempotent:
    1. the message is read from its stream
    2. the letter is stored                    (`capture`)
    3. the message is acknowledged for the consumer that gave up, so that WorkQueue and Interest remove it
    4. the advisory is acknowledged
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from penstock.deadletter import advisories, streams
from penstock.deadletter.advisories import Advisory
from penstock.deadletter.capture import Captured, capture, let_go
from penstock.deadletter.letters import BY_ADVISORY, any_time
from penstock.errors import AccessDenied, AlreadyExists, ConfigError, NotFound, PenstockError, ServerBusy, Unavailable
from penstock.jetstream import metadata
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import Broker
from penstock.jetstream.fetch import fetch
from penstock.jetstream.model import ConsumerInfo, StoredMessage
from penstock.retry import Backoff, Tries
from penstock.settings import Settings
from penstock.subjects import DLQ, DLQ_SUBJECTS, overlap
from penstock.wire import aio
from penstock.wire.frames import Message

CONSUMER = "dlq_capture"
BATCH = 200
AT_ONCE = 16
IDLE = 0.5
"""Seconds to wait for the next advisory before looking whether to stop."""
REMEMBER = 5.0
"""Seconds that information about a consumer is cached."""
PATIENCE = 1.0
"""Seconds that storing a letter is retried before its advisory is nacked."""
LATER = b'-NAK {"delay": 2000000000}'

log = logging.getLogger("penstock.deadletter")


@dataclass(frozen=True, slots=True)
class CaptureStatistics:
    """What a capturer has done so far."""

    advisories: int = 0
    stored: int = 0
    """Letters that this capturer has stored."""
    known: int = 0
    """Advisories whose letter was there, or had been settled, already."""
    unconcerned: int = 0
    """Advisories of consumers without a `dlq:`, and of messages that were removed while a consumer had them."""
    gone: int = 0
    """Letters without a body, since the message was no longer stored."""
    failed: int = 0
    """Advisories that could not be handled yet; they are redelivered."""
    last_error: str | None = None


class Capturer:
    """One running capturer; several share the work. `undeclared` also takes consumers that have no `dlq:`."""

    def __init__(self, settings: Settings, *, undeclared: bool = False) -> None:
        self._settings = settings
        self._undeclared = undeclared
        self._statistics = CaptureStatistics()

    def statistics(self) -> CaptureStatistics:
        return self._statistics

    async def run(self, stop: asyncio.Event | None = None, *, until_caught_up: bool = False) -> CaptureStatistics:
        """Capture until `stop` is set, or until no advisory is left. Reconnects after a lost connection."""
        stop = stop or asyncio.Event()
        tries = Tries(backoff=Backoff(first=0.1), tell=lambda exc: self._note(last_error=str(exc)))
        while not stop.is_set():
            try:
                async with Broker(self._settings, "penstock dlq capture") as broker:
                    await self._session(broker, stop, until_caught_up)
                return self._statistics
            except (ServerBusy, Unavailable) as exc:
                if until_caught_up:
                    raise
                await tries.failed(exc, stop)
        return self._statistics

    async def _session(self, broker: Broker, stop: asyncio.Event, until_caught_up: bool) -> None:
        connection = broker.connection
        jetstream = JetStream(connection.requester(), self._settings.domain, self._settings.timeout)
        stream = await ensure_advisories(jetstream)
        await ensure_consumer(jetstream, stream)
        desk = Desk(connection, jetstream, self._settings.domain, self._undeclared)
        refused = _refusals(connection, f".{stream}.{CONSUMER}")
        while not stop.is_set():
            messages = await fetch(broker, stream, CONSUMER, BATCH, wait=IDLE)
            await self._take(connection, desk, messages, until_caught_up)
            if refused:
                raise refused[0]
            if until_caught_up and not messages:
                info = await jetstream.consumer_info(stream, CONSUMER)
                if not info.unprocessed:
                    return

    async def _take(
        self, connection: aio.Connection, desk: Desk, messages: list[Message], until_caught_up: bool
    ) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(message: Message) -> None:
            async with gate:
                answer = await self._handled(desk, message, until_caught_up)
                await connection.publish(message.reply, answer)

        await asyncio.gather(*(one(message) for message in messages))

    async def _handled(self, desk: Desk, message: Message, until_caught_up: bool) -> bytes:
        """Store the letter of an advisory, and return the advisory's acknowledgement."""
        advisory = advisories.parse(message.data)
        try:
            done = await desk.take(advisory) if advisory else None
        except Unavailable:
            raise
        except PenstockError as exc:
            if until_caught_up and isinstance(exc, AccessDenied):
                raise  # it would be redelivered forever
            log.warning("an advisory is put back: %s", exc, extra={"action": "advisory_put_back"})
            self._note(failed=self._statistics.failed + 1, last_error=str(exc))
            return LATER
        now = self._statistics
        self._note(
            advisories=now.advisories + 1,
            stored=now.stored + (done is not None and done.new),
            known=now.known + (done is not None and not done.new),
            unconcerned=now.unconcerned + (done is None),
            gone=now.gone + (done is not None and done.new and done.id.endswith(".0")),
            last_error=now.last_error if done is None else None,
        )
        return b"+ACK"

    def _note(self, **changes: object) -> None:
        self._statistics = replace(self._statistics, **changes)  # type: ignore[arg-type]  # names of its own fields


def _refusals(connection: aio.Connection, of: str) -> list[AccessDenied]:
    """Return a list that collects refusals of pulls and acknowledgements, which are sent without an answer."""
    found: list[AccessDenied] = []
    connection.on_denied(lambda denied: found.append(denied.error()) if of in denied.subject else None)
    return found


class Desk:
    """Turns advisories into letters, and caches information about consumers for a while."""

    def __init__(
        self, connection: aio.Connection, jetstream: JetStream, domain: str | None, undeclared: bool = False
    ) -> None:
        self._connection = connection
        self._jetstream = jetstream
        self._domain = domain
        self._undeclared = undeclared
        self._consumers: dict[tuple[str, str], tuple[float, ConsumerInfo | None]] = {}

    async def take(
        self,
        advisory: Advisory,
        captured_by: str = BY_ADVISORY,
        message: StoredMessage | None = None,
        release: bool = True,
    ) -> Captured | None:
        """Store the letter of an advisory; None when it concerns no dead letters.

        The message is read unless it is given. `release`: acknowledge it for its consumer when the letter is stored.
        """
        consumer = await self._consumer(advisory.stream, advisory.consumer)
        dlq = await self._dlq(consumer) if consumer and advisory.concerns_letters else None
        if consumer is None or dlq is None:
            return None
        message = message or await self._message(advisory)
        done = await self._stored(advisory, message, consumer, dlq, captured_by)
        if release and not advisory.terminated:  # the server has acknowledged what was terminated
            await let_go(self._connection, advisory.stream, advisory.consumer, advisory.sequence)
        return done

    async def _stored(
        self, advisory: Advisory, message: StoredMessage | None, consumer: ConsumerInfo, dlq: str, captured_by: str
    ) -> Captured:
        letter = advisories.letter(advisory, message, consumer, captured_by)
        if message is None and (known := await known_letter(self._jetstream, dlq, letter.id)):
            return known
        attempted = advisories.last_attempt(advisory, consumer)
        return await capture(self._connection, letter, dlq, attempted=attempted, domain=self._domain, patience=PATIENCE)

    async def _message(self, advisory: Advisory) -> StoredMessage | None:
        """The message that the consumer gave up on; None when it is gone, or its stream was recreated since."""
        try:
            message = await self._jetstream.get_message(advisory.stream, advisory.sequence)
        except NotFound:
            return None
        return None if _later(message.time, advisory.time) else message

    async def _consumer(self, stream: str, name: str) -> ConsumerInfo | None:
        asked, info = self._consumers.get((stream, name), (0.0, None))
        if not asked or time.monotonic() - asked > REMEMBER:
            try:
                info = await self._jetstream.consumer_info(stream, name)
            except NotFound:
                info = None
            self._consumers[stream, name] = time.monotonic(), info
        return info

    async def _dlq(self, consumer: ConsumerInfo) -> str | None:
        """Return the consumer's dead-letter subject; a reader of dead letters has none, or they would never end."""
        if (declared := dlq_of(consumer)) or not self._undeclared:
            return declared
        captured = (await self._jetstream.stream_info(consumer.stream)).config.get("subjects") or ()
        if any(overlap(subject, DLQ_SUBJECTS) for subject in captured):
            return None
        return f"{DLQ}.{consumer.stream}.{consumer.name}"


async def known_letter(jetstream: JetStream, dlq: str, letter_id: str) -> Captured | None:
    """A letter of that message from when it was still there: a worker stores the letter, then terminates."""
    subject = f"{dlq}.{any_time(letter_id)}"
    places = [(name, subject) for name in await jetstream.stream_names(subject)]
    for stream, filter_ in (*places, (streams.AUDIT, streams.settled_subject(any_time(letter_id)))):
        with suppress(NotFound):
            found = await jetstream.get_message(stream, last_of=filter_)
            return Captured(letter_id, found.subject, new=False)
    return None


def dlq_of(consumer: ConsumerInfo) -> str | None:
    """Return the declared dead-letter subject of a consumer."""
    found: str | None = (consumer.config.get("metadata") or {}).get(metadata.DLQ)
    return found


def _later(one: datetime | None, other: datetime) -> bool:
    return one is not None and one > other


async def ensure_advisories(jetstream: JetStream) -> str:
    """Return the stream that stores the advisories, whatever its name; creates one if there is none."""
    found = [set(await jetstream.stream_names(subject)) for subject in streams.ADVISORY_SUBJECTS]
    if both := set.intersection(*found):
        return min(both)
    if any(found):
        raise ConfigError(
            f"stream {min(set.union(*found))!r} keeps only some of the advisories that dead letters are made of; "
            f"give it all of these subjects: {', '.join(streams.ADVISORY_SUBJECTS)}"
        )
    await jetstream.create_stream(streams.advisories_config())
    return streams.ADVISORIES


async def ensure_consumer(jetstream: JetStream, stream: str) -> None:
    """Create the durable consumer that all capturers share."""
    config = {
        "durable_name": CONSUMER,
        "ack_policy": "explicit",
        "ack_wait": 60 * 1_000_000_000,
        "max_ack_pending": 5 * BATCH,
        "filter_subjects": list(streams.ADVISORY_SUBJECTS),
        "metadata": {metadata.SERVICE: "penstock dlq capture", metadata.PURPOSE: "makes dead letters of advisories"},
    }
    with suppress(AlreadyExists):
        await jetstream.create_consumer(stream, config)
