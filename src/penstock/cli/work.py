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

from penstock.broker.jetstream import JetStream
from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, Context, err, flag_values, json_option, out, print_json, sync
from penstock.errors import ConfigError, PenstockError
from penstock.settings import Settings
from penstock.units import counted, parse_duration
from penstock.wire import aio
from penstock.workers import handlers, metrics
from penstock.workers.group import WorkerGroup
from penstock.workers.group_options import GroupOptions
from penstock.workers.handlers import Handler
from penstock.workers.identity import new_instance
from penstock.workers.metrics import WorkerMetrics
from penstock.workers.options import ConsumerOptions, Positions, WorkerOptions
from penstock.workers.overlap import Overlap
from penstock.workers.partitions import Partition, SubjectPattern
from penstock.workers.sources import Hashed, InBucket, Listed, PartitionSource, SeenInStream
from penstock.workers.verdicts import BACKOFF, MAX_DELIVER, Retries
from penstock.workers.worker import Worker

LOOK_EVERY = 0.2
"""Seconds between two looks whether everything is done."""
FOLLOW_EVERY = 5.0
"""Seconds between two looks at the partitions of a worker that is alone."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

OPTIONS = [
    click.option("--stream", required=True, metavar="NAME", help="The stream to work on."),
    click.option("--group", metavar="NAME", help="The group that shares the partitions."),
    click.option("--alone", "worker_id", metavar="ID", help="No group: all partitions are this worker's."),
    click.option("--pattern", metavar="PATTERN", help="Subjects with the partition in them: 'dc.{tool}.completion'."),
    click.option("--partition", "listed", multiple=True, metavar="ID=SUBJECT", help="A partition; repeatable."),
    click.option("--hashed", type=click.IntRange(1), metavar="N", help="N partitions; {partition} in the pattern."),
    click.option("--in-bucket", is_flag=True, help="The partitions in the group's bucket, as a migration lists them."),
    click.option("--overlap", is_flag=True, help="Pass over what old consumers handle: see `group migrate`."),
    click.option("--start", type=click.Choice(["all", "new"]), default="all", show_default=True,
                 help="Where a partition begins that nobody ever handled."),
    click.option("--dlq", metavar="SUBJECT", help="Where messages go that are given up."),
    click.option("--max-deliver", type=click.IntRange(1), default=MAX_DELIVER, show_default=True, metavar="N",
                 help="Tries of a message."),
    click.option("--backoff", default=",".join(f"{s:g}s" for s in BACKOFF), show_default=True, metavar="DURATIONS",
                 help="Waits between tries; the last one repeats."),
    click.option("--ack-wait", default="30s", show_default=True, metavar="DURATION",
                 help="When the server delivers again what got no answer."),
    click.option("--max-ack-pending", type=click.IntRange(1), default=500, show_default=True, metavar="N",
                 help="Messages out at a time."),
    click.option("--max-subjects", type=click.IntRange(1), default=500, show_default=True, metavar="N",
                 help="Filter subjects of a consumer."),
    click.option("--max-consumers", type=click.IntRange(1), default=1, show_default=True, metavar="N",
                 help="Consumers of the worker, when there are too many subjects for one."),
    click.option("--max-in-flight", type=click.IntRange(1), default=64, show_default=True, metavar="N",
                 help="Messages that a slow partition may hold."),
    click.option("--concurrency", type=click.IntRange(1), default=256, show_default=True, metavar="N",
                 help="Partitions handled at the same time."),
    click.option("--processes", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Processes for a handler that computes."),
    click.option("--handler-timeout", metavar="DURATION", help="How long a handler may take."),
    click.option("--label", "labels", multiple=True, metavar="LABEL", help="Of this worker; repeatable."),
    click.option("--instance", metavar="NAME", help="A name that stays over restarts.  [default: chosen]"),
    click.option("--ttl", default="15s", show_default=True, metavar="DURATION",
                 help="When the group gives up a worker that is not heard of."),
    click.option("--metrics-port", type=click.IntRange(0, 65535), metavar="PORT",
                 help="Serve /metrics for Prometheus on loopback; 0: any."),
    click.option("--report-every", default="10s", show_default=True, metavar="DURATION",
                 help="A line on stderr; 0: none."),
    click.option("--until-done", is_flag=True, help="End when everything that is there has been handled."),
]  # fmt: skip


def _work_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command(epilog="Exit code 2 says that messages became dead letters.")
@click.argument("handler", metavar="MODULE:HANDLER")
@_work_options
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
        chosen = handlers.load(handler)
        consumer, worker = _consumer(given), _worker(given)
        partitions = _listed(given)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    running = _alone if given["worker_id"] else _member
    async with running(settings, given, chosen, consumer, worker, partitions) as started:
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


# -- what was given ----------------------------------------------------------------------------------------------------


def _consumer(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "ack_wait": _seconds(given["ack_wait"]),
        "max_ack_pending": given["max_ack_pending"],
        "max_subjects": given["max_subjects"],
        "max_consumers": given["max_consumers"],
    }


def _worker(given: dict[str, Any]) -> WorkerOptions:
    delays = tuple(_seconds(part) for part in given["backoff"].split(","))
    return WorkerOptions(
        retries=Retries(max_deliver=given["max_deliver"], backoff=delays),
        dlq=given["dlq"],
        concurrency=given["concurrency"],
        handler_timeout=_seconds(given["handler_timeout"]) if given["handler_timeout"] else None,
        processes=given["processes"],
        max_in_flight=given["max_in_flight"],
    )


def _seconds(text: str) -> float:
    return parse_duration(text).total_seconds()


def _listed(given: dict[str, Any]) -> tuple[Partition, ...]:
    """Partitions that the command line names; none when they are to be found in the stream."""
    if bool(given["group"]) == bool(given["worker_id"]):
        raise ConfigError("name the group with --group, or give the worker an id of its own with --alone")
    if (given["in_bucket"] or given["overlap"]) and not given["group"]:
        raise ConfigError("--in-bucket and --overlap go with --group: they are about the migration to a group")
    if [bool(given[one]) for one in ("pattern", "listed", "in_bucket")].count(True) != 1:
        raise ConfigError(
            "say what the partitions are: --pattern 'dc.{tool}.completion', --partition ID=SUBJECT, or --in-bucket"
        )
    if given["hashed"] and not given["pattern"]:
        raise ConfigError("--hashed goes with --pattern, such as 'orders.{partition}.>'")
    if given["pattern"] and not given["hashed"]:
        SubjectPattern(given["pattern"])  # refuses one that makes no sense
    pairs = [text.partition("=") for text in given["listed"]]
    for id_, equals, subject in pairs:
        if not (id_ and equals and subject):
            raise ConfigError(f"{id_ + equals + subject!r}: a partition is written as ID=SUBJECT")
    return tuple(Partition(id_, (subject,)) for id_, _, subject in pairs)


# -- running -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _member(
    settings: Settings,
    given: dict[str, Any],
    handler: Handler,
    consumer: dict[str, Any],
    worker: WorkerOptions,
    partitions: tuple[Partition, ...],
) -> AsyncIterator[Running]:
    """A worker of a group."""
    options = GroupOptions(
        group=given["group"],
        stream=given["stream"],
        source=lambda control, bucket: (
            InBucket(bucket) if given["in_bucket"] else _source(given, partitions, control.jetstream)
        ),
        start=given["start"],
        ttl=_seconds(given["ttl"]),
        labels=frozenset(given["labels"]),
        instance=given["instance"] or new_instance(),
    )
    async with (
        _overlapping(settings, given, handler) as chosen,
        WorkerGroup(settings, options, chosen, consumer=consumer, worker=worker) as group,
    ):
        err.print(f"worker {group.worker_id} of group {options.group} is working on {options.stream}", markup=False)
        yield Running(group.metrics, lambda: nothing_left(group.worker), group.until_stopped)


@asynccontextmanager
async def _overlapping(settings: Settings, given: dict[str, Any], handler: Handler) -> AsyncIterator[Handler]:
    """The handler, and around it, if that is asked for, what passes over messages that the old side has handled."""
    if not given["overlap"]:
        yield handler
        return
    async with Overlap.open(settings, given["group"]) as overlap:
        yield overlap.around(handler)


def _source(given: dict[str, Any], listed: tuple[Partition, ...], jetstream: JetStream) -> PartitionSource:
    if listed:
        return Listed(listed)
    if given["hashed"]:
        return Hashed(given["hashed"], given["pattern"])
    return SeenInStream(jetstream, given["stream"], SubjectPattern(given["pattern"]))


@asynccontextmanager
async def _alone(
    settings: Settings,
    given: dict[str, Any],
    handler: Handler,
    consumer: dict[str, Any],
    worker: WorkerOptions,
    partitions: tuple[Partition, ...],
) -> AsyncIterator[Running]:
    """A worker that has everything to itself."""
    options = ConsumerOptions(stream=given["stream"], worker_id=given["worker_id"], **consumer)
    async with aio.Connection(settings, name="penstock work") as connection:
        await connection.reconnect()
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        source = _source(given, partitions, jetstream)
        positions = await _positions(jetstream, options, given["start"])
        async with Worker(settings, options, handler, options=worker, positions=positions) as alone:
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
    reporting = asyncio.ensure_future(_report(started.numbers, _seconds(given["report_every"])))
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
