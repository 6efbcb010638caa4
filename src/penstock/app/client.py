"""`penstock.connect()`: publish, read and keep, over one object.

async with penstock.connect("nats://127.0.0.1:4222") as client:
    await client.publish("orders.placed", {"id": 1})
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from penstock.app import payloads
from penstock.app.browse import Browser
from penstock.app.buckets import Bucket
from penstock.deadletter.capture import capture
from penstock.deadletter.letters import FailedDelivery, Failure
from penstock.errors import Unavailable
from penstock.facts import Appended, Confirmation, Fact, Facts, Page
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import Broker, NoStream
from penstock.jetstream.model import ConsumerInfo, Json, StoredMessage, StreamInfo
from penstock.publish.atomic import AtomicBatch, Publisher
from penstock.publish.batch import literal_subject
from penstock.publish.fast import FastIngest
from penstock.publish.packed import PackedPublisher
from penstock.retry import retrying
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.headers import Headers

WAIT = 5.0
"""Seconds that a reader waits for a page."""


@asynccontextmanager
async def connect(servers: str | Collection[str] | Settings | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A client of a server. `settings` are those of `Settings`, such as `credentials` or `domain`; what is not given
    comes from the settings file and the environment variables."""
    if not isinstance(servers, Settings):
        if servers:
            settings["servers"] = [servers] if isinstance(servers, str) else list(servers)
        servers = Settings.load(**settings)
    publisher = await Publisher.connect(servers)
    facts = Facts(servers)
    try:
        yield Client(servers, publisher, facts)
    finally:
        await facts.close()
        await publisher.close()


class Client:
    """The API of a server; any number of tasks of one event loop may use it."""

    def __init__(self, settings: Settings, publisher: Publisher, facts: Facts) -> None:
        self.settings = settings
        self._publisher = publisher
        self._broker = Broker(settings, connection=publisher.connection)
        self._facts = facts
        self._max_payload = publisher.connection.info.max_payload

    @property
    def jetstream(self) -> JetStream:
        """Everything that JetStream's API can do."""
        return self._publisher.jetstream

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, with its headers; of the last one, while none is there."""
        if self._publisher.connection.connected:
            self._max_payload = self._publisher.connection.info.max_payload
        return self._max_payload

    async def publish(
        self, subject: str, value: Any, *, headers: Headers | None = None, message_id: str | None = None
    ) -> int:
        """Store a message, and return its sequence. `value`: bytes, text, or something that becomes JSON.

        Raises `Unavailable` when no stream takes the subject. After an error that is `Unavailable` it may be stored or
        not; with a `message_id` it can be published again within the stream's duplicate window.
        """
        literal_subject(subject)
        return int((await self._store(subject, payloads.encode(value), headers, message_id))["seq"])

    async def _store(
        self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> Json:
        """Publish, and return the stream's answer. Retries for a short time when no stream stores the subject."""
        all_headers = {**(headers or {}), **({"Nats-Msg-Id": message_id} if message_id else {})}
        unheard = self._publisher.no_responders_timeout

        async def store() -> Json:
            await self._publisher.ready()
            return await self._broker.publish(subject, data, all_headers or None)

        try:
            return await retrying(store, unheard, retry_on=lambda exc: isinstance(exc, NoStream))
        except NoStream as exc:
            raise Unavailable(
                f"no stream takes {subject!r} (tried for {unheard:g} s): create one, or check it"
            ) from exc

    def atomic(self, stream: str) -> AtomicBatch:
        """A batch that is stored whole or not at all: `async with client.atomic("ORDERS") as batch`."""
        return self._publisher.atomic(stream)

    def fast(self, stream: str, **choices: Any) -> FastIngest:
        """Any number of messages in order, at the server's speed."""
        return self._publisher.fast(stream, **choices)

    def packed(self, **choices: Any) -> PackedPublisher:
        """Many rows in one message: `async with client.packed(rows=500) as packed`. Needs the extra `arrow`.

        `rows`, `max_bytes` and `within` (seconds) bound a pack; `codec` is `lz4`, `zstd` or `none`.
        """
        return PackedPublisher(self._store, lambda: self.max_payload, **choices)

    def kv(self, bucket: str) -> Bucket:
        """A bucket of keys and values."""
        return Bucket(self._publisher, self._broker, bucket)

    def stream(self, name: str) -> Stream:
        return Stream(self._publisher, name)

    def consumer(self, name: str, stream: str) -> Consumer:
        """A durable consumer of a stream, to look at and to operate; `App` handles its messages."""
        return Consumer(self._publisher.jetstream, stream, name)

    def reader(self, name: str, stream: str | None = None) -> NamedReader:
        """A named reader of facts: pages, each with a receipt that confirms exactly that page."""
        return NamedReader(self._facts, name, stream)

    async def bury(self, message: Received, error: BaseException, dlq: str) -> bool:
        """Store a message that a handler of another client gives up as a dead letter; durable when it returns.

        `message` is what that client has received through a consumer, not yet acknowledged. `dlq` is the subject that
        the platform file names for the consumer. Returns False when the letter was there already.
        """
        letter = FailedDelivery.parse(message.reply).letter(
            subject=message.subject,
            body=message.data,
            headers=_values(getattr(message, "headers", None)),
            failure=Failure.of(error),
            failed_at=datetime.now(UTC),
        )
        await self._publisher.ready()
        return (await capture(self._publisher.connection, letter, dlq, domain=self.settings.domain)).new

    async def append_fact(self, subject: str, fact_id: str, value: Any, *, headers: Headers | None = None) -> Appended:
        """Store a fact once, however often and however late it is appended."""
        return await self._facts.append_fact(subject, fact_id, payloads.encode(value), headers=headers)


class Received(Protocol):
    """A message that any client has received through a consumer."""

    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def reply(self) -> str: ...


def _values(headers: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Headers with all their values, however a client keeps them."""
    return {name: [one] if isinstance(one, str) else list(one) for name, one in (headers or {}).items()}


class Stream:
    """A stream to look at."""

    def __init__(self, publisher: Publisher, name: str) -> None:
        self.name = name
        self._publisher = publisher

    async def info(self) -> StreamInfo:
        return await self._publisher.jetstream.stream_info(self.name)

    async def messages(
        self,
        subjects: str | Collection[str] = (),
        *,
        since: datetime | timedelta | str | None = None,
        first: int | None = None,
        last: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[StoredMessage]:
        """Its messages in order, whatever its retention; no consumer is made for it.

        `since`: stored at that time or later; "1h" counts back from now. `first` and `last`: sequences. `follow`: goes
        on with what comes.
        """
        async with await aio.connect(self._publisher.connection.settings, name="penstock view") as connection:
            browser = Browser(connection, self.name)
            async for message in browser.messages(subjects, since=since, first=first, last=last, follow=follow):
                yield message


class Consumer:
    """A durable consumer to look at and to operate; `penstock.App` handles its messages."""

    def __init__(self, jetstream: JetStream, stream: str, name: str) -> None:
        self.stream = stream
        self.name = name
        self._jetstream = jetstream

    async def info(self) -> ConsumerInfo:
        return await self._jetstream.consumer_info(self.stream, self.name)

    async def pause(self, until: datetime | timedelta) -> datetime | None:
        """Stop deliveries until then."""
        return await self._jetstream.pause_consumer(self.stream, self.name, until)

    async def resume(self) -> None:
        await self._jetstream.resume_consumer(self.stream, self.name)

    async def reset(self, sequence: int | None = None) -> None:
        """Continue at a sequence, or after the ack floor."""
        await self._jetstream.reset_consumer(self.stream, self.name, sequence)


@dataclass(frozen=True, slots=True)
class ReaderPage:
    """A page of facts."""

    page: Page
    reader: NamedReader

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(self.page.facts)

    async def confirm(self) -> Confirmation:
        """Confirm exactly this page; it is durable when this returns."""
        return await self.reader.confirm(self.page.receipt)


@dataclass(frozen=True, slots=True)
class NamedReader:
    """A durable consumer that is read page by page."""

    facts: Facts
    name: str
    stream: str | None = None

    async def page(self, limit: int = 100, wait: float = WAIT) -> ReaderPage | None:
        """Return the next page; None when nothing has arrived within `wait` seconds."""
        page = await self.facts.fetch_facts(self.name, limit, stream=self.stream, wait=wait)
        return ReaderPage(page, self) if page else None

    async def pages(self, limit: int = 100, wait: float = WAIT, follow: bool = False) -> AsyncIterator[ReaderPage]:
        """Yield page after page, until nothing has arrived for `wait` seconds; with `follow`, forever."""
        while True:
            found = await self.page(limit, wait)
            if found:
                yield found
            elif not follow:
                return
            else:
                await asyncio.sleep(0)

    async def confirm(self, receipt: str | None) -> Confirmation:
        return await self.facts.confirm_receipt(self.name, receipt, stream=self.stream)
