"""Replaying and discarding dead letters on a real server."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
from tests.integration.deadletter.stage import Stage, bury, events, replay_problems
from tests.support.streams import make_stream

from penstock.deadletter import headers, streams
from penstock.deadletter.audit import Deed, place
from penstock.deadletter.editing import merge_patch
from penstock.deadletter.letters import is_for
from penstock.deadletter.replay import ReplayOptions, discard, opened, replay
from penstock.deadletter.selection import Selection
from penstock.deadletter.tally import Tally
from penstock.errors import ConfigError
from penstock.publish.plain import PlainPublisher
from penstock.testing import stream_messages
from penstock.wire.frames import Message

ALL = Selection()


async def dead(stage: Stage, count: int, **build: int) -> None:
    await stage.build(ack_wait_ms=60_000, **build)  # type: ignore[arg-type]  # only numbers are changed here
    await stage.publish(events(count))
    await bury(stage, count)


async def replayed(stage: Stage, wanted: Selection = ALL, **options: object) -> Tally:
    made = ReplayOptions(**options)  # type: ignore[arg-type]  # the tests name fields of it
    return await replay(stage.settings, wanted, made, actor="tester", reason="fixed")


async def orders(stage: Stage) -> list[Message]:
    return await asyncio.to_thread(stream_messages, stage.settings, "ORDERS")


async def audit(stage: Stage) -> list[dict[str, object]]:
    kept = await asyncio.to_thread(stream_messages, stage.settings, streams.AUDIT)
    return [json.loads(message.data) for message in kept]


async def test_a_replay_stores_the_same_event_again_and_takes_the_letter_away(stage: Stage) -> None:
    await dead(stage, 3)
    assert (await replayed(stage)).done == 3
    messages = await orders(stage)
    assert [message.data for message in messages[3:]] == [message.data for message in messages[:3]]
    assert {message.subject for message in messages} == {"orders.placed"}
    assert await asyncio.to_thread(replay_problems, stage, {"e0", "e1", "e2"}) == []


async def test_inside_the_duplicate_window_a_replay_is_not_swallowed(stage: Stage) -> None:
    await dead(stage, 1, window_ms=3_600_000)
    await replayed(stage)
    first, again = await orders(stage)
    assert first.header_values()["Nats-Msg-Id"] == ["e0"]
    assert again.header_values()["Nats-Msg-Id"] != ["e0"]
    assert again.header_values()[headers.EVENT_ID] == ["e0"]


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_what_is_replayed_into_a_stream_that_removes_what_was_read_is_processed_once(
    stage: Stage, retention: str
) -> None:
    await stage.build(retention, ack_wait_ms=60_000)
    await stage.publish(events(3))
    await bury(stage, 3)
    assert await stage.messages("ORDERS") == 0
    assert (await replayed(stage)).done == 3
    assert [json.loads((await stage.answered("billing")).data)["event_id"] for _ in range(3)] == ["e0", "e1", "e2"]
    assert (await stage.messages("ORDERS"), await stage.dead_events()) == (0, {})


async def test_letters_are_chosen_by_consumer_error_time_and_id(stage: Stage) -> None:
    await dead(stage, 2)
    await stage.publish([{"event_id": "other"}])
    await bury(stage, 1, error="no project 7")
    letters = await asyncio.to_thread(stage.letters)
    chosen = {
        "consumer": Selection(readers=("nobody",)),
        "error": Selection(errors=("no project",)),
        "since": Selection(since=datetime.now(UTC) + timedelta(minutes=1)),
        "id": Selection(ids=(letters[0].short_id,)),
    }
    done = {name: (await replayed(stage, wanted)).done for name, wanted in chosen.items()}
    assert done == {"consumer": 0, "error": 1, "since": 0, "id": 1}
    assert await stage.dead_events() == {"e1": 1}
    assert (await replayed(stage, Selection(readers=("ORDERS/billing",)))).done == 1


async def test_an_event_that_fails_again_and_again_is_not_replayed_for_ever(stage: Stage) -> None:
    await dead(stage, 1)
    counts = []
    for _ in range(4):
        counts.append((await replayed(stage, max_replays=2)).done)
        if counts[-1]:
            await bury(stage, 1)
    assert counts == [1, 1, 0, 0]
    (filed,) = await asyncio.to_thread(stage.letters)
    assert filed.letter.replays == 2
    assert filed.letter.first_failure < filed.letter.last_failure  # type: ignore[operator]  # both are known here
    assert (await replayed(stage, max_replays=3)).done == 1


async def test_a_replay_for_the_failed_consumer_says_so_to_all_others(stage: Stage) -> None:
    await dead(stage, 1)
    await replayed(stage, only_failed=True)
    *_, message = await orders(stage)
    assert is_for(message.header_values(), "ORDERS", "billing")
    assert not is_for(message.header_values(), "ORDERS", "shipping")
    assert (await audit(stage))[1]["replay"]["only_failed"] is True  # type: ignore[index]  # JSON


async def test_an_edit_changes_the_event_and_never_its_id(stage: Stage) -> None:
    await dead(stage, 1)
    forbidden = await replayed(stage, edit=merge_patch('{"event_id": "another"}'))
    assert (forbidden.done, sum(forbidden.skipped.values())) == (0, 1)
    await replayed(stage, edit=merge_patch('{"price": 5, "poison": null}'))
    *_, message = await orders(stage)
    assert json.loads(message.data) == {"event_id": "e0", "price": 5}
    assert [record["replay"]["edited"] for record in await audit(stage) if "replay" in record] == [True]  # type: ignore[index]  # JSON


async def test_a_letter_stays_when_its_message_cannot_be_stored(stage: Stage) -> None:
    await dead(stage, 2)
    await stage.js.update_stream("ORDERS", {"max_msg_size": 40})
    tally = await replayed(stage, edit=merge_patch(json.dumps({"long": "x" * 100})))
    assert (tally.done, len(tally.refused)) == (0, 2)
    assert await stage.dead_events() == {"e0": 1, "e1": 1}
    assert [record for record in await audit(stage) if record.get("action")] == []


async def test_a_replay_does_not_land_in_another_stream_that_took_over_the_subject(stage: Stage) -> None:
    await dead(stage, 1)
    await stage.js.update_stream("ORDERS", {"subjects": ["elsewhere.>"]})
    await make_stream(stage.js, "NEW", subjects=["orders.>"])
    tally = await replayed(stage)
    assert (tally.done, len(tally.refused)) == (0, 1)
    assert await stage.messages("NEW") == 0


async def test_the_rate_bounds_how_fast_messages_are_stored(stage: Stage) -> None:
    await dead(stage, 30)
    await replayed(stage, rate=20.0)
    before, *_ = (message for message in await orders(stage) if headers.LETTER in message.header_values())
    *_, after = await orders(stage)
    span = int(after.reply.split(".")[7]) - int(before.reply.split(".")[7])
    # The server may store the first of them late, and the last one at once.
    assert span > 0.9e9, "29 messages at 20 a second take 1.45 seconds"


async def test_discarding_needs_a_reason_and_leaves_it_in_the_audit(stage: Stage) -> None:
    await dead(stage, 2)
    with pytest.raises(ConfigError, match="say why"):
        await discard(stage.settings, ALL, actor="tester", reason=" ")
    assert await stage.dead_events() == {"e0": 1, "e1": 1}
    assert (await discard(stage.settings, ALL, actor="tester", reason="billed by hand")).done == 2
    assert await stage.dead_events() == {}
    assert {(record["action"], record["reason"], record["actor"]) for record in await audit(stage)} == {
        ("discarded", "billed by hand", "tester")
    }


async def test_of_the_audit_only_what_may_still_be_there_is_remembered(stage: Stage) -> None:
    await dead(stage, 3)
    await replayed(stage)
    await stage.publish([{"event_id": "late"}])
    await bury(stage, 1)
    (late,) = await asyncio.to_thread(stage.letters)
    async with opened(stage.settings) as room:  # interrupted between the audit and the removal of the letter
        room._remove = _interrupted  # type: ignore[method-assign,assignment]  # the one place where it can be
        with pytest.raises(Interrupted):
            await room.replay([late], Deed(run="cut", actor="tester"), 0, ReplayOptions())
    async with opened(stage.settings) as room:
        await room.finish_interrupted()
        await room.load_settled()
        assert room.settled == {place(late)}
    assert (await replayed(stage)).found_done == 1
    async with opened(stage.settings) as room:
        await room.finish_interrupted()
        await room.load_settled()
        assert room.settled == set()


class Interrupted(Exception):
    pass


async def _interrupted(_: object) -> None:
    raise Interrupted


async def test_a_naive_replay_is_found_out_by_the_check(stage: Stage) -> None:
    """Without the audit and ids of our own, an interruption between publish and removal doubles events."""
    await dead(stage, 3)
    letters = await asyncio.to_thread(stage.letters)
    async with PlainPublisher(stage.settings) as publisher:
        for filed in [*letters, letters[0]]:  # interrupted after the first message, begun again
            await publisher.add(filed.letter.subject, filed.letter.body, {headers.LETTER: filed.message_id})
        await publisher.finish()
    await stage.js.purge_stream("DLQ")
    problems = await asyncio.to_thread(replay_problems, stage, {"e0", "e1", "e2"})
    assert "e0 is stored 2 times" in problems
    assert "the audit tells 0 times of e1" in problems
