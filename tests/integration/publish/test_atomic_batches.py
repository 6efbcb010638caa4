"""Atomic batches against a real server: all or nothing, what they expect, and what a lost connection leaves.

A contract: each test runs on the asyncio and on the blocking publisher, unless it says why not.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.support.publishers import AnyPublisher, connect_publisher, fill, loss_noticed, stored

from penstock import errors, publish
from penstock.publish import BlockingPublisher, Publisher
from penstock.publish.batch import Batch
from penstock.server.embedded import EmbeddedServer

# -- the promise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eob", [False, True], ids=["commit on last", "eob"])
async def test_leaving_the_block_stores_all_next_to_each_other(publisher: AnyPublisher, eob: bool) -> None:
    await publisher.publish_batch("S", "s.before", [b"before"])
    async with publisher.atomic("S", eob=eob) as batch:
        assert await batch.add("s.a", b"a", headers={"Colour": ["red", "blue"]}) == 0
        assert await batch.add("s.b", b"b", message_id="id-b") == 1
        assert await batch.add("s.c", b"") == 2
    ack = batch.ack
    assert (ack.stream, ack.sequence, ack.batch_id, ack.count) == ("S", 4, batch.batch_id, 3)
    assert [ack.sequence_of(index) for index in range(3)] == [2, 3, 4] == list(ack.sequences)
    messages = [await publisher.jetstream.get_message("S", sequence) for sequence in ack.sequences]
    assert [(m.subject, m.data) for m in messages] == [("s.a", b"a"), ("s.b", b"b"), ("s.c", b"")]
    assert messages[0].headers["Colour"] == ["red", "blue"]
    assert messages[1].headers["Nats-Msg-Id"] == ["id-b"]
    assert "Colour" not in messages[1].headers


@pytest.mark.parametrize("flushed", [False, True])
async def test_an_exception_inside_stores_nothing(publisher: AnyPublisher, flushed: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S") as batch:
            await fill(batch, 5)
            if flushed:
                await batch.flush()
            raise ZeroDivisionError
    assert await stored(publisher) == []
    with pytest.raises(errors.ConfigError, match="not committed"):
        _ = batch.ack


async def test_members_that_are_flushed_one_by_one_are_stored_like_others(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"a")
        await batch.flush()
        await batch.add("s.b", b"b", headers={"X": "y"})
        await batch.flush()
        await batch.add("s.c", b"c")
    assert list(batch.ack.sequences) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"a")
            await batch.add("s.a", b"b")
            await batch.flush()
            raise ZeroDivisionError
    ack = await publisher.publish_batch("S", ["s.a", "s.b"], [b"1", b"2"], headers=[{"A": "1"}, None])
    assert list(ack.sequences) == [4, 5]
    assert await stored(publisher) == [b"a", b"b", b"c", b"1", b"2"]


def test_several_blocking_batches_can_be_under_way(blocking_publisher: BlockingPublisher) -> None:
    """Blocking only: `begin` and `finish` are what tasks are to asyncio."""
    flights = []
    for number in range(4):
        content = Batch("S")
        content.extend("s.a", [b"%d" % number] * 100)
        flights.append(blocking_publisher.begin(content))
    acks = [blocking_publisher.finish(flight) for flight in flights]
    assert [ack.first_sequence for ack in acks] == [1, 101, 201, 301]


async def test_a_batch_is_committed_once_also_by_hand_inside_the_block(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S") as batch:
        await fill(batch, 2)
        ack = await batch.commit()
    assert batch.ack == ack
    with pytest.raises(errors.ConfigError, match="make a new one"):
        await batch.commit()
    with pytest.raises(errors.ConfigError, match="make a new one"):
        await batch.add("s.a", b"")
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"", expected_last_sequence=0)
        with pytest.raises(publish.WrongSequence):
            await batch.commit()
    assert await stored(publisher) == [b"0", b"1"]


async def test_data_that_is_not_bytes_is_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(errors.ConfigError, match="not str"):
        await batch.add("s.a", "text")  # type: ignore[arg-type] # that is the point
    with pytest.raises(errors.ConfigError, match="not int"):
        await publisher.publish_batch("S", "s.a", [b"", 1])  # type: ignore[list-item] # that is the point


# -- expectations and duplicates ---------------------------------------------------------------------------------------


async def test_a_wrong_expected_sequence_rejects_all_and_says_what_is_there(publisher: AnyPublisher) -> None:
    await publisher.publish_batch("S", ["s.a", "s.b"], [b"1", b"2"])
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"3", expected_last_sequence=2, expected_last_subject_sequence=1)
        await batch.add("s.b", b"4", expected_last_subject_sequence=2)
        await batch.add("s.b", b"5")
    with pytest.raises(publish.WrongSequence, match="4 was expected, and it is 5") as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"6", expected_last_sequence=4)
            await batch.add("s.b", b"7")
    assert (caught.value.expected, caught.value.actual) == ((4,), 5)
    with pytest.raises(publish.WrongSequence) as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.c", b"8", expected_last_subject_sequence=0)
            await batch.add("s.b", b"9", expected_last_subject_sequence=2)
    assert (caught.value.expected, caught.value.actual) == ((0, 2), 5)
    assert await stored(publisher) == [b"1", b"2", b"3", b"4", b"5"]


async def test_an_expectation_that_the_batch_itself_breaks_is_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    await batch.add("s.a", b"")
    with pytest.raises(errors.ConfigError, match="first message of a batch"):
        await batch.add("s.b", b"", expected_last_sequence=0)
    with pytest.raises(errors.ConfigError, match=r"first message on 's\.a'"):
        await batch.add("s.a", b"", expected_last_subject_sequence=0)


async def test_expectations_under_concurrent_writers_let_exactly_one_win_each_round(
    nats_server: EmbeddedServer, publisher: AnyPublisher, half: str
) -> None:
    """Several writers increment a counter of two subjects with compare-and-swap: no update is lost."""
    await publisher.publish_batch("S", ["s.n", "s.sum"], [b"0", b"0"])
    conflicts = 0

    async def increment(own: AnyPublisher, times: int) -> None:
        nonlocal conflicts
        while times:
            counter = await own.jetstream.get_message("S", last_of="s.n")
            try:
                async with own.atomic("S") as batch:
                    value = b"%d" % (int(counter.data) + 1)
                    await batch.add("s.n", value, expected_last_subject_sequence=counter.sequence)
                    await batch.add("s.sum", value)
            except publish.WrongSequence:
                conflicts += 1
                continue
            times -= 1

    writers = [await connect_publisher(half, nats_server.settings) for _ in range(4)]
    await asyncio.gather(*(increment(writer, 10) for writer in writers))
    for writer in writers:
        await writer.close()
    assert await stored(publisher) == [b"%d" % (n // 2) for n in range(82)]
    assert conflicts > 0


async def test_a_duplicate_message_id_rejects_the_whole_batch(publisher: AnyPublisher) -> None:
    await publisher.publish_batch("S", "s.a", [b"1", b"2"], message_id="chunk-1")
    with pytest.raises(publish.DuplicateId, match="'chunk-1' is already stored") as caught:
        await publisher.publish_batch("S", "s.a", [b"1", b"2"], message_id="chunk-1")
    assert caught.value.message_id == "chunk-1"
    with pytest.raises(publish.DuplicateId, match="one of its 2 message ids") as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"3", message_id="new")
            await batch.add("s.a", b"4", message_id="chunk-1")
    assert caught.value.message_id is None
    assert caught.value.ids == ("new", "chunk-1")
    batch = publisher.atomic("S")
    await batch.add("s.a", b"", message_id="twice")
    with pytest.raises(publish.RepeatedId, match="'twice' comes twice in it"):
        await batch.add("s.a", b"", message_id="twice")
    assert await stored(publisher) == [b"1", b"2"]


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_many_tasks_share_one_publisher(asyncio_publisher: Publisher) -> None:
    """Asyncio only: a blocking publisher is for one thread."""
    rng = random.Random(7)
    sizes = [rng.randint(1, 20) for _ in range(100)]

    async def one(number: int, size: int) -> publish.BatchAck:
        return await asyncio_publisher.publish_batch("S", "s.a", [b"%d" % number] * size)

    acks = await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
    payloads = await stored(asyncio_publisher)
    for number, ack in enumerate(acks):
        assert payloads[ack.first_sequence - 1 : ack.sequence] == [b"%d" % number] * sizes[number]
    assert len(payloads) == sum(sizes)


async def test_a_lost_connection_is_replaced_for_the_next_batch(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    await publisher.publish_batch("S", "s.a", [b"1"])
    opened = publisher.connection.opened
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await publisher.publish_batch("S", "s.a", [b"2"])).sequence == 2
    assert publisher.connection.opened == opened + 1


async def test_a_lost_connection_is_replaced_for_requests_too(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    await publisher.publish_batch("S", "s.a", [b"1"])
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1


async def test_a_batch_of_which_nothing_was_sent_survives_a_lost_connection(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    batch = publisher.atomic("S")
    await batch.add("s.a", b"1")
    await batch.flush()
    assert batch.content.sent == 0
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await batch.commit()).sequence == 1


async def test_a_batch_that_was_sent_in_part_ends_with_its_connection_and_nothing_of_it_is_stored(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    await batch.flush()
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    with pytest.raises(errors.ConnectionLost):
        await batch.commit()
    assert await batch.resolve() is None
    await publisher.publish_batch("S", "s.a", [b"next"])
    assert await stored(publisher) == [b"next"]


async def test_a_cancelled_publish_ends_wherever_it_is(asyncio_publisher: Publisher) -> None:
    """Else Ctrl-C, or a timeout around it, would be lost in it. Asyncio only: a blocking call cannot be cancelled."""
    for steps in range(12):
        task = asyncio.create_task(asyncio_publisher.publish_batch("S", "s.a", [b"x"] * 3))
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
