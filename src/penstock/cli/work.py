"""`penstock work`: run one worker from the shell, of a group or alone, until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
from click.core import ParameterSource

from penstock import subjects
from penstock.app import App
from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    Context,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    sync,
)
from penstock.cli.following import FOLLOW_EVERY, Following
from penstock.cli.serving import Serving, serve_app, served
from penstock.cli.terminal import log_to_stderr
from penstock.cli.work_flags import Asked, asked, consumer_options, declared_values, work_options
from penstock.consume import handlers
from penstock.consume.handlers import Handler
from penstock.consume.hooks import Hooks
from penstock.consume.metrics import WorkerMetrics
from penstock.jetstream.api import JetStream
from penstock.metrics.endpoint import Health
from penstock.publish.control import Control
from penstock.settings import Settings
from penstock.topology.model import Platform
from penstock.units import counted
from penstock.workers.group.leader import Holder
from penstock.workers.group.overlap import Overlap
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import ConsumerOptions, GroupOptions, WorkerOptions
from penstock.workers.pull.consumer import stream_identity
from penstock.workers.worker import Worker

LOOK_EVERY = 0.2
"""Seconds between two looks whether everything is done."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command(epilog="Exit code 2: messages became dead letters, or partitions did not fit and were not served.")
@click.argument("handler", metavar="MODULE:HANDLER")
@work_options
@json_option
@click.pass_obj
@sync
async def work(context: Context, /, handler: str, as_json: bool, **given: Any) -> int:
    """Run one worker: messages go to a function, partition by partition, each in order.

    HANDLER takes a message and its context. Returning acknowledges the message, raising tries it again later. Start
    the same command several times, anywhere: the group shares its partitions among them, and nothing is lost when one
    comes or goes.

    With --consumer there are no partitions: the function handles the messages of a durable consumer, and takes what
    handlers of an app take.

    \b
    Example:
      penstock work billing.handlers:on_usage --group billing --stream BILLING \\
        --pattern 'platform.billing.{topic}' --dlq dlq.billing --metrics-port 9400
      penstock work billing.handlers:on_usage --group billing        # as penstock.yaml declares it
      penstock work billing.handlers:charge --consumer billing_worker_usage_metered
    """
    ctx = click.get_current_context()
    chosen = {name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    flags = Serving.of(given)
    if name := given["consumer"]:
        app = _app(context)
        with flag_values():
            app.consumer(name, **consumer_options(given, chosen))(handlers.load(handler, takes_context=False))
        return await serve_app(app, (), flags, as_json)
    platform = context.platform() if given["group"] else None
    if platform and (spec := platform.groups.get(given["group"])):
        given |= declared_values(spec, chosen)
    elif not context.file and not context.env:
        platform = None  # a file that is here by chance, and says nothing about this group
    settings = _settings(context, platform)
    with flag_values():
        wanted = asked(handler, given)
    log_to_stderr("%(asctime)s %(message)s", flags.log_level.upper())
    async with _running(settings, wanted, given) as started:
        with served(flags, started.numbers, started.health):
            for line in (*started.waits, *_failures(wanted.worker)):
                err.print(line, markup=False, soft_wrap=True)
            await _until_stopped(started, given)
        found = list(started.numbers())
    _show(found, as_json)
    return EXIT_ATTENTION if any(one.dead_letters or one.left_out for one in found) else EXIT_OK


def _app(context: Context) -> App:
    """An app for a handler on a durable consumer that the platform file declares, or the server has."""
    platform = context.platform()
    settings = _settings(context, platform)
    return App(platform.path if platform else None, context.env if platform else None, settings)


def _settings(context: Context, platform: Platform | None) -> Settings:
    if platform is None:
        return context.settings()
    return context.settings_below_flags(**platform.environment.settings_overrides())


Numbers = Callable[[], Iterable[WorkerMetrics]]


@dataclass(frozen=True, slots=True)
class Running:
    """A worker at work."""

    numbers: Numbers
    done: Callable[[], Awaitable[bool]]
    """Whether everything that is there has been handled."""
    ended: Callable[[], Awaitable[None]]
    """Returns or raises when the worker ends by itself."""
    health: Callable[[], Health]
    waits: tuple[str, ...]
    """What it waits for, and for how long, in words."""


# -- running -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _running(settings: Settings, wanted: Asked, given: dict[str, Any]) -> AsyncIterator[Running]:
    if given["wildcards"]:
        async with _asking(settings) as control:
            wanted.consumer["universe"] = await _universe(control.jetstream, wanted)
    if wanted.group:
        running = _member(settings, wanted, wanted.group, given["overlap"])
    else:
        running = _alone(settings, wanted, given["start"])
    async with running as started:
        yield started


@asynccontextmanager
async def _asking(settings: Settings) -> AsyncIterator[Control]:
    control = await Control.connect(settings)  # connects again by itself
    try:
        yield control
    finally:
        await control.close()


async def _universe(jetstream: JetStream, wanted: Asked) -> frozenset[str]:
    """All subjects that a wildcard may meet: those of the partitions, and whatever else the stream has."""
    info = await jetstream.stream_info(wanted.stream, subjects_filter=subjects.REST)
    return frozenset(info.state.subjects).union(*(partition.subjects for partition in wanted.known))


@asynccontextmanager
async def _member(settings: Settings, wanted: Asked, options: GroupOptions, overlaps: bool) -> AsyncIterator[Running]:
    """A worker of a group."""
    worker = replace(wanted.worker, hooks=Hooks(on_assigned=_TellOnce()))
    async with (
        _overlapping(settings, options.group if overlaps else None, wanted.handler) as handler,
        WorkerGroup(settings, options, handler, consumer=wanted.consumer, worker=worker) as group,
    ):
        err.print(f"worker {group.worker_id} of group {options.group} is working on {options.stream}", markup=False)
        yield Running(group.metrics, group.has_nothing_left, group.until_stopped, group.health, (_first_wait(options),))


class _TellOnce:
    """Says how many partitions a worker gets, the first time."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, partitions: tuple[str, ...]) -> None:
        if not self._told:
            err.print(f"it has {counted(len(partitions), 'partition')}", markup=False)
        self._told = True


def _first_wait(options: GroupOptions) -> str:
    windows = options.windows
    return (
        f"it waits for its partitions: a group that begins assigns them {windows.cold_start:g} s after its last worker "
        f"came (--cold-start), one that runs {windows.planned:g} s after (--planned)"
    )


@asynccontextmanager
async def _overlapping(settings: Settings, group: str | None, handler: Handler) -> AsyncIterator[Handler]:
    """The handler, and around it, if that is asked for, what passes over messages that the old side has handled."""
    if group is None:
        yield handler
        return
    async with Overlap.open(settings, group) as overlap:
        yield overlap.around(handler)


@asynccontextmanager
async def _alone(settings: Settings, wanted: Asked, start: str) -> AsyncIterator[Running]:
    """A worker that has everything to itself."""
    options = ConsumerOptions(stream=wanted.stream, worker_id=wanted.worker_id, **wanted.consumer)
    async with _asking(settings) as control:
        jetstream = control.jetstream
        source = wanted.source(jetstream)
        begins = await _begins(jetstream, options, start)
        async with Worker(settings, options, wanted.handler, options=wanted.worker, begins=begins) as alone:
            following = Following(alone, source, Holder(jetstream, options.stream, options.consumer, source))
            await following.begin()
            found = counted(len(alone.partitions), "partition")
            err.print(f"worker {options.worker_id} is working on {options.stream}, alone, with {found}", markup=False)
            waits = () if wanted.known else (f"it looks for partitions that come every {FOLLOW_EVERY:g} s",)

            async def done() -> bool:
                return not alone.partitions or await nothing_left(alone)

            yield Running(lambda: [alone.metrics], done, following.run, alone.health, waits)


async def _begins(jetstream: JetStream, options: ConsumerOptions, start: str) -> tuple[str, int]:
    """Where partitions begin that the worker never had: behind what is there now, if only what comes is wanted."""
    if start == "all" or options.consumer in await jetstream.consumer_names(options.stream):
        return "", 0
    info = await jetstream.stream_info(options.stream)
    return stream_identity(info), info.state.last_seq


async def nothing_left(worker: Worker | None) -> bool:
    """Whether everything that the worker's consumers have is handled and acknowledged."""
    return worker is not None and await worker.has_nothing_left()


async def _until_stopped(started: Running, given: dict[str, Any]) -> None:
    """Return on a signal, or when all is done and that was asked for. Raises what ended the worker."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(started.ended())]
    if given["until_done"]:
        waiting.append(asyncio.ensure_future(_until_done(started)))
    reporting = asyncio.ensure_future(_report(started.numbers, given["report_every"]))
    try:
        ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in ended:
            one.result()
    finally:
        for one in (*waiting, reporting):
            one.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _until_done(started: Running) -> None:
    while True:
        if await started.done():
            return
        await asyncio.sleep(LOOK_EVERY)


async def _report(numbers: Numbers, every: float) -> None:
    while every:
        await asyncio.sleep(every)
        for one in numbers():
            err.print(_line(one), markup=False)


# -- telling -----------------------------------------------------------------------------------------------------------


def _failures(options: WorkerOptions) -> list[str]:
    """What becomes of a message that fails again and again, where that may surprise."""
    if options.dlq is not None:
        return []
    tries, wait = options.retries.max_deliver, options.retries.backoff[-1]
    return [
        f"no --dlq: a message that has failed {tries} times is not given up. It is tried again every {wait:g} s, and "
        "nothing behind it in its partition is handled meanwhile"
    ]


def _line(one: WorkerMetrics) -> str:
    trouble = [(one.redeliveries, "redelivered"), (one.failures, "failed"), (one.dead_letters, "dead")]
    trouble.append((one.left_out, "partitions left out"))
    shown = "".join(f", {count:,} {what}" for count, what in trouble if count)
    return f"{one.consumer}: {counted(one.done, 'message')} handled of {one.look().partitions} partitions{shown}"


def _show(found: list[WorkerMetrics], as_json: bool) -> None:
    if not as_json:
        for one in found:
            out.print(_line(one), markup=False)
        return
    print_json(
        [
            {
                "worker": one.worker_id,
                "consumer": one.consumer,
                "partitions": one.look().partitions,
                "delivered": one.messages,
                "handled": one.done,
                "redelivered": one.redeliveries,
                "failed": one.failures,
                "dead_letters": one.dead_letters,
                "partitions_left_out": one.left_out,
            }
            for one in found
        ]
    )
