"""One process of an old or of the new side of an overlap: `python -m tests.e2e.workers.overlap_side '{…}'`.

The old side pulls with nats-py, from one consumer a partition; the new side is a worker of the group. With `die` the
process kills itself at that point of a message: `begun`, `effect`, or `done` (before the acknowledgement).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import Any

import nats
from nats.js.client import JetStreamContext
from tests.e2e.workers.group_tracker import SinkClient
from tests.e2e.workers.group_worker import describe, group_options

from penstock.consume.messages import Message, MessageContext
from penstock.settings import Settings
from penstock.workers.group.overlap import Overlap, TurnLost
from penstock.workers.group.worker_group import WorkerGroup

log = logging.getLogger(__name__)

LEASE = 2.0
"""Seconds: less than the ack_wait of the old consumers, and longer than a process may stand still by accident."""


class Side:
    """What both sides do with a message."""

    def __init__(self, told: dict[str, Any], sink: SinkClient, overlap: Overlap | None) -> None:
        self._name = told["name"]
        self._die_at, self._die_after = told.get("die", (None, 0))
        self._sink = sink
        self._overlap = overlap

    async def handle(self, partition: str, data: bytes, subject: str, sequence: int, stored_at: datetime) -> None:
        said = {
            "partition": partition,
            "number": json.loads(data)["n"],
            "sequence": sequence,
            "worker": self._name,
            "id": self._name,
            "token": 0,  # both sides have the same: whatever is done twice is a duplicate
        }
        if self._overlap is None:
            await self._sink.tell(what="effect", **said)
            return
        async with self._overlap.turn(subject, sequence, stored_at) as turn:
            if turn:
                self._die("begun")
                if not (turn.tries and await self._sink.tell(what="seen", **said)):
                    await self._sink.tell(what="effect", **said)
                self._die("effect")
        self._die("done")

    def _die(self, point: str) -> None:
        if point == self._die_at:
            self._die_after -= 1
            if self._die_after <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def pull_for_ever(self, stream: JetStreamContext, partition: str) -> None:
        """The old pull loop of one partition."""
        subscription = await stream.pull_subscribe_bind(f"old-{partition}", "S")
        while True:
            with suppress(nats.errors.TimeoutError):
                for message in await subscription.fetch(1, timeout=1):
                    seen = message.metadata
                    told = partition, message.data, message.subject, seen.sequence.stream, seen.timestamp
                    while not await self._handled(*told):
                        pass
                    await message.ack()

    async def _handled(self, *told: Any) -> bool:
        """False for a turn that ran out, on a machine that is busy: whoever took it over is done by the next try."""
        try:
            await self.handle(*told)
        except TurnLost:
            log.exception("again")
            return False
        return True

    async def handle_as_worker(self, message: Message, context: MessageContext) -> None:
        await self.handle(context.partition_id, message.data, message.subject, message.sequence, message.timestamp)


async def main(told: dict[str, Any]) -> None:
    sink = SinkClient()
    await sink.connect(told["sink"])
    stopping, groups = asyncio.Event(), list[WorkerGroup]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, describe, groups)
    settings = Settings(servers=tuple(told["servers"]), timeout=3.0)
    async with AsyncExitStack() as open_:
        overlap = None
        if told["overlap"]:
            overlap = await open_.enter_async_context(Overlap.open(settings, "g", name=told["name"], lease=LEASE))
        side = Side(told, sink, overlap)
        if told["side"] == "old":
            client = await open_.enter_async_context(await nats.connect(told["servers"][0], connect_timeout=30))
            loops = [
                asyncio.create_task(side.pull_for_ever(client.jetstream(), partition))
                for partition in told["partitions"]
            ]
            open_.callback(lambda: [loop.cancel() for loop in loops])
        else:
            consumer = {"ack_wait": told["ack_wait"], "window": 0.02, "min_interval": 0.05}
            options = group_options(told, f"{told['name']}-0")
            group = WorkerGroup(settings, options, side.handle_as_worker, consumer=consumer)
            await open_.enter_async_context(group)
            groups.append(group)
        await stopping.wait()
    print("left", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S")
    asyncio.run(main(json.loads(sys.argv[1])))
