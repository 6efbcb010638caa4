"""`penstock work`: run one worker from the shell, of a group or alone, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import click

from penstock import subjects
from penstock.broker.jetstream import JetStream
from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, Context, err, flag_values, json_option, out, print_json, sync
from penstock.cli.work_flags import Asked, asked, work_options
from penstock.errors import PenstockError
from penstock.settings import Settings
from penstock.units import counted
from penstock.wire import aio
from penstock.workers import metrics
from penstock.workers.group import WorkerGroup
from penstock.workers.group_options import GroupOptions
from penstock.workers.handlers import Handler
from penstock.workers.metrics import WorkerMetrics
from penstock.workers.options import ConsumerOptions, Positions
from penstock.workers.overlap import Overlap
from penstock.workers.partitions import Partition
from penstock.workers.sources import PartitionSource
from penstock.workers.worker import Worker

LOOK_EVERY = 0.2
"""Seconds between two looks whether everything is done."""
FOLLOW_EVERY = 5.0
"""Seconds between two looks at the partitions of a worker that is alone."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command(epilog="Exit code 2 says that messages became dead letters.")
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

    \b
    Example:
      penstock work billing.handlers:on_usage --group billing --stream BILLING \\
        --pattern 'platform.billing.{topic}' --dlq dlq.billing --metrics-port 9400
    """
    settings = context.settings()
    with flag_values():
        wanted = asked(handler, given)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    async with _running(settings, wanted, given) as started:
        with _serving(given["metrics_port"], started.numbers):
            await _until_stopped(started, given)
        found = list(started.numbers())
    _show(found, as_json)
    return EXIT_ATTENTION if any(one.dead_letters for one in found) else EXIT_OK


Numbers = Callable[[], Iterable[WorkerMetrics]]


@dataclass(frozen=True, slots=True)
class Running:
    """A worker at work."""

    numbers: Numbers
    done: Callable[[], Awaitable[bool]]
    """Whether everything that is there has been handled."""
    ended: Callable[[], Awaitable[None]]
    """Returns or raises when the worker ends by itself."""


# -- running -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _running(settings: Settings, wanted: Asked, given: dict[str, Any]) -> AsyncIterator[Running]:
    if given["wildcards"]:
        async with _asking(settings) as jetstream:
            wanted.consumer["universe"] = await _universe(jetstream, wanted)
    if wanted.group:
        running = _member(settings, wanted, wanted.group, given["overlap"])
    else:
        running = _alone(settings, wanted, given["start"])
    async with running as started:
        yield started


@asynccontextmanager
async def _asking(settings: Settings) -> AsyncIterator[JetStream]:
    async with aio.Connection(settings, name="penstock work") as connection:
        await connection.reconnect()
        yield JetStream(connection.requester(), settings.domain, settings.timeout)


async def _universe(jetstream: JetStream, wanted: Asked) -> frozenset[str]:
    """All subjects that a wildcard may meet: those of the partitions, and whatever else the stream has."""
    info = await jetstream.stream_info(wanted.stream, subjects_filter=subjects.REST)
    return frozenset(info.state.subjects).union(*(partition.subjects for partition in wanted.known))


@asynccontextmanager
async def _member(settings: Settings, wanted: Asked, options: GroupOptions, overlaps: bool) -> AsyncIterator[Running]:
    """A worker of a group."""
    async with (
        _overlapping(settings, options.group if overlaps else None, wanted.handler) as handler,
        WorkerGroup(settings, options, handler, consumer=wanted.consumer, worker=wanted.worker) as group,
    ):
        err.print(f"worker {group.worker_id} of group {options.group} is working on {options.stream}", markup=False)
        yield Running(group.metrics, lambda: nothing_left(group.worker), group.until_stopped)


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
    async with _asking(settings) as jetstream:
        source = wanted.source(jetstream)
        positions = await _positions(jetstream, options, start)
        async with Worker(settings, options, wanted.handler, options=wanted.worker, positions=positions) as alone:
            await alone.update(await source.partitions())
            err.print(f"worker {options.worker_id} is working on {options.stream}, alone", markup=False)

            async def done() -> bool:
                return not alone.partitions or await nothing_left(alone)

            yield Running(lambda: [alone.metrics], done, lambda: _follow(alone, source))


async def _positions(jetstream: JetStream, options: ConsumerOptions, start: str) -> Positions | None:
    """Where partitions begin that the worker never had: behind what is there now, if only what comes is wanted."""
    if start == "all" or options.consumer in await jetstream.consumer_names(options.stream):
        return None
    end = (await jetstream.stream_info(options.stream)).state.last_seq

    async def at_the_end(partitions: Collection[Partition]) -> Mapping[str, int]:
        return {partition.id: end for partition in partitions}

    return at_the_end


async def _follow(alone: Worker, source: PartitionSource) -> None:
    """Take up partitions that come, and drop those that go. Raises what ended the worker."""
    while True:
        await asyncio.sleep(FOLLOW_EVERY)
        if alone.failure:
            raise alone.failure
        try:
            await alone.update(await source.partitions())
        except PenstockError as exc:
            err.print(f"the partitions stay as they are: {exc}", markup=False)


async def nothing_left(worker: Worker | None) -> bool:
    """Whether everything that the worker's consumers have is handled and acknowledged."""
    if worker is None or not worker.partitions or worker.behind:
        return False
    infos = (await worker.consumer.present()).values()
    return bool(infos) and not any(info.unprocessed for info in infos)


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


@contextmanager
def _serving(port: int | None, numbers: Numbers) -> Iterator[None]:
    if port is None:
        yield
        return
    chosen, end = metrics.serve(port, numbers)
    err.print(f"metrics: http://127.0.0.1:{chosen}/metrics", markup=False)
    try:
        yield
    finally:
        end()


# -- telling -----------------------------------------------------------------------------------------------------------


def _line(one: WorkerMetrics) -> str:
    trouble = [(one.redeliveries, "redelivered"), (one.failures, "failed"), (one.dead_letters, "dead")]
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
            }
            for one in found
        ]
    )
