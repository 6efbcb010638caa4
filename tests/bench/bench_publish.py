"""Publishing: prebuilt bytes on a bare socket (the limits), our publishers, nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import nats
import publish_load as ours
import rawnats
from harness import Bench, Timed
from publish_load import DATA, STREAM, SUBJECT

from penstock.publish import IngestOptions
from penstock.server.embedded import EmbeddedServer


def run(bench: Bench) -> None:
    bench.about = "200-byte messages, file storage, one server on the same machine."
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    url = server.url
    many, few = bench.size(200_000, quick=40_000), bench.size(8_000, quick=2_000)

    def fresh() -> None:
        rawnats.fresh_stream(server.port, STREAM, ["bench.>"], allow_atomic=True, allow_batched=True)

    def add(name: str, work: Callable[[], Timed], count: int, limit: str | None = None) -> None:
        def checked() -> Timed:
            timed = work()
            if (found := rawnats.stored(server.port, STREAM)) != count:
                raise AssertionError(f"{name}: {found} of {count} messages are in the stream")
            return timed

        bench.add(name, checked, before=fresh, limit=limit)

    flow, outstanding = IngestOptions().flow, IngestOptions().max_outstanding_acks
    add("raw atomic", lambda: rawnats.atomic(server.port, SUBJECT, DATA, many), many)
    add("atomic, add", lambda: asyncio.run(ours.atomic_one_by_one(url, many)), many, "raw atomic")
    add("atomic, bulk", lambda: asyncio.run(ours.atomic_in_bulk(url, many)), many, "raw atomic")
    add("raw fast", lambda: rawnats.fast(server.port, SUBJECT, DATA, many, flow, outstanding), many)
    add("fast, add", lambda: asyncio.run(ours.fast_one_by_one(url, many)), many, "raw fast")
    add("fast, bulk", lambda: asyncio.run(ours.fast_in_bulk(url, many)), many, "raw fast")
    add("nats-py publish", lambda: asyncio.run(nats_py_publish(url, few)), few)
    add("nats-py publish_async", lambda: asyncio.run(nats_py_publish_async(url, many // 4)), many // 4)
    for way in ("add", "bulk"):
        bench.goal(f"atomic, {way}", of="raw atomic", at_least=0.8)
        bench.goal(f"atomic, {way}", of="nats-py publish", at_least=20)
        bench.goal(f"fast, {way}", of="raw fast", at_least=0.8)
        bench.goal(f"fast, {way}", of="nats-py publish_async", at_least=4)


async def nats_py_publish(url: str, count: int) -> Timed:
    async with await nats.connect(url) as client:
        stream = client.jetstream()
        started = time.perf_counter()
        for _ in range(count):
            await stream.publish(SUBJECT, DATA)
        return Timed(count, time.perf_counter() - started)


async def nats_py_publish_async(url: str, count: int) -> Timed:
    async with await nats.connect(url) as client:
        stream = client.jetstream()
        started = time.perf_counter()
        for _ in range(count):
            await stream.publish_async(SUBJECT, DATA)
        await stream.publish_async_completed()
        return Timed(count, time.perf_counter() - started)
