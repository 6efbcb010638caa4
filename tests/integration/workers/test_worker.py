"""A worker on a real server: order, retries, dead letters, backpressure, and everything that may go wrong around it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from tests.integration.workers import work_module
from tests.integration.workers.world import STREAM, World, partitions

from penstock.consume.hooks import Hooks
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Reject, Retries
from penstock.errors import Unavailable
from penstock.publish import Publisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.wire import aio
from penstock.workers.dispatch.dispatcher import LATENCIES_PER_REPORT, OwnsAll
from penstock.workers.group.claims import Reached
from penstock.workers.options import ConsumerOptions
from penstock.workers.partitions import Partition
from penstock.workers.pull.stored import stored


async def counts(world: World, **wanted: int) -> None:
    """Wait until the consumer's numbers are these: the server counts an acknowledgement after it has received it."""

    async def so() -> bool:
        info = await world.consumer()
        return {name: getattr(info, name) for name in wanted} == wanted

    await eventually_async(so, what=f"{wanted}", state=world.consumer)


async def test_messages_of_many_partitions_are_handled_once_in_order_through_one_consumer(world: World) -> None:
    await world.create()
    ids = [str(n) for n in range(20)]
    for id_ in ids:
        await world.publish(id_, 30)
    worker = await world.worker()
    await worker.update(partitions(*ids))
    for id_ in ids:
        await world.publish(id_, 30)
    await world.all_handled()
    await world.all_acknowledged()
    assert await world.js.consumer_names(STREAM) == ["test-1"]
    assert worker.metrics.redeliveries == 0


def test_a_worker_runs_in_uvloop_too(nats_server: EmbeddedServer) -> None:
    async def scene() -> None:
        async with await Publisher.connect(nats_server.settings) as publisher:
            world = World(nats_server, publisher)
            async with world.open:
                await world.create()
                worker = await world.worker()
                await worker.update(partitions("a", "b"))
                for id_ in "ab":
                    await world.publish(id_, 300)
                await world.all_handled()
                await world.all_acknowledged()

    uvloop.run(scene())


async def test_the_context_says_where_a_message_comes_from(world: World) -> None:
    await world.create()
    worker = await world.worker(worker_id="w7")
    await worker.update(partitions("a"))
    await world.publish("a")
    await world.all_handled()
    context = world.contexts[0]
    assert context[:3] == ("w.a", "a", "w7")
    assert (context.delivery_count, context.fencing_token) == (1, 1)


async def test_a_failing_message_comes_again_and_keeps_its_place(world: World) -> None:
    await world.create()
    tries = []

    async def handler(message: Message, context: MessageContext) -> None:
        if message.data == b"2" and context.partition_id == "a" and context.delivery_count < 3:
            tries.append(context.delivery_count)
            raise ValueError("not yet")
        await world.handle(message, context)

    worker = await world.worker(handler)
    await worker.update(partitions("a", "b"))
    await world.publish("a", 10)
    await world.publish("b", 10)
    await world.all_handled()
    await world.all_acknowledged()
    assert tries == [1, 2]


async def test_a_poison_message_becomes_a_dead_letter_with_its_reason_and_the_rest_goes_on(world: World) -> None:
    await world.create()

    async def handler(message: Message, context: MessageContext) -> None:
        if message.data == b"2":
            raise ValueError("no such project")
        if message.data == b"3":
            raise Reject("no JSON")
        await world.handle(message, context)

    worker = await world.worker(handler)
    await worker.update(partitions("a"))
    await world.publish("a", 5)
    await eventually_async(lambda: world.handled["a"] == [b"1", b"4", b"5"], state=world.state)
    await world.all_acknowledged()
    letters = [await world.js.get_message("DLQ", seq) for seq in (1, 2)]
    assert [letter.data for letter in letters] == [b"2", b"3"]
    reasons = [letter.headers["Penstock-Dlq-Reason"][0] for letter in letters]
    assert reasons == ["gave up after 3 tries: ValueError: no such project", "rejected by the handler: no JSON"]
    assert worker.metrics.dead_letters == 2


async def test_without_a_place_for_dead_letters_nothing_is_lost(world: World) -> None:
    await world.create()
    await world.js.delete_stream("DLQ")

    async def handler(message: Message, context: MessageContext) -> None:
        raise ValueError("never")

    worker = await world.worker(handler)
    await worker.update(partitions("a"))
    await world.publish("a")
    await eventually_async(lambda: worker.metrics.failures >= 5, 60, "several tries", lambda: worker.metrics.failures)
    assert (await world.consumer()).ack_pending == 1
    assert worker.metrics.dead_letters == 0


async def test_a_handler_slower_than_ack_wait_gets_its_message_only_once(world: World) -> None:
    await world.create()
    release = asyncio.Event()

    async def handler(message: Message, context: MessageContext) -> None:
        await release.wait()
        await world.handle(message, context)

    # long enough for a machine with much to do: a third of it after the last sign the next one is due
    worker = await world.worker(handler, consumer={"ack_wait": 2.0})
    await worker.update(partitions("a"))
    await world.publish("a", 3)
    await eventually_async(lambda: worker.metrics.messages == 3)
    await asyncio.sleep(3.0)  # longer than ack_wait: what is shown is that nothing comes meanwhile
    release.set()
    await world.all_handled()
    await world.all_acknowledged()
    assert worker.metrics.redeliveries == 0


async def test_a_stuck_partition_does_not_starve_the_others(world: World) -> None:
    await world.create()
    release = asyncio.Event()

    async def handler(message: Message, context: MessageContext) -> None:
        if context.partition_id == "stuck":
            await release.wait()
        await world.handle(message, context)

    worker = await world.worker(handler, consumer={"max_ack_pending": 40}, max_in_flight=10)
    await worker.update(partitions("stuck", "a"))
    await world.publish("stuck", 300)
    await world.publish("a", 200)
    await eventually_async(lambda: len(world.handled["a"]) == 200, 60, "the others to be handled", world.state)
    assert world.handled["stuck"] == []
    release.set()
    await world.all_handled()
    await world.all_acknowledged()


async def test_a_handler_that_waits_does_not_hold_up_other_partitions(world: World) -> None:
    await world.create()
    together = asyncio.Barrier(3)

    async def handler(message: Message, context: MessageContext) -> None:
        await together.wait()
        await world.handle(message, context)

    worker = await world.worker(handler)
    await worker.update(partitions("a", "b", "c"))
    for id_ in "abc":
        await world.publish(id_, 5)
    await world.all_handled()


async def test_a_handler_that_takes_too_long_is_cancelled_and_counts_as_failed(world: World) -> None:
    await world.create()

    async def handler(message: Message, context: MessageContext) -> None:
        if context.delivery_count == 1:
            await asyncio.Event().wait()
        await world.handle(message, context)

    worker = await world.worker(handler, handler_timeout=0.1)
    await worker.update(partitions("a"))
    await world.publish("a", 2)
    await world.all_handled()
    assert worker.metrics.failures == 2


async def test_two_workers_of_their_own_each_keep_what_they_give_up(world: World) -> None:
    async def reject(message: Message, context: MessageContext) -> None:
        raise Reject(f"not for {context.worker_id}")

    await world.create()
    workers = [await world.worker(reject, id_) for id_ in "12"]
    for worker in workers:
        await worker.update(partitions("a"))
    await world.publish("a", 3)
    await eventually_async(lambda: sum(worker.metrics.dead_letters for worker in workers) == 6, state=world.state)
    assert (await world.js.stream_info("DLQ")).state.messages == 6


async def test_a_handler_that_computes_runs_in_other_processes(world: World) -> None:
    await world.create()
    worker = await world.worker(work_module.record, processes=2)
    path = world.server.log.parent / "handled"
    await worker.update(partitions("a", "b"))
    for id_ in "ab":
        await world.publisher.publish_batch(STREAM, f"w.{id_}", [f"{path}:{n}".encode() for n in range(20)])

    def found() -> list[str]:
        return path.read_text().split() if path.exists() else []

    await eventually_async(lambda: len(found()) == 40, 60, "all to be computed", lambda: len(found()))
    lines = [line.split(":") for line in found()]
    for id_ in "ab":
        assert [n for partition, n, _ in lines if partition == id_] == [str(n) for n in range(20)]
    assert str(os.getpid()) not in {pid for _, _, pid in lines}


async def test_a_process_that_dies_costs_its_message_a_try_and_nothing_else(world: World) -> None:
    await world.create()
    worker = await world.worker(work_module.die_once, processes=1, retries=Retries(max_deliver=5, backoff=(0.05,)))
    path = world.server.log.parent / "died"
    await worker.update(partitions("a"))
    await world.publisher.publish_batch(STREAM, "w.a", [str(path).encode()] * 3)
    await eventually_async(lambda: worker.metrics.done == 3, 60, state=lambda: worker.metrics.failures)
    assert path.exists()
    assert worker.metrics.failures >= 1


async def test_a_handler_that_hangs_in_a_process_costs_no_other_message_a_try(world: World) -> None:
    await world.create()
    retries = Retries(max_deliver=2, backoff=(0.05,))
    worker = await world.worker(
        work_module.hang_at_two, processes=1, handler_timeout=1.5, retries=retries, dlq="dlq.workers"
    )
    await worker.update(partitions(*"abcd"))
    for id_ in "abcd":
        await world.publish(id_, 5)
    await eventually_async(
        lambda: worker.metrics.done == 19 and worker.metrics.dead_letters == 1,
        60,
        state=lambda: (worker.metrics.done, worker.metrics.failures, worker.metrics.dead_letters),
    )
    assert worker.metrics.failures == 2


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_a_partition_that_is_added_later_brings_its_backlog_first(world: World, retention: str) -> None:
    await world.create(retention, allow_direct=retention == "limits")
    # Somebody else has the subject until it is handed over: on an Interest stream nothing would be kept otherwise.
    other = {"name": "other", "durable_name": "other", "filter_subjects": ["w.b"], "ack_policy": "explicit"}
    await world.js.create_consumer(STREAM, other)
    worker = await world.worker()
    await worker.update(partitions("a"))
    for _ in range(3):
        await world.publish("b", 20)
        await world.publish("a", 20)
    await eventually_async(lambda: len(world.handled["a"]) == 60, state=world.state)
    if retention == "workqueue":
        await world.js.delete_consumer(STREAM, "other")
    outcome = await worker.update(partitions("a", "b"))
    await world.publish("b", 20)
    await world.all_handled()
    assert outcome.passed_over == {"w.b"}
    await eventually_async(lambda: worker.done_through("b") == 140)


async def test_a_partition_of_a_work_queue_is_not_taken_for_caught_up_while_the_server_is_away(world: World) -> None:
    await world.create("workqueue")
    worker = await world.worker(hooks=Hooks(on_assigned=lambda ids: world.server.kill() if "b" in ids else None))
    await worker.update(partitions("a"))
    await world.publish("b", 5)
    await world.publish("a", 1)
    await eventually_async(lambda: world.handled["a"] == [b"1"])
    with pytest.raises(Unavailable):  # the consumer's note that b is behind stays
        await worker.update(partitions("a", "b"))
    assert worker.behind == {"b"}
    await asyncio.to_thread(world.server.start)
    await eventually_async(lambda: worker.connects >= 2, 60)
    await worker.update(partitions("a", "b"))
    await world.all_handled()


async def test_a_work_queue_is_caught_up_with_by_a_consumer_that_has_delivered_nothing(world: World) -> None:
    """There is no delivery before the reset that the first one after it could be told from."""
    await world.create("workqueue")
    await world.publish("b", 20)
    worker = await world.worker()
    await worker.update(partitions("a"))
    await worker.update(partitions("a", "b", "c"))
    await world.publish("b", 5)
    await world.all_handled()


async def test_without_reading_it_the_backlog_of_an_added_partition_never_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hole that reading the backlog closes: this is what happens without it."""
    await world.create()
    gate = asyncio.Event()

    async def read_later(*arguments: Any) -> AsyncIterator[Message]:
        await gate.wait()
        async for message in stored(*arguments):
            yield message

    monkeypatch.setattr("penstock.workers.worker.stored", read_later)
    worker = await world.worker()
    await worker.update(partitions("a"))
    await world.publish("b", 5)
    await world.publish("a", 1)
    await eventually_async(lambda: world.handled["a"] == [b"1"])
    await worker.update(partitions("a", "b"))
    await world.publish("b", 1)
    await eventually_async(lambda: worker.metrics.messages == 2)
    await counts(world, pending=0, ack_pending=1)  # only the sixth was delivered, and waits
    assert worker.behind == {"b"}
    gate.set()
    await world.all_handled()


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_backlog_comes_in_batches_and_its_retries_in_order(world: World, retention: str) -> None:
    await world.create(retention)
    sizes: list[int] = []
    failed: list[int] = []

    async def handler(messages: list[Message], context: MessageContext) -> None:
        sizes.append(len(messages))
        if b"7" in [message.data for message in messages] and len(failed) < 2:
            failed.append(len(messages))
            raise ValueError("not yet")
        for message in messages:
            await world.handle(message, context)

    worker = await world.worker(handler, batch=10)
    await worker.update(partitions("a"))
    await world.publish("b", 40)
    await world.publish("a", 1)
    await eventually_async(lambda: world.handled["a"] == [b"1"])
    await worker.update(partitions("a", "b"))
    await world.publish("b", 10)
    await world.all_handled()
    assert max(sizes) > 1
    assert failed[-1] == 1, "what failed in a batch is handled by itself"
    assert not worker.behind


async def test_a_worker_that_died_before_it_caught_up_does_so_when_it_comes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create()

    async def never_read(*_: Any) -> AsyncIterator[Message]:
        await asyncio.Event().wait()
        yield await anext(stored(*_))

    with monkeypatch.context() as patched:
        patched.setattr("penstock.workers.worker.stored", never_read)
        first = await world.worker()
        await first.update(partitions("a"))
        await world.publish("b", 5)
        await world.publish("a", 1)
        await eventually_async(lambda: world.handled["a"] == [b"1"])
        await first.update(partitions("a", "b"))
        await first.stop()
    second = await world.worker()
    await second.update(partitions("a", "b"))
    await world.publish("b", 1)
    await world.all_handled()


async def test_a_partition_that_is_drained_is_done_up_to_what_is_said_and_no_further(world: World) -> None:
    await world.create()
    begun, release = asyncio.Event(), asyncio.Event()

    async def handler(message: Message, context: MessageContext) -> None:
        if message.data == b"3":
            begun.set()
            await release.wait()
        await world.handle(message, context)

    worker = await world.worker(handler)
    await worker.update(partitions("a"))
    await world.publish("a", 10)
    await begun.wait()
    draining = asyncio.create_task(worker.drain(["a"]))
    release.set()
    assert {id_: reached.done for id_, reached in (await draining).items()} == {"a": 3}
    assert world.handled["a"] == [b"1", b"2", b"3"]
    await counts(world, ack_floor_stream_seq=3)
    await worker.resume(["a"])
    await world.all_handled()


@pytest.mark.parametrize("direct", [True, False])
async def test_the_lag_of_a_partition_is_what_is_not_done_of_it(world: World, direct: bool) -> None:
    await world.create(allow_direct=direct)
    release = asyncio.Event()

    async def handler(message: Message, context: MessageContext) -> None:
        if context.partition_id == "slow" and message.data == b"3":
            await release.wait()
        await world.handle(message, context)

    worker = await world.worker(handler, measure_every=0)
    await worker.update(partitions("slow", "idle"))
    await world.publish("slow", 10)
    await eventually_async(lambda: worker.done_through("slow") == 2)
    lag = await worker.measure()
    assert lag["slow"].messages == (8 if direct else -1)  # without direct get the stream cannot count them
    assert lag["slow"].seconds > 0
    assert (lag["idle"].messages, lag["idle"].seconds) == (0, 0.0)
    release.set()
    await world.all_handled()
    await eventually_async(lambda: worker.done_through("slow") == 10)
    assert (await worker.measure())["slow"].messages == 0


async def test_a_replay_for_another_reader_is_acknowledged_and_not_handled(world: World) -> None:
    await world.create()
    worker = await world.worker()
    await worker.update(partitions("a"))
    async with await aio.connect(world.server.settings) as connection:
        await connection.request("w.a", b"theirs", {"Penstock-Dlq-Only": f"{STREAM}/other"})
        await connection.request("w.a", b"ours", {"Penstock-Dlq-Only": f"{STREAM}/test"})
    await eventually_async(lambda: world.handled["a"] == [b"ours"], state=lambda: world.handled)
    await world.all_acknowledged()


async def test_a_partition_with_wildcards_and_several_subjects_is_one_order(world: World) -> None:
    await world.create()
    worker = await world.worker()
    await worker.update([Partition("both", ("w.x.>", "w.y")), *partitions("z")])
    async with await aio.connect(world.server.settings) as connection:
        for number, subject in enumerate(["w.x.1", "w.y", "w.x.2.3", "w.y", "w.x.1"]):
            await connection.request(subject, b"%d" % number)
    await eventually_async(lambda: world.handled["both"] == [b"0", b"1", b"2", b"3", b"4"], state=lambda: world.handled)


async def test_what_a_worker_remembers_of_its_messages_does_not_grow(world: World) -> None:
    await world.create()
    worker = await world.worker()
    await worker.update(partitions("a"))
    for _ in range(3):
        await world.publish("a", 900)
    await world.all_handled()
    await world.all_acknowledged()
    assert len(worker._dispatcher._latencies) <= LATENCIES_PER_REPORT + 500
    assert not worker._dispatcher.lanes["a"].items


class Owner:
    """Ownership that a test gives and takes."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def token(self, partition_id: str) -> int | None:
        return self.tokens.get(partition_id)


async def test_messages_of_a_partition_that_is_not_owned_wait(world: World) -> None:
    await world.create()
    owner = Owner()
    worker = await world.worker(ownership=owner)
    await worker.update(partitions("a", "b"))
    owner.tokens["b"] = 5
    await world.publish("a", 3)
    await world.publish("b", 3)
    await eventually_async(lambda: len(world.handled["b"]) == 3)
    assert "a" not in world.handled
    assert (await world.consumer()).ack_floor_stream_seq == 0
    owner.tokens["a"] = 17
    await world.all_handled()
    assert {context.fencing_token for context in world.contexts} == {5, 17}


async def test_what_is_handled_while_ownership_is_lost_is_not_acknowledged(world: World) -> None:
    await world.create("workqueue")
    owner = Owner()
    owner.tokens["a"] = 1

    async def handler(message: Message, context: MessageContext) -> None:
        await world.handle(message, context)
        owner.tokens.clear()

    worker = await world.worker(handler, ownership=owner)
    await worker.update(partitions("a"))
    await world.publish("a")
    await eventually_async(lambda: world.handled["a"] == [b"1"])
    await worker.drain(["a"])
    assert (await world.js.stream_info(STREAM)).state.messages == 1


async def test_a_consumer_that_vanishes_is_made_again_and_nothing_is_lost_or_repeated(world: World) -> None:
    await world.create()
    worker = await world.worker()
    await worker.update(partitions("a", "b"))
    await world.publish("a", 20)
    await world.publish("b", 5)
    await world.all_handled()
    await world.js.delete_consumer(STREAM, "test-1")
    await world.publish("a", 20)
    await world.publish("b", 20)
    await world.all_handled()
    await world.all_acknowledged()


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_a_server_that_is_killed_and_comes_back_loses_nothing_and_keeps_the_order(
    world: World, retention: str
) -> None:
    await world.create(retention)

    async def handler(message: Message, context: MessageContext) -> None:
        await asyncio.sleep(0.002)
        await world.handle(message, context)

    worker = await world.worker(handler, consumer={"ack_wait": 5.0})
    await worker.update(partitions("a", "b", "c"))
    for id_ in "abc":
        await world.publish(id_, 100)
    await eventually_async(lambda: len(world.handled["a"]) > 10)
    world.server.kill()
    await asyncio.to_thread(world.server.start)
    async with asyncio.timeout(60):
        while True:
            try:
                for id_ in "abc":
                    await world.publish(id_, 20)
                break
            except Exception:  # noqa: BLE001 -- the publisher's connection takes a moment to come back
                await asyncio.sleep(0.1)
    await eventually_async(
        lambda: all(set(world.handled[id_]) >= set(world.published[id_]) for id_ in "abc"), 90, state=world.state
    )
    for id_ in "abc":
        numbers = [int(data) for data in dict.fromkeys(world.handled[id_])]
        assert numbers == sorted(numbers), f"out of order in {id_}"
    assert worker.connects >= 2


async def test_a_worker_that_comes_back_handles_first_what_its_predecessor_left(world: World) -> None:
    await world.create()
    stuck = asyncio.Event()

    async def never(message: Message, context: MessageContext) -> None:
        await stuck.wait()

    first = await world.worker(never, consumer={"ack_wait": 30.0}, stop_within=0.1)
    await first.update(partitions("a"))
    await world.publish("a", 10)
    await eventually_async(lambda: first.metrics.messages == 10)
    await first.stop()
    second = await world.worker(consumer={"ack_wait": 30.0})
    await second.update(partitions("a"))
    await world.publish("a", 10)
    await world.all_handled()
    await world.all_acknowledged()


async def test_what_a_predecessor_left_is_handled_in_order_whatever_order_the_server_brings_it_in(world: World) -> None:
    await world.create()
    # So many that they do not all come with one read.
    allowed: dict[str, Any] = {"ack_wait": 30.0, "max_ack_pending": 4000}
    options = ConsumerOptions(stream=STREAM, worker_id="1", prefix="test", **allowed)
    await world.js.create_consumer(STREAM, options.created(0, ["w.a"], None))
    for _ in range(4):
        await world.publish("a", 500)
    async with await aio.connect(world.server.settings) as gone:
        came: list[str] = []
        await gone.subscribe("gone.inbox", handler=lambda message: came.append(message.reply))
        await gone.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.test-1", b"2000", reply="gone.inbox")
        await eventually_async(lambda: len(came) == 2000)
        for reply in came[1000:]:  # these are now first in the server's queue
            await gone.publish(reply, b"-NAK")
        await gone.request(came[-1], b"-NAK")
    worker = await world.worker(consumer=allowed)
    await worker.update(partitions("a"))
    await world.all_handled()
    await world.all_acknowledged()
    assert {context.delivery_count for context in world.contexts} == {1}, "a delivery to somebody else is no try"


async def test_deliveries_that_went_to_somebody_else_are_fetched_before_anything_after_them(world: World) -> None:
    await world.create()
    worker = await world.worker(consumer={"ack_wait": 30.0})
    await worker.update(partitions("a", "b"))
    await world.publish("a", 5)
    await world.all_handled()
    async with await aio.connect(world.server.settings) as zombie:
        came: list[object] = []
        await zombie.subscribe("zombie.inbox", handler=came.append)
        ask = b'{"batch": 7, "expires": 60000000000, "idle_heartbeat": 100000000}'
        await zombie.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.test-1", ask, reply="zombie.inbox")
        await eventually_async(lambda: came, what="a heartbeat: the server has the request")
        await world.publish("a", 30)
        await world.publish("b", 30)
        await world.all_handled()
    await world.all_acknowledged()
    assert worker.connects >= 2


async def test_a_consumer_whose_reset_failed_is_pulled_from_once_it_succeeds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create()
    worker = await world.worker()
    await eventually_async(lambda: worker.connects == 1, what="a session")
    reset = worker.consumer.reset
    failures = [Unavailable("the server is busy")]

    async def fails_once(name: str, first: int | None) -> None:
        if failures:
            raise failures.pop()
        await reset(name, first)

    monkeypatch.setattr(worker.consumer, "reset", fails_once)
    await world.publish("a", 5)
    with pytest.raises(Unavailable, match="the server is busy"):
        await worker.update(partitions("a"))
    await worker.update(partitions("a"))
    await world.all_handled()


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_what_lies_below_the_start_of_a_consumer_is_read_from_the_stream(world: World, retention: str) -> None:
    """The server moves no consumer to before its start. So is a claim that was not settled before its owner died."""
    await world.create(retention, allow_direct=True)
    durable = {"ack_policy": "explicit", "filter_subjects": ["w.a", "w.b"]}
    held = {**durable, "name": "holds", "durable_name": "holds"}  # an Interest stream keeps only what somebody wants
    await world.js.create_consumer(STREAM, held)
    await world.publish("a", 20)
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": 15}
    await world.js.create_consumer(STREAM, {**durable, **start, "name": "test-1", "durable_name": "test-1"})

    world.handled["a"] = world.published["a"][:5]
    worker = await world.worker(ownership=OwnsAll(), before=lambda id_: Reached({"a": 5, "b": 20}[id_]))
    await worker.update(partitions("a", "b"))
    for id_ in "ab":
        await world.publish(id_, 5)
    await world.all_handled()
    await world.all_acknowledged()
