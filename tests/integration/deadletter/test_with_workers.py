"""Dead letters of partitioned workers, and back to them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack

from tests.integration.deadletter.stage import DLQ, Stage, events

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Retries
from penstock.deadletter.letters import BY_WORKER
from penstock.deadletter.replay import ReplayOptions, replay
from penstock.deadletter.selection import Selection
from penstock.testing import eventually_async
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.partitions import SubjectPattern
from penstock.workers.worker import Worker

PARTITIONS = [SubjectPattern("orders.{partition}").partition("placed")]


class Service:
    """A group of one worker, whose handler fails while it is broken."""

    def __init__(self, stage: Stage, name: str, worker_id: str = "1") -> None:
        self.name = name
        self.broken = False
        self.seen: Counter[str] = Counter()
        self.worker = Worker(
            stage.settings,
            ConsumerOptions(stream="ORDERS", worker_id=worker_id, prefix=name, window=0.01, min_interval=0.02),
            self.handle,
            options=WorkerOptions(retries=Retries(max_deliver=2, backoff=(0.05,)), dlq=DLQ, stop_within=2.0),
        )

    async def handle(self, message: Message, context: MessageContext) -> None:
        if self.broken:
            raise ValueError("the tax service is away")
        self.seen[json.loads(message.data)["event_id"]] += 1


async def test_what_one_group_gave_up_on_comes_back_to_that_group_alone(stage: Stage) -> None:
    await stage.build()
    await stage.js.delete_consumer("ORDERS", "billing")
    billing, shipping = Service(stage, "billing"), Service(stage, "shipping")
    billing.broken = True
    expected = {"e0": 1, "e1": 1, "e2": 1}
    async with AsyncExitStack() as running:
        for service in (billing, shipping):
            await running.enter_async_context(service.worker)
            await service.worker.update(PARTITIONS)
        await stage.publish(events(3))
        await eventually_async(lambda: billing.worker.metrics.dead_letters == 3, 60, "three dead letters")
        assert await stage.dead_events() == expected

        billing.broken = False
        wanted = Selection(readers=("ORDERS/billing",), errors=("tax service",))
        done = await replay(stage.settings, wanted, ReplayOptions(only_failed=True), actor="tester")
        assert done.done == 3
        await eventually_async(lambda: billing.seen == expected, 60, "the three to be processed", lambda: billing.seen)
        await eventually_async(lambda: all_read(stage), 60, "everything to be acknowledged")
    assert shipping.seen == expected, "the replay was not meant for shipping"
    assert await stage.dead_events() == {}


async def all_read(stage: Stage) -> bool:
    return [one.unprocessed for one in await stage.js.consumers("ORDERS")] == [0, 0]


async def test_what_two_workers_of_their_own_gave_up_on_comes_back_to_each_once(stage: Stage) -> None:
    """They share a name and nothing else: each has its letters, and a replay of all of them reaches each once."""
    await stage.build()
    await stage.js.delete_consumer("ORDERS", "billing")
    both = [Service(stage, "billing", id_) for id_ in "12"]
    expected = {"e0": 1, "e1": 1}
    async with AsyncExitStack() as running:
        for service in both:
            service.broken = True
            await running.enter_async_context(service.worker)
            await service.worker.update(PARTITIONS)
        await stage.publish(events(2))
        await eventually_async(
            lambda: [s.worker.metrics.dead_letters for s in both] == [2, 2], 15, "all to be given up"
        )
        filed = await stage.filed()
        assert len({one.id for one in filed}) == 4, "each of them keeps its own"
        assert {one.letter.consumer for one in filed} == {"billing"}, "and they are found by the name they share"
        assert {one.letter.worker for one in filed} == {"billing-1", "billing-2"}

        for service in both:
            service.broken = False
        wanted = Selection(readers=("ORDERS/billing",))
        done = await replay(stage.settings, wanted, ReplayOptions(only_failed=True), actor="tester")
        assert done.done == 4
        await eventually_async(lambda: all_read(stage), 15, "everything to be acknowledged")
    assert [service.seen for service in both] == [expected, expected]
    assert await stage.dead_events() == {}


async def test_the_letter_of_a_worker_says_how_it_failed(stage: Stage) -> None:
    await stage.build()
    await stage.js.delete_consumer("ORDERS", "billing")
    billing = Service(stage, "billing")
    billing.broken = True
    async with billing.worker as worker:
        await worker.update(PARTITIONS)
        await stage.publish(events(1))
        await eventually_async(lambda: worker.metrics.dead_letters == 1, 60, "the dead letter")
    (filed,) = await stage.filed()
    letter = filed.letter
    assert (letter.consumer, letter.captured_by, letter.event_id, letter.deliveries) == ("billing", BY_WORKER, "e0", 2)
    assert (letter.failure.type, "in handle" in letter.failure.stack) == ("ValueError", True)
    assert "the tax service is away" in letter.failure.message
