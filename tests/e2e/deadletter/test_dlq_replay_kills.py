"""`penstock dlq replay` killed, and run again: everything once, and the audit complete."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.integration.deadletter.stage import Stage, bury, events, replay_problems, work_until_done

from penstock import holds
from penstock.deadletter import steps
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, eventually_async

STEPS = [
    steps.REPLAY_BEGUN,
    steps.MESSAGE_SENT,
    steps.REPLAY_PUBLISHED,
    steps.REPLAY_NOTED,
    steps.LETTERS_REMOVED,
]
SEED = 20261116


def start(server: EmbeddedServer, *words: str, hold: Path | None = None) -> subprocess.Popen[bytes]:
    """`penstock dlq replay`, as a process that can be killed."""
    environment = {**os.environ, holds.VARIABLE: str(hold)} if hold else dict(os.environ)
    command = [sys.executable, "-m", "penstock", "--servers", server.url, "dlq", "replay", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; an error that it told is shown."""
    _, told = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), told.decode()
    return process.returncode


@pytest.mark.kills
async def test_killed_at_every_step_and_run_again_outside_the_window_everything_is_stored_once(
    nats_server: EmbeddedServer, stage: Stage, tmp_path: Path
) -> None:
    await stage.build(window_ms=100)
    await stage.publish(events(5 * len(STEPS)))
    for step in STEPS:
        await bury(stage, 5, error=step)
    for step in STEPS:  # each run begins with what the one before has left
        (tmp_path / step).touch()
        process = start(nats_server, "--error", step, hold=tmp_path)
        held = tmp_path / f"{step}.{process.pid}"
        await asyncio.to_thread(eventually, held.exists, 60, f"the replay to reach {step!r}")
        process.kill()
        assert finish(process) == -signal.SIGKILL
        await asyncio.sleep(0.2)  # the window is over
    assert await asyncio.to_thread(finish, start(nats_server, "--all")) == 0
    assert await asyncio.to_thread(replay_problems, stage, {f"e{n}" for n in range(5 * len(STEPS))}) == []


async def killed_over_and_over(server: EmbeddedServer, stage: Stage, count: int, kills: int, *words: str) -> None:
    """Replay `count` letters with a process that is killed in the middle, again and again; then a consumer that was
    fixed processes them. The processes that are killed are told `words`, too."""
    seed, step = random.Random(SEED), count // (2 * kills)
    points = seed.sample(range(count // 4 + step // 2, count, step), kills)  # each with some work before and behind it
    await stage.build(window_ms=100)
    await stage.publish(events(count))
    await bury(stage, count)
    for left in sorted(points, reverse=True):
        process = start(server, "--all", *words)
        await eventually_async(partial(fewer_letters, stage, left), 120, f"fewer than {left} letters")
        process.kill()
        assert await asyncio.to_thread(finish, process) == -signal.SIGKILL, "it was killed before its end"
    assert await asyncio.to_thread(finish, start(server, "--all")) == 0
    expected = {f"e{n}" for n in range(count)}
    assert await asyncio.to_thread(replay_problems, stage, expected) == [], f"seed {SEED}"
    assert await work_until_done(server, "billing", mode="fixed") == 0
    assert await asyncio.to_thread(stage.output) == dict.fromkeys(expected, 1)


async def fewer_letters(stage: Stage, left: int) -> bool:
    return await stage.messages("DLQ") < left


@pytest.mark.kills
@pytest.mark.short
async def test_hundreds_replayed_with_kills_in_the_middle_are_each_processed_once(
    nats_server: EmbeddedServer, stage: Stage
) -> None:
    # slowly, in chunks of a hundred: it takes a second from what is waited for to the end
    await killed_over_and_over(nats_server, stage, 400, 2, "--rate", "100")


@pytest.mark.soak
async def test_ten_thousand_replayed_with_kills_in_the_middle_are_each_processed_once(
    nats_server: EmbeddedServer, stage: Stage
) -> None:
    await killed_over_and_over(nats_server, stage, 10_000, 5)


@pytest.mark.kills
async def test_a_replay_by_spark_killed_in_the_middle_is_finished_by_the_next_run(
    nats_server: EmbeddedServer, stage: Stage, tmp_path: Path
) -> None:
    count = 1_000
    await stage.build(window_ms=100)
    await stage.publish(events(count))
    await bury(stage, count)
    (tmp_path / steps.REPLAY_PUBLISHED).touch()
    process = start(nats_server, "--all", "--spark", "--master", "local[2]", hold=tmp_path)
    held = await asyncio.to_thread(
        eventually,
        lambda: list(tmp_path.glob(f"{steps.REPLAY_PUBLISHED}.*")),
        180,
        "a task to have published its chunk",
    )
    process.kill()  # the driver; Spark's JVM and the tasks end with it, but not the one that is held
    assert await asyncio.to_thread(finish, process) == -signal.SIGKILL
    os.kill(int(held[0].suffix[1:]), signal.SIGKILL)
    await eventually_async(lambda: quiet(stage), 60, "the other tasks to end")
    assert await asyncio.to_thread(finish, start(nats_server, "--all", "--spark", "--master", "local[2]")) == 0
    assert await asyncio.to_thread(replay_problems, stage, {f"e{n}" for n in range(count)}) == []


async def quiet(stage: Stage) -> bool:
    """Whether nobody has removed letters for a while."""
    before = await stage.messages("DLQ")
    await asyncio.sleep(2)
    return await stage.messages("DLQ") == before
