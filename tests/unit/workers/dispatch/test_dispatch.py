"""What becomes of a message while it is not certain whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import MAX_DELIVER, GiveUp
from penstock.errors import Unavailable
from penstock.testing import eventually_async
from penstock.workers.dispatch import dispatcher
from penstock.workers.dispatch.dispatcher import READ_AHEAD, READ_AHEAD_BYTES, Dispatcher, HandlingOptions
from penstock.workers.dispatch.lanes import Lane


class Answers:
    """Takes note."""

    def __init__(self) -> None:
        self.acks: list[str] = []
        self.keeps_letters = True
        self.refused = 0
        """Letters that could not be stored."""
        self.delay = 0.0
        self.trials: list[tuple[str, int]] = []

    def acked(self) -> None: ...
    def settled(self) -> None: ...
    def again(self, message: Message, delay: float) -> float:
        return self.delay or delay

    async def on_trial(self, partition_id: str, sequence: int) -> None:
        self.trials.append((partition_id, sequence))

    async def bury(self, message: Message, context: MessageContext, letter: GiveUp, error: BaseException) -> None:
        if not self.keeps_letters:
            self.refused += 1
            raise Unavailable("no stream takes dead letters")


class World:
    """One lane; the token may change while a message is handled."""

    def __init__(self) -> None:
        self.now: int | None = 7
        self.handled: list[tuple[int, int]] = []
        """Sequences and tokens."""
        self.changes: dict[int, int | None] = {}
        """By sequence: the token after it was handled."""
        self.fails = 0
        self.answers = Answers()
        self.dispatcher = Dispatcher(self.handle, self.answers, self, HandlingOptions())
        self.lane = self.dispatcher.lanes["p"] = Lane("p")

    def token(self, partition_id: str) -> int | None:
        return self.now

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.handled.append((message.sequence, context.fencing_token))
        self.now = self.changes.pop(message.sequence, self.now)
        if self.fails:
            self.fails -= 1
            raise ValueError("no")

    def deliver(self, *sequences: int) -> None:
        for sequence in sequences:
            message = Message("s.p", b"", sequence, 1, f"reply.{sequence}", datetime.now(UTC))
            self.dispatcher.deliver(self.lane, message)

    async def rest(self, handled: int) -> None:
        await eventually_async(lambda: len(self.handled) >= handled and not self.lane.busy, state=lambda: self.handled)

    def own(self, token: int) -> None:
        self.now = token
        self.dispatcher.owners_changed()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.dispatcher.close()


async def test_a_message_that_was_handled_while_the_lease_was_in_doubt_is_done_once_it_is_not(world: World) -> None:
    world.changes = {2: None}
    world.deliver(1, 2, 3)
    await world.rest(2)
    assert world.answers.acks == ["reply.1"]
    assert world.lane.done(0) == 1, "it is not known whether 2 counts"
    world.own(7)
    await world.rest(3)
    assert world.handled == [(1, 7), (2, 7), (3, 7)]
    assert world.answers.acks == ["reply.1", "reply.2", "reply.3"]


async def test_a_message_that_was_handled_under_a_token_of_before_is_handled_again_in_its_place(world: World) -> None:
    world.changes = {2: 9}
    world.deliver(1, 2, 3)
    await world.rest(2)
    world.dispatcher.owners_changed()
    await world.rest(4)
    assert world.handled == [(1, 7), (2, 7), (2, 9), (3, 9)]


async def test_a_try_that_failed_while_the_lease_was_in_doubt_is_made_again_in_its_place(world: World) -> None:
    world.changes, world.fails = {1: None}, 1
    world.deliver(1, 2)
    await world.rest(1)
    assert world.answers.acks == []
    world.own(7)
    await world.rest(3)
    assert world.handled == [(1, 7), (1, 7), (2, 7)]


async def test_a_message_that_was_read_from_the_stream_is_not_handled_twice_for_a_doubt(world: World) -> None:
    world.changes = {5: None}
    world.lane.begin_reading(4, 9)
    world.dispatcher.read(world.lane, Message("s.p", b"", 5, 1, "", datetime.now(UTC)))
    await world.rest(1)
    assert world.lane.done(9) == 4
    world.own(7)
    await eventually_async(lambda: world.lane.done(9) == 5)
    assert world.handled == [(5, 7)]
    assert 5 in world.dispatcher.finished
    assert world.answers.acks == [], "nothing was delivered"


async def test_a_delivery_waits_until_the_backlog_below_it_was_read(world: World) -> None:
    world.lane.begin_reading(0, 3)
    world.deliver(3, 4)
    for sequence in (1, 3):
        world.dispatcher.read(world.lane, Message("s.p", b"", sequence, 1, "", datetime.now(UTC)))
    await world.rest(2)
    assert world.handled == [(1, 7), (3, 7)]
    assert world.answers.acks == ["reply.3"], "a message that was read and delivered is acknowledged"
    assert not world.lane.has_done(3)
    world.dispatcher.end_reading(world.lane)
    await world.rest(3)
    assert world.handled == [(1, 7), (3, 7), (4, 7)]
    assert world.lane.has_done(3)
    assert world.dispatcher.held == 0


async def test_a_lower_message_that_comes_during_a_wait_does_not_stop_its_lane(world: World) -> None:
    world.fails, world.answers.delay = 1, 0.05
    world.deliver(2)
    await world.rest(1)
    world.deliver(1)
    await eventually_async(lambda: world.handled == [(2, 7), (1, 7), (2, 7)], 10)


async def test_of_a_backlog_only_so_much_is_read_ahead(world: World) -> None:
    world.now = None
    world.lane.begin_reading(0, 100)
    for sequence in range(1, READ_AHEAD + 1):
        world.dispatcher.read(world.lane, Message("s.p", b"", sequence, 1, "", datetime.now(UTC)))
    reading = asyncio.create_task(world.dispatcher.has_room(world.lane, 10))
    await asyncio.sleep(0)
    assert not reading.done()
    world.own(7)
    await reading
    await eventually_async(lambda: len(world.handled) == READ_AHEAD)


async def test_large_messages_of_a_backlog_are_read_one_at_a_time(world: World) -> None:
    world.now = None
    world.lane.begin_reading(0, 100)
    world.dispatcher.read(world.lane, Message("s.p", b"", 1, 1, "", datetime.now(UTC)))
    await world.dispatcher.has_room(world.lane, 1000)
    reading = asyncio.create_task(world.dispatcher.has_room(world.lane, READ_AHEAD_BYTES))
    await asyncio.sleep(0)
    assert not reading.done()
    world.own(7)
    await reading


@pytest.mark.parametrize("keeps_letters", [True, False])
async def test_a_message_that_is_given_up_is_acknowledged_only_once_its_letter_is_stored(
    world: World, keeps_letters: bool
) -> None:
    world.answers.keeps_letters, world.fails = keeps_letters, 1
    world.lane.tries[1] = MAX_DELIVER - 1
    world.deliver(1)
    await world.rest(1)
    assert world.answers.acks == (["reply.1"] if keeps_letters else [])
    assert world.lane.done(0) == (1 if keeps_letters else 0)


async def test_a_letter_that_could_not_be_stored_is_stored_later_without_calling_the_handler_again(
    world: World,
) -> None:
    world.answers.keeps_letters, world.answers.delay, world.fails = False, 0.01, 1
    world.lane.tries[1] = MAX_DELIVER - 1
    world.deliver(1, 2)
    await eventually_async(lambda: world.answers.refused > 2, 30, "several attempts to store the letter")
    assert (world.handled, world.answers.acks) == ([(1, 7)], []), "its partition waits"
    world.answers.keeps_letters = True
    await world.rest(2)
    assert world.handled == [(1, 7), (2, 7)]
    assert world.answers.acks == ["reply.1", "reply.2"]


async def test_a_message_that_was_given_up_under_a_token_of_before_is_handled_again(world: World) -> None:
    world.answers.keeps_letters, world.answers.delay, world.fails = False, 0.01, 1
    world.lane.tries[1] = MAX_DELIVER - 1
    world.deliver(1)
    await eventually_async(lambda: world.answers.refused, 30, "an attempt to store the letter")
    world.own(9)
    await world.rest(2)
    assert world.handled == [(1, 7), (1, 9)]


class Hanging:
    """Lanes whose messages number 1 never end; how many handlers may run is told."""

    def __init__(self, lanes: int, concurrency: int = 256) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.answers = Answers()
        owner = World()
        self.dispatcher = Dispatcher(self.handle, self.answers, owner, HandlingOptions(concurrency=concurrency))
        self.lanes = [self.dispatcher.lanes.setdefault(f"p{n}", Lane(f"p{n}")) for n in range(lanes)]

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.begun.append(context.partition_id)
        if message.sequence == 1:
            await self.gate.wait()
        self.ended.append(context.partition_id)

    def deliver(self, lane: Lane, sequence: int) -> None:
        self.dispatcher.deliver(lane, Message(f"s.{lane.id}", b"", sequence, 1, "reply", datetime.now(UTC)))


async def test_a_message_on_trial_that_does_not_end_keeps_no_other_from_being_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "TRIAL_SECONDS", 0.05)
    world = Hanging(3)
    for sequence, lane in enumerate(world.lanes, 1):
        lane.suspect = True
        world.deliver(lane, sequence)
    await eventually_async(lambda: world.ended == ["p1", "p2"], 5, state=lambda: (world.begun, world.answers.trials))
    assert world.answers.trials[-1] == ("p0", 1), "should the process die now, it is what it died of"
    world.gate.set()
    await eventually_async(lambda: world.answers.trials[-1] == ("", 0))
    await world.dispatcher.close()


async def test_a_partition_that_waits_for_its_turn_is_abandoned_without_cancelling_the_handler_of_another() -> None:
    world = Hanging(2, concurrency=1)
    hangs, waits = world.lanes
    world.deliver(waits, 2)
    await eventually_async(lambda: world.ended == ["p1"])
    world.deliver(hangs, 1)
    await eventually_async(lambda: world.begun == ["p1", "p0"])
    world.deliver(waits, 3)
    waits.held = True
    await world.dispatcher.abandon([waits])
    world.gate.set()
    await eventually_async(lambda: world.ended == ["p1", "p0"], 5, state=lambda: world.ended)
    await world.dispatcher.close()
