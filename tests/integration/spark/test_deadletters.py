"""Dead letters replayed by the tasks of a Spark job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from pyspark.sql import SparkSession
from tests.integration.deadletter.stage import Stage, bury, events, replay_problems

from penstock.deadletter.audit import Deed
from penstock.deadletter.editing import merge_patch
from penstock.deadletter.letters import FiledLetter
from penstock.deadletter.replay import ReplayOptions, opened
from penstock.deadletter.selection import Selection
from penstock.deadletter.tally import Tally
from penstock.server.embedded import EmbeddedServer
from penstock.spark.deadletters import replay_letters
from penstock.wire import aio

COUNT = 300


def on_stage(server: EmbeddedServer, act: Callable[[Stage], Awaitable[None]]) -> Stage:
    """Do something on the stage, from a test without an event loop."""

    async def run() -> Stage:
        async with await aio.connect(server.settings) as connection:
            stage = Stage(server.settings, connection)
            await act(stage)
            return stage

    return asyncio.run(run())


async def dead(stage: Stage) -> None:
    await stage.build(window_ms=100)
    await stage.publish(events(COUNT))
    await bury(stage, COUNT)


def replayed(spark: SparkSession, server: EmbeddedServer, wanted: Selection, **options: object) -> Tally:
    made = ReplayOptions(**options)  # type: ignore[arg-type]  # the tests name fields of it
    return replay_letters(spark, server.settings, wanted, made, actor="tester", partitions=3)


def test_a_job_replays_each_letter_once_and_only_those_that_match(
    jetstream: SparkSession, nats_server: EmbeddedServer
) -> None:
    stage = on_stage(nats_server, dead)
    nothing = replayed(jetstream, nats_server, Selection(errors=("something else",)))
    assert (nothing.done, nothing.skipped, len(stage.letters())) == (0, {}, COUNT)
    held = replayed(jetstream, nats_server, Selection(), max_replays=0)
    assert (held.done, sum(held.skipped.values()), len(stage.letters())) == (0, COUNT, COUNT)
    done = replayed(jetstream, nats_server, Selection(readers=("billing",)), edit=merge_patch('{"fixed": true}'))
    assert (done.done, done.refused, done.skipped) == (COUNT, [], {})
    assert replay_problems(stage, {f"e{n}" for n in range(COUNT)}) == []


def test_a_job_only_removes_what_an_interrupted_run_had_replayed(
    jetstream: SparkSession, nats_server: EmbeddedServer
) -> None:
    stage = on_stage(nats_server, dead)

    letters = stage.letters()[:20]
    asyncio.run(interrupted_replay(nats_server, letters))
    done = replayed(jetstream, nats_server, Selection())
    assert (done.done, done.found_done) == (COUNT - 20, 20)
    assert replay_problems(stage, {f"e{n}" for n in range(COUNT)}) == []


async def interrupted_replay(server: EmbeddedServer, letters: list[FiledLetter]) -> None:
    """A replay that ends between its audit and the removal of its letters."""
    async with opened(server.settings) as room:

        async def nothing(_: Sequence[FiledLetter]) -> None:
            raise Interrupted

        room._remove = nothing  # type: ignore[method-assign,assignment]  # this is where it is interrupted
        with suppress(Interrupted):
            await room.replay(letters, Deed(run="first", actor="tester"), 0, ReplayOptions())


class Interrupted(Exception):
    pass
