"""`penstock quickstart`: broker, platform, events, status, on one machine and in one command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from penstock.broker import Broker, JetStream, connect
from penstock.cli.common import out, progress, sync
from penstock.cli.home import Home
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

HOME = Path(".penstock")
DEFAULT_EVENTS = 10_000
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""When the simulated cloud opened. Every run simulates its next shift, so that a second run goes on in event time."""
SHIFT = timedelta(hours=6)
CLOCK_SUBJECT = "platform.billing.usage.metered"
BATCH = 500
"""Events in one atomic batch, as far as whole steps fit."""


@click.command()
@click.option("--keep", is_flag=True, help="Leave the broker running, and say how to reach and stop it.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs left in ./.penstock.")
@click.option("--events", type=click.IntRange(min=1), default=DEFAULT_EVENTS, show_default=True, metavar="N",
              help="How many events to simulate.")  # fmt: skip
@sync
async def quickstart(keep: bool, fresh: bool, events: int) -> None:
    """Run the whole story on an embedded broker in ./.penstock.

    Starts nats-server, applies the example platform, publishes simulated events in atomic batches, and shows where
    everything stands. The data stays: a second run goes on where the first stopped.

    \b
    Example:
      penstock quickstart --fresh --events 50000
    """
    home = Home(HOME)
    if fresh:
        home.clear()
    with home.broker(keep) as settings:
        await _story(settings, events)
    if kept := home.kept():
        out.print(f"\nThe broker is running: penstock --servers {kept.url} status\nStop it with: kill {kept.pid}")


async def _story(settings: Settings, events: int) -> None:
    folder = example_dir()
    platform = load(folder / "penstock.yaml", "dev")
    simulator = load_module(folder / "simulator.py", "gpuaas_simulator")
    async with connect(settings) as broker:
        _say("broker", f"nats-server {broker.server_version} at {settings.servers[0]}, data in {HOME}/nats")
        _say("platform", await _apply(broker, platform))
        _say("events", await _publish(settings, broker.jetstream, simulator, events))
        out.print()
        out.print(render(await collect(broker.jetstream)))


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
