"""A group that is looked at again and again: what is remembered of it is what a first look would find."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.workers.test_group import World, world

from penstock.consume.messages import Message, MessageContext
from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket
from penstock.observe.groups import GroupWatch
from penstock.publish.control import Control
from penstock.testing import eventually_async
from penstock.workers.group.overview import look

__all__ = ["world"]


class Held(World):
    """Handlers wait until they are let go."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # the same
        self.free = asyncio.Event()

    async def handle(self, message: Message, context: MessageContext) -> None:
        await self.free.wait()
        await super().handle(message, context)


async def test_what_is_remembered_is_what_a_first_look_finds(world: World, control: Control) -> None:
    await world.prepare()
    watch = GroupWatch(control, "g")

    async def same() -> bool:
        seen, found = await watch.look(), await look(control, "g")
        return (seen.version, seen.leader, seen.partitions, [(w.id, w.state, w.partitions) for w in seen.workers]) == (
            found.version, found.leader, found.partitions, [(w.id, w.state, w.partitions) for w in found.workers],
        )  # fmt: skip

    first = await world.join()
    await world.shared(6)
    assert await same()
    assert len((await watch.look()).partitions) == 6
    await world.join()
    await world.shared(3, 3)
    await eventually_async(same, what="both looks to find the same")
    await first.stop()  # its keys go, or say that it has retired
    await world.shared(6)
    await eventually_async(same, what="both looks to find the same")


async def test_only_what_changed_is_read_again(control: Control) -> None:
    bucket = Bucket(control, "penstock_g")
    await bucket.ensure()
    revisions = [await bucket.put(f"claims.p{n}", {"n": n}, 0) for n in range(3)]
    found, revision = await bucket.since(0)
    assert (sorted(found), revision) == (["claims.p0", "claims.p1", "claims.p2"], revisions[-1])
    assert await bucket.since(revision) == ({}, revision)
    await bucket.put("claims.p1", {"n": 7}, revisions[1])
    await bucket.delete("claims.p2", revisions[2])
    found, revision = await bucket.since(revision)
    changed = found.pop("claims.p1")
    assert changed is not None
    assert changed.value == {"n": 7}
    assert found == {"claims.p2": None}


async def test_more_keys_than_one_answer_holds_are_all_read(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.jetstream.kv.READ_AT_ONCE", 10)
    bucket = Bucket(control, "penstock_g")
    await bucket.ensure()
    for n in range(30):
        await bucket.put(f"claims.p{n}", {"n": n}, 0)
    assert len((await bucket.since(0))[0]) == 30


async def test_a_bucket_that_was_made_again_is_read_anew(world: World, control: Control) -> None:
    await world.prepare()
    await world.join()
    await world.shared(6)
    watch = GroupWatch(control, "g")
    assert (await watch.look()).workers
    await asyncio.gather(*(group.stop() for group in world.groups))
    world.groups.clear()
    await control.jetstream.delete_stream("KV_penstock_g")
    with pytest.raises(ConfigError, match="there is no group 'g'"):
        await watch.look()
    await Bucket(control, "penstock_g").ensure()
    assert not (await watch.look()).workers


async def test_lag_is_known_by_partition_and_measured_in_turns(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.observe.groups.MEASURED", 4)
    held = Held(world.server, world.control)
    await held.prepare()
    world.groups.append(await held.join())
    await held.shared(6)
    watch = GroupWatch(control, "g")
    assert {one.messages for one in (await watch.lags(await watch.look())).values()} == {0}
    await held.publish("p1", 5)
    await held.publish("p4", 2)

    async def all_known() -> bool:
        found = await watch.lags(await watch.look())
        return {name: one.messages for name, one in found.items() if one.messages} == {"p1": 5, "p4": 2}

    found = await watch.lags(await watch.look())
    assert len(found) <= 4
    await eventually_async(all_known, what="the lag of all partitions")
    held.free.set()
    await held.all_done()

    async def none() -> bool:
        found = await watch.lags(await watch.look())
        return len(found) == 6 and not any(one.messages for one in found.values())

    await eventually_async(none, what="the lag to go")
