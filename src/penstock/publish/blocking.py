"""Atomic batches from blocking code, such as a Spark task: the same batches over a blocking connection."""

from __future__ import annotations

from typing import Literal, Self, Unpack, overload

from penstock.coroutines import blocked, passed
from penstock.jetstream.api import JetStream
from penstock.publish.atomic import PATIENCE, AtomicBatch, ChunkedBatch, Flight, Publisher
from penstock.publish.batch import Batch
from penstock.publish.fast import OnLost
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.model import NO_RESPONDERS_TIMEOUT, BatchAck
from penstock.publish.options import IngestChoices, IngestOptions
from penstock.settings import Settings
from penstock.wire import blocking
from penstock.wire.headers import Headers

__all__ = ["BlockingBatch", "BlockingChunkedBatch", "BlockingPublisher", "Flight"]


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
        options = {"patience": patience, "no_responders_timeout": no_responders_timeout}
        self.inner = Publisher(connection.inner, in_flight=None, **options, name=name)

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

    patience = passed[float]()
    no_responders_timeout = passed[float]()
    name = passed[str]()
    jetstream = passed[JetStream]()
    close = blocked(Publisher.close)
    publish_batch = blocked(Publisher.publish_batch)
    begin = blocked(Publisher.begin)
    launch = blocked(Publisher.launch)
    send_commit = blocked(Publisher.send_commit)
    finish = blocked(Publisher.finish)
    resolve = blocked(Publisher.resolve)
    stored_ids = blocked(Publisher.stored_ids)

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
        if chunked:
            return BlockingChunkedBatch(self.inner.atomic(stream, batch_id=batch_id, eob=eob, chunked=True))
        return BlockingBatch(self.inner.atomic(stream, batch_id=batch_id, eob=eob))

    def fast(
        self, stream: str, *, on_lost: OnLost | None = None, **choices: Unpack[IngestChoices]
    ) -> BlockingFastIngest:
        """Any number of messages in order, at the server's speed; see `Publisher.fast`."""
        return BlockingFastIngest(self.connection.settings, stream, IngestOptions(**choices), on_lost)


class BlockingBatch:
    """One batch under construction; nothing is sent before `flush` or `commit`. See `AtomicBatch`."""

    def __init__(self, inner: AtomicBatch) -> None:
        self.inner = inner

    content = passed[Batch]()
    batch_id = passed[str]()
    ack = passed[BatchAck]()
    flush = blocked(AtomicBatch.flush)
    commit = blocked(AtomicBatch.commit)
    abandon = blocked(AtomicBatch.abandon)
    resolve = blocked(AtomicBatch.resolve)
    __exit__ = blocked(AtomicBatch.__aexit__)

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
        return self.inner.content.add(
            subject, data, headers, message_id, expected_last_sequence, expected_last_subject_sequence
        )

    def __enter__(self) -> Self:
        return self


class BlockingChunkedBatch:
    """Any number of messages in chunks of 1,000, each atomic by itself; the whole is not. See `ChunkedBatch`."""

    def __init__(self, inner: ChunkedBatch) -> None:
        self.inner = inner

    batch_id = passed[str]()
    acks = passed[list[BatchAck]]()
    add = blocked(ChunkedBatch.add)
    resolve = blocked(ChunkedBatch.resolve)
    __exit__ = blocked(ChunkedBatch.__aexit__)

    def sequence_of(self, index: int) -> int:
        """The sequence of message number `index`, counted from 0 over all chunks."""
        return self.inner.sequence_of(index)

    def __enter__(self) -> Self:
        return self
