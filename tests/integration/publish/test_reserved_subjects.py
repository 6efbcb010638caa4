"""Nobody publishes among the dead letters by hand: every publisher refuses, and tests say that they mean it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.support.streams import make_stream

from penstock.publish.atomic import Publisher
from penstock.publish.blocking import BlockingPublisher
from penstock.publish.plain import PlainPublisher
from penstock.publish.reserved import ReservedSubject
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import letter_subject, stream_data

SUBJECTS = ["dlq.>", "s.>", "dlq_audit.>"]
DATA = b"by hand"


async def plain(settings: Settings, subject: str) -> None:
    async with PlainPublisher(settings) as publisher:
        await publisher.add(subject, DATA)
        await publisher.finish()


async def atomic(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher, publisher.atomic("DLQ") as batch:
        await batch.add("s.before", b"goes down with the other")
        await batch.add(subject, DATA)


async def chunked(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher, publisher.atomic("DLQ", chunked=True) as batch:
        await batch.add(subject, DATA)


async def prepared(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher:
        await publisher.publish_batch("DLQ", ["s.a", subject], [b"a", DATA])


async def fast(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher, publisher.fast("DLQ") as ingest:
        await ingest.add(subject, DATA)


async def fast_in_bulk(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher, publisher.fast("DLQ") as ingest:
        await ingest.add_many([("s.a", b"a"), (subject, DATA)])


async def fast_of_one_subject(settings: Settings, subject: str) -> None:
    async with await Publisher.connect(settings) as publisher, publisher.fast("DLQ") as ingest:
        await ingest.add_data(subject, [DATA])


def blocking_atomic(settings: Settings, subject: str) -> None:
    with BlockingPublisher.connect(settings) as publisher, publisher.atomic("DLQ") as batch:
        batch.add(subject, DATA)


def blocking_prepared(settings: Settings, subject: str) -> None:
    with BlockingPublisher.connect(settings) as publisher:
        publisher.publish_batch("DLQ", subject, [DATA])


def blocking_fast(settings: Settings, subject: str) -> None:
    with BlockingPublisher.connect(settings) as publisher, publisher.fast("DLQ") as ingest:
        ingest.add_many([(subject, DATA)])


Way = Callable[[Settings, str], Awaitable[None]]


def threaded(way: Callable[[Settings, str], None]) -> Way:
    return lambda settings, subject: asyncio.to_thread(way, settings, subject)


WAYS: dict[str, Way] = {
    "plain": plain,
    "atomic": atomic,
    "chunked": chunked,
    "prepared": prepared,
    "fast": fast,
    "fast in bulk": fast_in_bulk,
    "fast of one subject": fast_of_one_subject,
    "blocking atomic": threaded(blocking_atomic),
    "blocking prepared": threaded(blocking_prepared),
    "blocking fast": threaded(blocking_fast),
}


@pytest.fixture
async def settings(nats_server: EmbeddedServer) -> Settings:
    async with await Publisher.connect(nats_server.settings) as publisher:
        await make_stream(publisher.jetstream, "DLQ", subjects=SUBJECTS, allow_atomic=True, allow_batched=True)
    return nats_server.settings


async def stored(settings: Settings) -> list[bytes]:
    return [data for data in await asyncio.to_thread(stream_data, settings, "DLQ") if data == DATA]


@pytest.mark.parametrize("way", WAYS)
async def test_no_publisher_writes_among_dead_letters_unless_a_test_says_that_it_means_it(
    settings: Settings, way: str
) -> None:
    for subject in ("dlq.orders.placed", "dlq", "dlq_audit.letters.x"):
        with pytest.raises(ReservedSubject, match=r"`penstock dlq replay`.*letter_subject"):
            await WAYS[way](settings, subject)
    assert await stored(settings) == []

    await WAYS[way](settings, letter_subject("dlq.orders.placed"))
    assert await stored(settings) == [DATA]
    with pytest.raises(ReservedSubject):
        await WAYS[way](settings, "dlq.orders.placed")
    assert await stored(settings) == [DATA]


async def test_a_publisher_that_was_allowed_one_letter_still_refuses_the_same_subject_as_text(
    settings: Settings,
) -> None:
    async with PlainPublisher(settings) as publisher:
        await publisher.add(letter_subject("dlq.a"), DATA)
        with pytest.raises(ReservedSubject):
            await publisher.add("dlq.a", DATA)
        await publisher.add("s.a", b"other")
        assert len(await publisher.finish()) == 2
