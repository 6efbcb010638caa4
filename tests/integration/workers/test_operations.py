"""What an operator does with a group: list, pause, move, seek, delete; from Python and from the shell."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.integration.workers.test_group import PARTITIONS, World, penstock, world

from penstock.consume.hooks import Hooks
from penstock.consume.messages import Message, MessageContext
from penstock.errors import ConfigError
from penstock.testing import eventually_async
from penstock.workers.group.operations import Groups
from penstock.workers.group.overview import look
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import WorkerOptions
from penstock.workers.partitions import InBucket

__all__ = ["world"]


async def owned(world: World, partition: str) -> str | None:
    found = await look(world.control, "g")
    return next(p.owner for p in found.partitions if p.id == partition)


async def test_a_group_that_is_paused_begins_nothing_and_goes_on_when_it_is_resumed(world: World) -> None:
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    groups = Groups(world.control)
    await groups.pause("g")
    worker = group.worker
    assert worker
    await eventually_async(lambda: worker._dispatcher.paused, what="the worker to hear of it")
    for partition in PARTITIONS:
        await world.publish(partition.id)
    await eventually_async(lambda: worker.metrics.messages == 6, what="messages to come", state=lambda: world.done)
    later = await world.join()  # one that comes later is paused too
    await world.shared(3, 3)
    assert not world.done
    code, shown = await penstock(world, "group", "show", "g")
    assert (code, "the group is paused" in shown) == (2, True)
    await groups.resume("g")
    await world.all_done()
    assert later.statistics().partitions


async def test_a_partition_is_moved_to_the_worker_that_is_named(world: World) -> None:
    await world.prepare()
    await world.join()
    await world.join()
    await world.shared(3, 3)
    before = await owned(world, "p0")
    wanted = "worker-1" if before == "worker-0" else "worker-0"
    groups = Groups(world.control)
    await groups.move("g", "p0", wanted)

    async def moved() -> bool:
        return await owned(world, "p0") == wanted and not (await look(world.control, "g")).moves

    await eventually_async(moved, 30, "the partition to be there")
    await world.publish("p0", 3)
    await world.all_done()
    assert world.by["p0"] == {wanted}
    await world.join()  # a later assignment keeps it
    await world.shared(2, 2, 2)
    assert await owned(world, "p0") == wanted
    assert (await look(world.control, "g")).pins == {"p0": wanted}
    await groups.move("g", "p0", None)
    assert not (await look(world.control, "g")).pins
    for partition, worker, says in [("px", wanted, "no partition 'px'"), ("p0", "worker-9", "no worker 'worker-9'")]:
        with pytest.raises(ConfigError, match=says):
            await groups.move("g", partition, worker)


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_group_that_was_sent_forward_skips_and_one_that_was_sent_back_repeats(
    world: World, retention: str
) -> None:
    await world.prepare(retention)
    group = await world.join()
    await world.shared(6)
    for partition in PARTITIONS:
        await world.publish(partition.id, 2)
    await world.all_done()
    groups = Groups(world.control)
    with pytest.raises(ConfigError, match="has workers: worker-0"):
        await groups.seek("g", 1)
    await group.stop()
    await world.publish("p0", 3)  # sequences 13 to 15
    sought = await groups.seek("g", 15, ["p0"])
    assert [(one.partition, one.after) for one in sought] == [("p0", 14)]
    group = await world.join()
    await eventually_async(lambda: world.done["p0"] == [1, 2, 5], 30, state=lambda: world.done)
    await group.stop()
    if retention == "limits":
        await groups.seek("g", 2, ["p0", "p1"])
        world.done.clear()
        await world.join()
        wanted = {"p0": [2, 3, 4, 5], "p1": [1, 2]}
        await eventually_async(lambda: dict(world.done) == wanted, 30, state=lambda: world.done)
    for first, wrong, says in [(99, "p0", "cannot continue"), (1, "px", "no partition 'px'")]:
        with pytest.raises(ConfigError, match=says):
            await groups.seek("g", first, [wrong], force=True)


async def test_a_work_queue_has_nothing_to_go_back_to(world: World) -> None:
    await world.prepare("workqueue")
    group = await world.join()
    await world.shared(6)
    await group.stop()
    with pytest.raises(ConfigError, match="is a work queue"):
        await Groups(world.control).seek("g", 1)


async def test_a_group_that_is_deleted_leaves_nothing(world: World) -> None:
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    code, shown = await penstock(world, "group", "delete", "g", "--yes")
    assert (code, "has workers: worker-0" in shown) == (1, True)
    await group.stop()
    code, shown = await penstock(world, "group", "delete", "g", "--yes", "--json")
    assert (code, json.loads(shown[shown.index("{") :])["group"]) == (0, "g")
    assert await world.control.jetstream.consumer_names("S") == []
    assert [name for name in await world.control.jetstream.stream_names() if "penstock_g" in name] == []


async def test_the_shell_lists_pauses_moves_and_seeks(world: World) -> None:
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    code, shown = await penstock(world, "group", "ls", "--json")
    assert code == 0
    assert json.loads(shown)["groups"] == [
        {
            "group": "g",
            "stream": "S",
            "state": "at work",
            "workers": 1,
            "partitions": 6,
            "moving": 0,
            "lag": 0,
            "leader": "worker-0",
        }
    ]
    for arguments, wanted in [
        (["pause", "g"], "group g is paused"),
        (["ls"], "paused"),
        (["resume", "g"], "goes on"),
        (["move", "g", "p0", "worker-0"], "goes to worker-0"),
        (["move", "g", "p0", "--anywhere"], "wherever the strategy wants"),
    ]:
        code, shown = await penstock(world, "group", *arguments)
        assert (code, wanted in shown) == (0, True), shown
    for arguments, status in [
        (["move", "g", "p0"], 64),
        (["seek", "g"], 64),
        (["seek", "g", "--to", "1"], 64),  # it asks, and nobody is there to answer
        (["pause", "nobody"], 1),
        (["seek", "g", "--to", "1", "--yes"], 1),
    ]:
        code, shown = await penstock(world, "group", *arguments)
        assert code == status, shown
    await group.stop()
    code, shown = await penstock(world, "group", "seek", "g", "--to", "1", "--yes")
    assert (code, "6 partitions of group g will go on with sequence 1" in shown) == (0, True), shown


async def test_hooks_are_called_as_partitions_come_and_go(world: World) -> None:
    """On assigned before the first message, on revoked before another has the partition."""
    await world.prepare()
    told: dict[str, list[str]] = {"a": [], "b": []}
    failing = ["once"]

    def hooks(name: str) -> Hooks:
        async def assigned(partitions: tuple[str, ...]) -> None:
            if failing:
                raise OSError(failing.pop())
            told[name] += [f"+{p}" for p in partitions]

        return Hooks(
            on_start=lambda: told[name].append("start"),
            on_stop=lambda: told[name].append("stop"),
            on_assigned=assigned,
            on_revoked=lambda partitions: told[name].extend(f"-{p}" for p in partitions),
        )

    async def handle(message: Message, context: MessageContext) -> None:
        name = "a" if context.worker_id == first.worker_id else "b"
        assert told[name].count(f"+{context.partition_id}") > told[name].count(f"-{context.partition_id}")
        await world.handle(message, context)

    def member(name: str) -> WorkerGroup:
        made = WorkerGroup(
            world.server.settings,
            world.options(source=lambda _, bucket: InBucket(bucket)),
            handle,
            consumer={"window": 0.01, "min_interval": 0.02},
            worker=WorkerOptions(hooks=hooks(name)),
        )
        world.groups.append(made)
        return made

    first = member("a")
    await first.start()
    await world.shared(6)
    assert told["a"] == ["start", *(f"+p{n}" for n in range(6))]
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    second = member("b")
    await second.start()
    await world.shared(3, 3)
    assert len([one for one in told["a"] if one.startswith("-")]) == 3
    assert {one[1:] for one in told["a"] if one.startswith("-")} == {one[1:] for one in told["b"] if one[0] == "+"}
    await world.all_done()
    await asyncio.gather(first.stop(), second.stop())
    for name in told:
        gone = [one for one in told[name] if one.startswith("-")]
        assert len(gone) == len([one for one in told[name] if one.startswith("+")])
        assert told[name][-1] == "stop"
