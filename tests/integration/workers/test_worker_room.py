"""What a worker holds, and what it tells of what waits and of handlers that do not end."""

from __future__ import annotations

import asyncio

from tests.integration.workers.world import World, partitions

from penstock.consume.messages import Message, MessageContext
from penstock.consume.metrics import MOST_LABELS, OTHERS, WorkerMetrics, WorkerSnapshot
from penstock.testing import eventually_async
from penstock.workers.dispatch.dispatcher import LongRunning

MIB = 2**20
LARGE = 512 * 1024  # bytes


async def test_what_a_worker_holds_is_bounded_in_bytes(world: World) -> None:
    """First many small messages, so that batches are large; then large ones."""
    await world.create()
    await world.publish("a", 500)
    blocked = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        if len(message.data) == LARGE:
            await blocked.wait()
        await world.handle(message, context)

    worker = await world.worker(handle, max_bytes=8 * MIB)
    await worker.update(partitions("a"))
    await eventually_async(lambda: len(world.handled["a"]) == 500)
    for _ in range(120):
        await world.publisher.connection.request("w.a", bytes(LARGE))

    def held() -> int:
        lanes = worker._dispatcher.lanes.values()
        return sum(len(message.data) for lane in lanes for message in lane.items.values() if message)

    seen: list[int] = []

    async def still() -> bool:
        """What does not fit stays at the server, or is put aside and is read again later."""
        seen.append(held())
        await asyncio.sleep(0.2)
        return 0 < seen[-1] == held()

    await eventually_async(still, 20, state=held)
    assert max(seen) <= 16 * MIB, f"{max(seen) / MIB:.0f} MiB are held"
    blocked.set()
    await eventually_async(lambda: len(world.handled["a"]) == 620, 30, state=lambda: len(world.handled["a"]))


async def test_what_waits_is_counted_while_a_partition_is_caught_up_with(world: World) -> None:
    await world.create(allow_direct=True)
    blocked = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        if context.partition_id == "b":
            await blocked.wait()
        await world.handle(message, context)

    await world.publish("b", 900)
    await world.publish("a", 1)
    worker = await world.worker(handle)
    await worker.update(partitions("a"))
    await eventually_async(lambda: len(world.handled["a"]) == 1)
    await worker.update(partitions("a", "b"))
    await eventually_async(lambda: worker.metrics.look().oldest > 0)
    await worker.measure()
    assert worker.metrics.values()["parti_consumer_inflight"] >= 899
    blocked.set()
    await eventually_async(lambda: len(world.handled["b"]) == 900, 30)
    assert worker.metrics.labelled()["parti_partition_messages_total"] == {"a": 1, "b": 900}
    await worker.measure()
    assert worker.metrics.values()["parti_consumer_inflight"] == 0


async def test_a_handler_that_does_not_end_is_told_of(world: World) -> None:
    await world.create()
    await world.publish("a")
    blocked = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        await blocked.wait()

    worker = await world.worker(handle)
    worker._upkeep.long_running = LongRunning(0.2)
    await worker.update(partitions("a"))
    await eventually_async(lambda: any("handlers that have not ended: a for" in one for one in worker.troubles()))
    values = worker.metrics.values()
    assert values["parti_handlers_long_running"] == 1
    assert values["parti_handler_oldest_seconds"] > 0.2
    blocked.set()
    await eventually_async(lambda: not worker.troubles())


def test_labels_do_not_grow_with_the_partitions() -> None:
    metrics = WorkerMetrics("1", "c")
    handled = {f"p{n:04}": (1, 0.5) for n in range(2 * MOST_LABELS)}
    metrics.look = lambda: WorkerSnapshot(handled=handled)
    found = metrics.labelled()
    assert len(found["parti_partition_messages_total"]) == MOST_LABELS + 1
    assert found["parti_partition_messages_total"][OTHERS] == MOST_LABELS
    assert found["parti_partition_latency_seconds"][OTHERS] == 0.5
