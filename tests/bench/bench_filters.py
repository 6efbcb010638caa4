"""What a server spends on a consumer that is behind, by the number of subjects that share the stream.

A worker's consumer has a filter for each of its subjects. While it keeps up, the next message is near. Behind by more
messages than there are subjects, a 2.15 server looks for it once for every subject of the consumer, each time anew.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial

import rawnats
from crew import cpu_seconds
from harness import Bench, Figure

from penstock.jetstream import Broker, connect
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer

STREAM = "FILTERS"
DATA = b"x" * 200
SHARES = 25
"""The consumer has every so-maniest subject."""
COUNT = 100_000
TAKEN = 2_000
"""Messages that are measured: all of them with most of the stream still to come."""
SUBJECTS = (50, 200, 1_000, 2_000, 10_000)


def run(bench: Bench) -> None:
    bench.about = (
        f"Server CPU for each message of a consumer that has 1/{SHARES} of the subjects, and {COUNT:,} messages of all "
        "subjects before it."
    )
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    for subjects in SUBJECTS[:2] if bench.quick else SUBJECTS:
        bench.probe(partial(figures, server, subjects, "file"))
    if not bench.quick:
        bench.probe(lambda: figures(server, 2_000, "memory"))


def figures(server: EmbeddedServer, count: int, storage: str) -> list[Figure]:
    subjects = [f"f.{number % SHARES}.{number}" for number in range(count)]
    rawnats.fresh_stream(server.port, STREAM, ["f.>"], storage=storage, allow_batched=True)
    with BlockingPublisher.connect(server.settings) as publisher, publisher.fast(STREAM) as ingest:
        ingest.add_many((subjects[number % count], DATA) for number in range(COUNT))
    name = f"{count:,} subjects" + (", in memory" if storage == "memory" else "")
    ways = {"a filter for each subject": subjects[::SHARES], "one wildcard": ["f.0.*"]}
    return [
        Figure(name=name, column=way, value=asyncio.run(cost(server, filters)), unit="µs")
        for way, filters in ways.items()
    ]


async def cost(server: EmbeddedServer, filters: list[str]) -> float:
    """CPU microseconds of the server for a message."""
    async with connect(server.settings) as broker:
        consumer = {"durable_name": "c", "filter_subjects": filters, "ack_policy": "none"}
        await broker.jetstream.create_consumer(STREAM, consumer)
        await pull(broker, 100)
        before = cpu_seconds(server.pid)
        await pull(broker, TAKEN)
        used = cpu_seconds(server.pid) - before
        await broker.jetstream.delete_consumer(STREAM, "c")
    return 1e6 * used / TAKEN


async def pull(broker: Broker, count: int) -> None:
    connection, inbox = broker.connection, broker.settings.new_inbox()
    sid = await connection.subscribe(inbox)
    ask = json.dumps({"batch": count}).encode()
    await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.c", ask, reply=inbox)
    for _ in range(count):
        await connection.receive(60)
    await connection.unsubscribe(sid)
