"""A message that kills its worker is given up after its tries, and no other message with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.e2e.workers.group_fleet import Fleet, fleet
from tests.support.streams import make_stream

from penstock.server.embedded import EmbeddedServer

pytestmark = pytest.mark.kills
PARTITIONS = 4
DEATHS = 8
"""One that nobody could foresee, one that made it suspect, its three tries, and some for a loaded machine."""


async def restart_those_that_died(group: Fleet) -> int:
    """Returns how many had."""
    dead = [name for name, process in group.processes.items() if process.ended()]
    for name in dead:
        group.start(name)
    return len(dead)


@pytest.mark.short
@pytest.mark.parametrize("names", [["a"], ["a", "b"]], ids=["one worker", "two workers"])
async def test_a_message_that_kills_its_worker_is_given_up_and_no_other_is(
    nats_server: EmbeddedServer, tmp_path: Path, names: list[str]
) -> None:
    async with fleet(nats_server, tmp_path, "limits", partitions=PARTITIONS, dlq="dlq.g") as group:
        await make_stream(group.control.jetstream, "DLQ", subjects=["dlq.>"])
        orders = iter(["", "", "", "", "", "die"])
        group.flood.instruct = lambda: next(orders, "")
        group.start(*names)
        await group.settled(len(names))
        group.flood.start()
        deaths = 0
        while not (await group.control.jetstream.stream_info("DLQ")).state.messages:
            deaths += await restart_those_that_died(group)
            assert deaths <= DEATHS, await group.state()
            await asyncio.sleep(0.1)
        await group.more_done(20)
        await group.flood.end()
        guilty = group.flood.total - 1
        await group.eventually(lambda: group.sink.count == guilty, "all but the one to be done")
        letters = await group.control.jetstream.get_message("DLQ", last_of="dlq.>")
        assert (await group.control.jetstream.stream_info("DLQ")).state.messages == 1
        assert letters.headers["Penstock-Dlq-Subject"] == ["s.p1"]
        assert "kill" in letters.headers["Penstock-Dlq-Reason"][0]
