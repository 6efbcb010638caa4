"""Publishing 200-byte messages to a file stream: raw bytes, our publishers, nats-py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats
import rawnats
from harness import Bench, Timed

from penstock.broker.embedded import EmbeddedServer

SUBJECT = "bench.event"
DATA = b"x" * 200
FLOW = 500
OUTSTANDING = 4


def run(bench: Bench) -> None:
    bench.about = "200-byte messages, file storage, one server on the same machine."
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    many, few = bench.size(200_000, quick=50_000), bench.size(6_000, quick=2_000)

    def fresh() -> None:
        config = {"allow_atomic": True, "allow_batched": True}
        rawnats.fresh_stream(server.port, "BENCH", ["bench.>"], **config)

    def add(name: str, work: Callable[[], int | Timed], limit: str | None = None) -> None:
        bench.add(name, work, before=fresh, limit=limit)

    add("raw atomic", lambda: rawnats.atomic(server.port, SUBJECT, DATA, many))
    add("raw fast", lambda: rawnats.fast(server.port, SUBJECT, DATA, many, FLOW, OUTSTANDING))
    add("nats-py publish", lambda: asyncio.run(nats_py_publish(server.url, few)))
    add("nats-py publish_async", lambda: asyncio.run(nats_py_publish_async(server.url, many // 4)))


async def nats_py_publish(url: str, count: int) -> int:
    async with await nats.connect(url) as client:
        stream = client.jetstream()
        for _ in range(count):
            await stream.publish(SUBJECT, DATA)
    return count


async def nats_py_publish_async(url: str, count: int) -> int:
    async with await nats.connect(url) as client:
        stream = client.jetstream()
        for _ in range(count):
            await stream.publish_async(SUBJECT, DATA)
        await stream.publish_async_completed()
    return count
