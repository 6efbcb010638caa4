"""Carrying a stream to another server: bare sockets (the limits), our receiver and bridge, the server, nats-py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import rawnats
import read_load
import sourcing_load as load
from harness import Bench, Timed
from sourcing_load import COPY, DATA

from penstock.server.embedded import EmbeddedServer
from penstock.testing import leaf_pair
from penstock.wire import compiled

PUSH = "raw push"
WRITE = "raw atomic"


def run(bench: Bench) -> None:
    bench.about = "200-byte messages, file storage, from one server to another, both on the same machine."
    compiled.warm()
    pair = bench.enter(leaf_pair(bench.scratch / "nats"))
    far = bench.enter(EmbeddedServer(data=bench.scratch / "far"))
    here, linked = pair.leaf, pair.hub
    count, few = bench.size(300_000, quick=60_000), bench.size(10_000, quick=2_000)
    read_load.fill(here.url, here.port, count, DATA, load.ORIGIN, load.SUBJECT)

    def before() -> None:
        rawnats.fresh_stream(far.port, COPY, ["bench.>"], allow_atomic=True)
        rawnats.fresh_stream(linked.port, COPY, ["copy.>"])
        load.fresh_consumer(here.url)

    def add(name: str, work: Callable[[], Timed], wanted: int, limit: str | None = None) -> None:
        def checked() -> Timed:
            timed = work()
            if (found := rawnats.stored(far.port, COPY) + rawnats.stored(linked.port, COPY)) != wanted:
                raise AssertionError(f"{name}: {found} of {wanted} messages are in the stream")
            return timed

        bench.add(name, checked, before=before, limit=limit)

    add(PUSH, lambda: load.raw_push(here.port, count), 0)
    add("receiver", lambda: load.receiver(here.url, count), 0, PUSH)
    add(WRITE, lambda: rawnats.atomic(far.port, load.SUBJECT, DATA, count), count)
    add("bridge", lambda: load.bridge(here.url, far.url, count), count, WRITE)
    add("server's own", lambda: load.servers_own(linked.url, count), count, WRITE)
    add("nats-py loop", lambda: asyncio.run(load.nats_py(here.url, far.url, few)), few, WRITE)
    bench.goal("receiver", of=PUSH, at_least=0.8)
    bench.goal("receiver to Arrow", of=PUSH, at_least=0.8)
    bench.goal("bridge", of=WRITE, at_least=0.7)
    bench.goal("bridge", of="server's own", at_least=1.0)
    bench.goal("bridge", of="nats-py loop", at_least=10)
