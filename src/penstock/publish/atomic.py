"""Atomic batches from asyncio: all messages of a batch are stored next to each other, or none.

async with await Publisher.connect(settings) as publisher:
    async with publisher.atomic("BILLING") as batch:
        await batch.add("billing.charge", b"…")
        await batch.add("billing.balance", b"…", expected_last_subject_sequence=7)
    print(batch.ack.sequences)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self, TypeVar, Unpack, overload

from penstock.coroutines import sleep
from penstock.errors import ConfigError, ConnectionLost, DeadlineExceeded, Unavailable
from penstock.jetstream.api import JetStream
from penstock.publish import outcome
from penstock.publish.batch import Batch, ask_id, checked_publisher, drop, is_stored, new_id, probe, probed
from penstock.publish.chunks import Chunks
from penstock.publish.errors import BatchOutcomeUnknown, NobodyListens, TooManyInFlight
from penstock.publish.fast import FastIngest, OnLost
from penstock.publish.model import MAX_MESSAGES, NO_RESPONDERS_TIMEOUT, BatchAck, BatchRef
from penstock.publish.options import IngestChoices, IngestOptions
from penstock.publish.streams import KnownStream, KnownStreams
from penstock.publish.unheard import until_heard
from penstock.retry import retrying
from penstock.settings import Settings
from penstock.wire import aio, frames
from penstock.wire.headers import Headers

T = TypeVar("T")
IN_FLIGHT = 16
"""Maximum open batches of one publisher on one stream; the server allows 50 of all publishers together."""
PATIENCE = 30.0
"""Seconds that a batch is retried while the server has too many open."""
ASKED_AT_ONCE = 100
"""Message ids that `stored_ids` checks in one round trip."""
FIRST_ANSWER = 1.0
"""Seconds to wait for the answer to the first member when the last one was refused: the first is answered earlier."""


@dataclass(slots=True)
class Flight:
    """A batch that is being sent on one connection."""

    content: Batch
    subjects: tuple[str, ...]
    """The stream's subjects."""
    after: int
    """A sequence the stream had reached before."""
    opened: int
    heard: float
    """When a member was last sent."""
    first: str = ""
    """The reply subject of its first member; empty when that answer was taken, or the first is the last."""
    last: str = ""

    @property
    def ref(self) -> BatchRef:
        return self.content.ref(self.after)


class Publisher:
    """Publishes atomic batches over one connection; any number of tasks may use it.

    It needs the permission to read stream information: the stream's configuration and its last sequence. A connection
    that is found lost before anything of a batch is sent is reopened; if it is lost later, the batch raises.

    `name` begins the ids of its batches, so that `penstock batches` can tell whose they are.

    A batch whose subject no stream stores is retried for `no_responders_timeout` seconds, but never longer than
    `patience`.
    """

    def __init__(
        self,
        connection: aio.Connection,
        *,
        in_flight: int | None = IN_FLIGHT,
        patience: float = PATIENCE,
        no_responders_timeout: float = NO_RESPONDERS_TIMEOUT,
        name: str | None = None,
    ) -> None:
        self.connection = connection
        self.patience = patience
        self.no_responders_timeout = no_responders_timeout
        self.name = checked_publisher(name)
        settings = connection.settings
        self.jetstream = JetStream(self.request, settings.domain, settings.timeout)
        """The JetStream API; a lost connection is reopened for it."""
        self._in_flight = in_flight
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._streams = KnownStreams()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        settings: Settings,
        *,
        in_flight: int = IN_FLIGHT,
        patience: float = PATIENCE,
        no_responders_timeout: float = NO_RESPONDERS_TIMEOUT,
        name: str | None = None,
    ) -> Self:
        """A publisher with a connection of its own, closed with it."""
        connection = await aio.connect(settings, name="penstock publisher")
        options = {"patience": patience, "no_responders_timeout": no_responders_timeout}
        return cls(connection, in_flight=in_flight, **options, name=name)

    async def close(self) -> None:
        self._closed = True
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[False] = False
    ) -> AtomicBatch: ...

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[True]
    ) -> ChunkedBatch: ...

    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: bool = False
    ) -> AtomicBatch | ChunkedBatch:
        """A batch for one stream: `async with` commits it, an exception inside drops it and nothing is stored.

        It takes at most 1,000 messages; the next raises `TooLarge` before anything is sent. With `chunked` it takes
        any number, in chunks of 1,000, and **each chunk is atomic by itself, the whole is not**.

        `batch_id` must not have been used on this stream before, or `resolve` may find the earlier batch. `eob`
        commits with an extra message that is not stored, so that `flush` sends all that was added.
        """
        batch_id = new_id(self.name) if batch_id is None else batch_id
        if chunked:
            return ChunkedBatch(self, stream, batch_id, eob)
        return AtomicBatch(self, Batch(stream, batch_id, eob))

    def fast(self, stream: str, *, on_lost: OnLost | None = None, **choices: Unpack[IngestChoices]) -> FastIngest:
        """Any number of messages in order, at the server's speed; not atomic, but nothing is lost: see `FastIngest`.

        On a connection of its own. `choices` are the fields of `IngestOptions`, such as `flow=100`,
        `max_outstanding_acks=2` or `on_gap="continue"`; with the latter `on_lost` hears of lost messages.
        """
        return FastIngest(self.connection.settings, stream, IngestOptions(**choices), on_lost)

    async def publish_batch(
        self,
        stream: str,
        subjects: str | Sequence[str],
        payloads: Sequence[bytes],
        *,
        headers: Sequence[Headers | None] | None = None,
        message_id: str | None = None,
        batch_id: str | None = None,
    ) -> BatchAck:
        """Publish prepared messages as one batch, with little work for each; see `Batch.extend`."""
        batch = self.atomic(stream, batch_id=batch_id)
        batch.content.extend(subjects, payloads, headers, message_id)
        return await batch.commit()

    # -- in two steps: the next batch can be prepared while the server stores this one -----------------------------

    async def begin(self, content: Batch) -> Flight:
        """Send a batch with its commit, and do not wait. Keep the number of those under way well below 50.

        One that `finish` must send again is stored behind others that were under way with it; where the order of
        batches matters, let each expect the last sequence.
        """
        return await self.send_commit(await self.launch(content))

    async def finish(self, flight: Flight) -> BatchAck:
        """Wait until the batch is stored. Sends it again while too many are under way, or no stream takes it.

        Raises `BatchRejected` when nothing is stored, `BatchOutcomeUnknown` when no answer came: then `resolve`.
        """
        with suppress(TooManyInFlight, NobodyListens):  # nothing is stored: it can be resent from the start
            return await self._answered(flight)

        async def again() -> BatchAck:
            return await self._answered(await self.begin(flight.content))

        return await self.persistently(again)

    async def resolve(self, ref: BatchRef, *, settle: float = outcome.SETTLE) -> BatchAck | None:
        """Find out whether a batch whose answer was lost is stored: its ack, or None when it is not and never will be.

        The server is made to drop the batch first, in case it still waits for the rest of it. When the batch is not in
        the stream, both are repeated after `settle` seconds: the server may have received bytes on a connection
        that is lost by now, and not read them yet. Raises `BatchOutcomeUnknown` when messages were removed from the
        stream meanwhile that could have been the batch, or when its cluster has not decided yet.

        To ask, two messages that the stream refuses are sent to the batch's subject: plain subscribers see them.
        """
        ack = await self._dropped_or_found(ref)
        if ack is None and settle:
            await sleep(settle)
            ack = await self._dropped_or_found(ref)
        return ack

    async def _dropped_or_found(self, ref: BatchRef) -> BatchAck | None:
        await self.ready()
        connection, subject = self.connection, ref.subject.encode()
        dropped, reached = connection.inbox(ref.subject), connection.inbox(ref.subject)
        try:
            await connection.send(drop(ref.batch_id, subject, dropped) + probe(subject, reached))
            was_dropped = await connection.wait(dropped, what=f"dropping batch {ref.batch_id!r}")
            has_reached = await connection.wait(reached, what=f"the last sequence of stream {ref.stream!r}")
        finally:
            connection.forget(dropped, reached)
        await outcome.check_heard(self.jetstream, ref, was_dropped, has_reached)
        return await outcome.look(self.jetstream, ref, probed(has_reached))

    async def stored_ids(self, messages: Sequence[tuple[str, str]]) -> set[str]:
        """Which message ids, each with the subject of its message, are in the duplicate window of their stream.

        Asks by batches that are never stored. Raises `ServerBusy` while one of them is being stored.
        """
        await self.ready()
        stored: set[str] = set()
        for start in range(0, len(messages), ASKED_AT_ONCE):
            part = messages[start : start + ASKED_AT_ONCE]
            asked = {self.connection.inbox(subject): (subject, id_) for subject, id_ in part}
            try:
                await self.connection.send(b"".join(ask_id(s.encode(), id_, to) for to, (s, id_) in asked.items()))
                for reply, (subject, id_) in asked.items():
                    answer = await self.connection.wait(reply, what=f"message id {id_!r}")
                    if is_stored(subject, id_, answer):
                        stored.add(id_)
            finally:
                self.connection.forget(*asked)
        return stored

    # -- the steps of a batch --------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Ensure an open connection: one that broke while idle is replaced."""
        if self._closed:
            raise ConfigError("this publisher is closed: connect a new one")
        self.notice_loss()
        await self.connection.ready()

    def notice_loss(self) -> None:
        """Check whether the connection broke while idle, before something is sent on it in vain."""
        if self.connection.connected:
            with suppress(ConnectionLost):
                self.connection.poll()

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """One request of the JetStream API."""
        await self.ready()
        return (await self.connection.request(subject, payload, timeout=timeout)).data

    async def persistently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry a batch that the server refused as a whole because too many were open, or because no stream stores its
        subject."""
        unheard = min(self.patience, self.no_responders_timeout)
        return await retrying(lambda: until_heard(call, unheard), self.patience, retry_on=is_crowded)

    async def launch(self, content: Batch) -> Flight:
        """Check everything that can fail before anything is sent."""
        await self.ready()
        known = await self._known(content)
        content.check_subjects(known.subjects)
        content.check_sizes(self.connection.info.max_payload)
        content.rewind()
        return Flight(content, known.subjects, known.last_sequence, self.connection.opened, time.monotonic())

    async def open(self, content: Batch) -> Flight:
        """Send the members before the commit, and wait until the server has accepted the first of them."""
        flight = await self.launch(content)
        reply = self.connection.inbox(content.first_subject)
        try:
            if data := content.ahead(reply):
                await self.connection.send(data)
                content.accepted(await self.connection.wait(reply, what=f"the start of batch {content.batch_id!r}"))
        finally:
            self.connection.forget(reply)
        return flight

    async def send_commit(self, flight: Flight) -> Flight:
        """Send what is left of a batch, with its commit."""
        connection, content = self.connection, flight.content
        self.check_same_connection(flight)
        flight.first = connection.inbox(content.first_subject) if content.first_answers else ""
        flight.last = connection.inbox(content.first_subject)
        try:
            for piece in content.commit(flight.first, flight.last):
                await connection.send(piece)
        except BaseException as exc:
            connection.forget(flight.first, flight.last)
            if isinstance(exc, ConnectionLost | DeadlineExceeded):
                raise BatchOutcomeUnknown(flight.ref, str(exc)) from exc
            raise
        return flight

    def check_same_connection(self, flight: Flight) -> None:
        """Raise when members that were sent may be lost with their connection. Nothing is stored then."""
        if not self.connection.connected or self.connection.opened != flight.opened:
            raise ConnectionLost(", ".join(self.connection.settings.servers), "in the middle of a batch")

    async def _answered(self, flight: Flight) -> BatchAck:
        connection, content = self.connection, flight.content
        if connection.opened != flight.opened:
            raise BatchOutcomeUnknown(flight.ref, "the connection was lost and reopened")
        try:
            answer = await connection.wait(flight.last, what=f"the commit of batch {content.batch_id!r}")
            idle = time.monotonic() - flight.heard
            start = await self._answer_to_first(flight.first) if flight.first else None
        except (ConnectionLost, DeadlineExceeded) as exc:
            raise BatchOutcomeUnknown(flight.ref, str(exc)) from exc
        finally:
            connection.forget(flight.first, flight.last)
        try:
            ack = content.verdict(start, answer, idle, flight.subjects)
        except NobodyListens:
            with suppress(Unavailable):  # the server may hold members sent before: the retry starts again
                await connection.send(content.abandon())
            raise
        self._streams.note(ack, time.monotonic())
        return ack

    async def _answer_to_first(self, reply: str) -> frames.Message | None:
        with suppress(Unavailable):  # the answer to the last decides; this one only adds details
            return await self.connection.wait(reply, FIRST_ANSWER)
        return None

    async def _known(self, batch: Batch) -> KnownStream:
        if known := self._streams.recent(batch.stream, time.monotonic()):
            return known
        info = await self.jetstream.stream_info(batch.stream)
        return self._streams.learn(info, batch.batch_id, time.monotonic())

    async def take_slot(self, batch: Batch) -> asyncio.Semaphore | None:
        """Acquire a slot for an open batch on this stream; the caller releases it."""
        if self._in_flight is None:
            return None
        slots = self._slots.setdefault(batch.stream, asyncio.Semaphore(self._in_flight))
        try:
            async with asyncio.timeout(self.patience):  # Python 3.11's `wait_for` swallows cancellations
                await slots.acquire()
        except TimeoutError:
            words = f"{self._in_flight} batches of this publisher are under way"
            raise TooManyInFlight(batch.stream, batch.batch_id, 429, 0, words) from None
        return slots


class AtomicBatch:
    """One batch under construction; nothing is sent before `flush` or `commit`."""

    def __init__(self, publisher: Publisher, content: Batch) -> None:
        self.content = content
        self._publisher = publisher
        self._slot: asyncio.Semaphore | None = None
        self._flight: Flight | None = None
        self._ack: BatchAck | None = None

    @property
    def batch_id(self) -> str:
        return self.content.batch_id

    @property
    def ack(self) -> BatchAck:
        """Where the batch is stored, once it is committed."""
        if self._ack is None:
            raise ConfigError(f"batch {self.batch_id!r} is not committed, so it has no sequences")
        return self._ack

    async def add(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        message_id: str | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
    ) -> int:
        """Add a message, and return its number, counted from 0, for `ack.sequence_of`.

        `message_id` is checked against the stream's duplicate window: one duplicate rejects the whole batch. The
        expectations are compared with the stream as it is before the batch, at the commit: the stream's last sequence
        (first message only), or the last one of this subject (first message on that subject only).
        """
        return self.content.add(
            subject, data, headers, message_id, expected_last_sequence, expected_last_subject_sequence
        )

    async def flush(self) -> None:
        """Send what was added, except the last message, which may turn out to be the one that commits.

        From then on the batch is open on the server, which drops it after 10 seconds without a message.
        """
        self.content.check_open()
        if self._flight is None or not self.content.sent:
            await self._take_slot()
            self._flight = await self._publisher.persistently(lambda: self._publisher.open(self.content))
        else:
            self._publisher.notice_loss()
            self._publisher.check_same_connection(self._flight)
            await self._publisher.connection.send(self.content.ahead(""))
        self._flight.heard = time.monotonic()

    async def commit(self) -> BatchAck:
        """Send what is left and wait until all of it is stored. Leaving the `async with` block does this.

        Raises `BatchRejected` when nothing is stored, `BatchOutcomeUnknown` when no answer came: then `resolve`.
        """
        self.content.end()
        try:
            if self._flight is None or not self.content.sent:
                await self._take_slot()
                self._flight = await self._publisher.launch(self.content)
            else:
                self._publisher.notice_loss()
            self._ack = await self._publisher.finish(await self._publisher.send_commit(self._flight))
            return self._ack
        finally:
            self._release()

    async def abandon(self) -> None:
        """Drop the batch: nothing of it is stored."""
        self.content.end()
        try:
            if self.content.sent and self._publisher.connection.connected:
                with suppress(Unavailable):  # best effort: the server drops it by itself after a while
                    await self._publisher.connection.send(self.content.abandon())
        finally:
            self._release()

    async def resolve(self) -> BatchAck | None:
        """After `BatchOutcomeUnknown`: the ack if the batch is stored, None if it is not and never will be."""
        if self._flight is None:
            return None  # nothing was sent
        connection = self._publisher.connection
        same = connection.connected and connection.opened == self._flight.opened
        self._ack = await self._publisher.resolve(self._flight.ref, settle=0 if same else outcome.SETTLE)
        return self._ack

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.content.over:
            return
        if kind is None:
            await self.commit()
        else:
            await self.abandon()

    async def _take_slot(self) -> None:
        if self._slot is None:
            self._slot = await self._publisher.take_slot(self.content)

    def _release(self) -> None:
        if self._slot:
            self._slot.release()
            self._slot = None


class ChunkedBatch(Chunks):
    """Any number of messages in chunks of 1,000. Each chunk is atomic by itself; the whole is not.

    A chunk is committed as soon as it is full. An exception drops the last one; those before stay stored.
    """

    def __init__(self, publisher: Publisher, stream: str, batch_id: str | None, eob: bool = False) -> None:
        super().__init__(stream, batch_id, eob)
        self._publisher = publisher
        self._chunk = AtomicBatch(publisher, self.next_chunk())

    async def add(
        self, subject: str, data: bytes, *, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        """Add a message, and return its number over all chunks, counted from 0, for `sequence_of`."""
        if len(self._chunk.content) == MAX_MESSAGES:
            await self._commit_chunk()
        return self.number(self._chunk.content.add(subject, data, headers, message_id))

    async def _commit_chunk(self) -> None:
        self.acks.append(await self._chunk.commit())
        self._chunk = AtomicBatch(self._publisher, self.next_chunk())

    async def resolve(self) -> BatchAck | None:
        """After `BatchOutcomeUnknown`: the ack if the chunk under way is stored, None if it is not."""
        return await self._chunk.resolve()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._chunk.content.over:
            return
        if kind is not None:
            await self._chunk.abandon()
        elif len(self._chunk.content):
            await self._commit_chunk()


def is_crowded(error: BaseException) -> bool:
    """Whether the server refused a batch only because too many are under way."""
    return isinstance(error, TooManyInFlight) and error.err_code != 0
