"""A group that is looked at again and again: what is remembered of it is what a first look would find."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.workers.test_group import World, world

from penstock.consume.messages import Message, MessageContext
from penstock.jetstream.kv import Bucket, Entry
from penstock.observe.snapshot import Observer
from penstock.publish.control import Control
from penstock.testing import eventually_async
from penstock.workers.group.assignment import HEAD, OF
from penstock.workers.group.identity import LEADER_KEY, WorkerRecord
from penstock.workers.group.leader import PROBLEMS
from penstock.workers.group.migration import MIGRATION_KEY
from penstock.workers.group.overview import GroupOverview, look

__all__ = ["world"]


class Seen:
    """The group as the pages see it."""

    def __init__(self, control: Control) -> None:
        self._observer = Observer(control)

    async def look(self) -> GroupOverview | None:
        return (await self._observer.look()).group("g")

    async def lags(self) -> dict[str, int]:
        """Of partitions where it is known."""
        found = await self.look()
        assert found
        return {name: one.messages for name, one in (await self._observer.groups.lags(found)).items()}


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
    watch = Seen(control)

    async def same() -> bool:
        seen, found = await watch.look(), await look(control, "g")
        assert seen
        return (seen.version, seen.leader, seen.partitions, [(w.id, w.state, w.partitions) for w in seen.workers]) == (
            found.version, found.leader, found.partitions, [(w.id, w.state, w.partitions) for w in found.workers],
        )  # fmt: skip

    first = await world.join()
    await world.shared(6)
    assert await same()
    found = await watch.look()
    assert found
    assert len(found.partitions) == 6
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
    await bucket.add("claims.p0", b"not JSON")
    found, last = await bucket.since(revision)
    assert await bucket.since(revision, await control.jetstream.stream_info(bucket.stream)) == (found, last)
    changed = found.pop("claims.p1")
    assert changed is not None
    assert changed.value == {"n": 7}
    assert found == {"claims.p2": None}


async def test_changes_that_others_have_overwritten_are_not_waited_for(control: Control) -> None:
    bucket = Bucket(control, "penstock_g")
    await bucket.ensure()
    first = await bucket.put("workers.w", {"n": 0}, 0)
    for n in range(1, 20):
        last = await bucket.put("workers.w", {"n": n})
    found, revision = await bucket.since(first - 1, await control.jetstream.stream_info(bucket.stream))
    assert (found, revision) == ({"workers.w": Entry({"n": 19}, last)}, last)


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
    watch = Seen(control)
    found = await watch.look()
    assert found
    assert found.workers
    await asyncio.gather(*(group.stop() for group in world.groups))
    world.groups.clear()
    await control.jetstream.delete_stream("KV_penstock_g")
    assert await watch.look() is None
    bucket = Bucket(control, "penstock_g")
    await bucket.ensure()
    assert await watch.look() is None
    await bucket.put(HEAD, {"v": 1, "version": 1, "members": [], "parked": [], "stream": "G", "leader": "w"})
    found = await watch.look()
    assert found
    assert not found.workers


async def test_lag_is_known_by_partition_and_measured_in_turns(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.observe.groups.MEASURED", 4)
    held = Held(world.server, world.control)
    await held.prepare()
    world.groups.append(await held.join())
    await held.shared(6)
    watch = Seen(control)
    assert set((await watch.lags()).values()) == {0}
    await held.publish("p1", 5)
    await held.publish("p4", 2)

    async def all_known() -> bool:
        return {name: count for name, count in (await watch.lags()).items() if count} == {"p1": 5, "p4": 2}

    assert len(await watch.lags()) <= 4
    await eventually_async(all_known, what="the lag of all partitions")
    held.free.set()
    await held.all_done()

    async def none() -> bool:
        found = await watch.lags()
        return len(found) == 6 and not any(found.values())

    await eventually_async(none, what="the lag to go")


@pytest.mark.parametrize("value", [{}, {"partitions": 7, "version": "x", "members": 3}])
async def test_buckets_that_hold_no_group_hide_nothing_else(control: Control, value: dict[str, object]) -> None:
    keys = [HEAD, f"{OF}w", PROBLEMS, LEADER_KEY, MIGRATION_KEY, "claims.p1", "workers.w"]
    for number, key in enumerate(keys):
        bucket = Bucket(control, f"penstock_odd{number}")
        await bucket.ensure()
        await bucket.put("workers.good", WorkerRecord("good").to_json())
        await bucket.put(key, value)
    bucket = Bucket(control, "penstock_well")
    await bucket.ensure()
    await bucket.put("workers.good", WorkerRecord("good").to_json())
    found = (await Observer(control).look()).group("well")
    assert found
    assert [one.id for one in found.workers] == ["good"]
