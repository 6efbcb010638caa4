"""Handlers that take lists: all at once, verdicts by message, and failures that concern only what failed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.workers.dispatch.test_dispatch import Answers

from penstock.consume.handlers import HandlerRunner
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Reject, Retries
from penstock.errors import ConfigError
from penstock.testing import eventually_async
from penstock.workers.dispatch.dispatcher import Dispatcher, HandlingOptions, OwnsAll
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.options import WorkerOptions


class World:
    """One lane with messages, and the lists that the handler got."""

    def __init__(self, batch: int = 4, plain: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.bad: dict[int, list[BaseException]] = {}
        """By sequence: what it does to whoever handles it, call by call."""
        self.by_message = False
        self.answers = Answers()
        options = HandlingOptions(batch=batch, retries=Retries(max_deliver=2, backoff=(0.01,)))
        runner = HandlerRunner(self.plainly if plain else self.handle)
        self.dispatcher = Dispatcher(runner.call, self.answers, OwnsAll(), options)
        self.lane = self.dispatcher.lanes["p"] = Lane("p")

    def plainly(self, messages: list[Message], context: MessageContext) -> Any:
        assert context.partition_id == "p"
        self.calls.append([message.sequence for message in messages])
        errors = [self.bad[m.sequence].pop(0) if self.bad.get(m.sequence) else None for m in messages]
        if self.by_message:
            return errors
        for error in errors:
            if error:
                raise error
        return None

    async def handle(self, messages: list[Message], context: MessageContext) -> Any:
        await asyncio.sleep(0)
        return self.plainly(messages, context)

    async def run(self, count: int) -> list[list[int]]:
        """Deliver so many messages, and wait until they are done."""
        self.lane.held = True
        for sequence in range(1, count + 1):
            message = Message("s.p", b"", sequence, 1, f"reply.{sequence}", datetime.now(UTC))
            self.dispatcher.deliver(self.lane, message)
        self.lane.held = False
        self.dispatcher.wake(self.lane)
        await eventually_async(lambda: len(self.answers.acks) == count, state=lambda: self.calls)
        await self.dispatcher.close()
        return self.calls

    @property
    def done(self) -> list[int]:
        return [int(reply.split(".")[1]) for reply in self.answers.acks]


@pytest.mark.parametrize("plain", [False, True])
async def test_messages_of_a_partition_come_in_lists_in_their_order(plain: bool) -> None:
    world = World(plain=plain)
    assert await world.run(9) == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert world.done == list(range(1, 10))


async def test_a_batch_that_raises_is_done_again_one_by_one_and_only_the_bad_one_is_given_up() -> None:
    world = World()
    world.bad[3] = [ValueError("no")] * 3
    assert await world.run(6) == [[1, 2, 3, 4], [1], [2], [3], [3], [4], [5, 6]]
    assert world.done == [1, 2, 3, 4, 5, 6]
    assert world.dispatcher.handled == 6


async def test_with_a_verdict_for_each_what_is_done_is_not_done_again() -> None:
    world = World()
    world.by_message = True
    world.bad[2], world.bad[4] = [ValueError("no")], [Reject("never")] * 2
    assert await world.run(4) == [[1, 2, 3, 4], [2], [4]]
    assert world.done == [1, 3, 2, 4]


async def test_an_answer_that_is_no_verdict_is_a_failure_of_the_handler() -> None:
    world = World(batch=3)
    made = iter([["done"], [None], [None], [None]])

    async def odd(messages: list[Message], context: MessageContext) -> Any:
        world.calls.append([message.sequence for message in messages])
        return next(made)

    world.dispatcher._handler = world.dispatcher._call_any = odd
    assert await world.run(3) == [[1, 2, 3], [1], [2], [3]]


def test_a_negative_batch_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="batch must be 0 or more"):
        WorkerOptions(batch=-1)
