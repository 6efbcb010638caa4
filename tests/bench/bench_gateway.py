"""The gateway beside the direct Python API: pages fetched and confirmed, and facts appended."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Bench, Figure, Timed

from penstock.facts import BlockingFacts, Facts
from penstock.gateway import BlockingGatewayClient, GatewayClient, GatewayLogin
from penstock.server.embedded import EmbeddedServer

STREAM, CONSUMER, SUBJECT = "FACTS", "reader", "facts.bench"
PAGE = 500
WRITERS = 16
"""Appends under way at the same time."""
DATA = b"x" * 200
TOKEN = "a token for a benchmark"

Reader = BlockingFacts | BlockingGatewayClient
Writer = Facts | GatewayClient


def run(bench: Bench) -> None:
    bench.about = (
        f"facts of 200 bytes, pages of {PAGE}, each confirmed before the next; plain HTTP, one gateway process."
    )
    bench.unit = "facts/s"
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    facts, appends = bench.size(40_000, quick=5_000), bench.size(4_000, quick=500)
    asyncio.run(filled(server, facts))
    url = bench.enter(gateway(bench.scratch, server.url))
    login = GatewayLogin(token=TOKEN)

    def rewind() -> None:
        asyncio.run(rewound(server))

    def direct() -> Timed:
        with BlockingFacts(server.settings) as reader:
            return read(reader, facts)

    def through() -> Timed:
        with BlockingGatewayClient(url, login, timeout=60) as reader:
            return read(reader, facts)

    bench.add("fetch and confirm, direct", direct, before=rewind)
    bench.add("fetch and confirm, gateway", through, before=rewind, limit="fetch and confirm, direct")
    bench.add("append, direct", lambda: asyncio.run(append(Facts(server.settings), appends)))
    gate = lambda: asyncio.run(append(GatewayClient(url, login, timeout=60), appends))  # noqa: E731 - made anew each round
    bench.add("append, gateway", gate, limit="append, direct")
    bench.probe(lambda: pages(bench))


def pages(bench: Bench) -> list[Figure]:
    """The same in pages: what one reader sees."""
    ways = {name: bench.contestants[f"fetch and confirm, {name}"].median / PAGE for name in ("direct", "gateway")}
    return [Figure(name=f"pages, {name}", value=rate, unit="pages/s") for name, rate in ways.items()]


def read(reader: Reader, count: int) -> Timed:
    """Read everything, page by page."""
    seen, began = 0, time.perf_counter()
    while seen < count:
        page = reader.fetch_facts(CONSUMER, PAGE, wait=5)
        assert page.receipt, f"{seen} of {count} facts were there"
        reader.confirm_receipt(CONSUMER, page.receipt)
        seen += len(page)
    return Timed(seen, time.perf_counter() - began)


_run = iter(range(1_000_000))


async def append(writer: Writer, count: int) -> Timed:
    """Append facts of new ids, several at a time."""
    number, left = next(_run), iter(range(count))

    async def work() -> None:
        for at in left:
            await writer.append_fact("facts.appended", f"{number}-{at}", DATA)

    async with writer:
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(WRITERS)))
        return Timed(count, time.perf_counter() - began)


async def filled(server: EmbeddedServer, count: int) -> None:
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        await js.create_stream({"name": STREAM, "subjects": ["facts.>"]})
        for start in range(0, count, 500):
            numbers = range(start, min(start + 500, count))
            await asyncio.gather(*(facts.append_fact(SUBJECT, str(n), DATA) for n in numbers))


async def rewound(server: EmbeddedServer) -> None:
    """A reader of the first facts only, made anew: each round reads the same."""
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        if CONSUMER in await js.consumer_names(STREAM):
            await js.delete_consumer(STREAM, CONSUMER)
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "filter_subject": f"{SUBJECT}.*"}
        await js.create_consumer(STREAM, config)


@contextmanager
def gateway(folder: Path, servers: str) -> Iterator[str]:
    """`penstock gateway` as a process of its own, in plain HTTP; its URL."""
    identity = {
        "tokens": [{"sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}],
        "consumers": [CONSUMER],
        "subjects": ["facts.>"],
    }
    platform = {
        "environments": {"dev": {"servers": [servers]}},
        "streams": {STREAM: {"subjects": ["facts.>"]}},
        "consumers": {CONSUMER: {"stream": STREAM}},
        "gateway": {"limits": {"rate": 1_000_000}, "identities": {"bench": identity}},
    }
    file = folder / "penstock.yaml"
    file.write_text(json.dumps(platform))
    command = [sys.executable, "-m", "penstock", "gateway", str(file), "--insecure", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--drain", "0.1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
