"""What is done stays done: while a message waits, in a restart, after a loss of the consumer or of the stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from tests.integration.workers.world import STREAM, World, partitions

from penstock.consume.hooks import Hooks
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Retries, RetryLater
from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.testing import eventually_async
from penstock.workers.dispatch.lanes import REMEMBERED_SEQUENCES
from penstock.workers.group.claims import ALONE, progress_key
from penstock.workers.partitions import Partition
from penstock.workers.pull.consumer import stream_identity
from penstock.workers.pull.session import DeliveriesMissing

MANY = 2 * REMEMBERED_SEQUENCES + 3000
"""More than a worker remembers one by one."""
RETENTIONS = ["limits", "workqueue", "interest"]


class Waiting:
    """A handler that puts off the first message of partition a until it is told not to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: Counter[tuple[str, bytes]] = Counter()
        self.open = False

    async def __call__(self, message: Message, context: MessageContext) -> None:
        if context.partition_id == "a" and not self.open:
            raise RetryLater(after=0.2)
        self.calls[context.partition_id, message.data] += 1
        await self.world.handle(message, context)


ENDLESS = Retries(max_deliver=10_000, backoff=(0.2,))


async def all_but_one(world: World, handler: Waiting) -> None:
    done = lambda: len(world.handled["b"]) == len(world.published["b"])  # noqa: E731
    await eventually_async(done, 60, "everything of b", world.state)


async def restart(world: World) -> None:
    """The worker is stopped in order."""
    await world.open.aclose()


async def lose_server(world: World) -> None:
    world.server.kill()
    await asyncio.to_thread(world.server.start)


async def delete_consumer(world: World) -> None:
    await world.js.delete_consumer(STREAM, "test-1")


TROUBLES = [(retention, trouble) for trouble in (restart, lose_server) for retention in RETENTIONS]
TROUBLES += [("limits", delete_consumer), ("workqueue", delete_consumer)]
"""An Interest stream deletes what only a consumer that was deleted wanted."""


@pytest.mark.parametrize(("retention", "trouble"), TROUBLES)
async def test_what_is_done_behind_a_message_that_waits_is_not_done_again(
    world: World, retention: str, trouble: Callable[[World], Awaitable[None]]
) -> None:
    await world.create(retention)
    handler = Waiting(world)
    worker = await world.worker(handler, retries=ENDLESS, consumer={"max_ack_pending": 4000})
    await worker.update(partitions("a", "b"))
    await world.publish("a", 1)
    for _ in range(MANY // 500):
        await world.publish("b", 500)
    await all_but_one(world, handler)
    await trouble(world)
    if trouble is restart:
        worker = await world.worker(handler, retries=ENDLESS)
        await worker.update(partitions("a", "b"))
    await world.publish("b", 10)
    await all_but_one(world, handler)
    handler.open = True
    await world.all_handled()
    await world.all_acknowledged()
    again = sum(count - 1 for count in handler.calls.values())
    assert again <= (500 if trouble is lose_server else 0), "a server that is killed forgets its last tenth of a second"


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_message_that_leaves_the_stream_while_it_waits_holds_up_nothing(world: World, retention: str) -> None:
    await world.create(retention)
    handler = Waiting(world)
    worker = await world.worker(handler, retries=ENDLESS)
    await worker.update(partitions("a"))
    await world.publish("a", 1)
    await eventually_async(lambda: worker.strained, 30, "the message to wait")
    await world.js.purge_stream(STREAM)
    handler.open = True
    await world.publish("a", 5)
    await world.all_handled()


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_all_of_a_stream_that_was_made_anew_is_handled(world: World, retention: str) -> None:
    await world.create(retention)
    worker = await world.worker()
    await worker.update(partitions("a"))
    await world.publish("a", 40)
    await world.all_handled()
    await world.js.delete_stream(STREAM)
    await world.js.delete_stream("DLQ")
    await world.create(retention)
    await eventually_async(lambda: worker.consumer.remade or worker.connects > 1, 30, "the worker to notice")
    if retention == "interest":  # what nobody wants yet is not kept
        await eventually_async(lambda: world.js.consumer_names(STREAM), 30, "its consumer to be back")
    await world.publish("a", 40)
    await world.all_handled()


async def test_a_stream_that_was_made_anew_is_begun_again_until_that_succeeds(world: World) -> None:
    await world.create()
    asked = list[tuple[str, ...]]()

    def fails_once(ids: tuple[str, ...]) -> None:
        asked.append(ids)
        if len(asked) == 2:  # the first time on the new stream
            raise OSError("the database is away")

    worker = await world.worker(hooks=Hooks(on_assigned=fails_once))
    await worker.update(partitions("a"))
    await world.publish("a", 5)
    await world.all_handled()
    await world.js.delete_stream(STREAM)
    await world.js.delete_stream("DLQ")
    await world.create()
    await world.publish("a", 5)
    await world.all_handled()
    assert asked == [("a",)] * 3


async def test_a_worker_that_began_with_new_messages_handles_all_of_a_stream_that_was_made_anew(world: World) -> None:
    """The end of the old stream says nothing about the new one."""
    await world.create()
    await world.publish("a", 40)
    before = await world.js.stream_info(STREAM)
    world.handled["a"] = list(world.published["a"])
    worker = await world.worker(begins=(stream_identity(before), before.state.last_seq))
    await worker.update(partitions("a"))
    await world.publish("a", 5)
    await world.all_handled()
    await world.js.delete_stream(STREAM)
    await world.js.delete_stream("DLQ")
    await world.create()
    await world.publish("a", 20)
    await world.all_handled()


async def test_a_backlog_between_the_cursor_and_the_end_is_read_when_its_subject_is_added(world: World) -> None:
    """The consumer has delivered the first message of a; b lies behind it, and before the last one of a."""
    await world.create()
    gate = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        await gate.wait()
        await world.handle(message, context)

    worker = await world.worker(handle, consumer={"max_ack_pending": 1})
    await worker.update(partitions("a"))
    for _ in range(20):
        await world.publish("a", 1)
        await world.publish("b", 1)
    await worker.update(partitions("a", "b"))
    gate.set()
    await world.all_handled()


async def test_a_consumer_that_is_made_again_with_one_more_partition_brings_all_of_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far the one before had come says nothing about a partition that it did not have."""
    await world.create()
    worker = await world.worker()
    await worker.update(partitions("b"))
    await world.publish("a", 20)
    await world.publish("b", 20)
    await eventually_async(lambda: world.handled["b"] == world.published["b"], state=world.state)
    session = worker._answers.session
    assert session
    monkeypatch.setattr(session, "_status", lambda *_: None)  # the session does not hear of it in time
    await world.js.delete_consumer(STREAM, "test-1")
    await worker.update(partitions("a", "b"))
    session.fail(DeliveriesMissing("it hears of it now"))
    await world.all_handled()


async def test_a_worker_that_is_alone_and_ends_without_a_word_is_known_to_have_crashed(world: World) -> None:
    await world.create()
    control = await Control.connect(world.server.settings)
    world.open.push_async_callback(control.close)
    bucket, key = Bucket(control, ALONE), progress_key(STREAM, "test-1")
    worker = await world.worker()
    await worker.update(partitions("a"))
    begun = await bucket.get(key)
    assert begun
    assert not begun.value["ended"], "written down before anything is handled"
    await world.publish("a", 3)
    await world.all_handled()
    await worker.stop()
    ended = await bucket.get(key)
    assert ended
    assert ended.value["ended"]
    assert ended.value["partitions"]["a"][1] == 3


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_partition_that_gets_another_id_goes_on_with_what_was_not_done(world: World, retention: str) -> None:
    await world.create(retention)
    gate = asyncio.Event()

    async def handle(message: Message, context: MessageContext) -> None:
        if message.data == b"3":
            await gate.wait()
        world.handled["a"].append(message.data)

    worker = await world.worker(handle)
    await worker.update(partitions("a"))
    await world.publish("a", 6)
    await eventually_async(lambda: len(world.handled["a"]) == 2)
    renamed = asyncio.create_task(worker.update([Partition("b", ("w.a",))]))
    await world.publish("a", 3)
    gate.set()
    await renamed
    await world.publish("a", 3)
    await world.all_handled()
    await world.all_acknowledged()
    await worker.update(partitions("a"))
    await world.publish("a", 3)
    await world.all_handled()


@pytest.mark.parametrize("restart", [False, True])
async def test_a_partition_that_gets_other_subjects_begins_with_them(world: World, restart: bool) -> None:
    await world.create()
    await world.publish("b", 20)
    await world.publish("a", 10)

    async def handle(message: Message, context: MessageContext) -> None:
        world.handled[message.subject.removeprefix("w.")].append(message.data)

    worker = await world.worker(handle)
    await worker.update(partitions("a"))
    await eventually_async(lambda: world.handled["a"] == world.published["a"], state=world.state)
    if restart:
        await worker.stop()
        worker = await world.worker(handle)
    await worker.update([Partition("a", ("w.b",))])
    await world.publish("b", 5)
    await world.all_handled()


async def test_a_record_of_a_version_that_knew_no_subjects_counts(world: World) -> None:
    await world.create()
    control = await Control.connect(world.server.settings)
    world.open.push_async_callback(control.close)
    bucket, key = Bucket(control, ALONE), progress_key(STREAM, "test-1")
    worker = await world.worker()
    await worker.update(partitions("a"))
    await world.publish("a", 3)
    await world.all_handled()
    await worker.stop()
    record = await bucket.get(key)
    assert record
    record.value["partitions"]["a"][0] = 0
    await bucket.put(key, record.value)
    await world.js.delete_consumer(STREAM, "test-1")  # only the record says what was done
    worker = await world.worker()
    await worker.update(partitions("a"))
    await world.publish("a", 1)
    await world.all_handled()
