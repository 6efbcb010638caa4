"""`penstock quickstart`: broker, platform, events, status, on one machine and in one command."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from penstock.broker import Broker, JetStream, connect
from penstock.cli.common import Column, out, progress, sync, table
from penstock.cli.home import Home
from penstock.cli.letters_story import LettersStory
from penstock.cli.services_story import run_services
from penstock.cli.status import render
from penstock.errors import NotFound
from penstock.examples import example_dir, load_module
from penstock.observe.status import collect
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
    from penstock.observe.pipelines import Progress
    from penstock.spark.runs import PipelineResult

T = TypeVar("T")

HOME = Path(".penstock")
DEFAULT_EVENTS = 10_000
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""When the simulated cloud opened. Every run simulates its next shift, so that a second run goes on in event time."""
SHIFT = timedelta(hours=6)
CLOCK_SUBJECT = "platform.billing.usage.metered"
SAMPLED = ("usage_hourly", "balance_watch")
"""Pipelines whose first rows are shown."""
BATCH = 500
"""Events in one atomic batch, as far as whole steps fit."""


@click.command()
@click.option("--keep", is_flag=True, help="Leave the broker running, and say how to reach and stop it.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs left in ./.penstock.")
@click.option("--events", type=click.IntRange(min=1), default=DEFAULT_EVENTS, show_default=True, metavar="N",
              help="How many events to simulate.")  # fmt: skip
@click.option("--no-spark", is_flag=True, help="Leave out the pipelines, for a machine without Java.")
@sync
async def quickstart(keep: bool, fresh: bool, events: int, no_spark: bool) -> None:
    """Run the whole story on an embedded broker in ./.penstock.

    Starts nats-server, applies the example platform, publishes simulated events in atomic batches, has the services'
    workers handle them, lets a handler fail on some, runs the Spark pipelines, replays what failed after its cause is
    fixed, and shows where everything stands. The data stays: a second run goes on where the first stopped.

    \b
    Example:
      penstock quickstart --fresh --events 50000
    """
    home = Home(HOME)
    with home.claimed():
        if fresh:
            home.clear()
        with home.broker(keep) as settings:
            await _story(settings, events, no_spark)
    if kept := home.kept():
        out.print(f"\nThe broker is running: penstock --servers {kept.url} status\nStop it with: kill {kept.pid}")


async def _story(settings: Settings, events: int, no_spark: bool) -> None:
    folder = example_dir()
    platform = load(folder / "penstock.yaml", "dev")
    simulator = load_module(folder / "simulator.py", "gpuaas_simulator")
    async with connect(settings) as broker:
        _say("broker", f"nats-server {broker.server_version} at {settings.servers[0]}, data in {HOME}/nats")
        _say("platform", await _apply(broker, platform))
        _say("events", await _publish(settings, broker.jetstream, simulator, events))
        await run_services(settings, load_module(folder / "services.py", "gpuaas_services"), _say)
        letters = LettersStory(settings, load_module(folder / "handlers.py", "gpuaas_handlers"), _say)
        await letters.fail()
        if not no_spark:
            _show_results(await _run_pipelines(platform, settings))
        await letters.repair()
        out.print()
        out.print(render((await collect(broker.jetstream)).of_platform(platform.name)))


async def _run_pipelines(platform: Platform, settings: Settings) -> list[PipelineResult]:
    """Run every pipeline over what is there, in one Spark that ends with it."""
    from penstock.spark.runs import run_all

    base = Path.cwd() / HOME
    with progress() as bar:
        task = bar.add_task("starting Spark", total=len(platform.pipelines))
        done: set[str] = set()

        def show(seen: Progress) -> None:
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
    return f"{value:%Y-%m-%d %H:%M}" if isinstance(value, datetime) else str(value)


def _say(step: str, text: str) -> None:
    out.print(f"[bold green]✓[/] [bold]{step:<9}[/] {text}", soft_wrap=True)


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
