"""The two publishers and the two fast ingests with one surface each, so that one suite runs on both.

The `Threaded…` classes are the blocking ones for `await`: each call that may wait runs in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

from tests.support.connections import ThreadedConnection

from penstock.jetstream.api import JetStream
from penstock.publish import (
    AtomicBatch,
    BatchAck,
    BatchRef,
    BlockingBatch,
    BlockingChunkedBatch,
    BlockingFastIngest,
    BlockingPublisher,
    ChunkedBatch,
    FastAck,
    FastIngest,
    IngestOptions,
    Lost,
    Publisher,
)
from penstock.publish.batch import Batch
from penstock.publish.outcome import SETTLE
from penstock.publish.rows import Publication
from penstock.settings import Settings
from penstock.testing import eventually_async
from penstock.wire.blocking import run
from penstock.wire.headers import Headers

OnLost = Callable[[Lost], object]


class ThreadedPublisher:
    """A blocking publisher with the calls of `Publisher`."""

    def __init__(self, inner: BlockingPublisher) -> None:
        self.inner = inner
        self.connection = ThreadedConnection(inner.connection)
        self.jetstream = JetStream(self._request)

    async def _request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        return await asyncio.to_thread(lambda: run(self.inner.inner.request(subject, payload, timeout)))

    @classmethod
    async def connect(cls, settings: Settings) -> Self:
        return cls(await asyncio.to_thread(BlockingPublisher.connect, settings))

    @property
    def patience(self) -> float:
        return self.inner.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.inner.patience = seconds

    @property
    def no_responders_timeout(self) -> float:
        return self.inner.no_responders_timeout

    @no_responders_timeout.setter
    def no_responders_timeout(self, seconds: float) -> None:
        self.inner.no_responders_timeout = seconds

    async def close(self) -> None:
        await asyncio.to_thread(self.inner.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[False] = False
    ) -> ThreadedBatch: ...

    @overload
    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: Literal[True]
    ) -> ThreadedChunkedBatch: ...

    def atomic(
        self, stream: str, *, batch_id: str | None = None, eob: bool = False, chunked: bool = False
    ) -> ThreadedBatch | ThreadedChunkedBatch:
        if chunked:
            return ThreadedChunkedBatch(self.inner.atomic(stream, batch_id=batch_id, eob=eob, chunked=True))
        return ThreadedBatch(self.inner.atomic(stream, batch_id=batch_id, eob=eob))

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
        def call() -> BatchAck:
            return self.inner.publish_batch(
                stream, subjects, payloads, headers=headers, message_id=message_id, batch_id=batch_id
            )

        return await asyncio.to_thread(call)

    async def resolve(self, ref: BatchRef, *, settle: float = SETTLE) -> BatchAck | None:
        return await asyncio.to_thread(lambda: self.inner.resolve(ref, settle=settle))


class ThreadedBatch:
    """A blocking batch with the calls of `AtomicBatch`."""

    def __init__(self, inner: BlockingBatch) -> None:
        self.inner = inner

    @property
    def content(self) -> Batch:
        return self.inner.content

    @property
    def batch_id(self) -> str:
        return self.inner.batch_id

    @property
    def ack(self) -> BatchAck:
        return self.inner.ack

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
        return self.inner.add(
            subject,
            data,
            headers=headers,
            message_id=message_id,
            expected_last_sequence=expected_last_sequence,
            expected_last_subject_sequence=expected_last_subject_sequence,
        )

    async def flush(self) -> None:
        await asyncio.to_thread(self.inner.flush)

    async def commit(self) -> BatchAck:
        return await asyncio.to_thread(self.inner.commit)

    async def abandon(self) -> None:
        await asyncio.to_thread(self.inner.abandon)

    async def resolve(self) -> BatchAck | None:
        return await asyncio.to_thread(self.inner.resolve)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.inner.__exit__, kind, error, trace)


class ThreadedChunkedBatch:
    """A blocking series of chunks with the calls of `ChunkedBatch`."""

    def __init__(self, inner: BlockingChunkedBatch) -> None:
        self.inner = inner

    @property
    def acks(self) -> list[BatchAck]:
        return self.inner.acks

    def sequence_of(self, index: int) -> int:
        return self.inner.sequence_of(index)

    async def add(
        self, subject: str, data: bytes, *, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        return await asyncio.to_thread(lambda: self.inner.add(subject, data, headers=headers, message_id=message_id))

    async def resolve(self) -> BatchAck | None:
        return await asyncio.to_thread(self.inner.resolve)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.inner.__exit__, kind, error, trace)


class ThreadedFastIngest:
    """A blocking fast ingest with the calls of `FastIngest`."""

    def __init__(self, inner: BlockingFastIngest) -> None:
        self.inner = inner

    @property
    def ack(self) -> FastAck | None:
        return self.inner.ack

    @property
    def stored(self) -> int:
        return self.inner.stored

    @property
    def added(self) -> int:
        return self.inner.added

    @property
    def sequence(self) -> int:
        return self.inner.sequence

    @property
    def maybe_twice(self) -> int:
        return self.inner.maybe_twice

    @property
    def max_payload(self) -> int:
        return self.inner.max_payload

    async def add(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        return await asyncio.to_thread(self.inner.add, subject, data, headers, message_id)

    async def add_many(self, messages: Iterable[Publication]) -> int:
        return await asyncio.to_thread(self.inner.add_many, messages)

    async def add_data(self, subject: str, data: Iterable[bytes]) -> int:
        return await asyncio.to_thread(self.inner.add_data, subject, data)

    async def flush(self) -> int:
        return await asyncio.to_thread(self.inner.flush)

    async def ping(self) -> None:
        await asyncio.to_thread(self.inner.ping)

    async def commit(self) -> FastAck:
        return await asyncio.to_thread(self.inner.commit)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.inner.__exit__, kind, error, trace)


AnyPublisher = Publisher | ThreadedPublisher
AnyBatch = AtomicBatch | ThreadedBatch
AnyChunkedBatch = ChunkedBatch | ThreadedChunkedBatch
AnyFastIngest = FastIngest | ThreadedFastIngest


async def connect_publisher(half: str, settings: Settings) -> AnyPublisher:
    """A publisher of one half, with a connection of its own."""
    kind = Publisher if half == "asyncio" else ThreadedPublisher
    return await kind.connect(settings)


def open_fast_ingest(
    half: str, settings: Settings, stream: str, on_lost: OnLost | None = None, **options: Any
) -> AnyFastIngest:
    """A fast ingest of one half; `options` are those of `IngestOptions`."""
    made = IngestOptions(**options)
    if half == "asyncio":
        return FastIngest(settings, stream, made, on_lost)
    return ThreadedFastIngest(BlockingFastIngest(settings, stream, made, on_lost))


async def loss_noticed(publisher: AnyPublisher) -> None:
    """Return when the publisher can know that its connection is gone: the blocking one looks before each batch."""
    if isinstance(publisher, Publisher):
        await eventually_async(lambda: not publisher.connection.connected, what="the loss to be noticed")


async def stored(publisher: AnyPublisher, stream: str = "S") -> list[bytes]:
    """The payloads in the stream, in order."""
    state = (await publisher.jetstream.stream_info(stream)).state
    found = []
    for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
        found.append((await publisher.jetstream.get_message(stream, sequence)).data)
    return found


async def fill(batch: AnyBatch, count: int) -> None:
    for number in range(count):
        await batch.add("s.a", b"%d" % number)
