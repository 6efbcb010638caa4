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
from typing import Literal, Self, TypeVar, Unpack, overload

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
"""Batches that one publisher has under way on one stream; the server takes 50 from all publishers together."""
PATIENCE = 30.0
"""Seconds for which a batch is tried again while the server has too many under way."""
ASKED_AT_ONCE = 100
"""Message ids that `stored_ids` asks for in one go."""
FIRST_ANSWER = 1.0
"""Seconds to wait for the answer to the first member when the last one was refused: it comes before that."""


class Publisher:
    """Publishes atomic batches over one connection; any number of tasks may use it.

    It needs the permission to read stream information: what a stream allows, and where it stands. A connection that
    is found lost before anything of a batch is sent is opened again; lost later, the batch raises.

    `name` begins the ids of its batches, so that `penstock batches` can tell whose they are.

    A batch that no stream takes is tried again for `no_responders_timeout` seconds, but never longer than `patience`.
    """

    def __init__(
        self,
        connection: aio.Connection,
        *,
        in_flight: int = IN_FLIGHT,
        patience: float = PATIENCE,
        no_responders_timeout: float = NO_RESPONDERS_TIMEOUT,
        name: str | None = None,
    ) -> None:
        self.connection = connection
        self.patience = patience
        self.no_responders_timeout = no_responders_timeout
        self.name = checked_publisher(name)
        settings = connection.settings
        self.jetstream = JetStream(self._request, settings.domain, settings.timeout)
        """The JetStream API; a connection that was lost is opened again for it."""
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
        batch = AtomicBatch(self, Batch(stream, new_id(self.name) if batch_id is None else batch_id))
        batch.content.extend(subjects, payloads, headers, message_id)
        return await batch.commit()

    async def resolve(self, ref: BatchRef, *, settle: float = outcome.SETTLE) -> BatchAck | None:
        """Find out whether a batch whose answer was lost is stored: its ack, or None when it is not and never will be.

        The server is made to drop the batch first, in case it still waits for the rest of it. When the batch is not in
        the stream, both are done once more after `settle` seconds: the server may have received bytes on a connection
        that is lost by now, and not read them yet. Raises `BatchOutcomeUnknown` when messages were removed from the
        stream meanwhile that could have been the batch, or when its cluster has not decided yet.

        To ask, two messages that the stream refuses are sent to the batch's subject: plain subscribers see them.
        """
        ack = await self._dropped_or_found(ref)
        if ack is None and settle:
            await asyncio.sleep(settle)
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

    # -- for the batches -------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Have an open connection; raises `Unavailable` when none can be had."""
        if self._closed:
            raise ConfigError("this publisher is closed: connect a new one")
        await self.connection.ready()

    async def _request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        await self.ready()
        return (await self.connection.request(subject, payload, timeout=timeout)).data

    async def _known(self, batch: Batch) -> KnownStream:
        if known := self._streams.recent(batch.stream, time.monotonic()):
            return known
        info = await self.jetstream.stream_info(batch.stream)
        return self._streams.learn(info, batch.batch_id, time.monotonic())

    async def _persistently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat what the server refused as a whole because it was crowded, or knew of no stream for it."""
        unheard = min(self.patience, self.no_responders_timeout)
        return await retrying(lambda: until_heard(call, unheard), self.patience, retry_on=is_crowded)

    async def _take_slot(self, batch: Batch) -> asyncio.Semaphore:
        """One of the places for batches under way on this stream; the caller releases it."""
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
        self._subjects: tuple[str, ...] = ()
        self._after = 0
        self._opened = 0
        self._heard = 0.0
        """When the server was last sent something of this batch."""
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
        if self.content.sent:
            await self._send(self.content.ahead(""))
        else:
            await self._publisher._persistently(self._open)

    async def commit(self) -> BatchAck:
        """Send what is left and wait until all of it is stored. Leaving the `async with` block does this.

        Raises `BatchRejected` when nothing is stored, `BatchOutcomeUnknown` when no answer came: then `resolve`.
        """
        self.content.end()
        try:
            if self.content.sent:
                with suppress(TooManyInFlight, NobodyListens):  # nothing is stored: it can go again from the start
                    return await self._exchange()
            return await self._publisher._persistently(self._attempt)
        finally:
            self._release()

    async def abandon(self) -> None:
        """Drop the batch: nothing of it is stored."""
        self.content.end()
        try:
            if self.content.sent and self._connection.connected:
                # Best effort: the server gives it up by itself after a while.
                with suppress(Unavailable):
                    await self._connection.send(self.content.abandon())
        finally:
            self._release()

    async def resolve(self) -> BatchAck | None:
        """After `BatchOutcomeUnknown`: the ack if the batch is stored, None if it is not and never will be."""
        if not self._opened:
            return None  # nothing was sent
        same = self._connection.connected and self._connection.opened == self._opened
        found = await self._publisher.resolve(self.content.ref(self._after), settle=0 if same else outcome.SETTLE)
        return found and self._done(found)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.content.over:
            return
        if kind is None:
            await self.commit()
        else:
            await self.abandon()

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _connection(self) -> aio.Connection:
        return self._publisher.connection

    @property
    def _subject(self) -> str:
        return self.content.subjects[0].decode() if self.content.subjects else ""

    async def _begin(self) -> None:
        """All that can go wrong before anything is sent."""
        if self._slot is None:
            self._slot = await self._publisher._take_slot(self.content)
        await self._publisher.ready()
        known = await self._publisher._known(self.content)
        self.content.check_subjects(known.subjects)
        self.content.check_sizes(self._connection.info.max_payload)
        self._subjects, self._after = known.subjects, known.last_sequence
        self._opened = self._connection.opened
        self.content.rewind()

    async def _open(self) -> None:
        await self._begin()
        reply = self._connection.inbox(self._subject)
        if data := self.content.ahead(reply):
            await self._send(data)
            self.content.accepted(await self._connection.wait(reply, what=f"the start of batch {self.batch_id!r}"))

    async def _attempt(self) -> BatchAck:
        await self._begin()
        self._heard = time.monotonic()
        return await self._exchange()

    async def _exchange(self) -> BatchAck:
        """Send the rest with the commit, and take the answer."""
        connection, content = self._connection, self.content
        two_answers = content.first_answers
        if connection.opened != self._opened:  # members that were sent may be lost; nothing is stored
            raise ConnectionLost(", ".join(connection.settings.servers), "in the middle of a batch")
        first, last = connection.inbox(self._subject), connection.inbox(self._subject)
        try:
            for piece in content.commit(first, last):
                await connection.send(piece)
            answer = await connection.wait(last, what=f"the commit of batch {self.batch_id!r}")
            idle = time.monotonic() - self._heard
            start = await self._answer_to_first(first) if two_answers else None
        except (ConnectionLost, DeadlineExceeded) as exc:
            raise BatchOutcomeUnknown(content.ref(self._after), str(exc)) from exc
        finally:
            connection.forget(first, last)
        try:
            return self._done(content.verdict(start, answer, idle, self._subjects))
        except NobodyListens:
            with suppress(Unavailable):  # the server may hold members sent before: the next try begins anew
                await connection.send(content.abandon())
            raise

    async def _answer_to_first(self, reply: str) -> frames.Message | None:
        with suppress(Unavailable):  # the answer to the last decides; this one only tells more
            return await self._connection.wait(reply, FIRST_ANSWER)
        return None

    async def _send(self, data: bytes) -> None:
        await self._connection.send(data)
        self._heard = time.monotonic()

    def _done(self, ack: BatchAck) -> BatchAck:
        self._ack = ack
        self._publisher._streams.note(ack, time.monotonic())
        return ack

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
