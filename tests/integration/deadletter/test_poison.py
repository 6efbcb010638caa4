"""Consumers that crash on poison: each dead letter once, nothing blocked, on every retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.integration.deadletter.stage import Stage, events, work_until_done
from tests.support.streams import make_stream

from penstock.deadletter.capturer import Capturer
from penstock.deadletter.letters import BY_ADVISORY, BY_WORKER
from penstock.server.embedded import EmbeddedServer
from penstock.testing import EmbeddedCluster, eventually_async
from penstock.wire import aio

RETENTIONS = ["limits", "interest", "workqueue"]
POISON = (3, 7)


@asynccontextmanager
async def capturing(stage: Stage) -> AsyncIterator[Capturer]:
    """A capturer that runs for the length of the block."""
    capturer, stop = Capturer(stage.settings), asyncio.Event()
    running = asyncio.create_task(capturer.run(stop))
    try:
        yield capturer
    finally:
        stop.set()
        await running


async def dead(stage: Stage, count: int) -> None:
    """Wait until the capturer has taken so many advisories to their end."""
    await eventually_async(
        lambda: all_taken(stage, count),
        within=60,
        what=f"{count} advisories to be taken",
        state=lambda: stage.js.consumers("DLQ_ADVISORIES"),
    )


async def all_taken(stage: Stage, count: int) -> bool:
    kept = await stage.js.stream_info("DLQ_ADVISORIES")
    readers = await stage.js.consumers(kept.name)
    # By position: the server counts a message for its consumers a moment after it has stored it.
    done = [one.delivered_stream_seq >= kept.state.last_seq and not one.unprocessed for one in readers]
    return kept.state.messages >= count and done == [True]


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_consumer_that_crashes_on_poison_leaves_each_letter_once_and_blocks_nothing(
    nats_server: EmbeddedServer, stage: Stage, retention: str
) -> None:
    await stage.build(retention)
    await stage.publish(events(12, POISON))
    async with capturing(stage):
        kills = await work_until_done(nats_server, "billing")
        await dead(stage, len(POISON))
        assert kills == 2 * len(POISON), "each poisoned event is delivered twice"
        assert await stage.dead_events() == {f"e{number}": 1 for number in POISON}

        await stage.publish([{"event_id": "after", "poison": False}])
        assert await work_until_done(nats_server, "billing") == 0
    good = {f"e{number}" for number in range(12) if number not in POISON} | {"after"}
    assert await asyncio.to_thread(stage.output) == dict.fromkeys(good, 1)
    assert await stage.messages("ORDERS") == (13 if retention == "limits" else 0)
    assert (await stage.js.consumer_info("ORDERS", "billing")).unprocessed == 0


async def test_letters_of_crashes_carry_all_that_the_server_knows(nats_server: EmbeddedServer, stage: Stage) -> None:
    await stage.build("workqueue")
    await stage.publish(events(1, [0]))
    async with capturing(stage):
        await work_until_done(nats_server, "billing")
        await dead(stage, 1)
    (filed,) = await asyncio.to_thread(stage.letters)
    letter = filed.letter
    assert (letter.subject, letter.stream, letter.sequence, letter.consumer) == (
        "orders.placed",
        "ORDERS",
        1,
        "billing",
    )
    assert (letter.deliveries, letter.event_id, letter.captured_by) == (2, "e0", BY_ADVISORY)
    assert letter.body == b'{"event_id": "e0", "poison": true}'
    assert letter.headers == {"Nats-Msg-Id": ("e0",)}
    assert letter.stored is not None
    assert letter.last_failure is not None
    assert letter.stored < letter.last_failure


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_worker_killed_between_its_letter_and_its_answer_leaves_one_letter(
    nats_server: EmbeddedServer, stage: Stage, retention: str
) -> None:
    await stage.build(retention)
    await stage.publish(events(4, [1]))
    async with capturing(stage) as capturer:
        await work_until_done(nats_server, "billing", mode="capture")
        await dead(stage, 1)
        assert (capturer.statistics().stored, capturer.statistics().known) == (0, 1)
    (filed,) = await asyncio.to_thread(stage.letters)
    assert (filed.letter.captured_by, filed.letter.failure.type) == (BY_WORKER, "Poison")
    assert await stage.messages("ORDERS") == (4 if retention == "limits" else 0)


async def test_an_interest_stream_keeps_a_dead_message_for_the_consumers_that_still_want_it(
    nats_server: EmbeddedServer, stage: Stage
) -> None:
    await stage.build("interest")
    await stage.consumer("audit", max_deliver=5, ack_wait_ms=30_000)
    await stage.publish(events(3, [1]))
    async with capturing(stage):
        await work_until_done(nats_server, "billing")
        await dead(stage, 1)
        assert await stage.messages("ORDERS") == 3
        await work_until_done(nats_server, "audit", mode="fixed")
    assert await stage.messages("ORDERS") == 0
    assert await stage.dead_events() == {"e1": 1}


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_a_terminated_message_becomes_a_letter_with_the_reason(stage: Stage, retention: str) -> None:
    await stage.build(retention)
    await stage.publish(events(1))
    await stage.terminate("billing", b"+TERM price is negative")
    async with capturing(stage):
        await dead(stage, 1)
    (filed,) = await asyncio.to_thread(stage.letters)
    assert (filed.letter.failure.type, filed.letter.failure.message) == ("Terminated", "price is negative")
    # WorkQueue and Interest remove what is terminated at once: a letter says so, and has nothing else to say
    assert filed.letter.body_gone == (retention != "limits")


async def test_consumers_without_a_dead_letter_subject_are_left_alone_unless_asked_for(stage: Stage) -> None:
    await stage.build()
    await stage.js.update_consumer("ORDERS", "billing", {"metadata": {}})
    await stage.publish(events(1))
    await stage.terminate("billing", b"+TERM")
    assert (await Capturer(stage.settings).run(until_caught_up=True)).unconcerned == 1
    await stage.publish([{"event_id": "second"}])
    await stage.terminate("billing", b"+TERM")
    assert (await Capturer(stage.settings, undeclared=True).run(until_caught_up=True)).stored == 1
    (filed,) = await asyncio.to_thread(stage.letters)
    assert filed.subject.startswith("dlq.ORDERS.billing.")


async def test_without_a_stream_for_letters_advisories_wait_until_there_is_one(stage: Stage) -> None:
    await stage.build()
    await stage.js.delete_stream("DLQ")
    await stage.publish(events(1))
    await stage.terminate("billing", b"+TERM no")
    async with capturing(stage) as capturer:
        await eventually_async(lambda: capturer.statistics().failed, within=60, what="the advisory to be put back")
        await make_stream(stage.js, "DLQ")
        await dead(stage, 1)
    assert await stage.dead_events() == {"e0": 1}


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_a_message_whose_letter_cannot_be_stored_stays_in_its_stream(stage: Stage, retention: str) -> None:
    await stage.build(retention, max_deliver=1, ack_wait_ms=100)
    await stage.js.delete_stream("DLQ")
    await stage.publish(events(1))
    await stage.fetch("billing")  # and never answered
    await eventually_async(lambda: _kept(stage), what="the advisory that its deliveries ran out", within=60)
    async with capturing(stage) as capturer:
        await eventually_async(lambda: capturer.statistics().failed, within=60, what="the advisory to be put back")
        assert await stage.messages("ORDERS") == 1, "it is nowhere else"
        await stage.js.create_stream({"name": "DLQ", "subjects": ["dlq.>"]})
        await dead(stage, 1)
    (filed,) = await asyncio.to_thread(stage.letters)
    assert (filed.letter.event_id, filed.letter.body_gone) == ("e0", False)


async def _kept(stage: Stage) -> bool:
    return await stage.messages("DLQ_ADVISORIES") > 0


async def test_a_capturer_waits_out_a_restart_of_the_server(nats_server: EmbeddedServer, stage: Stage) -> None:
    await stage.build()
    await stage.publish(events(2))
    async with capturing(stage) as capturer:
        await stage.terminate("billing", b"+TERM one")
        await eventually_async(lambda: capturer.statistics().stored == 1, what="the first letter")
        nats_server.stop()
        nats_server.start()
        await eventually_async(lambda: not stage.connection.connected, what="the loss to be noticed")
        await stage.connection.reconnect()
        await stage.terminate("billing", b"+TERM two")
        await eventually_async(lambda: capturer.statistics().stored == 2, within=60, what="the second letter")
    assert await stage.dead_events() == {"e0": 1, "e1": 1}


@pytest.mark.kills
async def test_in_a_cluster_a_dead_message_goes_when_its_letter_is_stored(nats_cluster: EmbeddedCluster) -> None:
    async with await aio.connect(nats_cluster.settings) as connection:
        stage = Stage(nats_cluster.settings, connection)
        await stage.build("workqueue", max_deliver=1, replicas=3)
        await stage.publish(events(3))
        for _ in range(3):
            await stage.fetch("billing")
        async with capturing(stage):
            await dead(stage, 3)

            async def gone() -> bool:
                return await stage.messages("ORDERS") == 0

            await eventually_async(gone, within=60, what="the messages to be removed on all nodes")
        assert await stage.dead_events() == {"e0": 1, "e1": 1, "e2": 1}
