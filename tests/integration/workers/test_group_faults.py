"""What goes wrong in a group, one thing at a time: a handler that hangs, keys that go, a worker that is cut off."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.workers.test_group import PARTITIONS, RETENTIONS, World, world
from tests.support.streams import make_stream

from penstock.cli.following import Following
from penstock.cli.group import needs_attention
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import RetryLater
from penstock.errors import PenstockError
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import Retention
from penstock.publish.control import Control
from penstock.settings import Settings
from penstock.testing import eventually_async
from penstock.testing.proxy import LossyProxy
from penstock.workers.group import assignment, claims, leader
from penstock.workers.group.claims import Claim, Reached, claim_key
from penstock.workers.group.identity import RETIRED, ClaimLost, Sightings, worker_key
from penstock.workers.group.leader import Holder
from penstock.workers.group.overview import look
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import ConsumerOptions
from penstock.workers.partitions import LIST_KEY, Partition, SeenInStream, SubjectPattern
from penstock.workers.pull.consumer import stream_identity
from penstock.workers.worker import Worker

__all__ = ["world"]

PATTERN = SubjectPattern("s.{partition}")
QUICK: dict[str, Any] = {"window": 0.01, "min_interval": 0.02}


def seen(control: Control, _: Bucket) -> SeenInStream:
    return SeenInStream(control.jetstream, "S", PATTERN)


@pytest.mark.parametrize("before", [0, 3])
async def test_new_is_what_came_since_the_group_began_also_of_subjects_that_are_seen_later(
    world: World, before: int
) -> None:
    await make_stream(world.control.jetstream, allow_direct=True)
    for _ in range(before):
        await world.control.connection.request("s.old", b"0")
    await world.join(source=seen, start="new")
    for number in range(4):
        await world.publish(f"n{number}", 10)
    if before:
        await world.publish("old", 2)
    await world.all_done()


async def test_a_handler_that_does_not_end_keeps_no_other_partition_from_moving(world: World) -> None:
    await world.prepare()
    ends = asyncio.Event()
    handle = world.handle

    async def hangs(message: Message, context: MessageContext) -> None:
        if context.partition_id == "p0" and context.worker_id == "worker-0":
            await ends.wait()
        await handle(message, context)

    world.handle = hangs  # type: ignore[method-assign]  # of this one world
    first = await world.join()
    await world.shared(6)
    await world.publish("p0")
    second = await world.join()
    await eventually_async(lambda: len(second.statistics().partitions) >= 2, 20, "healthy partitions to move")
    for partition in PARTITIONS[1:]:
        await world.publish(partition.id, 5)
    rest = {partition.id: [1, 2, 3, 4, 5] for partition in PARTITIONS[1:]}
    await eventually_async(lambda: dict(world.done) == rest, 20, "the rest to be handled", state=lambda: world.done)
    assert "p0" in first.statistics().partitions, "it is still handled there"
    ends.set()
    await world.all_done()


async def test_a_partition_that_is_taken_off_the_list_is_let_go_on_an_interest_stream_too(world: World) -> None:
    await world.prepare("interest")
    await world.join()
    await world.shared(6)
    await world.publish("p5")
    await world.all_done()
    await world.source.write(PARTITIONS[:5])

    async def let_go() -> bool:
        consumers = await world.control.jetstream.consumers("S")
        return not any("s.p5" in consumer.filters for consumer in consumers)

    await eventually_async(let_go, 30, "its subject to be covered by nobody")


@pytest.mark.parametrize("key", [claim_key("p0"), assignment.HEAD, "leader.lease"])
async def test_a_key_that_somebody_deletes_is_made_again(world: World, key: str) -> None:
    await world.prepare()
    await world.join(ttl=1.5)
    await world.join(ttl=1.5)
    await world.shared(3, 3)
    await delete(world, key)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await world.all_done()

    async def back() -> bool:
        found = await world.source.bucket.entries(claims.CLAIMS, assignment.ASSIGNMENT, "leader")
        return key in found

    await eventually_async(back, 30, "the key to be there")
    await world.join(ttl=1.5)  # partitions still move
    await world.shared(2, 2, 2)


async def test_a_list_with_a_mistake_is_told_and_the_group_goes_on_as_before(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.prepare()
    await world.join()
    await world.shared(6)
    await world.source.bucket.put(LIST_KEY, {"v": 1, "partitions": [{"idd": "p0", "subjects": ["s.p0"]}]})
    await eventually_async(
        lambda: any(
            "is no list of partitions" in one.getMessage() for one in caplog.records if one.levelname == "WARNING"
        )
    )
    await world.publish("p0", 3)
    await world.all_done()
    await world.source.write(PARTITIONS[:3])
    await world.shared(3)


async def test_a_worker_that_is_alone_learns_of_new_subjects_after_its_connection_was_lost(world: World) -> None:
    await make_stream(world.control.jetstream, allow_direct=True)
    options = ConsumerOptions(stream="S", worker_id="1", **QUICK)
    source = seen(world.control, world.source.bucket)
    async with Worker(world.server.settings, options, world.handle) as worker:
        holder = Holder(world.control.jetstream, "S", options.consumer, source)
        following = Following(worker, source, holder, look_every=0.05)
        await following.begin()
        running = asyncio.create_task(following.run())
        await world.publish("a")
        await world.all_done()
        await asyncio.to_thread(world.server.kill)
        await asyncio.to_thread(world.server.start)
        await eventually_async(lambda: _published(world, "b"), 30, "the server to be back")
        await world.all_done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _published(world: World, partition: str) -> bool:
    before = world.published[partition]
    try:
        await world.control.ready()
        await world.publish(partition)
    except PenstockError:
        world.published[partition] = before
        return False
    return True


class Cut:
    """A proxy that passes nothing on once it is told to; connections stay open."""

    def __init__(self, proxy: LossyProxy) -> None:
        self.proxy = proxy

    def off(self) -> None:
        self.proxy.drop_up = self.proxy.drop_down = lambda _: True


@pytest.fixture
def cut(world: World) -> Iterator[Cut]:
    with LossyProxy(int(world.server.url.rsplit(":", 1)[1])) as proxy:
        yield Cut(proxy)
        proxy.cut()


async def test_a_leader_that_is_cut_off_handles_nothing_beside_its_successor_which_does_not_wait_for_two_leases(
    world: World, cut: Cut
) -> None:
    """Alone behind its proxy it does not know that the server is there for others: its lease ends all the same."""
    await world.prepare()
    ttl, began = 4.0, defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))

    def joining(name: str) -> Callable[[Message, MessageContext], Any]:
        async def handle(message: Message, context: MessageContext) -> None:
            began[context.partition_id][name].append(time.monotonic())
            await asyncio.sleep(0.1)

        return handle

    def member(name: str, settings: Settings) -> WorkerGroup:
        made = WorkerGroup(settings, world.options(ttl=ttl), joining(name), consumer=QUICK)
        world.groups.append(made)
        return made

    first = member("first", Settings(servers=(cut.proxy.url,), timeout=1.0))
    await first.start()
    await world.shared(6)
    assert first.statistics().leads
    second = member("second", world.server.settings)
    await second.start()
    await world.shared(3, 3)
    theirs = first.statistics().partitions
    for partition in theirs:
        await world.publish(partition, 150)  # more than it can handle in a lease
    cut.off()
    since = time.monotonic()
    await eventually_async(lambda: len(second.statistics().partitions) == 6, 30, "the other to have all")
    assert time.monotonic() - since < 1.9 * ttl
    await eventually_async(lambda: all(began[p]["second"] for p in theirs), 30, "the other to handle them")
    # What the first one has begun before may still run: its token is refused where effects are kept.
    late = {p: [at for at in began[p]["first"] if at > began[p]["second"][0]] for p in theirs}
    assert not any(late.values()), late
    world.groups.remove(first)
    stopping = asyncio.create_task(first.stop())
    cut.proxy.drop_up = cut.proxy.drop_down = lambda _: False
    await stopping


async def test_a_claim_about_a_stream_of_before_says_nothing_to_a_worker_that_had_nothing_of_it(world: World) -> None:
    await world.prepare(partitions=[])
    group = await world.join()
    await eventually_async(lambda: group.member and group.member.assigned, 30, "it to know the stream")
    jetstream = world.control.jetstream
    before = stream_identity(await jetstream.stream_info("S"))
    await jetstream.delete_stream("S")
    await make_stream(jetstream, allow_direct=True)
    await claims.store(world.source.bucket, [Claim("p0", 50, stream=before)])
    await world.publish("p0", 5)
    await world.source.write(PARTITIONS)
    await world.all_done()


async def test_a_claim_that_nobody_writes_again_is_created_by_the_leader(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner died before it noticed, and the assignment stays as it is: nothing else would create the claim."""
    monkeypatch.setattr(leader, "AUDIT_EVERY", 2)
    await world.prepare()
    group = await world.join(ttl=1.5)
    await world.shared(6)
    await group.stop()
    world.groups.remove(group)
    key = claim_key("p0")
    entry = await world.source.bucket.get(key)
    assert entry
    await world.source.bucket.delete(key, entry.revision)
    made = leader.Leader(world.control, world.source.bucket, world.options(ttl=0.2), world.source, "worker-9")

    async def is_there() -> bool:
        await made.step(Retention.LIMITS, Sightings(1.0))
        return await world.source.bucket.get(key) is not None

    assert not await is_there(), "a living owner gets the time to write it again"
    await eventually_async(is_there, 10, "the claim to be there again")


async def test_a_worker_that_is_told_to_stop_while_it_takes_part_anew_stops(world: World) -> None:
    """It was given up, and has not claimed another id yet: there is nobody to hand over, and nobody to wait for."""
    await world.prepare()
    group = await world.join(ttl=1.5)
    await world.shared(6)
    member, key = group.member, worker_key("worker-0")
    assert member
    entry = await world.source.bucket.get(key)
    assert entry
    await world.source.bucket.put(key, {**entry.value, "state": RETIRED})
    await eventually_async(lambda: member.identity.lost, 30, "it to find out")
    await asyncio.wait_for(group.stop(), 20)
    world.groups.remove(group)
    await world.join()
    await world.shared(6)


async def test_of_two_with_one_instance_name_the_older_stops_once_and_says_why(world: World) -> None:
    await world.prepare()
    first = await world.join(instance="pod-1")
    await world.shared(6)
    second = await world.join(instance="pod-1")
    with pytest.raises(ClaimLost, match="was started as instance 'pod-1' too, and replaces it"):
        await first.until_stopped()
    assert second.worker_id == "worker-0"
    await world.shared(6)
    await world.publish("p0", 3)
    await world.all_done()
    assert (second.worker_id, second.health().broken) == ("worker-0", "")


async def test_a_worker_that_comes_back_works_beside_a_partition_that_it_only_holds_for_another(world: World) -> None:
    """How far that one is done is not known there; its consumer must not be moved to the first message for it."""
    await world.prepare("interest")
    await world.publish("p0", 6)  # nobody wants them yet
    world.published.clear()
    first = await world.join(start="new", instance="one")
    await world.shared(6)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await world.all_done()
    info = await world.control.jetstream.consumer_info("S", "g-worker-0")
    assert info.config["opt_start_seq"] == 7, "the server refuses to move it to 1"
    await world.crash(first)
    bucket = world.source.bucket
    taken = claims.claims_in(await bucket.entries(claims.CLAIMS))["p1"]
    anothers = replace(taken, owner="worker-9", incarnation="x", settled=False, holders=("worker-0",))
    entry = await bucket.get(worker_key("worker-0"))
    assert entry
    await bucket.put(worker_key("worker-9"), {**entry.value, "instance": "nine", "incarnation": "x"})
    await claims.store(bucket, [anothers])
    again = await world.join(start="new", instance="one")
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    own = [partition.id for partition in PARTITIONS if partition.id != "p1"]
    await eventually_async(
        lambda: [world.done[id_] for id_ in own] == [[1, 2, 3, 4, 5, 6]] * len(own),
        30,
        "its own partitions to be handled",
        state=lambda: world.done,
    )
    assert "p1" in again.statistics().held
    await world.all_done()  # and that one too, when its owner is given up


@pytest.mark.parametrize("loses_claims", [False, True])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_what_is_done_behind_a_message_that_waits_is_not_done_again_after_a_crash(
    world: World, monkeypatch: pytest.MonkeyPatch, retention: str, loses_claims: bool
) -> None:
    """The consumer's ack floor stands at the message that waits; the record of the dead process says more, even if
    somebody deletes its claims."""
    await world.prepare(retention)
    handle, open_ = world.handle, asyncio.Event()

    async def wait(message: Message, context: MessageContext) -> None:
        if context.partition_id == "p0" and not open_.is_set():
            raise RetryLater(after=0.1)
        await handle(message, context)

    monkeypatch.setattr(world, "handle", wait)
    first = await world.join(ttl=1.5)
    await world.shared(6)
    await world.publish("p0", 1)
    await world.publish("p1", 200)

    async def recorded() -> bool:
        records = claims.records_in(await world.source.bucket.entries(claims.PROGRESS)).values()
        return any(record.partitions.get("p1", Reached(0)).done >= 201 for record in records)

    await eventually_async(recorded, 30, "all of p1 to be written down", state=lambda: world.done)
    await world.crash(first)
    if loses_claims:
        await delete_claims(world)
    await world.join(ttl=1.5)
    await world.publish("p1", 3)
    await eventually_async(lambda: len(world.done["p1"]) >= 203, 30, "the next owner", state=lambda: world.done)
    open_.set()
    await world.all_done()


async def test_the_ack_floor_of_a_dead_worker_counts_when_its_claims_were_deleted(world: World) -> None:
    """Its consumer stays until there are claims again."""
    await world.prepare()
    await world.join(ttl=1.5)
    second = await world.join(ttl=1.5)
    await world.shared(3, 3)
    for partition in PARTITIONS:
        await world.publish(partition.id, 20)
    await world.all_done()
    await world.crash(second)
    await delete_claims(world)
    await world.shared(6)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await world.all_done()


async def test_what_a_dead_worker_had_done_is_known_without_its_consumer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message waited, so that the consumer's ack floor said everything. Then somebody deletes that consumer."""
    monkeypatch.setattr("penstock.workers.worker.CALM_RECORD_EVERY", 0.1)
    await world.prepare()
    first = await world.join(ttl=1.5)
    await world.shared(6)
    await world.publish("p0", 100)

    async def recorded() -> bool:
        records = claims.records_in(await world.source.bucket.entries(claims.PROGRESS)).values()
        return any(record.partitions.get("p0", Reached(0)).done >= 100 for record in records)

    await eventually_async(recorded, 30, "all of p0 to be written down", state=lambda: world.done)
    await world.crash(first)
    for info in await world.control.jetstream.consumers("S"):
        await world.control.jetstream.delete_consumer("S", info.name)
    await world.join(ttl=1.5)
    await world.publish("p0", 3)
    await world.all_done()


async def delete_claims(world: World) -> None:
    for key in await world.source.bucket.entries(claims.CLAIMS):
        await delete(world, key)


async def delete(world: World, key: str) -> None:
    """Delete a key whatever its revision is, as an operator does: its owner may write it at the same moment."""
    bucket = world.source.bucket
    while entry := await bucket.get(key):
        with suppress(WrongRevision):
            return await bucket.delete(key, entry.revision)
    raise AssertionError(f"there is no key {key}")


async def test_a_worker_that_stops_keeps_its_partitions_for_as_long_as_their_handlers_take(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than its lease: nobody else may begin what it is about to finish."""
    await world.prepare()
    handle, begun = world.handle, asyncio.Event()

    async def slowly(message: Message, context: MessageContext) -> None:
        if message.sequence == 1:
            begun.set()
            await asyncio.sleep(2.5)
        await handle(message, context)

    monkeypatch.setattr(world, "handle", slowly)
    first = await world.join(ttl=1.0)
    await world.shared(6)
    await world.publish("p0", 3)
    await begun.wait()
    await world.join(ttl=1.0)
    await first.stop()
    await world.all_done()
    assert world.by["p0"] == {"worker-0", "worker-1"}, "the first message was finished where it was begun"


async def test_what_is_being_handled_is_finished_when_a_partition_moves_while_it_catches_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.prepare()
    handle, cancelled = world.handle, list[int]()

    async def slowly(message: Message, context: MessageContext) -> None:
        try:
            await asyncio.sleep(0.0 if context.worker_id == "worker-2" else 0.15)
        except asyncio.CancelledError:
            cancelled.append(message.sequence)
            raise
        await handle(message, context)

    monkeypatch.setattr(world, "handle", slowly)
    await world.join()
    await world.shared(6)
    for partition in PARTITIONS:
        await world.publish(partition.id, 30)
    second = await world.join()
    await eventually_async(lambda: second.statistics().catching_up, 30, "the second to catch up")
    await world.join()
    await world.all_done()
    assert not cancelled
    assert any("worker-2" in workers and len(workers) > 1 for workers in world.by.values()), "partitions did move"


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_partition_that_gets_another_id_while_its_handler_runs_loses_nothing(
    world: World, retention: str
) -> None:
    await world.prepare(retention)
    gate = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        if message.json() == 3:
            await gate.wait()
        world.done[message.subject.removeprefix("s.")].append(message.json())

    world.handle = handle  # type: ignore[method-assign]  # of this one world
    group = await world.join()
    await world.shared(6)
    await world.publish("p0", 6)
    await eventually_async(lambda: world.done["p0"] == [1, 2], state=lambda: world.done)
    await world.source.write([Partition("new", ("s.p0",)), *PARTITIONS[1:]])
    await eventually_async(lambda: "new" in group.statistics().partitions, 20, "the new one to be taken")
    await world.publish("p0", 3)
    gate.set()
    await eventually_async(lambda: "p0" not in group.statistics().held, 30, "the old one to be let go")
    await world.publish("p0", 3)
    await world.all_done()


async def test_a_partition_that_is_listed_again_with_other_subjects_begins_with_them(world: World) -> None:
    await world.prepare()

    async def handle(message: Message, context: MessageContext) -> None:
        world.done[message.subject.removeprefix("s.")].append(message.json())

    world.handle = handle  # type: ignore[method-assign]  # of this one world
    await world.publish("other", 20)
    group = await world.join()
    await world.shared(6)
    await world.publish("p0", 5)
    await eventually_async(lambda: len(world.done["p0"]) == 5)
    await world.source.write(PARTITIONS[1:])
    await eventually_async(lambda: "p0" not in group.statistics().partitions)
    await world.source.write([Partition("p0", ("s.other",)), *PARTITIONS[1:]])
    await world.all_done()


@pytest.mark.parametrize("value", [{"partitions": [{"idd": "p0"}]}, None])
async def test_a_worker_that_dies_while_the_list_is_wrong_is_replaced(world: World, value: Any) -> None:
    """The list has a mistake, or it was deleted."""
    await world.prepare()
    dying = await world.join(ttl=1.5)
    await world.join(ttl=1.5)
    await world.shared(3, 3)
    if value:
        await world.source.bucket.put(LIST_KEY, value)
    else:
        await delete(world, LIST_KEY)
    await world.crash(dying)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await world.all_done()
    found = await look(world.control, "g")
    assert needs_attention(found)
    assert LIST_KEY in found.problems[0]


async def test_something_is_left_while_messages_wait_for_a_worker_that_has_died(world: World) -> None:
    await world.prepare()
    dying, other = await world.join(ttl=1.5), await world.join(ttl=1.5)
    await world.shared(3, 3)
    await world.crash(dying)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await eventually_async(other.has_nothing_left, 30)
    assert world.done == {partition.id: [1, 2, 3] for partition in PARTITIONS}


KEYS = [claim_key("p0"), assignment.HEAD, f"{assignment.OF}worker-0", "leader.lease", "workers.stranger", LIST_KEY]
VALUES = [b"no JSON", b"{}", b'{"version": 1, "handoff": "x", "members": 1, "partitions": [{"id": 7}], "tries": 3}']


@pytest.mark.parametrize("key", KEYS)
async def test_what_somebody_writes_by_hand_ends_no_worker(world: World, key: str) -> None:
    await world.prepare()
    groups = [await world.join(ttl=1.5), await world.join(ttl=1.5)]
    await world.shared(3, 3)
    for value in VALUES:
        await world.control.connection.request(f"$KV.penstock_g.{key}", value)
        await asyncio.sleep(0.7)
        await look(world.control, "g")
    await world.source.write(PARTITIONS)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    await eventually_async(
        lambda: all(world.done[p.id][-3:] == [1, 2, 3] for p in PARTITIONS), 40, "all to be done", lambda: world.done
    )
    assert not any(group._running and group._running.done() for group in groups)
    await world.join(ttl=1.5)  # partitions still move
    await world.shared(2, 2, 2)
