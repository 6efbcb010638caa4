"""A server with something on every page of `penstock ui`, the pages over it in a browser, and the commands.

There is a group with uneven lag, handoffs and a worker that has died; dead letters of several causes, one replayed and
one discarded; messages that were given up on without a letter; pipelines that run, failed and never ran; a sink's
micro-batch and a bridge.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Page, sync_playwright
from tests.integration.ui.test_proof import bridge_all, write_batch
from tests.integration.workers.test_watching import Held
from tests.support.commands import ended, invoked
from tests.support.pages_served import chromium, served
from tests.support.pulls import Pull
from tests.support.shown import Figure, Row, differences, rows, seen_at
from tests.support.streams import Streams

import penstock
from penstock.deadletter.waiting import given_up
from penstock.jetstream import JetStream, connect
from penstock.observe.snapshot import Observer
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.spark.progress import (
    BUCKET,
    BUCKET_CONFIG,
    FAILED,
    FINISHED,
    RUNNING,
    InputRange,
    MicroBatch,
    PipelineProgress,
)
from penstock.testing import eventually, eventually_async, stream_messages
from penstock.topology.load import load
from penstock.wire import blocking
from penstock.wire.blocking import run
from penstock.workers.group.overview import look

T = TypeVar("T")
SOON = 15.0
"""Seconds in which a page and a command must have seen the same."""
Json = Any

FILE = """
name: shop
environments: {dev: {servers: ["%s"]}}
history: 1d
streams:
  ORDERS: {subjects: [orders.>], retention: workqueue, max_age: 1d, max_bytes: 64KiB, allow_direct: true,
           allow_atomic: true}
  EVENTS: {subjects: [events.>], max_age: 1d, allow_direct: true}
  DLQ: {subjects: [dlq.>], max_age: 1d, allow_direct: true}
consumers:
  bill: {stream: ORDERS, filter: orders.paid, service: billing, ack_wait: 30s, max_deliver: 1, deliver: all,
         dlq: dlq.orders.paid, purpose: writes bills}
  ship: {stream: ORDERS, filter: orders.sent, service: shipping, ack_wait: 30s, max_deliver: 1, deliver: all,
         dlq: dlq.orders.sent, purpose: ships}
  pack: {stream: ORDERS, filter: orders.packed, service: shipping, ack_wait: 30s, max_deliver: 3, deliver: all,
         dlq: dlq.orders.packed, purpose: packs}
services:
  shop: {publishes: [orders.>]}
pipelines:
  rollup: {from: {stream: EVENTS, consumer: rollup}, to: [{format: console}]}
  clean: {from: {stream: EVENTS, consumer: clean}, to: [{format: console}]}
  later: {from: {stream: EVENTS}, to: [{format: console}]}
"""


@dataclass(frozen=True, slots=True)
class Shop:
    """A server with something on every page, the pages, and the commands."""

    server: EmbeddedServer
    file: Path
    tab: Page
    thread: ThreadPoolExecutor
    """Runs commands: this thread has the browser's event loop."""

    def told(self, *command: str | Path) -> Json:
        """What a command prints with `--json`."""
        return json.loads(self.printed(*command, "--json"))

    def printed(self, *command: str | Path) -> str:
        words = map(str, ("--servers", self.server.url, *command))
        return self.thread.submit(invoked, *words).result(60)[1]

    def pipelines(self) -> Json:
        return self.told("pipeline", "status", "--file", self.file)["pipelines"]

    def offered(self) -> str:
        """What the command prints that the page of messages offers for copying."""
        name, *words = shlex.split(self.tab.locator("#copy-view").inner_text())
        assert name == "penstock"
        return self.thread.submit(invoked, *words).result(60)[1]

    def lags(self, group: str) -> dict[str, int]:
        """How far each partition is behind."""

        async def measured() -> dict[str, int]:
            control = await Control.connect(self.server.settings)
            observer = Observer(control)
            found = (await observer.look()).group(group)
            assert found
            lags = await observer.groups.lags(found)
            await control.close()
            return {name: one.messages for name, one in lags.items()}

        return self.thread.submit(lambda: asyncio.run(measured())).result(60)

    def asked(self, question: Callable[[JetStream], Awaitable[T]]) -> T:
        """What the model says about the server."""

        async def answered() -> T:
            async with connect(self.server.settings) as broker:
                return await question(broker.jetstream)

        return self.thread.submit(lambda: asyncio.run(answered())).result(60)

    def same(self, path: str, compare: Callable[[], list[str]]) -> None:
        """Open a page and compare it, until both have seen the same moment."""

        def equal() -> bool:
            self.tab.goto(path)
            found = compare()
            assert not found, "\n".join(found)
            return True

        eventually(equal, SOON, f"{path} to show what is told")

    def rows(self, selector: str) -> list[Row]:
        return rows(self.tab, selector)

    def differs(self, selector: str, documents: Json, columns: Mapping[str, Figure], key: str = "") -> list[str]:
        """Where rows or facts of the page differ from documents."""
        return differences(rows(self.tab, selector), documents, columns, seen_at(self.tab), key)


@contextmanager
def busy_shop(server: EmbeddedServer, folder: Path) -> Iterator[Shop]:
    """Make all of it, and open a browser."""
    file = folder / "penstock.yaml"
    file.write_text(FILE % server.url)
    ended("apply", file)
    with blocking.connect(server.settings) as connection:
        streams = Streams(connection)
        fill(streams)
        record_pipelines(streams)
        write_batch(server, streams)
        bridge_all(server, streams)
    asyncio.run(take(server))
    asyncio.run(bury(server))
    settle_one(server)
    with (
        group_at_work(server),
        served(server.settings, load(file, "dev")) as pages,
        sync_playwright() as playwright,
        ThreadPoolExecutor(1) as thread,
    ):
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield Shop(server, file, browser.new_page(base_url=pages.url, viewport={"width": 1280, "height": 900}), thread)
        browser.close()


def fill(streams: Streams) -> None:
    """Messages, lag, something in flight, something delivered again, and a consumer that is paused."""
    streams.publish("orders.paid", [b'{"price": -1}', b'{"price": -2}', b"no price"])
    streams.publish("orders.sent", [b'{"to": "nowhere"}'])
    streams.number("orders.packed", 1, 1_234)
    streams.number("events.a", 1, 2_400)
    streams.publish("events.b", [b"<script>alert(1)</script>"], Kind="odd")
    streams.publish("events.b", [b"\x00\xff", b'{"deep": {"list": [1, 2.5, null, "\xc3\xbc"]}}'])
    run(streams.api.pause_consumer("ORDERS", "pack", timedelta(hours=1)))
    config = {"ack_policy": "explicit", "max_ack_pending": 500}
    for name in ("rollup", "clean"):
        run(streams.api.create_consumer("EVENTS", {"durable_name": name, **config}))
    lost = {"durable_name": "lost", "max_deliver": 1, "ack_wait": 200_000_000, "metadata": {"penstock.dlq": "dlq.lost"}}
    run(streams.api.create_consumer("EVENTS", {**lost, **config, "filter_subject": "events.b"}))


def record_pipelines(streams: Streams) -> None:
    """One that runs, one that has failed, and one that is not declared."""
    run(streams.api.create_stream(BUCKET_CONFIG))
    now = datetime.now(UTC)
    batches = (
        MicroBatch(7, now - timedelta(seconds=9), 2.0, 10, inputs=(InputRange("EVENTS", None, 10),)),
        MicroBatch(8, now, 0.25, 1_990, state_rows=1_033, late_rows=2, inputs=(InputRange("EVENTS", 11, 2_000),)),
    )
    common: dict[str, Any] = {"streams": ("EVENTS",), "host": "h", "started": now}
    for record in (
        PipelineProgress(
            pipeline="rollup", state=RUNNING, consumer="rollup", pid=11, heard=now + timedelta(hours=1), query="query",
            batch=8, batch_ended=now, batch_seconds=0.25, batch_rows=1_990, rows_per_second=7_960.0, state_rows=1_033,
            state_bytes=70_000, late_rows=2, rows_read=2_000, rows_written=1_500, bad_records=1_001, batches=2,
            recent=batches, ui="http://driver:4040", **common,
        ),
        PipelineProgress(pipeline="clean", state=FAILED, consumer="clean", pid=12, heard=now, error="a\nb", **common),
        PipelineProgress(pipeline="stray", state=FINISHED, consumer="stray", pid=13, heard=now, batch=0, **common),
    ):  # fmt: skip
        streams.connection.request(f"$KV.{BUCKET}.{record.pipeline}", json.dumps(record.json()).encode())


async def take(server: EmbeddedServer) -> None:
    """Messages are delivered, and one of them again; of others a consumer is given up on."""
    async with connect(server.settings) as broker:
        ours, theirs = (Pull(broker.connection, "EVENTS", name, None, 3) for name in ("clean", "lost"))
        first, *_ = await ours.fetch(10)
        await broker.connection.publish(first.reply, b"-NAK")
        while not (await broker.jetstream.consumer_info("EVENTS", "clean")).redelivered:
            await ours.fetch(10)
        await theirs.fetch(10)
        await theirs.fetch(0.5)  # the server gives up when somebody asks for more
        await eventually_async(lambda: given_up(broker.jetstream), 10, "the server to tell what it has given up")
        await ours.close()
        await theirs.close()


async def bury(server: EmbeddedServer) -> None:
    """Handlers give up for several reasons, and once more on what was replayed."""
    app, stop = penstock.App(settings=server.settings), asyncio.Event()

    @app.consumer("bill", stream="ORDERS", dlq="dlq.orders.paid")
    async def bill(message: penstock.Message) -> None:
        raise penstock.Reject(f"the price {json.loads(message.data)['price']} is not positive")

    @app.consumer("ship", stream="ORDERS", dlq="dlq.orders.sent")
    async def ship(message: penstock.Message) -> None:
        raise penstock.Reject("nowhere to go")

    async def stored(count: int) -> None:
        await eventually_async(lambda: len(stream_messages(server.settings, "DLQ")) == count, 30, "the letters")

    serving = asyncio.create_task(app.serve(stop))
    await stored(4)
    command = ("--servers", server.url, "dlq", "replay", "--consumer", "ship", "--reason", "there is an address now")
    await asyncio.to_thread(invoked, *command)
    await stored(4)
    stop.set()
    await serving


def settle_one(server: EmbeddedServer) -> None:
    """A letter is discarded, and new messages wait."""
    ended("--servers", server.url, "dlq", "discard", "--error", "JSONDecodeError", "--reason", "free", "--yes")
    with blocking.connect(server.settings) as connection:
        Streams(connection).number("orders.paid", 1, 12)


@contextmanager
def group_at_work(server: EmbeddedServer) -> Iterator[None]:
    """A group in a thread of its own: handlers that do not end, a worker that has died, and one that has just come."""
    stop, ready = threading.Event(), threading.Event()

    async def work() -> None:
        control = await Control.connect(server.settings)
        held = Held(server, control)
        await held.prepare()
        dead = (await held.join(ttl=8.0), await held.join(ttl=8.0), await held.join(ttl=8.0))[-1]
        await held.shared(2, 2, 2)
        await held.crash(dead)
        for place in range(6):
            await held.publish(f"p{place}", 3 * place + 1)
        await held.join(ttl=8.0)
        await eventually_async(lambda: _moves(control), 30, "partitions to move")
        ready.set()
        await asyncio.to_thread(stop.wait)
        held.free.set()
        await asyncio.gather(*(group.stop() for group in held.groups))
        await control.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    eventually(lambda: ready.is_set() or not thread.is_alive(), 60, "the group to be at work")
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


async def _moves(control: Control) -> bool:
    return bool((await look(control, "g")).moves)
