"""Workers of a group in a process of their own: `python -m tests.e2e.workers.group_worker '{…}'`; tests kill it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection
from typing import Any

from tests.e2e.workers.group_tracker import SinkClient

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Reject, RetryLater
from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.settings import Settings
from penstock.workers import worker
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.group.assignment import RoundRobin, Windows
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions, WorkerOptions
from penstock.workers.partitions import InBucket, PartitionSource, SeenInStream, SubjectPattern
from penstock.workers.worker import Worker


class Fenced(Exception):
    """The sink has seen a higher token."""


def source(told: dict[str, Any], control: Control, bucket: Bucket) -> PartitionSource:
    """The list in the bucket, or whatever is seen in the stream."""
    if pattern := told.get("pattern"):
        return SeenInStream(control.jetstream, told["stream"], SubjectPattern(pattern))
    return InBucket(bucket)


def group_options(told: dict[str, Any], instance: str) -> GroupOptions:
    return GroupOptions(
        group="g",
        stream=told["stream"],
        source=lambda control, bucket: source(told, control, bucket),
        instance=instance,
        ttl=told["ttl"],
        look_every=0.25,
        look_soon=0.05,
        strategy=RoundRobin(),
        windows=Windows(cold_start=0.6, planned=0.3, emergency=0.0, min_interval=0.2),
        leave_within=15.0,
    )


async def no_rewind(worker: Worker, lanes: Collection[Lane]) -> None:
    """The same on a work queue."""
    for lane in lanes:
        worker._go_live(lane, 0)


async def nothing_stored(*_: object) -> AsyncIterator[Message]:
    """For a worker that does not read the backlog of partitions that it takes over."""
    for message in list[Message]():
        yield message


async def obey(order: str, attempt: int) -> None:
    """What a message does to its handler: `retry`, `hang` and `poison` fail the first time, `slow` takes a while, `die`
    ends the process."""
    if order == "die":
        os._exit(9)
    if order == "slow":
        await asyncio.sleep(0.4)
    if order == "hang" and attempt == 1:
        await asyncio.Event().wait()
    if order in ("retry", "poison") and attempt == 1:
        raise RetryLater(after=0.3)


def describe(groups: list[WorkerGroup]) -> None:
    """What everybody waits for, for a test that has waited too long."""
    for group in groups:
        print(group.statistics() if group.member else "not joined", flush=True)
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"
        print(f"{task.get_name()} at {where}", flush=True)


async def main(told: dict[str, Any]) -> None:
    if not told.get("hand_over", True):
        setattr(Worker, "_rewind", no_rewind)  # noqa: B010 -- as below
        setattr(worker, "stored", nothing_stored)  # noqa: B010 -- a worker has no such option, for good reason
    sink, gated = SinkClient(), told.get("gated", False)
    await sink.connect(told["sink"])
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)

    async def handle(message: Message, context: MessageContext) -> None:
        said = {
            "partition": context.partition_id,
            "number": message.json()["n"],
            "token": context.fencing_token,
            "worker": told["name"],
            "id": context.worker_id,
            "sequence": message.sequence,
        }
        if gated:
            await sink.tell(what="begin", **said)
        await obey(message.json().get("do", ""), context.delivery_count)
        if not await sink.tell(what="effect", **said):
            raise Fenced(f"{said}")
        if message.json().get("do") == "poison":
            raise Reject("poison")  # given up counts as done

    consumer = {"ack_wait": told["ack_wait"], "max_ack_pending": 50, "window": 0.02, "min_interval": 0.05}
    groups = [
        WorkerGroup(
            Settings(servers=tuple(told["servers"]), timeout=told["timeout"]),
            group_options(told, f"{told['name']}-{number}"),
            handle,
            consumer=consumer,
            worker=WorkerOptions(dlq=told.get("dlq"), handler_timeout=told.get("handler_timeout"), stop_within=10.0),
        )
        for number in range(told.get("workers", 1))
    ]
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, describe, groups)
    await asyncio.gather(*(group.start() for group in groups))
    print("joined", *(group.worker_id for group in groups), flush=True)
    await stopping.wait()
    await asyncio.gather(*(group.stop() for group in groups))
    print("left", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S")
    for name in ("claims", "consumer", "member"):  # what `Fleet.explain` looks for
        logging.getLogger(f"penstock.workers.{name}").setLevel(logging.DEBUG)
    asyncio.run(main(json.loads(sys.argv[1])))
