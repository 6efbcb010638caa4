"""A subject that no stream takes yet: every publisher tries again before it calls that an error.

On a cluster, servers hear of a new stream one after the other. One server that hears of a subject late stands for that:
the answer ("no responders", 503) is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from penstock.errors import ConfigError
from penstock.jetstream import connect
from penstock.publish import BlockingPublisher, NobodyListens, Publisher, WrongStream
from penstock.publish.batch import Batch
from penstock.publish.fast import FastIngest
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.options import IngestOptions
from penstock.publish.plain import PlainPublisher, PubAck
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import stream_data

Publish = Callable[[Settings, list[tuple[str, bytes]], float], Coroutine[None, None, None]]
"""Publishes messages to stream S in order, with this `no_responders_timeout`."""

LATE = 0.3
"""Seconds after which the stream takes the subject."""


async def plain(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    async with PlainPublisher(settings, no_responders_timeout=timeout) as publisher:
        outcomes = [one for message in messages for one in await publisher.add(*message)]
        for outcome in outcomes + await publisher.finish():
            if not isinstance(outcome, PubAck):
                raise outcome


async def atomic(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    subjects, payloads = [subject for subject, _ in messages], [data for _, data in messages]
    async with await Publisher.connect(settings, no_responders_timeout=timeout) as publisher:
        await publisher.publish_batch("S", subjects, payloads)


async def atomic_flushed(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    async with (
        await Publisher.connect(settings, no_responders_timeout=timeout) as publisher,
        publisher.atomic("S") as batch,
    ):
        for message in messages:
            await batch.add(*message)
        await batch.flush()


async def atomic_blocking(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    def work() -> None:
        with BlockingPublisher.connect(settings, no_responders_timeout=timeout) as publisher:
            publisher.publish_batch("S", [subject for subject, _ in messages], [data for _, data in messages])

    await asyncio.to_thread(work)


async def atomic_blocking_flushed(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    def work() -> None:
        made = BlockingPublisher.connect(settings, no_responders_timeout=timeout)
        with made as publisher, publisher.atomic("S") as batch:
            for message in messages:
                batch.add(*message)
            batch.flush()

    await asyncio.to_thread(work)


async def atomic_in_two_steps(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    """As the bridge and the Spark sink do it."""

    def work() -> None:
        with BlockingPublisher.connect(settings, no_responders_timeout=timeout) as publisher:
            batch = Batch("S")
            batch.extend([subject for subject, _ in messages], [data for _, data in messages])
            publisher.finish(publisher.begin(batch))

    await asyncio.to_thread(work)


async def fast(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    async with FastIngest(settings, "S", IngestOptions(no_responders_timeout=timeout)) as ingest:
        await ingest.add_many(messages)


async def fast_resending(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    options = IngestOptions(no_responders_timeout=timeout, on_gap="resend")
    async with FastIngest(settings, "S", options) as ingest:
        await ingest.add_many(messages)


async def fast_blocking(settings: Settings, messages: list[tuple[str, bytes]], timeout: float) -> None:
    def work() -> None:
        with BlockingFastIngest(settings, "S", IngestOptions(no_responders_timeout=timeout)) as ingest:
            ingest.add_many(messages)

    await asyncio.to_thread(work)


PUBLISHERS: list[Publish] = [
    plain,
    atomic,
    atomic_flushed,
    atomic_blocking,
    atomic_blocking_flushed,
    atomic_in_two_steps,
    fast,
    fast_resending,
    fast_blocking,
]
every_publisher = pytest.mark.parametrize("publish", PUBLISHERS, ids=lambda one: one.__name__.replace("_", " "))


async def make_stream(settings: Settings) -> None:
    config = {"name": "S", "subjects": ["s.>"], "allow_atomic": True, "allow_batched": True}
    async with connect(settings) as broker:
        await broker.jetstream.create_stream(config)


@asynccontextmanager
async def taken_late(settings: Settings) -> AsyncIterator[None]:
    """Let stream S take `late.>` as well, a moment after the block has begun."""
    begun = asyncio.Event()

    async def take() -> None:
        await asyncio.sleep(LATE)  # what is tested is that the publisher waits
        begun.set()
        async with connect(settings) as broker:
            await broker.jetstream.update_stream("S", {"subjects": ["s.>", "late.>"]})

    taking = asyncio.create_task(take())
    yield
    assert begun.is_set(), "the publisher did not wait"
    await taking


def numbered(subject: str, count: int, start: int = 1) -> list[tuple[str, bytes]]:
    return [(subject, b"%d" % number) for number in range(start, start + count)]


async def contents(settings: Settings) -> list[bytes]:
    return await asyncio.to_thread(stream_data, settings, "S")


@every_publisher
@pytest.mark.parametrize("count", [1, 20])
async def test_messages_for_a_subject_that_is_taken_late_are_stored_once_and_in_order(
    nats_server: EmbeddedServer, publish: Publish, count: int
) -> None:
    await make_stream(nats_server.settings)
    async with taken_late(nats_server.settings):
        await publish(nats_server.settings, numbered("late.a", count), 30)
    assert await contents(nats_server.settings) == [data for _, data in numbered("late.a", count)]


@every_publisher
async def test_a_message_on_a_subject_that_is_taken_late_behind_others_is_stored_once(
    nats_server: EmbeddedServer, publish: Publish
) -> None:
    await make_stream(nats_server.settings)
    messages = [*numbered("s.a", 3), *numbered("late.a", 1, 4)]
    async with taken_late(nats_server.settings):
        await publish(nats_server.settings, messages, 30)
    assert await contents(nats_server.settings) == [data for _, data in messages]


async def test_a_plain_publish_that_begins_before_its_stream_exists_is_stored_once(nats_server: EmbeddedServer) -> None:
    """The others ask for the stream first: one that does not exist is an error at once."""
    publishing = asyncio.create_task(plain(nats_server.settings, numbered("s.a", 20), 30))
    await asyncio.sleep(LATE)
    assert not publishing.done()
    await make_stream(nats_server.settings)
    await publishing
    assert await contents(nats_server.settings) == [data for _, data in numbered("s.a", 20)]


@pytest.mark.parametrize("publish", [fast, fast_blocking], ids=["asyncio", "blocking"])
async def test_a_fast_ingest_that_begins_before_its_stream_exists_is_stored_once(
    nats_server: EmbeddedServer, publish: Publish
) -> None:
    publishing = asyncio.create_task(publish(nats_server.settings, numbered("s.a", 20), 30))
    await asyncio.sleep(LATE)
    assert not publishing.done()
    await make_stream(nats_server.settings)
    await publishing
    assert await contents(nats_server.settings) == [data for _, data in numbered("s.a", 20)]


@every_publisher
async def test_a_subject_that_no_stream_takes_is_an_error_that_says_for_how_long_it_was_tried(
    nats_server: EmbeddedServer, publish: Publish
) -> None:
    await make_stream(nats_server.settings)
    with pytest.raises((NobodyListens, WrongStream, ConfigError), match=r"tried for 0\.[1-9] s"):
        await publish(nats_server.settings, numbered("nowhere", 3), 0.4)
    assert await contents(nats_server.settings) == []


@pytest.mark.parametrize("publish", [fast, fast_resending, fast_blocking], ids=["fail", "resend", "blocking"])
async def test_a_fast_ingest_has_stored_what_came_before_a_subject_that_no_stream_takes(
    nats_server: EmbeddedServer, publish: Publish
) -> None:
    await make_stream(nats_server.settings)
    messages = [*numbered("s.a", 3), ("nowhere", b"4"), *numbered("s.a", 3, 5)]
    with pytest.raises(WrongStream, match=r"message 4: no stream takes subject 'nowhere' \(tried for") as raised:
        await publish(nats_server.settings, messages, 0.2)
    assert raised.value.stored == 3
    assert await contents(nats_server.settings) == [b"1", b"2", b"3"]


async def test_a_plain_publisher_waits_once_for_a_subject_that_no_stream_takes(nats_server: EmbeddedServer) -> None:
    """Else many messages for it would each take the whole time, and a load of them hours."""
    await make_stream(nats_server.settings)
    async with PlainPublisher(nats_server.settings, window=10, no_responders_timeout=0.2) as publisher:
        outcomes = [one for _ in range(500) for one in await publisher.add("nowhere", b"")]
        outcomes += await publisher.finish()
        assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
        assert len(outcomes) == 500
        await publisher.add("s.a", b"1")
        assert await publisher.finish() == [PubAck("S", 1)]
