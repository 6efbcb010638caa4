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
from functools import partial
from pathlib import Path

from harness import Bench, Figure, Timed
from rawnats import acknowledged_pulls

from penstock.facts import BlockingFacts, Facts, NewFact
from penstock.gateway import BlockingGatewayClient, GatewayClient, GatewayLogin
from penstock.jetstream import metadata
from penstock.server.embedded import EmbeddedServer

STREAM, CONSUMER, SUBJECT = "FACTS", "reader", "facts.bench"
PAGE, LARGE_PAGE = 500, 5_000
WRITERS = 16
"""Appends under way at the same time."""
AT_ONCE = 500
"""Facts of one call that appends many."""
DATA = b"x" * 200
TOKEN = "a token for a benchmark"
FACTS_A_SECOND = 100_000
"""The goal of reading directly."""

Reader = BlockingFacts | BlockingGatewayClient
Writer = Facts | GatewayClient


def run(bench: Bench) -> None:
    bench.about = (
        f"facts of 200 bytes, pages of {PAGE} and {LARGE_PAGE:,}, each confirmed before the next; plain HTTP, one "
        "gateway process. The raw limit pulls and acknowledges with prebuilt bytes, and parses nothing."
    )
    bench.unit = "facts/s"
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    facts, appends = bench.size(100_000, quick=5_000), bench.size(4_000, quick=500)
    asyncio.run(filled(server, facts))
    url = bench.enter(gateway(bench.scratch, server.url))
    login = GatewayLogin(token=TOKEN)

    def direct(page: int) -> Timed:
        with BlockingFacts(server.settings) as reader:
            return read(reader, facts, page)

    def through() -> Timed:
        with BlockingGatewayClient(url, login, timeout=60) as reader:
            return read(reader, facts, PAGE)

    for page in (PAGE, LARGE_PAGE):
        limit, ours, alone = f"raw limit, pages of {page}", f"direct, pages of {page}", f"dedicated, pages of {page}"
        raw = partial(acknowledged_pulls, server.port, STREAM, CONSUMER, facts, page)
        bench.add(limit, raw, before=lambda: asyncio.run(rewound(server)))
        bench.add(ours, partial(direct, page), before=lambda: asyncio.run(rewound(server)), limit=limit)
        bench.add(alone, partial(direct, page), before=lambda: asyncio.run(rewound(server, "dedicated")), limit=limit)
        bench.goal(ours, of=limit, at_least=0.5)
    bench.add("gateway", through, before=lambda: asyncio.run(rewound(server)), limit=f"direct, pages of {PAGE}")
    bench.goal("gateway", of=f"direct, pages of {PAGE}", at_least=0.6)
    bench.add("append, direct", lambda: asyncio.run(append(Facts(server.settings), appends)))
    gate = lambda: asyncio.run(append(GatewayClient(url, login, timeout=60), appends))  # noqa: E731 - made anew each round
    bench.add("append, gateway", gate, limit="append, direct")
    many = bench.size(20_000, quick=2_000)
    bench.add("append many, direct", lambda: asyncio.run(append_many(Facts(server.settings), many)))
    gate_many = lambda: asyncio.run(append_many(GatewayClient(url, login, timeout=60), many))  # noqa: E731
    bench.add("append many, gateway", gate_many, limit="append many, direct")
    bench.probe(lambda: rates(bench))


def rates(bench: Bench) -> list[Figure]:
    """The goal that is no ratio, and the same in pages: what one reader sees."""
    median = {name: one.median for name, one in bench.contestants.items()}
    reached = [
        Figure(name=name, value=median[name], unit="facts/s", at_least=FACTS_A_SECOND)
        for name in (f"direct, pages of {PAGE}", f"direct, pages of {LARGE_PAGE}")
    ]
    pages = {"direct": f"direct, pages of {PAGE}", "gateway": "gateway"}
    return [
        *reached,
        *(Figure(name=f"pages, {way}", value=median[of] / PAGE, unit="pages/s") for way, of in pages.items()),
    ]


def read(reader: Reader, count: int, size: int) -> Timed:
    """Read everything, page by page, and look at the data of each fact."""
    seen = read_bytes = 0
    began = time.perf_counter()
    while seen < count:
        page = reader.fetch_facts(CONSUMER, size, wait=5)
        assert page.receipt, f"{seen} of {count} facts were there"
        read_bytes += sum(len(fact.data) for fact in page.facts)
        reader.confirm_receipt(CONSUMER, page.receipt)
        seen += len(page)
    seconds = time.perf_counter() - began
    assert read_bytes == count * len(DATA)
    return Timed(seen, seconds)


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


async def append_many(writer: Writer, count: int) -> Timed:
    """Append facts of new ids, many in one call, one call after the other."""
    number = next(_run)
    facts = [NewFact("facts.appended", f"{number}-{at}", DATA) for at in range(count)]
    async with writer:
        began = time.perf_counter()
        for start in range(0, count, AT_ONCE):
            await writer.append_facts(facts[start : start + AT_ONCE])
        return Timed(count, time.perf_counter() - began)


async def filled(server: EmbeddedServer, count: int) -> None:
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        await js.create_stream({"name": STREAM, "subjects": ["facts.>"]})
        await facts.append_facts([NewFact(SUBJECT, str(n), DATA) for n in range(count)])


async def rewound(server: EmbeddedServer, kind: str = "shared") -> None:
    """A reader of the first facts only, made anew: each round reads the same."""
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        if CONSUMER in await js.consumer_names(STREAM):
            await js.delete_consumer(STREAM, CONSUMER)
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "filter_subject": f"{SUBJECT}.*"}
        own = {"max_ack_pending": 2 * LARGE_PAGE, "metadata": {metadata.READER: kind}}
        await js.create_consumer(STREAM, {**config, **own})


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
