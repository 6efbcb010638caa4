"""What `penstock run` and `penstock work` share: run the handlers of an app, watch them, and tell what they did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import click

from penstock.app import App
from penstock.app.app import Running, stopped_by_signals
from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, Read, err, out, print_json, table
from penstock.cli.terminal import log_to_stderr
from penstock.consume import metrics
from penstock.consume.metrics import WorkerMetrics
from penstock.errors import PenstockError
from penstock.metrics.endpoint import Health
from penstock.units import counted, parse_duration

LOOK_EVERY = 0.2
"""Seconds between two looks whether everything is done."""


def seconds(text: str) -> float:
    return parse_duration(text).total_seconds()


DURATION = Read("duration", seconds)

SERVING_OPTIONS = [
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning",
                 show_default=True, help="What is logged on stderr."),
    click.option("--metrics-port", type=click.IntRange(0, 65535), metavar="PORT",
                 help="Serve /metrics, /healthz and /readyz; 0: any."),
    click.option("--metrics-address", default="127.0.0.1", show_default=True, metavar="ADDRESS",
                 help="Where to serve them; 0.0.0.0 for every interface."),
    click.option("--report-every", type=DURATION, default="10s", show_default=True, metavar="DURATION",
                 help="A line on stderr; 0: none."),
    click.option("--until-done", is_flag=True, help="End when everything that is there has been handled."),
]  # fmt: skip
"""How handlers are run and watched, whatever they handle."""


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(SERVING_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Serving:
    """The values of these flags."""

    log_level: str
    metrics_port: int | None
    metrics_address: str
    report_every: float
    until_done: bool

    @classmethod
    def of(cls, given: dict[str, Any]) -> Serving:
        return cls(**{name: given[name] for name in cls.__slots__})


async def serve_app(app: App, services: Collection[str], flags: Serving, as_json: bool) -> int:
    """Run the handlers until SIGINT or SIGTERM, and show what they did. Returns the exit code."""
    log_to_stderr("%(asctime)s %(message)s", flags.log_level.upper())
    handlers: list[Running] = []

    def began(running: list[Running]) -> None:
        handlers.extend(running)
        names = ", ".join(one.consumer for one in running)
        err.print(f"handling {names}; Ctrl-C stops", markup=False)

    def stopping() -> None:
        err.print("finishing what runs; the same signal again ends it at once", markup=False)

    with (
        stopped_by_signals(stopping) as stop,
        served(flags, lambda: chain.from_iterable(one.metrics() for one in handlers), lambda: _health(handlers)),
    ):
        besides = [asyncio.ensure_future(_report(handlers, flags.report_every))]
        if flags.until_done:
            besides.append(asyncio.ensure_future(_until_done(handlers, stop)))
        try:
            await app.serve(stop, services, began)
        finally:
            for one in besides:
                one.cancel()
    _show(handlers, as_json)
    return EXIT_ATTENTION if any(one.counts.dead for one in handlers) else EXIT_OK


@contextmanager
def served(
    flags: Serving, numbers: Callable[[], Iterable[WorkerMetrics]], health: Callable[[], Health]
) -> Iterator[None]:
    """Answer /metrics, /healthz and /readyz, if that is asked for."""
    if flags.metrics_port is None:
        yield
        return
    address = flags.metrics_address
    chosen, end = metrics.serve(flags.metrics_port, numbers, address, health)
    shown = f"[{address}]" if ":" in address else address
    err.print(f"metrics: http://{shown}:{chosen}/metrics", markup=False)
    try:
        yield
    finally:
        end()


def _health(handlers: list[Running]) -> Health:
    """Of all together: broken if one is, waiting while one waits."""
    if not handlers:
        return Health(waiting="has not started yet")
    found = [(one.consumer, one.health()) for one in handlers]
    broken = [f"{name}: {health.broken}" for name, health in found if health.broken]
    waiting = [f"{name}: {health.waiting}" for name, health in found if health.waiting]
    return Health("; ".join(broken), "; ".join(waiting))


async def _report(handlers: list[Running], every: float) -> None:
    while every:
        await asyncio.sleep(every)
        counts = [one.counts for one in handlers]
        trouble = [(sum(one.failed for one in counts), "failed tries"), (sum(one.dead for one in counts), "dead")]
        shown = "".join(f", {count:,} {what}" for count, what in trouble if count)
        err.print(f"{counted(sum(one.handled for one in counts), 'message')} handled{shown}", markup=False)


async def _until_done(handlers: list[Running], stop: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY)
        with suppress(PenstockError):  # the server is away, or the connection not open yet
            if handlers and all([await one.done() for one in handlers]):
                stop.set()
                return


def _show(handlers: list[Running], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "consumers": [
                    {
                        "stream": one.stream,
                        "consumer": one.consumer,
                        "handled": one.counts.handled,
                        "failed_tries": one.counts.failed,
                        "dead_letters": one.counts.dead,
                    }
                    for one in handlers
                ]
            }
        )
        return
    numbers = [(heading, "right") for heading in ("handled", "failed tries", "dead letters")]
    columns: list[str | tuple[str, str]] = ["consumer", "stream", *numbers]
    rows = [(one.consumer, one.stream, one.counts.handled, one.counts.failed, one.counts.dead) for one in handlers]
    out.print(table(None, columns, rows))
