"""Reading what a consumer has passed over: in order, whole, by either way of asking."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.workers.world import STREAM, World

from penstock.consume.messages import Message
from penstock.wire import aio
from penstock.workers.partitions import Partition
from penstock.workers.pull.stored import BATCH, BATCH_BYTES, StoredStream, measure, stored


@pytest.fixture(params=[True, False], ids=["many at a time", "one by one"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def read(world: World, direct: bool, subjects: tuple[str, ...], first: int, last: int) -> list[Message]:
    async with await aio.connect(world.server.settings) as connection:
        place = StoredStream(connection, world.js, STREAM, direct)
        return [message async for message in stored(place, subjects, first, last)]


async def test_several_subjects_come_whole_and_in_the_order_of_the_stream(world: World, direct: bool) -> None:
    await world.create(allow_direct=True)
    for _ in range(3):
        for id_ in ("a", "b", "x.1", "x.2"):
            await world.publish(id_, BATCH // 2)
    found = await read(world, direct, ("w.a", "w.x.*"), 1, 6 * BATCH)
    numbers = {id_: [m.data for m in found if m.subject == f"w.{id_}"] for id_ in ("a", "x.1", "x.2")}
    assert numbers == {id_: world.published[id_] for id_ in numbers}
    sequences = [message.sequence for message in found]
    assert sequences == sorted(sequences)
    assert {message.delivery_count for message in found} == {1}


async def test_only_the_range_is_read_and_what_was_deleted_is_left_out(world: World, direct: bool) -> None:
    await world.create(allow_direct=True)
    await world.publish("a", 20)
    await world.publish("b", 5)
    for sequence in (4, 9):
        await world.js.delete_message(STREAM, sequence)
    assert [m.sequence for m in await read(world, direct, ("w.a",), 3, 9)] == [3, 5, 6, 7, 8]
    assert [m.sequence for m in await read(world, direct, ("w.a",), 0, 2)] == [1, 2]
    assert await read(world, direct, ("w.a",), 21, 25) == []
    assert await read(world, direct, ("w.b",), 1, 20) == [], "the first one lies above the range"
    assert await read(world, direct, ("w.none",), 1, 25) == []


async def test_a_message_is_as_it_was_stored(world: World, direct: bool) -> None:
    await world.create(allow_direct=True)
    async with await aio.connect(world.server.settings) as connection:
        await connection.request("w.a", b"one", {"Kind": "first", "Nats-Msg-Id": "17"})
        await connection.request("w.a", b"")
    first, second = await read(world, direct, ("w.a",), 1, 2)
    assert (first.subject, first.data, first.reply) == ("w.a", b"one", "")
    assert first.headers == {"Kind": ["first"], "Nats-Msg-Id": ["17"]}
    assert first.timestamp == (await world.js.get_message(STREAM, 1)).time
    assert (second.data, second.raw_headers) == (b"", b"")


async def test_a_publisher_chooses_neither_subject_nor_sequence_nor_time(world: World, direct: bool) -> None:
    """Direct get tells them in headers, behind those of the message itself, which may have the same names."""
    await world.create(allow_direct=direct)
    forged = {"Nats-Subject": "w.b", "Nats-Sequence": "99", "Nats-Time-Stamp": "1999-01-01T00:00:00Z"}
    async with await aio.connect(world.server.settings) as connection:
        await connection.request("w.a", b"one", {**forged, "Nats-Num-Pending": "none"})
        behind = await measure(connection, world.js, STREAM, [Partition("a", ("w.a",))], {})
    (found,) = await read(world, direct, ("w.a",), 1, 1)
    assert (found.subject, found.sequence) == ("w.a", 1)
    assert found.timestamp == (await world.js.get_message(STREAM, 1)).time
    assert (behind["a"].messages, behind["a"].seconds < 3600) == (1 if direct else -1, True)


async def test_large_messages_come_too(world: World, direct: bool) -> None:
    await world.create(allow_direct=True)
    bodies = [bytes([n]) * (BATCH_BYTES - 200) for n in range(4)]
    async with await aio.connect(world.server.settings) as connection:
        for body in bodies:
            await connection.request("w.a", body)
    assert [message.data for message in await read(world, direct, ("w.a",), 1, 4)] == bodies


async def test_a_reader_that_stops_leaves_nothing_behind(world: World, direct: bool) -> None:
    await world.create(allow_direct=True)
    await world.publish("a", 3 * BATCH)
    before = asyncio.all_tasks()
    async with await aio.connect(world.server.settings) as connection:
        reading = stored(StoredStream(connection, world.js, STREAM, direct), ("w.a",), 1, 3 * BATCH)
        assert (await anext(reading)).data == b"1"
        await reading.aclose()
        assert not [task for task in asyncio.all_tasks() - before if "_next" in str(task.get_coro())]
