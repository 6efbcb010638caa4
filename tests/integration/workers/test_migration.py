"""From one consumer a partition to one a worker and back, on a real server: nothing lost, nothing repeated."""

from __future__ import annotations

import asyncio
import json
import secrets
from datetime import UTC, datetime

import pytest
from prometheus_client import generate_latest
from tests.integration.workers.test_group import RETENTIONS, World, penstock, world
from tests.support.streams import make_stream

from penstock.errors import ConfigError, MessageNotFound
from penstock.jetstream.kv import Bucket
from penstock.observe.migration import MigrationWatch, RollbackRule
from penstock.testing import eventually_async
from penstock.wire import frames
from penstock.workers.group.migration import Migration
from penstock.workers.group.overlap import Overlap

__all__ = ["world"]


async def legacy_world(world: World, retention: str, direct: bool = True) -> Migration:
    """Four old consumers, one a partition, of which each has done 3 of 5 messages."""
    await make_stream(world.control.jetstream, retention=retention, allow_direct=direct)
    for n in range(4):
        old = {"durable_name": f"old-p{n}", "name": f"old-p{n}", "filter_subject": f"s.p{n}", "ack_policy": "explicit"}
        await world.control.jetstream.create_consumer("S", old)
        await world.publish(f"p{n}", 5)
        assert await pull(world, n, 3) == [1, 2, 3]
    return Migration(world.control, Bucket(world.control, "penstock_g"), "S", "old-")


async def pull(world: World, n: int, count: int, overlap: Overlap | None = None) -> list[int]:
    """Handle messages as the old pull loop of a partition does, if need be those only that the group has not."""
    connection, arrived = world.control.connection, asyncio.Queue[frames.Message]()
    inbox, found = f"_INBOX.{secrets.token_hex(8)}", []
    sid = await connection.subscribe(inbox, handler=arrived.put_nowait)
    ask = json.dumps({"batch": 1, "no_wait": True}).encode()

    async def answered() -> frames.Message | None:
        """A message, or a status when there is none: the server counts a moment after it has stored."""
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.old-p{n}", ask, reply=inbox)
        message = await asyncio.wait_for(arrived.get(), 30)
        return message if not message.status or await nothing_comes(world, n) else None

    for _ in range(count):
        message = await eventually_async(answered, what=f"an answer of old-p{n}")
        if message.status:
            break
        if overlap is None:
            found.append(json.loads(message.data))
        else:
            async with overlap.turn(message.subject, int(message.reply.split(".")[-4]), datetime.now(UTC)) as turn:
                found += [json.loads(message.data)] if turn else []
        await connection.request(message.reply, b"+ACK")
    await connection.unsubscribe(sid)
    world.done[f"p{n}"] += found
    return found


async def nothing_comes(world: World, n: int) -> bool:
    """Whether the old consumer has delivered all there is of its partition, or is paused."""
    info = await world.control.jetstream.consumer_info("S", f"old-p{n}")
    try:
        last = await world.control.jetstream.get_message("S", last_of=f"s.p{n}")
    except MessageNotFound:
        return True
    return info.paused or last.sequence <= info.delivered_stream_seq


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_migration_goes_on_where_the_old_consumers_were(world: World, retention: str) -> None:
    migration = await legacy_world(world, retention)
    assert [p.id for p in await migration.shadow()] == ["p0", "p1", "p2", "p3"]
    group = await world.join()
    parity = await migration.compare()
    assert [(one.unprocessed, one.counted, one.missing) for one in parity] == [(2, 2, False)] * 4
    with pytest.raises(ConfigError, match="comes after"):
        await migration.switch()
    assert await migration.drain() == 0
    assert await pull(world, 0, 1) == [], "it is paused"
    assert group.statistics().partitions == (), "nothing is assigned before the switch"
    await world.publish("p0", 2)
    assert await migration.switch() == 4
    await world.shared(4)
    await world.all_done()
    await migration.clean_up()
    names = await world.control.jetstream.consumer_names("S")
    assert names == [f"g-{group.worker_id}"]


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_stream_that_cannot_count_by_itself_is_compared_too(world: World, retention: str) -> None:
    migration = await legacy_world(world, retention, direct=False)
    parity = await migration.compare()
    assert [(one.unprocessed, one.counted, one.missing) for one in parity] == [(2, 2, False)] * 4
    jetstream = world.control.jetstream
    assert sorted(await jetstream.consumer_names("S")) == [f"old-p{n}" for n in range(4)], "counting leaves nothing"
    before = (await jetstream.stream_info("S")).state.messages
    assert before == (20 if retention == "limits" else 8)
    for n in range(4):
        await pull(world, n, 5)
    await world.all_done()
    left = (await jetstream.stream_info("S")).state.messages
    assert left == (20 if retention == "limits" else 0), "what is done is removed as ever"


async def test_a_stream_without_messages_for_the_group_is_told_by_compare(world: World) -> None:
    migration = await legacy_world(world, "limits", direct=False)
    await world.control.jetstream.purge_stream("S", subject="s.p0")
    parity = {one.partition: one for one in await migration.compare()}
    assert (parity["p0"].counted, parity["p1"].counted) == (0, 2)


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_rollback_goes_on_where_the_group_was(world: World, retention: str) -> None:
    migration = await legacy_world(world, retention)
    await migration.shadow()
    await migration.drain()
    await migration.switch()
    group = await world.join()
    await world.shared(4)
    await world.all_done()
    with pytest.raises(ConfigError, match="still work for the group"):
        await migration.roll_back()
    await group.stop()
    await world.publish("p1", 2)
    assert await migration.roll_back() == 4
    assert await pull(world, 1, 5) == [6, 7]
    assert await pull(world, 0, 5) == []
    await world.all_done()


async def test_old_consumers_go_on_when_a_migration_is_given_up_before_the_switch(world: World) -> None:
    migration = await legacy_world(world, "workqueue")
    await migration.shadow()
    await migration.drain()
    await migration.roll_back()
    for n in range(4):
        await pull(world, n, 5)
    await world.all_done()


async def test_the_steps_as_commands(world: World) -> None:
    await legacy_world(world, "limits")
    old = ("--stream", "S", "--legacy", "old-")
    code, shown = await penstock(world, "group", "migrate", "g", "switch", *old)
    assert (code, "begin with `shadow`" in shown) == (1, True)
    code, shown = await penstock(world, "group", "migrate", "not-begun", "compare", *old)
    assert (code, "old-" in shown) == (0, True)
    assert await penstock(world, "group", "migrate", "g", "shadow", *old) == (0, "shadow: 4 partitions\n")
    code, shown = await penstock(world, "group", "migrate", "g", "compare", "--json", *old)
    assert code == 0
    assert [one["counted"] for one in json.loads(shown)["partitions"]] == [2, 2, 2, 2]
    assert await penstock(world, "group", "migrate", "g", "drain", *old) == (0, "drain: 0 messages in flight\n")
    assert await penstock(world, "group", "migrate", "g", "switch", *old) == (0, "switch: 4 partitions\n")
    await world.join()
    await eventually_async(lambda: all(len(done) == 5 for done in world.done.values()), 60, "the rest to be done")


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_rollback_from_an_overlap_passes_over_what_the_group_has_done(world: World, retention: str) -> None:
    migration = await legacy_world(world, retention)
    async with Overlap.open(world.server.settings, "g") as overlap:
        world.handle = overlap.around(world.handle)  # type: ignore[method-assign,assignment]  # for every worker that joins
        await migration.shadow()
        group = await world.join()
        assert await migration.overlap() == 4
        await world.shared(4)
        await world.all_done()
        wanted = [(2, 0)] * 4

        async def parity() -> list[tuple[int, int | None]]:
            return [(one.unprocessed, one.left_to_group) for one in await migration.compare()]

        async def settled() -> bool:  # what is done is acknowledged a moment later
            return await parity() == wanted

        await eventually_async(settled, what=f"{wanted} messages left", state=parity)
        with pytest.raises(ConfigError, match="still at work"):
            await migration.switch()
        await group.stop()
        await world.publish("p1", 2)
        assert await migration.roll_back() == 4
        assert await pull(world, 1, 5, overlap) == [6, 7]
        assert await pull(world, 0, 5, overlap) == []
        await world.all_done()


async def test_an_overlap_as_commands(world: World) -> None:
    await legacy_world(world, "limits")
    old = ("--stream", "S", "--legacy", "old-")
    async with Overlap.open(world.server.settings, "g") as overlap:
        world.handle = overlap.around(world.handle)  # type: ignore[method-assign,assignment]  # for every worker that joins
        await penstock(world, "group", "migrate", "g", "shadow", *old)
        group = await world.join()
        assert await penstock(world, "group", "migrate", "g", "overlap", *old) == (0, "overlap: 4 partitions\n")
        await world.shared(4)
        await world.all_done()
        await group.stop()
        await world.publish("p0", 2)
        assert await pull(world, 0, 3, overlap) == [6], "4 and 5 were the group's"
        worker = ("--stream", "S", "--group", "g", "--in-bucket", "--overlap", "--until-done", "--json")
        code, shown = await penstock(world, "work", "operator:eq", *worker)  # a handler that does nothing
        assert code == 0
        handled = json.loads(shown[shown.index("[\n") :])[0]["handled"]
        assert handled == 2, "both of them came, of which it passed one over"
        assert await pull(world, 0, 3, overlap) == [], "the worker has done 7"
    assert await penstock(world, "group", "migrate", "g", "drain", *old) == (0, "drain: 0 messages in flight\n")
    assert await penstock(world, "group", "migrate", "g", "switch", *old) == (0, "switch: 4 partitions\n")


async def test_a_drain_by_force_leaves_what_nobody_will_acknowledge_to_the_group(world: World) -> None:
    migration = await legacy_world(world, "limits")
    await migration.shadow()
    await leave_in_flight(world, 0)
    step = ("group", "migrate", "g", "drain", "--stream", "S", "--legacy", "old-", "--within", "0.1")
    code, shown = await penstock(world, *step)
    assert (code, "drain: 1 messages in flight" in shown) == (2, True), shown
    code, shown = await penstock(world, *step, "--force")
    assert code == 0, shown
    await migration.switch()
    await world.join()
    await world.all_done()


async def leave_in_flight(world: World, n: int) -> None:
    """The old side takes a message, and dies."""
    connection, arrived = world.control.connection, asyncio.Queue[frames.Message]()
    inbox = f"_INBOX.{secrets.token_hex(8)}"
    sid = await connection.subscribe(inbox, handler=arrived.put_nowait)
    ask = json.dumps({"batch": 1, "expires": 10_000_000_000}).encode()
    await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.old-p{n}", ask, reply=inbox)
    await asyncio.wait_for(arrived.get(), 30)
    await connection.unsubscribe(sid)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_group_that_does_badly_for_some_windows_gives_its_partitions_back(world: World, retention: str) -> None:
    migration = await legacy_world(world, retention)
    await migration.shadow()
    await migration.drain()
    await migration.switch()
    group = await world.join()
    await world.shared(4)
    await world.all_done()
    assert group.worker_id
    world.pauses[group.worker_id] = 1.0  # from now on it is slow
    await world.publish("p0", 20)
    flags = ("--every", "0.1", "--windows", "2", "--max-lag", "3", "--metrics-port", "0")
    code, shown = await penstock(world, "group", "migrate", "g", "watch", "--stream", "S", "--legacy", "old-", *flags)
    assert (code, "bad for 2 windows" in shown, "rollback: 4 consumers" in shown) == (2, True, True), shown
    await eventually_async(lambda: not group.statistics().partitions, 30, "the group to have given all back")
    await pull(world, 0, 20)
    for n in range(1, 4):
        await pull(world, n, 1)
    await world.all_done()


async def test_a_migration_that_goes_well_is_watched_for_as_long_as_asked(world: World) -> None:
    migration = await legacy_world(world, "limits")
    await migration.shadow()
    watch = MigrationWatch(migration, "g", RollbackRule(max_lag=10))
    assert (await watch.look()).why == ""
    text = generate_latest(watch.numbers()).decode()
    assert 'parti_migration_unprocessed{group="g",partition="p1"} 2.0' in text
    assert 'parti_migration_counted{group="g",partition="p1"} 2.0' in text
    assert 'parti_migration_missing{group="g",partition="p1"} 0.0' in text
    await migration.drain()
    await migration.switch()
    await world.join()
    await world.all_done()
    step = ("group", "migrate", "g", "watch", "--stream", "S", "--legacy", "old-", "--every", "0.1", "--until", "0.2")
    code, shown = await penstock(world, *step)
    assert code == 0, shown
