"""`penstock quickstart`: broker, platform, events, status, on one machine and in one command."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import webbrowser
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from penstock.app import App
from penstock.cli.common import Column, out, progress, sync, table
from penstock.cli.home import Home
from penstock.cli.letters_story import repair, show_failures
from penstock.cli.services_story import INSTANCES, run_group, run_services
from penstock.cli.status import render
from penstock.cli.terminal import Text
from penstock.consume import failures
from penstock.errors import NotFound
from penstock.examples import example_dir, load_module
from penstock.jetstream import Broker, JetStream, connect
from penstock.observe.collecting import collect
from penstock.publish import Publisher
from penstock.settings import Settings
from penstock.topology import actual
from penstock.topology import apply as carrying_out
from penstock.topology import plan as planning
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.topology.resource import Desired
from penstock.units import counted

if TYPE_CHECKING:  # Spark takes a second to import
    from penstock.spark.progress import PipelineProgress
    from penstock.spark.runs import PipelineResult

T = TypeVar("T")

HOME = Path(".penstock")
DEFAULT_EVENTS = 10_000
PAGES_PORT = 8222
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""When the simulated cloud opened. Every run simulates its next shift, so that a second run goes on in event time."""
SHIFT = timedelta(hours=6)
CLOCK_SUBJECT = "platform.billing.usage.metered"
SAMPLED = ("usage_hourly", "balance_watch")
"""Pipelines whose first rows are shown."""
STOPPED = "app-runtime-worker"
"""The service that is left stopped, so that there is something to see."""
NEXT = """
What to look at next:
  penstock quickstart --ui           the same, and see it flow in a browser
  penstock quickstart --keep         the same, and the broker stays: it says how to look at it
  penstock init shop                 a project with a handler of your own, and its test, in five minutes
  penstock import                    a platform file from a server that you have"""
KEPT = """
The broker is running. Look at it:
  export PENSTOCK_SERVERS={url}
  penstock ui {file}
  penstock status
  penstock view BILLING
  (cd {folder} && penstock run services:app --service {stopped})   start what is stopped
Stop it with: kill {pid}"""
SHOWN = 40
"""Characters of a value that are shown."""
BATCH = 500
"""Events in one atomic batch, as far as whole steps fit."""


@click.command()
@click.option("--keep", is_flag=True, help="Leave the broker running, and say how to reach and stop it.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs left in ./.penstock.")
@click.option("--events", type=click.IntRange(min=1), default=DEFAULT_EVENTS, show_default=True, metavar="N",
              help="How many events to simulate.")  # fmt: skip
@click.option("--no-spark", is_flag=True, help="Leave out the pipelines, for a machine without Java.")
@click.option("--ui", is_flag=True, help="Then serve the pages of `penstock ui` over it, until Ctrl-C.")
@sync
async def quickstart(keep: bool, fresh: bool, events: int, no_spark: bool, ui: bool) -> None:
    """Run a full demo on an embedded broker in ./.penstock.

    Starts nats-server, applies the example platform, publishes simulated events in atomic batches, has the services
    handle them on their declared consumers, lets a handler fail on some, shares a stream among a group of workers, runs
    the Spark pipelines, replays what failed after its cause is fixed, and shows where everything stands. The data
    stays: a second run goes on where the first stopped.

    \b
    Example:
      penstock quickstart --fresh --events 50000
    """
    home = Home(HOME)
    with home.claimed():
        if fresh:
            home.clear()
        with home.broker(keep) as settings:
            with _failures_told_later():
                await _story(settings, events, no_spark)
            if ui:
                await _show_pages(settings)
                return
    if kept := home.kept():
        folder = example_dir()
        names = {"folder": folder, "file": folder / "penstock.yaml", "stopped": STOPPED}
        out.print(KEPT.format(url=kept.url, pid=kept.pid, **names), markup=False, soft_wrap=True)
    else:
        out.print(NEXT, markup=False)


async def _show_pages(settings: Settings) -> None:
    """Serve the pages over what the story left, with actions, since it is only an example."""
    from penstock.ui.access import Access
    from penstock.ui.server import Listen, serve

    def ready(url: str) -> None:
        out.print(f"\nLook at it: {url}  (Ctrl-C stops)", soft_wrap=True)
        webbrowser.open(url)

    platform = replace(load(example_dir() / "penstock.yaml", "dev"), history=timedelta(days=1))
    await serve(settings, platform, Listen(port=PAGES_PORT), Access(actions=True), ready)


async def _story(settings: Settings, events: int, no_spark: bool) -> None:
    folder = example_dir()
    platform = load(folder / "penstock.yaml", "dev")
    simulator = load_module(folder / "simulator.py", "gpuaas_simulator")
    async with connect(settings) as broker:
        _say("broker", f"nats-server {broker.server_version} at {settings.servers[0]}, data in {HOME}/nats")
        _say("platform", await _apply(broker, platform))
        _say("events", await _publish(settings, broker.jetstream, simulator, events))
        services = load_module(folder / "services.py", "gpuaas_services")
        services.app.settings = settings
        names = {one.service for one in platform.consumers.values() if one.service} - {STOPPED}
        _say("services", await _serve(services.app, names))
        telemetry = load(folder / "telemetry.yaml", "dev")
        await _apply(broker, telemetry)
        await run_group(settings, load_module(folder / "telemetry.py", "gpuaas_telemetry"), _say)
        await show_failures(settings, services, _say)
        if not no_spark:
            _show_results(await _run_pipelines(platform, settings))
        await repair(settings, services, names, _say)
        out.print()
        out.print(render((await collect(broker.jetstream)).of_platform(platform.name)))
        wait = ": its messages wait, as long as their streams keep them."
        out.print(Text.assemble("\n", (f"{STOPPED} was not started on purpose", "red"), wait))


@contextmanager
def _failures_told_later() -> Iterator[None]:
    """Leave out warnings about failed tries: what fails here is told in a chapter of its own."""
    log = logging.getLogger(failures.__name__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


async def _serve(app: App, names: Collection[str]) -> str:
    """Run services, two instances each, until their consumers have nothing left."""
    handlers = await run_services(app, names)
    events, consumers = sum(one.counts.handled for one in handlers), len({one.consumer for one in handlers})
    who = f"{len(names)} services, {INSTANCES} instances each"
    return f"{who}, handled {events:,} events on {consumers} declared consumers; {STOPPED} was not started"


async def _run_pipelines(platform: Platform, settings: Settings) -> list[PipelineResult]:
    """Run every pipeline over what is there, in one Spark that ends with it."""
    from penstock.spark.runs import run_all

    base = Path.cwd() / HOME
    with progress() as bar:
        task = bar.add_task("starting Spark", total=len(platform.pipelines))
        done: set[str] = set()

        def show(seen: PipelineProgress) -> None:
            done.add(seen.pipeline)
            words = f"{seen.pipeline}: {seen.rows_read:,} rows read"
            bar.update(task, description=words, completed=len(done) - 1)

        results = await _stoppable(lambda stop: run_all(platform, settings, base, show, stop=stop))
    for result in results:
        if result.error:
            raise result.error
    return results


async def _stoppable(work: Callable[[threading.Event], T]) -> T:
    """Do the work in a thread. On an interrupt it is told to stop, and we wait: it needs the broker until then."""
    stop = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(running, return_exceptions=True)
        raise


def _show_results(results: Sequence[PipelineResult]) -> None:
    """What the pipelines did, and a few rows of what they computed."""
    _say("pipelines", f"{counted(len(results), 'pipeline')} on Spark, results in {HOME}/lake")
    out.print()
    out.print(_pipelines_table(results))
    for result in results:
        if result.name in SAMPLED and (rows := result.sample(3)):
            cells = ([_cell(value) for value in row.values()] for row in rows)
            out.print()
            out.print(table(f"{result.name}, first rows", list(rows[0]), cells))


def _pipelines_table(results: Sequence[PipelineResult]) -> Table:
    columns: list[Column] = ["pipeline", ("read", "right"), ("written", "right"), ("bad", "right"), "wrote to"]
    rows = (
        (r.name, f"{r.rows_read:,}", f"{r.rows_written:,}", f"{r.progress.bad_records:,}", _places(r)) for r in results
    )
    return table(f"Pipelines ({len(results)})", columns, rows)


def _places(result: PipelineResult) -> str:
    here = f"file://{Path.cwd()}/"
    return ", ".join(place.removeprefix(here) for place in result.outputs)


def _cell(value: Any) -> str:
    if isinstance(value, dict):  # a window of time
        return " – ".join(_cell(part) for part in value.values())
    text = f"{value:%Y-%m-%d %H:%M}" if isinstance(value, datetime) else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _say(step: str, text: str) -> None:
    out.print(Text.assemble(("✓", "bold green"), " ", (f"{step:<9}", "bold"), f" {text}"), soft_wrap=True)


async def _apply(broker: Broker, platform: Platform) -> str:
    """Make the server as the example declares it."""
    desired = Desired.of(platform)
    plan = planning.plan(desired, await actual.read(broker.jetstream, desired))
    done = await carrying_out.apply(broker.jetstream, plan)
    declared = f"{len(platform.streams)} streams and {len(platform.consumers)} durable consumers"
    return f"{declared} as declared ({counted(len(done), 'change')})"


async def _publish(settings: Settings, js: JetStream, simulator: ModuleType, events: int) -> str:
    """Simulate the next shift and store it; what belongs together lies in one atomic batch."""
    shift = await _next_shift(js)
    steps = simulator.simulate(seed=shift, start=EPOCH + SHIFT * shift, span=SHIFT, events=events)
    stored = batches = 0
    async with await Publisher.connect(settings) as publisher:
        with progress() as bar:
            task = bar.add_task("publishing", total=events)
            for group in _whole_steps(steps, BATCH):
                subjects, payloads = [event.subject for event in group], [event.encode() for event in group]
                ack = await publisher.publish_batch(group[0].stream, subjects, payloads)
                stored, batches = stored + ack.count, batches + 1
                bar.advance(task, ack.count)
    began = f"{EPOCH + SHIFT * shift:%Y-%m-%d %H:%M}"
    return f"{stored:,} of the six hours from {began} (simulated), stored in {batches} atomic batches"


async def _next_shift(js: JetStream) -> int:
    """How many shifts earlier runs have simulated."""
    try:
        last = await js.get_message("BILLING", last_of=CLOCK_SUBJECT)
    except NotFound:
        return 0
    occurred = datetime.fromisoformat(json.loads(last.data)["occurred_at"])
    return (occurred - EPOCH) // SHIFT + 1


def _whole_steps(steps: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The events of one stream's steps in groups of at most `size`; a step is never divided."""
    groups: dict[str, list[Any]] = {}
    for step in steps:
        group = groups.setdefault(step.stream, [])
        if len(group) + len(step.events) > size:
            yield group
            group = groups[step.stream] = []
        group += step.events
    yield from (group for group in groups.values() if group)
