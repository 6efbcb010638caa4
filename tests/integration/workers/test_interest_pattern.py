"""Partitions found by a pattern on an Interest stream: nothing is dropped before somebody has seen its subject."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.cli.following import Following
from penstock.consume.messages import Message, MessageContext
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.workers.group.assignment import Windows
from penstock.workers.group.leader import Holder, covered_through
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import ConsumerOptions, GroupOptions, WorkerOptions
from penstock.workers.partitions import Described, SeenInStream, SubjectPattern
from penstock.workers.worker import Worker

PATTERN = SubjectPattern("s.{partition}")
QUICK: dict[str, Any] = {"window": 0.01, "min_interval": 0.02}
EACH, SUBJECTS = 5, 4


class Scene:
    """A stream, and what was done of it."""

    def __init__(self, server: EmbeddedServer, control: Control) -> None:
        self.server = server
        self.control = control
        self.done: dict[str, list[int]] = defaultdict(list)
        self.published: dict[str, list[int]] = defaultdict(list)

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.done[context.partition_id].append(message.json())

    async def publish(self, partition: str, count: int = EACH) -> None:
        for _ in range(count):
            number = len(self.published[partition]) + 1
            await self.control.connection.request(f"s.{partition}", b"%d" % number)
            self.published[partition].append(number)

    async def all_done(self) -> None:
        await eventually_async(lambda: self.done == self.published, 30, "all to be done, once, in order", self.state)

    def state(self) -> dict[str, list[int]]:
        return dict(self.done)

    async def left(self) -> int:
        return (await self.control.jetstream.stream_info("S")).state.messages

    async def all_deleted(self) -> None:
        async def empty() -> bool:
            return await self.left() == 0

        await eventually_async(empty, 30, "the stream to keep nothing that is done", self.left)


@pytest.fixture
async def scene(nats_server: EmbeddedServer, control: Control) -> Scene:
    await make_stream(control.jetstream, retention="interest", allow_direct=True)
    return Scene(nats_server, control)


def group(scene: Scene, **more: Any) -> WorkerGroup:
    options: dict[str, Any] = {
        "group": "g",
        "stream": "S",
        "source": lambda control, _: Described(SeenInStream(control.jetstream, "S", PATTERN)),
        "ttl": 5.0,
        "look_every": 0.1,
        "look_soon": 0.02,
        "windows": Windows(cold_start=0.2, planned=0.2, min_interval=0.1),
    }
    return WorkerGroup(scene.server.settings, GroupOptions(**{**options, **more}), scene.handle, consumer=QUICK)


async def test_a_group_handles_the_first_messages_of_subjects_that_come(scene: Scene) -> None:
    async with group(scene), group(scene):
        for number in range(SUBJECTS):
            await scene.publish(f"p{number}")
            await scene.publish("p0")
        await scene.all_done()
        await scene.all_deleted()
        await scene.publish("late")
        await scene.all_done()
        await scene.all_deleted()


async def test_what_comes_while_no_worker_runs_is_there_for_the_next(scene: Scene) -> None:
    async with group(scene):
        await scene.publish("a")
        await scene.all_done()
    await scene.publish("a")
    await scene.publish("new")
    async with group(scene):
        await scene.all_done()
        await scene.all_deleted()


async def test_what_no_partition_has_an_owner_for_stays(scene: Scene) -> None:
    """Nobody may have it, for its label: so it is kept."""
    labelled = lambda control, _: Described(SeenInStream(control.jetstream, "S", PATTERN), (), (("gpu*", "gpu"),))  # noqa: E731
    async with group(scene, source=labelled):
        await scene.publish("gpu1")
        await scene.publish("a")
        await eventually_async(lambda: len(scene.done["a"]) == EACH, 30, "a to be done", scene.state)
        assert await scene.left() >= EACH
        async with group(scene, source=labelled, labels=frozenset({"gpu"})):
            await scene.all_done()
            await scene.all_deleted()


async def test_a_stream_that_is_made_anew_is_held_too(scene: Scene) -> None:
    async with group(scene):
        await scene.publish("a")
        await scene.all_done()
        await scene.control.jetstream.delete_stream("S")
        await make_stream(scene.control.jetstream, retention="interest", allow_direct=True)

        async def held() -> bool:
            return "g-holder" in await scene.control.jetstream.consumer_names("S")

        await eventually_async(held, 30, "the holder to be made again")
        scene.done.clear()
        scene.published.clear()
        await scene.publish("b")
        await scene.publish("a")
        await scene.all_done()


async def alone(scene: Scene, body: Callable[[Following], Awaitable[None]], **consumer: Any) -> None:
    options = ConsumerOptions(stream="S", worker_id="1", **QUICK, **consumer)
    jetstream = scene.control.jetstream
    source = SeenInStream(jetstream, "S", PATTERN)
    async with Worker(scene.server.settings, options, scene.handle, options=WorkerOptions(dlq="dlq.w")) as worker:
        following = Following(worker, source, Holder(jetstream, "S", options.consumer, source), look_every=0.05)
        await following.begin()
        running = asyncio.create_task(following.run())
        try:
            await body(following)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_is_alone_handles_them_too(scene: Scene) -> None:
    async def body(_: Following) -> None:
        for number in range(SUBJECTS):
            await scene.publish(f"p{number}")
            await scene.publish("p0")
        await scene.all_done()
        await scene.all_deleted()

    await alone(scene, body)
    await scene.publish("away")
    await alone(scene, lambda _: scene.all_done())


async def test_what_does_not_fit_is_kept_until_there_is_room(scene: Scene) -> None:
    async def first_two(_: Following) -> None:
        for partition in "abc":
            await scene.publish(partition)
        done = {p: scene.published[p] for p in "ab"}
        await eventually_async(lambda: scene.done == done, 30, "what fits to be done", scene.state)

    await alone(scene, first_two, max_subjects=2)
    assert await scene.left() >= EACH
    await alone(scene, lambda _: scene.all_done(), max_subjects=3)


def test_nothing_is_released_beyond_a_partition_that_is_not_covered() -> None:
    assert covered_through(20, []) == 20
    assert covered_through(20, [7, 12]) == 7
    assert covered_through(20, [0]) == 0
    assert covered_through(20, [12, None]) == 0
