"""How much an atomic batch may hold, how many may be under way, and for how long.

A contract: each test runs on the asyncio and on the blocking publisher, unless it says why not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.support.publishers import AnyBatch, AnyPublisher, connect_publisher, fill, stored

from penstock import publish
from penstock.publish import Publisher
from penstock.publish.batch import Batch, drop
from penstock.server.embedded import EmbeddedServer
from penstock.testing.polling import eventually_async
from penstock.wire import aio, frames

# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_thousand_messages_are_stored_and_one_more_is_refused_before_anything_is_sent(
    publisher: AnyPublisher,
) -> None:
    async with publisher.atomic("S") as batch:
        await fill(batch, 1000)
    assert batch.ack.count == 1000
    with pytest.raises(publish.TooLarge, match="chunked=True"):
        async with publisher.atomic("S") as batch:
            await fill(batch, 1001)
    assert batch.content.sent == 0
    with pytest.raises(publish.TooLarge):
        await publisher.publish_batch("S", "s.a", [b""] * 1001)
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1000


@pytest.mark.parametrize("eob", [False, True], ids=["commit on last", "eob"])
async def test_the_server_takes_1000_messages_and_refuses_1001(
    publisher: AnyPublisher, monkeypatch: pytest.MonkeyPatch, eob: bool
) -> None:
    """The server's own limit, with our check out of the way."""
    async with publisher.atomic("S", eob=eob) as batch:
        await fill(batch, 1000)
    assert batch.ack.count == 1000
    monkeypatch.setattr("penstock.publish.batch.MAX_MESSAGES", 1001)
    monkeypatch.setattr("penstock.publish.batch._SEQUENCE_LINES", [b"%d\r\n" % n for n in range(1004)])
    with pytest.raises(publish.TooLarge) as caught:
        async with publisher.atomic("S", eob=eob) as batch:
            await fill(batch, 1001)
    assert caught.value.err_code == 10199
    assert batch.content.sent == 1001
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1000


async def test_chunks_are_atomic_each_by_itself(publisher: AnyPublisher) -> None:
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S", chunked=True) as batch:
            for number in range(2500):
                assert await batch.add("s.a", b"%d" % number) == number
            raise ZeroDivisionError
    assert [ack.count for ack in batch.acks] == [1000, 1000]
    async with publisher.atomic("S", chunked=True) as batch:
        for number in range(1001):
            await batch.add("s.a", b"%d" % number)
    assert [ack.count for ack in batch.acks] == [1000, 1]
    assert batch.sequence_of(1000) == 3001
    assert (await publisher.jetstream.get_message("S", 3001)).data == b"1000"


async def test_chunks_are_named_after_the_series(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S", chunked=True, batch_id="series") as batch:
        for number in range(1001):
            await batch.add("s.a", b"%d" % number)
    assert [(ack.batch_id, ack.count) for ack in batch.acks] == [("series-0", 1000), ("series-1", 1)]
    assert batch.sequence_of(1000) == 1001
    with pytest.raises(publish.BadId):
        publisher.atomic("S", chunked=True, batch_id="i" * 60)


@pytest.fixture
async def crowd(nats_server: EmbeddedServer, publisher: AnyPublisher) -> AsyncIterator[Sequence[publish.AtomicBatch]]:
    """As many open batches as the server takes."""
    async with await Publisher.connect(nats_server.settings, in_flight=60) as greedy:
        held = [greedy.atomic("S") for _ in range(50)]
        for batch in held:
            await fill(batch, 2)
            await batch.flush()
        yield held


def refusals_of(batch: AnyBatch) -> list[publish.TooManyInFlight]:
    """What the server answers to a batch because it is crowded, as it comes."""
    seen: list[publish.TooManyInFlight] = []
    accepted = batch.content.accepted

    def watched(first: frames.Message) -> None:
        try:
            accepted(first)
        except publish.TooManyInFlight as refusal:
            seen.append(refusal)
            raise

    batch.content.accepted = watched  # type: ignore[method-assign] # to see the refusals
    return seen


async def test_the_51st_batch_in_flight_waits_for_a_place(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch]
) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    refusals = refusals_of(batch)
    waiting = asyncio.create_task(batch.commit())
    await eventually_async(lambda: len(refusals) >= 2, what="the server to refuse it twice")
    assert not waiting.done()
    await crowd[0].commit()
    assert (await waiting).count == 3
    for one in crowd[1:]:
        await one.commit()
    assert (await publisher.jetstream.stream_info("S")).state.messages == 2 * 50 + 3


@pytest.mark.parametrize("before", [0, 1], ids=["all at once", "after a flush that sent nothing"])
async def test_a_flush_waits_for_a_place_too(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch], before: int
) -> None:
    """A single member is not sent by `flush`, as it may be the one that commits: the batch begins with the next."""
    batch = publisher.atomic("S")
    refusals = refusals_of(batch)
    if before:
        await batch.add("s.a", b"first")
        await batch.flush()
        assert batch.content.sent == 0
    await fill(batch, 3)
    flushing = asyncio.create_task(batch.flush())
    await eventually_async(lambda: len(refusals) >= 2, what="the server to refuse it twice")
    await crowd[0].commit()
    await flushing
    assert (await batch.commit()).count == 3 + before


async def test_too_many_in_flight_is_an_error_when_patience_ends(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch]
) -> None:
    publisher.patience = 0.3
    with pytest.raises(publish.TooManyInFlight) as caught:
        await publisher.publish_batch("S", "s.a", [b"1", b"2"])
    assert caught.value.err_code == 10210
    assert caught.value.retryable


async def test_one_publisher_keeps_below_its_own_limit(
    nats_server: EmbeddedServer, asyncio_publisher: Publisher
) -> None:
    """Asyncio only: a blocking publisher serves one thread, which decides by itself how many it begins."""
    async with await Publisher.connect(nats_server.settings, in_flight=1, patience=0.1) as narrow:
        batch = narrow.atomic("S")
        await fill(batch, 2)
        await batch.flush()
        with pytest.raises(publish.TooManyInFlight, match="too many"):
            await narrow.publish_batch("S", "s.a", [b"x"])
        await batch.commit()
        await narrow.publish_batch("S", "s.a", [b"x"])


async def test_ten_seconds_of_silence_end_a_batch(nats_server: EmbeddedServer, asyncio_publisher: Publisher) -> None:
    """Both publishers in one test, since it takes the server's ten seconds."""
    async with publish.Abandonments(nats_server.settings) as watch:
        other = await connect_publisher("blocking", nats_server.settings)
        batches: list[AnyBatch] = [asyncio_publisher.atomic("S"), other.atomic("S")]
        for batch in batches:
            await fill(batch, 3)
            await batch.flush()
        await eventually_async(lambda: watch.statistics().total == 2, within=60, what="the server to give up")
    assert watch.statistics().counts == {"S": {"timeout": 2}}
    for batch in batches:
        with pytest.raises(publish.TimedOut, match="10 s without a message"):
            await batch.commit()
    await other.close()
    assert await stored(asyncio_publisher) == []


async def test_a_batch_id_has_at_most_64_characters(nats_server: EmbeddedServer, publisher: AnyPublisher) -> None:
    ack = await publisher.publish_batch("S", "s.a", [b"x"], batch_id="i" * 64)
    assert ack.batch_id == "i" * 64
    with pytest.raises(publish.BadId, match="this one has 65"):
        publisher.atomic("S", batch_id="i" * 65)
    with pytest.raises(publish.BadId):
        publisher.atomic("S", batch_id="")
    # The server's own word for it, with our check out of the way.
    async with await aio.connect(nats_server.settings) as raw:
        reply = raw.inbox()
        await raw.send(drop("i" * 65, b"s.a", reply))
        answer = await raw.wait(reply)
    content = Batch("S")
    content.add("s.a", b"")
    with pytest.raises(publish.BadId) as caught:
        content.accepted(answer)
    assert caught.value.err_code == 10179
