"""The worker's consumer on a real server: what an update changes, and what it never does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.workers.world import STREAM, World, partitions

from penstock.consume.metrics import WorkerMetrics
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import NANOSECONDS
from penstock.retry import Backoff
from penstock.testing import eventually_async
from penstock.workers.options import ConsumerOptions
from penstock.workers.pull.consumer import UpdateFailed, UpdateStatus, WorkerConsumer, passed_over
from penstock.workers.pull.filters import SubjectCapExceeded


def make(world: World, metrics: WorkerMetrics | None = None, **choices: Any) -> WorkerConsumer:
    given = {"stream": STREAM, "worker_id": "1", "prefix": "test", "window": 0.01, "min_interval": 0.02, **choices}
    outer = {k: given.pop(k) for k in ("done", "on_trouble", "permitted") if k in given}
    return WorkerConsumer(given.pop("js", world.js), ConsumerOptions(**given), metrics=metrics, **outer)


class Deaf:
    """Asks a real server, and does not hear what became of a change as long as it is told to."""

    def __init__(self, world: World) -> None:
        self._ask = world.publisher.connection.requester()
        self.unheard = 0
        self.deaf = False
        self.js = JetStream(self, timeout=0.2)

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        deaf = self.deaf and ".CONSUMER.CREATE." in subject  # to the answer of what is asked now, whenever it comes
        answer = await self._ask(subject, payload, timeout)
        if deaf:
            self.unheard += 1
            raise DeadlineExceeded(subject, timeout)
        return answer


async def test_the_consumer_is_one_durable_that_pulls_and_acknowledges_explicitly(world: World) -> None:
    await world.create()
    outcome = await make(world).update(partitions("b", "a"))
    info = await world.consumer()
    assert outcome.status is UpdateStatus.CREATED
    assert info.config["durable_name"] == "test-1"
    assert info.filters == ("w.a", "w.b")
    assert info.config["ack_policy"] == "explicit"
    assert "deliver_subject" not in info.config
    assert await world.js.consumer_names(STREAM) == ["test-1"]


async def test_an_unchanged_set_is_skipped_and_nothing_is_asked_of_the_server(world: World) -> None:
    await world.create()
    metrics = WorkerMetrics("1", "test-1")
    consumer = make(world, metrics)
    await consumer.update(partitions("a", "b"))
    before = world.js.requests
    outcome = await consumer.update([*partitions("b", "a"), *partitions("a")])
    assert outcome.status is UpdateStatus.SKIPPED
    assert world.js.requests == before
    assert (metrics.updates_skipped, metrics.duplicates, metrics.updates.count) == (1, 1, 1)


async def test_hundreds_of_changes_become_a_few_updates_that_end_with_the_last(world: World) -> None:
    await world.create()
    metrics = WorkerMetrics("1", "test-1")
    consumer = make(world, metrics, window=0.05, min_interval=0.2)
    await consumer.update(partitions("a"))
    changes = [consumer.update(partitions("a", *(str(n) for n in range(k % 17 + 1)))) for k in range(300)]
    outcomes = await asyncio.gather(*changes)
    assert {outcome.subjects for outcome in outcomes} == {len(partitions("a")) + 299 % 17 + 1}
    assert set((await world.consumer()).filters) == {"w.a", *(f"w.{n}" for n in range(299 % 17 + 1))}
    assert metrics.updates.count <= 4
    assert metrics.updates_skipped >= 296


async def test_an_update_touches_nothing_but_the_filters(world: World) -> None:
    await world.create()
    made = {
        "name": "test-1",
        "durable_name": "test-1",
        "filter_subjects": ["w.a"],
        "ack_policy": "explicit",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": 7,
        "replay_policy": "original",
        "max_waiting": 77,
        "description": "made by somebody else",
        "max_batch": 900,
        "metadata": {"team": "etch"},
        "ack_wait": 30 * NANOSECONDS,
        "inactive_threshold": 24 * 3600 * NANOSECONDS,
        "max_ack_pending": 500,
    }
    await world.js.create_consumer(STREAM, made)
    before = (await world.consumer()).config
    await make(world).update(partitions("a", "b"))
    after = (await world.consumer()).config
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {"filter_subject", "filter_subjects", "metadata"}
    assert after["filter_subjects"] == ["w.a", "w.b"]
    assert after["metadata"].items() >= {"team": "etch", "penstock.behind": "w.b"}.items()


async def test_too_many_subjects_are_an_error_and_change_nothing(world: World) -> None:
    await world.create()
    consumer = make(world, max_subjects=3)
    await consumer.update(partitions("a"))
    with pytest.raises(SubjectCapExceeded):
        await consumer.update(partitions("a", "b", "c", "d"))
    assert (await world.consumer()).filters == ("w.a",)
    await consumer.update(partitions("a", "b", "c"))
    assert len((await world.consumer()).filters) == 3


async def test_too_many_subjects_are_compressed_where_all_of_them_are_ours(world: World) -> None:
    await world.create()
    universe = frozenset(f"w.{n}" for n in range(30))
    await make(world, max_subjects=3, universe=universe).update(partitions(*(str(n) for n in range(30))))
    assert (await world.consumer()).filters == ("w.*",)


async def test_too_many_subjects_go_to_a_second_consumer_that_goes_when_it_is_not_needed(world: World) -> None:
    await world.create()
    consumer = make(world, max_subjects=3, max_consumers=2)
    await consumer.update(partitions("a", "b", "c", "d"))
    assert await world.js.consumer_names(STREAM) == ["test-1", "test-1-2"]
    assert (await world.consumer("test-1-2")).filters == ("w.d",)
    await consumer.update(partitions("a", "d"))
    assert (await world.consumer("test-1-2")).filters == ("w.d",)
    await consumer.update(partitions("a"))
    assert await world.js.consumer_names(STREAM) == ["test-1"]
    await consumer.update([])
    assert await world.js.consumer_names(STREAM) == []


async def test_a_failed_update_keeps_the_last_good_filters_and_is_made_later(world: World) -> None:
    await world.create("workqueue")
    other = {"name": "other", "durable_name": "other", "filter_subjects": ["w.b"], "ack_policy": "explicit"}
    await world.js.create_consumer(STREAM, other)
    metrics, told = WorkerMetrics("1", "test-1"), []

    def trouble(error: PenstockError, failures: int) -> None:
        told.append(failures)

    consumer = make(world, metrics, attempts=3, retry=Backoff(first=0.01, most=0.05), on_trouble=trouble)
    await consumer.update(partitions("a"))
    with pytest.raises(UpdateFailed, match="last good filters"):
        await consumer.update(partitions("a", "b"))
    assert (await world.consumer()).filters == ("w.a",)
    assert told[:1] == [3]
    assert metrics.update_failures >= 3
    assert consumer.failures >= consumer.options.escalate_after
    await world.js.delete_consumer(STREAM, "other")

    async def updated() -> bool:
        return (await world.consumer()).filters == ("w.a", "w.b")

    await eventually_async(updated, what="the change to be made after all")
    await eventually_async(lambda: consumer.failures == 0)
    await consumer.close()


async def test_a_removal_whose_answer_was_lost_is_made_good_when_the_subject_comes_back(world: World) -> None:
    """The server has other filters than we know of: what we want, and what we knew, is the same."""
    await world.create()
    deaf = Deaf(world)
    consumer = make(world, js=deaf.js, retry=Backoff(first=0.05, most=0.05))
    await consumer.update(partitions("a", "b"))
    deaf.deaf = True
    removing = asyncio.create_task(consumer.update(partitions("a")))
    await eventually_async(lambda: deaf.unheard and consumer.failures)
    assert (await world.consumer()).filters == ("w.a",)
    back = asyncio.create_task(consumer.update(partitions("a", "b")))
    await eventually_async(lambda: len(consumer._waiting) == 2, what="both updates to wait for the same try")
    deaf.deaf = False
    outcomes = await asyncio.gather(removing, back)
    assert (await world.consumer()).filters == ("w.a", "w.b")
    assert [outcome.passed_over for outcome in outcomes] == [{"w.b"}] * 2
    await consumer.close()


async def test_a_subject_that_was_added_without_an_answer_is_still_to_be_caught_up_with(world: World) -> None:
    await world.create()
    await world.publish("b", 5)
    deaf = Deaf(world)
    consumer = make(world, js=deaf.js, retry=Backoff(first=0.05, most=0.05))
    await consumer.update(partitions("a"))
    deaf.deaf = True
    adding = asyncio.create_task(consumer.update(partitions("a", "b")))
    await eventually_async(lambda: deaf.unheard and consumer.failures)
    deaf.deaf = False
    assert (await adding).passed_over == {"w.b"}
    assert passed_over(await world.consumer()) == ["w.b"], "whoever comes after a crash finds it noted"
    await consumer.close()


async def test_a_worker_that_may_have_lost_its_id_leaves_the_consumer_alone(world: World) -> None:
    """Another process may have the id, and with it the consumer."""
    await world.create()
    allowed = True
    consumer = make(world, attempts=2, retry=Backoff(first=0.01, most=0.01), permitted=lambda: allowed)
    await consumer.update(partitions("a"))
    allowed = False
    for wanted in (partitions("a", "b"), []):
        with pytest.raises(UpdateFailed, match="until its id is confirmed"):
            await consumer.update(wanted)
    with pytest.raises(Unavailable, match="until its id is confirmed"):
        await consumer.reset("test-1", 1)
    assert (await world.consumer()).filters == ("w.a",)
    await consumer.close()


async def test_a_vanished_consumer_begins_behind_the_least_of_the_positions(world: World) -> None:
    await world.create()
    await world.publish("a", 10)
    consumer = make(world, done=lambda id_: {"a": 8, "b": 4}[id_])
    await consumer.update(partitions("a", "b"))
    await world.js.delete_consumer(STREAM, "test-1")
    found = await consumer.present()
    assert found["test-1"].config["opt_start_seq"] == 5
    assert (await world.consumer()).delivered_stream_seq == 4


async def test_updates_go_on_when_the_server_comes_back(world: World) -> None:
    await world.create()
    worker = await world.worker()
    await worker.update(partitions("a"))
    world.server.kill()
    updating = asyncio.create_task(worker.update(partitions("a", "b")))
    await eventually_async(lambda: worker.metrics.update_failures > 0, 60, "an update to fail")
    await asyncio.to_thread(world.server.start)
    async with asyncio.timeout(60):
        outcome = await updating
    assert outcome.subjects == 2
