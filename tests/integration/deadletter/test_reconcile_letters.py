"""Dead letters whose advisory nobody kept."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.deadletter.stage import Stage, events, work_until_done

from penstock.deadletter.letters import BY_RECONCILIATION
from penstock.deadletter.reconcile import PENDING, reconcile
from penstock.server.embedded import EmbeddedServer


async def missed(server: EmbeddedServer, stage: Stage, retention: str) -> None:
    """Two of eight events kill their worker, and nobody keeps the advisories."""
    await stage.build(retention)
    await stage.js.delete_stream("DLQ_ADVISORIES")
    await stage.publish(events(8, (2, 5)))
    await work_until_done(server, "billing")


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_what_died_without_anybody_hearing_of_it_is_found(
    nats_server: EmbeddedServer, stage: Stage, retention: str
) -> None:
    await missed(nats_server, stage, retention)
    nats_server.stop()
    nats_server.start()
    await stage.connection.reconnect()
    (done,) = await reconcile(stage.settings)
    assert (done.marked, done.stored, done.known, done.undecided) == (2, 2, 0, None)
    assert await stage.dead_events() == {"e2": 1, "e5": 1}
    assert {filed.letter.captured_by for filed in await asyncio.to_thread(stage.letters)} == {BY_RECONCILIATION}
    assert await stage.messages("ORDERS") == (8 if retention == "limits" else 0)
    (again,) = await reconcile(stage.settings)
    assert (again.marked, again.stored) == (0, 0)


async def test_on_interest_what_another_consumer_still_wants_is_not_taken_for_dead(
    nats_server: EmbeddedServer, stage: Stage
) -> None:
    await stage.build("interest")
    await stage.consumer("audit", ack_wait_ms=30_000)
    await stage.js.delete_stream("DLQ_ADVISORIES")
    await stage.publish(events(6, [2]))
    await work_until_done(nats_server, "billing")
    billing = next(one for one in await reconcile(stage.settings) if one.consumer == "billing")
    assert (billing.marked, billing.stored, billing.undecided) == (1, 1, None)
    assert await stage.dead_events() == {"e2": 1}
    assert await stage.messages("ORDERS") == 6
    assert await work_until_done(nats_server, "audit", mode="fixed") == 0
    assert await stage.messages("ORDERS") == 0


async def test_while_messages_are_in_flight_nothing_is_touched(nats_server: EmbeddedServer, stage: Stage) -> None:
    await missed(nats_server, stage, "limits")
    await stage.js.update_consumer("ORDERS", "billing", {"ack_wait": 60_000_000_000})
    await stage.publish([{"event_id": "busy"}])
    await stage.fetch("billing")
    before = await stage.js.consumer_info("ORDERS", "billing")
    (done,) = await reconcile(stage.settings)
    assert (done.marked, done.stored, done.undecided) == (before.redelivered, 0, PENDING)
    after = await stage.js.consumer_info("ORDERS", "billing")
    assert (after.ack_pending, after.redelivered) == (1, before.redelivered)
    assert before.redelivered >= 2
