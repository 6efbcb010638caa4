"""A group of workers in one process, on a real server: shares, planned handoffs, live partitions, labels, churn."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.cli.group import needs_attention
from penstock.consume.messages import Message, MessageContext
from penstock.errors import ConfigError, DeadlineExceeded, StreamNotFound
from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.workers.group.assignment import RoundRobin, Windows
from penstock.workers.group.claims import CLAIMS, claims_in
from penstock.workers.group.overview import look
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions
from penstock.workers.partitions import InBucket, Partition

PARTITIONS = [Partition(f"p{n}", (f"s.p{n}",)) for n in range(6)]
RETENTIONS = ["limits", "workqueue", "interest"]


class World:
    """A server with a stream, a list of partitions in the group's bucket, and what handlers have done."""

    def __init__(self, server: EmbeddedServer, control: Control) -> None:
        self.server = server
        self.control = control
        self.source = InBucket(Bucket(control, "penstock_g"))
        self.done: dict[str, list[int]] = defaultdict(list)
        self.by: dict[str, set[str]] = defaultdict(set)
        self.published: dict[str, int] = defaultdict(int)
        self.groups: list[WorkerGroup] = []
        self.pauses: dict[str, float] = {}
        """By worker id: seconds that it takes for each message."""

    async def prepare(self, retention: str = "limits", partitions: list[Partition] = PARTITIONS) -> None:
        await make_stream(self.control.jetstream, retention=retention, allow_direct=True)
        await self.source.bucket.ensure()
        await self.source.write(partitions)

    async def handle(self, message: Message, context: MessageContext) -> None:
        await asyncio.sleep(self.pauses.get(context.worker_id, 0.0))
        self.done[context.partition_id].append(message.json())
        self.by[context.partition_id].add(context.worker_id)

    def options(self, **more: Any) -> GroupOptions:
        options: dict[str, Any] = {
            "group": "g",
            "stream": "S",
            "source": lambda _, bucket: InBucket(bucket),
            "strategy": RoundRobin(),
            "ttl": 5.0,
            "look_every": 0.1,
            "look_soon": 0.02,
            "windows": Windows(cold_start=0.2, planned=0.2, min_interval=0.1),
        }
        return GroupOptions(**{**options, **more})

    async def join(self, max_subjects: int = 500, **more: Any) -> WorkerGroup:
        made = WorkerGroup(
            self.server.settings,
            self.options(**more),
            self.handle,
            consumer={"window": 0.01, "min_interval": 0.02, "max_subjects": max_subjects},
        )
        self.groups.append(made)
        await made.start()
        return made

    async def crash(self, group: WorkerGroup) -> None:
        """End a worker without a word to its group; its claims stay."""
        self.groups.remove(group)
        assert group._running
        group._running.cancel()
        await asyncio.gather(group._running, return_exceptions=True)

    async def shared(self, *sizes: int) -> None:
        """Wait until the groups own so many partitions each, and nothing moves."""

        async def calm() -> bool:
            found = await look(self.control, "g")
            owned = sorted(worker.partitions for worker in found.workers if worker.state == "active")
            return not found.moves and owned == sorted(sizes)

        await eventually_async(calm, 60, f"shares of {sizes}", state=lambda: look(self.control, "g"))

    async def publish(self, partition: str, count: int = 1) -> None:
        for _ in range(count):
            self.published[partition] += 1
            await self.control.connection.request(f"s.{partition}", json.dumps(self.published[partition]).encode())

    async def all_done(self) -> None:
        """Everything published is done once, in order."""
        wanted = {p: list(range(1, count + 1)) for p, count in self.published.items()}
        await eventually_async(lambda: dict(self.done) == wanted, 60, "all to be done once", state=lambda: self.done)


@pytest.fixture
async def world(nats_server: EmbeddedServer) -> AsyncIterator[World]:
    control = await Control.connect(nats_server.settings)
    made = World(nats_server, control)
    yield made
    await asyncio.gather(*(group.stop() for group in made.groups))
    await control.close()


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_workers_join_and_leave_and_every_message_is_done_once_in_order(world: World, retention: str) -> None:
    """Planned moves alone: no duplicate, whatever the retention."""
    await world.prepare(retention)
    await world.join()
    await world.shared(6)
    stop = asyncio.Event()

    async def publish_for_ever() -> None:
        while not stop.is_set():
            for partition in PARTITIONS:
                await world.publish(partition.id)

    publishing = asyncio.create_task(publish_for_ever())
    second = await world.join()
    await world.shared(3, 3)
    await world.join()
    await world.shared(2, 2, 2)
    await second.stop()
    await world.shared(3, 3)
    stop.set()
    await publishing
    await world.all_done()
    assert any(len(workers) > 1 for workers in world.by.values()), "partitions did change hands"
    handed = sum(group.statistics().handed_over for group in world.groups)
    assert handed >= 4
    metrics = [group.worker.metrics for group in world.groups if group.worker]
    assert sum(m.handoffs["out"] for m in metrics) == handed


async def test_on_a_work_queue_a_claim_does_not_say_done_of_what_is_only_on_its_way(world: World) -> None:
    """Its owner settles as soon as the backlog comes. Were it to die then, the next one would skip what is below."""
    await world.prepare("workqueue")
    first = await world.join()
    await world.join()
    await world.shared(3, 3)
    moving = first.statistics().partitions
    world.pauses = {"worker-0": 0.3, "worker-1": 1.0}  # neither is done with its messages when they are looked at
    for partition in PARTITIONS:
        await world.publish(partition.id, 30)
    await first.stop()
    await world.shared(6)
    claims = claims_in(await world.source.bucket.entries(CLAIMS))
    for name in moving:
        undone = await world.control.jetstream.get_message("S", 1, next_of=f"s.{name}")
        assert claims[name].handoff < undone.sequence, f"it says that {claims[name].handoff} is done"
    world.pauses.clear()
    await world.all_done()


async def test_a_worker_of_a_group_tells_how_many_subjects_its_consumer_may_have(world: World) -> None:
    """The alert compares with it: were it 0, it would always fire."""
    await world.prepare("limits")
    group = await world.join()
    assert [numbers.subject_limit for numbers in group.metrics()] == [500]


async def test_a_worker_with_another_stream_than_its_group_does_not_join(world: World) -> None:
    """It would take partitions, and nobody would handle them."""
    await world.prepare("limits")
    await world.join()
    await world.shared(6)
    with pytest.raises(StreamNotFound):
        await world.join(stream="T")
    await make_stream(world.control.jetstream, "T")
    with pytest.raises(ConfigError, match="works on stream 'S', not on 'T'"):
        await world.join(stream="T")
    del world.groups[1:]
    await world.shared(6)


async def test_a_worker_that_gets_too_many_subjects_serves_what_fits_and_tells_of_the_rest(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.prepare("limits")
    await world.join(max_subjects=5, ttl=1.0)
    for partition in PARTITIONS:
        await world.publish(partition.id)
    await eventually_async(lambda: len(world.done) == 5, 30, "what fits to be served", state=lambda: world.done)

    def said(level: int) -> list[str]:
        found = [one.getMessage() for one in caplog.records if one.levelno == level]
        return [one for one in found if "1 partitions are not served" in one]

    with caplog.at_level("DEBUG"):
        await eventually_async(lambda: len(said(logging.DEBUG)) > 3, state=lambda: caplog.messages)
    assert (len(said(logging.WARNING)), len(said(logging.INFO))) == (1, 0), "told once, and tried again and again"
    assert world.groups[0].metrics()[0].left_out == 1
    found = await look(world.control, "g")
    assert "1 partitions are not served" in found.workers[0].troubles[0]
    assert needs_attention(found)

    await world.join(max_subjects=5)  # with room for it
    await world.shared(3, 3)
    await world.all_done()
    await eventually_async(lambda: world.groups[0].metrics()[0].left_out == 0)


async def test_the_counts_of_partitions_that_changed_hands_are_the_same_whoever_asks(world: World) -> None:
    await world.prepare("limits")
    first = await world.join()
    await world.shared(6)
    second = await world.join()
    await world.shared(3, 3)
    told = {"in": 6 + 3, "out": 3}
    for metrics in ([g.worker.metrics for g in (first, second) if g.worker], [*first.metrics(), *second.metrics()]):
        assert {way: sum(m.handoffs[way] for m in metrics) for way in ("in", "out")} == told


async def test_what_is_wrong_with_partitions_reaches_whoever_looks(world: World) -> None:
    await world.prepare("limits", [Partition("all", ("s.>",)), Partition("eu", ("s.eu",))])
    await world.join()

    async def told() -> bool:
        found = await look(world.control, "g")
        return bool(found.problems) and needs_attention(found)

    await eventually_async(told, 30, state=lambda: look(world.control, "g"))
    await world.source.write(PARTITIONS)
    await world.shared(6)
    assert not (await look(world.control, "g")).problems


async def test_updates_that_fail_reach_the_leader_and_whoever_looks(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.prepare("workqueue")
    taken = {"name": "old", "durable_name": "old", "ack_policy": "explicit", "filter_subject": "s.p3"}
    await world.control.jetstream.create_consumer("S", taken)
    await world.join(ttl=1.0)

    async def told() -> bool:
        found = await look(world.control, "g")
        return any("+s.p3" in trouble for worker in found.workers for trouble in worker.troubles)

    await eventually_async(told, 30, state=lambda: look(world.control, "g"))
    assert needs_attention(await look(world.control, "g"))

    def heard() -> bool:
        by_leader = [one.getMessage() for one in caplog.records if one.name == "penstock.workers.group.leader"]
        return any("+s.p3" in line for line in by_leader)

    await eventually_async(heard, state=lambda: caplog.messages)
    await world.control.jetstream.delete_consumer("S", "old")
    await world.shared(6)

    async def well() -> bool:
        return not any(worker.troubles for worker in (await look(world.control, "g")).workers)

    await eventually_async(well, 30)


async def test_a_group_that_ends_and_starts_again_goes_on_where_it_was(world: World) -> None:
    await world.prepare("interest")
    first = await world.join()
    await world.shared(6)
    await world.publish("p0", 5)
    await world.all_done()
    await first.stop()
    await world.publish("p0", 5)  # nobody is there, and the stream keeps it: somebody's consumer still covers it
    await world.join()
    await world.all_done()


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_workers_that_leave_take_their_consumers_with_them_without_a_warning(
    world: World, retention: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.prepare(retention)
    groups = [await world.join(), await world.join()]
    await world.shared(3, 3)
    await world.publish("p0", 5)
    await world.all_done()
    for group in groups:
        await group.stop()
    left = await world.control.jetstream.consumer_names("S")
    # On an Interest stream nothing would be kept for whoever comes next.
    assert len(left) == (1 if retention == "interest" else 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_partition_that_could_not_be_given_away_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the handover is lost, and by the next look it is to stay."""
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    member = group.member
    assert member

    async def unanswered(handoffs: dict[str, int]) -> None:
        raise DeadlineExceeded("a write", 1.0)

    async def later(partitions: object) -> None:
        """The member's own look, which may come in between."""

    with monkeypatch.context() as patch:
        patch.setattr(member.claims, "give", unanswered)
        patch.setattr(member, "_stay", later)
        with pytest.raises(DeadlineExceeded):
            await member._give(["p0"])
    await world.publish("p0", 3)
    await world.all_done()


async def test_partitions_can_be_added_and_removed_while_the_group_runs(world: World) -> None:
    await world.prepare(partitions=PARTITIONS[:2])
    await world.join()
    await world.shared(2)
    await world.publish("p5", 3)  # there before its partition is
    await world.source.write([PARTITIONS[0], PARTITIONS[5]])
    await world.shared(2)
    await world.publish("p0", 2)
    await world.publish("p5", 2)
    await world.all_done()


async def test_labels_tie_partitions_to_workers(world: World) -> None:
    heavy = Partition("gpu", ("s.gpu",), labels=frozenset({"gpu"}))
    await world.prepare(partitions=[*PARTITIONS[:2], heavy])
    plain = await world.join()
    await eventually_async(lambda: set(plain.statistics().partitions) == {"p0", "p1"}, what="the plain ones")
    found = await look(world.control, "g")
    assert [p.move for p in found.partitions if p.id == "gpu"] == ["parked: no worker has its labels"]
    special = await world.join(labels=frozenset({"gpu"}))
    await eventually_async(lambda: "gpu" in special.statistics().partitions, what="the labelled one to find its worker")


async def test_hundreds_of_changes_become_a_few_updates(world: World) -> None:
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    worker = group.worker
    assert worker
    before, skipped = sum(worker.metrics.updates.counts), worker.metrics.updates_skipped
    changes = [worker.consumer.update(PARTITIONS[: n % 6 + 1]) for n in range(300)]
    await asyncio.gather(*changes)
    assert worker.metrics.updates_skipped - skipped >= 290
    assert sum(worker.metrics.updates.counts) - before <= 10
    assert len(worker.consumer.applied[0]) == 6, "the last one counts"


async def test_new_partitions_may_begin_with_what_comes(world: World) -> None:
    await world.prepare()
    await world.publish("p0", 3)
    await world.join(start="new")
    await world.shared(6)
    await world.publish("p0")
    await eventually_async(lambda: world.done["p0"] == [4], what="only the last", state=lambda: world.done)


async def test_group_show_tells_people_and_machines(world: World) -> None:
    await world.prepare()
    await world.join(instance="pod-1")
    await world.shared(6)
    code, shown = await penstock(world, "group", "show", "g", "--partitions")
    assert code == 0
    assert "worker-0 (leads)" in shown
    assert "6 partitions, 0 on the move" in shown
    assert max(map(len, shown.splitlines())) <= 100
    code, shown = await penstock(world, "group", "show", "g", "--json")
    found = json.loads(shown)
    assert {p["owner"] for p in found["partitions"]} == {"worker-0"}
    assert (found["stream"], found["leader"], found["schema"]) == ("S", "worker-0", 1)
    code, shown = await penstock(world, "group", "show", "nobody")
    assert code == 1
    assert "there is no group 'nobody'" in shown


async def penstock(world: World, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "penstock", "--servers", world.server.url, *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    shown, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, shown.decode()


def test_a_consumer_that_would_not_outlive_its_worker_is_refused(nats_server: EmbeddedServer) -> None:
    async def handle(message: Message, context: MessageContext) -> None: ...

    options = GroupOptions(group="g", stream="S", source=lambda _, bucket: InBucket(bucket), ttl=30)
    with pytest.raises(ConfigError, match="must outlive it"):
        WorkerGroup(nats_server.settings, options, handle, consumer={"inactive_threshold": 20})


async def test_a_worker_is_not_done_while_the_assignment_misses_partitions(world: World) -> None:
    """The assignment of yesterday says that nobody has anything left, and knows nothing of what has come since."""
    await world.prepare(partitions=[])
    first = await world.join()
    await eventually_async(first.has_nothing_left, 60, "an assignment without partitions")
    await first.stop()
    await world.source.write(PARTITIONS)
    for partition in PARTITIONS:
        await world.publish(partition.id, 3)
    rarely = Windows(cold_start=2.0, planned=2.0, min_interval=0.1)
    second = await world.join(windows=rarely)
    await eventually_async(lambda: second.member and second.member.assigned, 60, "the assignment of yesterday")
    await eventually_async(second.has_nothing_left, 60, "everything to be done")
    assert {name: len(done) for name, done in world.done.items()} == dict.fromkeys(world.published, 3)
