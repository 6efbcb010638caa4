"""`penstock plan` for a large platform: pages and streams, beside one request a resource."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import nats
from harness import Bench, Figure

from penstock.jetstream import connect
from penstock.server.embedded import EmbeddedServer
from penstock.topology import actual
from penstock.topology.apply import apply
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.topology.plan import plan
from penstock.topology.resource import Desired

CONSUMERS_A_STREAM = 4
PLAN = "file, read, plan"
SECONDS = 10.0
"""What "in seconds" means: the goal for one plan of the full size."""


def run(bench: Bench) -> None:
    streams = bench.size(500, quick=100)
    bench.about = f"{streams:,} streams, {streams * CONSUMERS_A_STREAM:,} consumers, all as declared."
    bench.unit = "resources/s"
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    file = platform_file(bench.scratch, server.url, streams)
    asyncio.run(applied(server, load(file)))

    bench.add("nats-py, one request a resource", lambda: asyncio.run(by_resource(server, load(file))))
    bench.add(PLAN, lambda: asyncio.run(planned(server, file))[0], limit="nats-py, one request a resource")
    bench.goal(PLAN, of="nats-py, one request a resource", at_least=1.0)
    bench.probe(lambda: figures(server, file, streams))


def platform_file(folder: Path, url: str, streams: int) -> Path:
    lines = [f"environments: {{dev: {{servers: ['{url}']}}}}", "streams:"]
    lines += [
        f"  S{n}: {{subjects: ['s{n}.>'], storage: memory, max_age: 7d, max_bytes: 1MiB}}" for n in range(streams)
    ]
    lines.append("consumers:")
    lines += [
        f"  s{n}_c{m}: {{stream: S{n}, filter: s{n}.e{m}, ack_wait: 30s, max_deliver: 10, mem_storage: true}}"
        for n in range(streams)
        for m in range(CONSUMERS_A_STREAM)
    ]
    path = folder / "penstock.yaml"
    path.write_text("\n".join(lines))
    return path


async def applied(server: EmbeddedServer, platform: Platform) -> None:
    desired = Desired.of(platform)
    async with connect(server.settings) as broker:
        await apply(broker.jetstream, plan(desired, await actual.read(broker.jetstream, desired)))


async def planned(server: EmbeddedServer, file: Path) -> tuple[int, int]:
    """What the command does; returns the resources it looked at and the requests it took."""
    async with connect(server.settings) as broker:
        desired = Desired.of(load(file))
        made = plan(desired, await actual.read(broker.jetstream, desired))
        assert not made, "the platform is as declared"
        return len(made.unchanged), broker.jetstream.requests


async def by_resource(server: EmbeddedServer, platform: Platform) -> int:
    """How a tool that knows nothing of lists goes about it."""
    async with await nats.connect(server.url) as client:
        js = client.jetstream()
        for name in platform.streams:
            await js.stream_info(name)
        for name, consumer in platform.consumers.items():
            await js.consumer_info(consumer.stream, name)
    return len(platform.streams) + len(platform.consumers)


def figures(server: EmbeddedServer, file: Path, streams: int) -> Sequence[Figure]:
    started = time.perf_counter()
    resources, requests = asyncio.run(planned(server, file))
    took = time.perf_counter() - started
    most = streams + 2 * -(-streams // 256) + 1  # a page overlaps the one before it
    return [
        Figure(name=f"one plan of {resources:,} resources", value=took, unit="s", at_most=SECONDS),
        Figure(name="API requests of one plan", value=requests, unit="requests", at_most=most),
    ]
