"""The streams and consumers of a platform in memory, for handlers of an app that are tested without a broker.

Handlers are called one after the other, in the order of the messages. What fails is handled again without waiting; in
order, before anything behind it, where the app asks for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock import subjects
from penstock.app import App
from penstock.app.app import OnConsumer
from penstock.app.groups import OnPartitions
from penstock.app.handled import key_of
from penstock.app.message import Message
from penstock.app.once import OnceBatch, ResultOrigin, check_target
from penstock.consume import messages, verdicts
from penstock.consume.dead_letters import GivenUpBy, letter_of
from penstock.consume.handlers import in_time
from penstock.consume.messages import MessageContext
from penstock.consume.verdicts import BACKOFF, GiveUp, Retries
from penstock.errors import PenstockError, Unavailable
from penstock.jetstream.model import Json, StoredMessage
from penstock.topology.model import Platform
from penstock.wire import headers as header_block
from penstock.wire.headers import Headers

ANY = "TEST"
"""The stream of consumers of which no platform file says where they read."""
UNLIMITED = 10**9


@dataclass(slots=True)
class MemoryStream:
    """A stream: what it takes, and what it has."""

    name: str
    config: Json | None
    """None: it takes everything, and anything may be stored in it."""
    messages: list[StoredMessage] = field(default_factory=list)

    def takes(self, subject: str) -> bool:
        return self.config is None or any(subjects.matches(one, subject) for one in self.config.get("subjects", ()))


Handle = Callable[[Any], Awaitable[Any]]
"""Takes a message of an app, or a list of them."""


@dataclass(slots=True)
class MemoryConsumer:
    """A consumer or a group with a handler, and what waits for it."""

    origin: ResultOrigin
    handle: Handle
    filters: tuple[str, ...]
    retries: Retries
    dlq: str | None = None
    batch: int = 0
    in_order: bool = False
    timeout: float | None = None
    partition: Callable[[str], str | None] | None = None
    """Of a group: the partition of a subject; None for one that belongs to none."""
    waiting: deque[tuple[StoredMessage, int]] = field(default_factory=deque)
    """Messages, each with the number of its next try."""

    def reads(self, subject: str) -> bool:
        matches = not self.filters or any(subjects.matches(one, subject) for one in self.filters)
        return matches and (self.partition is None or self.partition(subject) is not None)


class MemoryBroker:
    """Stores messages, and hands them to the handlers of an app."""

    def __init__(self, app: App, platform: Platform | None) -> None:
        self._platform = platform
        self.streams: dict[str, MemoryStream] = {}
        for name, spec in platform.streams.items() if platform else ():
            self.streams[name] = MemoryStream(name, {**spec.config, "subjects": list(spec.subjects)})
        self._markers: set[str] = set()
        self._finished: set[tuple[str, str]] = set()
        self._consumers = [self._consumer(app, one) for one in app.consumers]
        self._consumers += [self._group(app, one) for one in app.groups]

    def _stream(self, name: str) -> MemoryStream:
        """A stream by name; without a platform file every stream is there, and takes everything."""
        if name not in self.streams:
            if self._platform:
                raise PenstockError(f"{self._platform.path} declares no stream {name!r}")
            self.streams[name] = MemoryStream(name, None)
        return self.streams[name]

    def _consumer(self, app: App, declared: OnConsumer) -> MemoryConsumer:
        spec = self._platform.consumers.get(declared.name) if self._platform else None
        if self._platform and spec is None:
            raise PenstockError(f"{self._platform.path} declares no consumer {declared.name!r}")
        stream = self._stream(declared.stream or (spec.stream if spec else ANY))
        limit = (spec.max_deliver if spec else None) or -1
        options = declared.options
        call = declared.call if options.batch else app._around(declared.call)
        return MemoryConsumer(
            ResultOrigin(stream.name, "0", declared.name),
            self._once(declared.name, call) if declared.once else call,
            spec.filters if spec else (),
            Retries(max_deliver=limit if limit > 0 else UNLIMITED, backoff=BACKOFF),
            options.dlq or (spec.dlq if spec else None),
            options.batch,
            options.ordered_by is not None,
            options.timeout,
        )

    def _group(self, app: App, declared: OnPartitions) -> MemoryConsumer:
        found = declared.resolved(self._platform)
        pattern, known = found.pattern, found.filters
        return MemoryConsumer(
            ResultOrigin(self._stream(declared.stream).name, "0", declared.group, group=True),
            app._around(declared.call),
            (),
            found.worker.retries,
            found.worker.dlq,
            in_order=True,
            timeout=declared.timeout,
            partition=pattern.partition_id if pattern else lambda subject: subject if subject in known else None,
        )

    def _once(self, consumer: str, call: Handle) -> Handle:
        """Pass over events whose handler has finished before."""

        async def handle(message: Message) -> None:
            key = (consumer, key_of(message))
            if key not in self._finished:
                await call(message)
                self._finished.add(key)

        return handle

    # -- storing ---------------------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """Store a message in the streams that take it. Raises `Unavailable` when none does."""
        takers = [stream for stream in self.streams.values() if stream.takes(subject)]
        if not takers:
            raise Unavailable(f"no stream takes {subject!r}: nobody answered")
        for stream in takers:
            self._store(stream, subject, data, headers)

    def _store(self, stream: MemoryStream, subject: str, data: bytes, headers: Headers | None) -> None:
        parsed = header_block.parse(header_block.encode(headers)) if headers else {}
        stored = StoredMessage(stream.name, subject, len(stream.messages) + 1, datetime.now(UTC), data, parsed)
        stream.messages.append(stored)
        for consumer in self._consumers:
            if consumer.origin.stream == stream.name and consumer.reads(subject):
                consumer.waiting.append((stored, 1))

    def _batch(self, target: str, origin: ResultOrigin) -> OnceBatch:
        async def store(batch: OnceBatch) -> bool:
            stream = self.streams.get(target) if self._platform else self._stream(target)
            if self._platform:
                check_target(target, stream.config if stream else None)
            assert stream
            marker = origin.marker(target)
            if marker in self._markers:
                return False
            for subject, _, _ in batch.members:
                if not stream.takes(subject):
                    raise PenstockError(f"{subject} was refused: stream {target!r} does not take it")
            self._markers.add(marker)
            for subject, data, headers in batch.members:
                self._store(stream, subject, data, headers)
            return True

        return OnceBatch(store)

    # -- handling --------------------------------------------------------------------------------------------------

    async def handle_all(self) -> None:
        """Call handlers until nothing waits for them."""
        while waiting := [consumer for consumer in self._consumers if consumer.waiting]:
            for consumer in waiting:
                count = max(consumer.batch, 1)
                unit = [consumer.waiting.popleft() for _ in range(min(count, len(consumer.waiting)))]
                await self._handle(consumer, unit)

    async def _handle(self, consumer: MemoryConsumer, unit: list[tuple[StoredMessage, int]]) -> None:
        given = [self._message(consumer, stored, attempt) for stored, attempt in unit]
        try:
            async with in_time(consumer.timeout):
                await consumer.handle(given if consumer.batch else given[0])
        except Exception as exc:  # noqa: BLE001 -- whatever a handler raises is the verdict on its message
            if len(unit) > 1:
                for one in unit:
                    await self._handle(consumer, [one])
            else:
                self._failed(consumer, given[0], *unit[0], exc)

    def _failed(
        self, consumer: MemoryConsumer, message: Message, stored: StoredMessage, attempt: int, error: Exception
    ) -> None:
        verdict = verdicts.after_failure(error, attempt, consumer.retries)
        if isinstance(verdict, GiveUp):
            if consumer.dlq:
                reader = GivenUpBy(consumer.origin.stream, consumer.origin.consumer)
                letter = letter_of(reader, message.delivery, attempt, verdict, error)
                self.publish(f"{consumer.dlq}.{letter.id}", letter.body, letter.message_headers())
        elif consumer.in_order:
            consumer.waiting.appendleft((stored, attempt + 1))
        else:
            consumer.waiting.append((stored, attempt + 1))

    def _message(self, consumer: MemoryConsumer, stored: StoredMessage, attempt: int) -> Message:
        now, time = datetime.now(UTC), stored.time or datetime.now(UTC)
        delivery = messages.Message(
            stored.subject,
            stored.data,
            stored.sequence,
            attempt,
            "",
            now,
            header_block.encode(stored.headers) if stored.headers else b"",
            stored_ns=int(time.timestamp() * 1_000_000) * 1000,
        )
        context = None
        if consumer.partition:
            partition = consumer.partition(stored.subject) or ""
            context = MessageContext(stored.subject, partition, "test", now, attempt, 1)
        return Message(delivery, consumer.origin, self._batch, context)

    def stored(self, stream: str) -> Iterable[StoredMessage]:
        return tuple(self._stream(stream).messages)

    def letters(self) -> Iterable[StoredMessage]:
        return [
            one for stream in self.streams.values() for one in stream.messages if subjects.is_dead_letter(one.subject)
        ]
