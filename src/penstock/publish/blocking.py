"""Atomic batches from blocking code, such as a Spark task: the same batches over a blocking connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self, TypeVar, Unpack, overload

from penstock.errors import ConfigError, ConnectionLost, DeadlineExceeded, Unavailable
from penstock.jetstream.api import JetStream
from penstock.publish import outcome
from penstock.publish.atomic import FIRST_ANSWER, PATIENCE, is_crowded
from penstock.publish.batch import Batch, checked_publisher, drop, new_id, probe, probed
from penstock.publish.chunks import Chunks
from penstock.publish.errors import BatchOutcomeUnknown, NobodyListens, TooManyInFlight
from penstock.publish.fast import OnLost
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.model import MAX_MESSAGES, NO_RESPONDERS_TIMEOUT, BatchAck, BatchRef
from penstock.publish.options import IngestChoices, IngestOptions
from penstock.publish.streams import KnownStream, KnownStreams
from penstock.publish.unheard import until_heard_blocking
from penstock.retry import retrying_blocking
from penstock.settings import Settings
from penstock.wire import blocking, frames
from penstock.wire.headers import Headers

T = TypeVar("T")


@dataclass(slots=True)
class Flight:
    """A batch under way on one connection."""

    content: Batch
    subjects: tuple[str, ...]
    """The stream's."""
    after: int
    """A sequence the stream had reached before."""
    opened: int
    heard: float
    """When the server was last sent something of it."""
    first: str = ""
    """Where the answer to its first member comes; empty when that was taken already, or the first is the last."""
    last: str = ""

    @property
    def ref(self) -> BatchRef:
        return self.content.ref(self.after)


class BlockingPublisher:
    """Publishes atomic batches over one blocking connection, for one thread. See `Publisher`."""

    def __init__(
        self,
        connection: blocking.BlockingConnection,
        *,
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
        self._streams = KnownStreams()
        self._closed = False

    @classmethod
    def connect(
        cls,
        settings: Settings,
        *,
        patience: float = PATIENCE,
        no_responders_timeout: float = NO_RESPONDERS_TIMEOUT,
        name: str | None = None,
    ) -> Self:
        """A publisher with a connection of its own, closed with it."""
        connection = blocking.connect(settings, name="penstock publisher")
        options = {"patience": patience, "no_responders_timeout": no_responders_timeout}
        return cls(connection, **options, name=name)

    def close(self) -> None:
        self._closed = True
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[False] = False
    ) -> BlockingBatch: ...

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[True]
    ) -> BlockingChunkedBatch: ...

    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: bool = False
    ) -> BlockingBatch | BlockingChunkedBatch:
        """A batch for one stream: `with` commits it, an exception inside drops it; see `Publisher.atomic`."""
        batch_id = new_id(self.name) if batch_id is None else batch_id
        if chunked:
            return BlockingChunkedBatch(self, stream, batch_id, eob)
        return BlockingBatch(self, Batch(stream, batch_id, eob))

    def fast(
        self, stream: str, *, on_lost: OnLost | None = None, **choices: Unpack[IngestChoices]
    ) -> BlockingFastIngest:
        """Any number of messages in order, at the server's speed; not atomic, but nothing is lost.

        On a connection of its own. `choices` are the fields of `IngestOptions`, such as `flow=100`,
        `max_outstanding_acks=2` or `on_gap="continue"`; with the latter `on_lost` hears of lost messages.
        """
        return BlockingFastIngest(self.connection.settings, stream, IngestOptions(**choices), on_lost)

    def publish_batch(
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
        content = Batch(stream, new_id(self.name) if batch_id is None else batch_id)
        content.extend(subjects, payloads, headers, message_id)
        return self.finish(self.begin(content))

    # -- in two steps: the next batch can be prepared while the server stores this one -----------------------------

    def begin(self, content: Batch) -> Flight:
        """Send a batch with its commit, and do not wait. Keep the number of those under way well below 50.

        One that `finish` must send again is stored behind others that were under way with it; where the order of
        batches matters, let each expect the last sequence.
        """
        return self.send_commit(self.launch(content))

    def finish(self, flight: Flight) -> BatchAck:
        """Wait until the batch is stored. Sends it again while too many are under way, or no stream takes it.

        Raises `BatchRejected` when nothing is stored, `BatchOutcomeUnknown` when no answer came: then `resolve`.
        """
        with suppress(TooManyInFlight, NobodyListens):  # nothing is stored: it can go again from the start
            return self._answered(flight)
        return self.persistently(lambda: self._answered(self.begin(flight.content)))

    def resolve(self, ref: BatchRef, *, settle: float = outcome.SETTLE) -> BatchAck | None:
        """Find out whether a batch whose answer was lost is stored; see `Publisher.resolve`."""
        ack = self._dropped_or_found(ref)
        if ack is None and settle:
            time.sleep(settle)
            ack = self._dropped_or_found(ref)
        return ack

    # -- the steps of a batch --------------------------------------------------------------------------------------

    def persistently(self, call: Callable[[], T]) -> T:
        """Repeat what the server refused as a whole because it was crowded, or knew of no stream for it."""
        unheard = min(self.patience, self.no_responders_timeout)
        return retrying_blocking(lambda: until_heard_blocking(call, unheard), self.patience, retry_on=is_crowded)

    def launch(self, content: Batch) -> Flight:
        """All that can go wrong before anything is sent."""
        self._ready()
        known = self._known(content)
        content.check_subjects(known.subjects)
        content.check_sizes(self.connection.info.max_payload)
        content.rewind()
        return Flight(content, known.subjects, known.last_sequence, self.connection.opened, time.monotonic())

    def open(self, content: Batch) -> Flight:
        """Send what can go before the commit, and wait until the server has accepted the first of it."""
        flight = self.launch(content)
        reply = self.connection.inbox()
        if data := content.ahead(reply):
            self.connection.send(data)
            content.accepted(self.connection.wait(reply, what=f"the start of batch {content.batch_id!r}"))
        return flight

    def send_commit(self, flight: Flight) -> Flight:
        """Send what is left of a batch, with its commit."""
        self.check_same_connection(flight)
        flight.first = self.connection.inbox() if flight.content.first_answers else ""
        flight.last = self.connection.inbox()
        try:
            for piece in flight.content.commit(flight.first, flight.last):
                self.connection.send(piece)
        except ConnectionLost as exc:
            raise BatchOutcomeUnknown(flight.ref, str(exc)) from exc
        return flight

    def check_same_connection(self, flight: Flight) -> None:
        """Raise when members that were sent may be lost with their connection. Nothing is stored then."""
        if not self.connection.connected or self.connection.opened != flight.opened:
            raise ConnectionLost(", ".join(self.connection.settings.servers), "in the middle of a batch")

    def notice_loss(self) -> None:
        """Look whether the connection broke while nobody used it, before something is sent on it in vain."""
        if self.connection.connected:
            with suppress(ConnectionLost):
                self.connection.poll()

    def _ready(self) -> None:
        """Have an open connection: one that broke while nobody used it is replaced."""
        if self._closed:
            raise ConfigError("this publisher is closed: connect a new one")
        self.notice_loss()
        self.connection.ready()

    async def _request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        self._ready()
        return self.connection.request(subject, payload, timeout=timeout).data

    def _known(self, content: Batch) -> KnownStream:
        if known := self._streams.recent(content.stream, time.monotonic()):
            return known
        info = blocking.run(self.jetstream.stream_info(content.stream))
        return self._streams.learn(info, content.batch_id, time.monotonic())

    def _dropped_or_found(self, ref: BatchRef) -> BatchAck | None:
        self._ready()
        connection, subject = self.connection, ref.subject.encode()
        dropped, reached = connection.inbox(), connection.inbox()
        try:
            connection.send(drop(ref.batch_id, subject, dropped) + probe(subject, reached))
            was_dropped = connection.wait(dropped, what=f"dropping batch {ref.batch_id!r}")
            has_reached = connection.wait(reached, what=f"the last sequence of stream {ref.stream!r}")
        finally:
            connection.forget(dropped, reached)
        blocking.run(outcome.check_heard(self.jetstream, ref, was_dropped, has_reached))
        return blocking.run(outcome.look(self.jetstream, ref, probed(has_reached)))

    def _answered(self, flight: Flight) -> BatchAck:
        connection, content = self.connection, flight.content
        if connection.opened != flight.opened:
            raise BatchOutcomeUnknown(flight.ref, "the connection was lost and reopened")
        try:
            answer = connection.wait(flight.last, what=f"the commit of batch {content.batch_id!r}")
            idle = time.monotonic() - flight.heard
            start = self._answer_to_first(flight.first) if flight.first else None
        except (ConnectionLost, DeadlineExceeded) as exc:
            raise BatchOutcomeUnknown(flight.ref, str(exc)) from exc
        finally:
            connection.forget(flight.first, flight.last)
        try:
            ack = content.verdict(start, answer, idle, flight.subjects)
        except NobodyListens:
            with suppress(Unavailable):  # the server may hold members sent before: the next try begins anew
                connection.send(content.abandon())
            raise
        self._streams.note(ack, time.monotonic())
        return ack

    def _answer_to_first(self, reply: str) -> frames.Message | None:
        with suppress(Unavailable):  # the answer to the last decides; this one only tells more
            return self.connection.wait(reply, FIRST_ANSWER)
        return None


class BlockingBatch:
    """One batch under construction; nothing is sent before `flush` or `commit`. See `AtomicBatch`."""

    def __init__(self, publisher: BlockingPublisher, content: Batch) -> None:
        self.content = content
        self._publisher = publisher
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

    def add(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        message_id: str | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
    ) -> int:
        """Add a message, and return its number, counted from 0; see `AtomicBatch.add`."""
        return self.content.add(
            subject, data, headers, message_id, expected_last_sequence, expected_last_subject_sequence
        )

    def flush(self) -> None:
        """Send what was added, except the last message; see `AtomicBatch.flush`."""
        self.content.check_open()
        if self._flight is None or not self.content.sent:
            self._flight = self._publisher.persistently(lambda: self._publisher.open(self.content))
        else:
            self._publisher.notice_loss()
            self._publisher.check_same_connection(self._flight)
            self._publisher.connection.send(self.content.ahead(""))
        self._flight.heard = time.monotonic()

    def commit(self) -> BatchAck:
        """Send what is left and wait until all of it is stored. Leaving the `with` block does this."""
        self.content.end()
        if self._flight is None or not self.content.sent:
            self._flight = self._publisher.launch(self.content)
        else:
            self._publisher.notice_loss()
        self._ack = self._publisher.finish(self._publisher.send_commit(self._flight))
        return self._ack

    def abandon(self) -> None:
        """Drop the batch: nothing of it is stored."""
        self.content.end()
        if self.content.sent and self._publisher.connection.connected:
            with suppress(Unavailable):  # best effort: the server gives it up by itself after a while
                self._publisher.connection.send(self.content.abandon())

    def resolve(self) -> BatchAck | None:
        """After `BatchOutcomeUnknown`: the ack if the batch is stored, None if it is not and never will be."""
        if self._flight is None:
            return None  # nothing was sent
        same = self._publisher.connection.connected and self._publisher.connection.opened == self._flight.opened
        self._ack = self._publisher.resolve(self._flight.ref, settle=0 if same else outcome.SETTLE)
        return self._ack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.content.over:
            return
        if kind is None:
            self.commit()
        else:
            self.abandon()


class BlockingChunkedBatch(Chunks):
    """Any number of messages in chunks of 1,000, each atomic by itself; the whole is not. See `ChunkedBatch`."""

    def __init__(self, publisher: BlockingPublisher, stream: str, batch_id: str | None, eob: bool = False) -> None:
        super().__init__(stream, batch_id, eob)
        self._publisher = publisher
        self._chunk = BlockingBatch(publisher, self.next_chunk())

    def add(self, subject: str, data: bytes, *, headers: Headers | None = None, message_id: str | None = None) -> int:
        """Add a message, and return its number over all chunks, counted from 0, for `sequence_of`."""
        if len(self._chunk.content) == MAX_MESSAGES:
            self._commit_chunk()
        return self.number(self._chunk.content.add(subject, data, headers, message_id))

    def _commit_chunk(self) -> None:
        self.acks.append(self._chunk.commit())
        self._chunk = BlockingBatch(self._publisher, self.next_chunk())

    def resolve(self) -> BatchAck | None:
        """After `BatchOutcomeUnknown`: the ack if the chunk under way is stored, None if it is not."""
        return self._chunk.resolve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._chunk.content.over:
            return
        if kind is not None:
            self._chunk.abandon()
        elif len(self._chunk.content):
            self._commit_chunk()
