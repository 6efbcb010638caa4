"""`penstock dlq capture` as a process: stopped, and killed in the middle."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys

import pytest
from tests.integration.deadletter.stage import Stage, events
from tests.support.pulls import Pull

from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async

COUNT = 400
SEED = 20261117


def start(server: EmbeddedServer, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "--servers", server.url, "dlq", "capture", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def ended(process: subprocess.Popen[str]) -> int:
    _, told = await asyncio.to_thread(process.communicate, timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), told
    return process.returncode


async def die(stage: Stage) -> None:
    """Let a consumer take every message and never answer, until the server has given up on all of them."""
    pull = Pull(stage.connection, "ORDERS", "billing", None, COUNT)
    taken = 0
    while taken < COUNT:
        taken += len(await pull.fetch(5))
    await pull.close()

    async def all_dead() -> bool:
        return await stage.messages("DLQ_ADVISORIES") == COUNT

    await eventually_async(all_dead, 120, "the server to give up on all of them")


@pytest.mark.kills
@pytest.mark.short
async def test_a_capturer_killed_in_the_middle_again_and_again_leaves_each_letter_once(
    nats_server: EmbeddedServer, stage: Stage
) -> None:
    seed = random.Random(SEED)
    await stage.build("workqueue", max_deliver=1)
    await stage.publish(events(COUNT))
    await die(stage)
    await stage.redeliver_soon()
    for there in sorted(seed.randrange(1, COUNT * 3 // 4) for _ in range(2)):
        process = start(nats_server)

        async def enough(there: int = there) -> bool:
            return await stage.messages("DLQ") >= there

        await eventually_async(enough, 120, f"{there} letters, seed {SEED}")
        process.kill()
        assert await ended(process) == -signal.SIGKILL
    assert await ended(start(nats_server, "--until-caught-up")) == 0
    assert await stage.dead_events() == {f"e{number}": 1 for number in range(COUNT)}, f"seed {SEED}"
    assert await stage.messages("ORDERS") == 0


async def test_a_capturer_ends_when_it_is_told_to(nats_server: EmbeddedServer, stage: Stage) -> None:
    await stage.build()
    await stage.publish(events(1))
    await stage.terminate("billing", b"+TERM no")
    process = start(nats_server)

    async def captured() -> bool:
        return await stage.messages("DLQ") == 1

    await eventually_async(captured, 120, "the letter")
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0
