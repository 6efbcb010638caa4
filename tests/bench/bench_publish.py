"""Publishing: prebuilt bytes on a bare socket (the limits), our publishers, nats-py."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nats
import publish_load as ours
import rawnats
from harness import Bench, Figure, Timed, memory_of
from publish_load import DATA, STREAM, SUBJECT

from penstock.broker.embedded import EmbeddedServer
from penstock.publish import IngestOptions

KEPT_BYTES = 64 * 1024 * 1024
"""The stream of the memory runs keeps so much: ten million messages need not lie on the disk."""
GROWTH_MIB = 8
"""Growth of a process that counts as flat: the sampled memory of an idle Python process moves by a few MiB."""


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
    messages = bench.size(10_000_000, quick=300_000)
    for mode in ("fast", "atomic"):
        bench.probe(lambda mode=mode: memory(server, mode, messages))  # type: ignore[misc]


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


def memory(server: EmbeddedServer, mode: str, count: int) -> list[Figure]:
    """The memory of a process of its own that publishes `count` messages."""
    config = {"allow_atomic": True, "allow_batched": True, "max_bytes": KEPT_BYTES}
    rawnats.fresh_stream(server.port, STREAM, ["bench.>"], **config)
    found = memory_of([sys.executable, str(Path(ours.__file__)), server.url, mode, str(count)])
    name = f"{mode}, {count:,} messages: memory"
    mib = 1024 * 1024
    return [
        Figure(name=f"{name} growth", value=found.growth() / mib, unit="MiB", at_most=GROWTH_MIB),
        Figure(name=f"{name} at its peak", value=found.peak / mib, unit="MiB"),
    ]
