"""Why the steps of a handoff have their order: what the real server does when they have another."""

from __future__ import annotations

import asyncio
import json
import secrets

import pytest
from tests.support.streams import make_stream

from penstock.errors import ApiError, Unavailable
from penstock.publish.control import Control
from penstock.testing import eventually_async
from penstock.wire import frames

OVERLAP = 10100


async def prepare(control: Control, retention: str) -> None:
    """A owns p and q and has done nothing; B owns r, and its cursor is at the stream's end."""
    await make_stream(control.jetstream, subjects=["s.*"], retention=retention, allow_direct=True)
    for name, filters in (("A", ["s.p", "s.q"]), ("B", ["s.r"])):
        await control.jetstream.create_consumer(
            "S", {"durable_name": name, "name": name, "ack_policy": "explicit", "filter_subjects": filters}
        )
    for subject in ("s.p", "s.q", "s.p", "s.r"):
        await control.connection.request(subject, b"")

    async def counted() -> bool:  # for a pull that does not wait there is nothing before that
        return [info.pending for info in await control.jetstream.consumers("S")] == [3, 1]

    await eventually_async(counted)
    for message in await pull(control, "B"):
        await control.connection.request(message.reply, b"+ACK")


async def pull(control: Control, name: str) -> list[frames.Message]:
    arrived, inbox = asyncio.Queue[frames.Message](), f"_INBOX.{secrets.token_hex(8)}"
    await control.connection.subscribe(inbox, handler=arrived.put_nowait)
    ask = json.dumps({"batch": 100, "no_wait": True}).encode()
    await control.connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.{name}", ask, reply=inbox)
    found = []
    while not (message := await asyncio.wait_for(arrived.get(), 10)).status:
        found.append(message)
    return found


async def cover(control: Control, name: str, *subjects: str) -> None:
    await control.jetstream.update_consumer("S", name, {"filter_subjects": list(subjects)})


async def kept(control: Control, subject: str) -> int:
    info = await control.jetstream.stream_info("S", subjects_filter=subject)
    return info.state.subjects.get(subject, 0)


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_subject_that_is_added_brings_nothing_of_its_backlog(control: Control, retention: str) -> None:
    """So the new owner reads it itself (step 5)."""
    await prepare(control, retention)
    await cover(control, "B", "s.r", "s.p")
    assert await pull(control, "B") == []
    assert await kept(control, "s.p") == 2


async def test_on_an_interest_stream_letting_go_before_the_backlog_is_read_deletes_it(control: Control) -> None:
    """So step 7 waits for step 6."""
    await prepare(control, "interest")
    await cover(control, "B", "s.r", "s.p")
    await cover(control, "A", "s.q")
    assert await kept(control, "s.p") == 0


async def test_on_a_work_queue_the_new_owner_must_wait_for_the_old_one_to_let_go(control: Control) -> None:
    """So step 7 comes right after step 2, and never together with the adding of other subjects."""
    await prepare(control, "workqueue")
    with pytest.raises(ApiError) as refused:
        await cover(control, "B", "s.r", "s.p")
    assert refused.value.err_code == OVERLAP
    await cover(control, "A", "s.q")
    await cover(control, "B", "s.r", "s.p")
    assert await pull(control, "B") == [], "what was there is passed over"
    await control.jetstream.reset_consumer("S", "B", 1)
    assert [message.subject for message in await pull(control, "B")] == ["s.p", "s.p"]


@pytest.mark.parametrize("deleted", [True, False])
async def test_on_a_work_queue_a_dead_owner_can_remove_messages_until_its_consumer_is_gone(
    control: Control, deleted: bool
) -> None:
    """So the consumer of a dead worker is deleted, and not only its filters."""
    await prepare(control, "workqueue")
    first = (await pull(control, "A"))[0]
    assert first.subject == "s.p"
    await cover(control, "A", "s.q")
    await cover(control, "B", "s.r", "s.p")
    if deleted:
        await control.jetstream.delete_consumer("S", "A")
    if deleted:
        with pytest.raises(Unavailable):
            await control.connection.request(first.reply, b"+ACK")
    else:
        await control.connection.request(first.reply, b"+ACK")
    assert await kept(control, "s.p") == (2 if deleted else 1)
