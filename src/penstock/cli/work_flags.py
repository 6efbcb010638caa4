"""The flags of `penstock work`, and what they ask for together."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import click

from penstock.cli.common import Read
from penstock.cli.serving import DURATION, SERVING_OPTIONS, Serving, seconds
from penstock.consume import handlers
from penstock.consume.handlers import Handler
from penstock.consume.instance import new_instance
from penstock.consume.verdicts import BACKOFF, MAX_DELIVER, Retries
from penstock.errors import ConfigError
from penstock.jetstream.api import JetStream
from penstock.topology.model import GroupSpec
from penstock.units import INT32
from penstock.workers.group.assignment import STRATEGIES, Windows
from penstock.workers.group.worker_group import check_times
from penstock.workers.options import ConsumerOptions, GroupOptions, WorkerOptions, group_name, part_of_name
from penstock.workers.partitions import (
    Described,
    Hashed,
    InBucket,
    Listed,
    Partition,
    PartitionSource,
    SeenInStream,
    SubjectPattern,
)
from penstock.workers.pull import filters

MOST_PARTITIONS = 100_000
LEAVE_AFTER_STOP = 15.0
"""Seconds that a worker which stops has to hand over once its handlers have ended."""
TTL = 15.0
"""Seconds after which a worker of a group is given up, unless a flag says otherwise."""
_LABEL = re.compile(r"[A-Za-z0-9_.:/-]+")
_WEIGHT = re.compile(r"[1-9][0-9]{0,8}")

CONSUMER = ("ack_wait", "max_ack_pending", "max_subjects", "max_consumers", "inactive_threshold")
"""Flags that are fields of `ConsumerOptions`."""
SourceMaker = Callable[[JetStream], PartitionSource]
OF_A_GROUP = {
    "in_bucket": "--in-bucket", "overlap": "--overlap", "labels": "--label", "partition_labels": "--partition-label",
    "weights": "--weight", "strategy": "--strategy", "capacity": "--capacity", "instance": "--instance", "ttl": "--ttl",
    "cold_start": "--cold-start", "planned": "--planned", "leave_within": "--leave-within",
}  # fmt: skip
"""Flags that mean nothing to a worker that is alone, by their parameters."""
OF_A_CONSUMER = {"within": "--within", "ordered_by": "--ordered-by", "once": "--once", "keep": "--keep"}
"""Flags that mean something on a durable consumer only, by their parameters."""
ON_A_CONSUMER = frozenset(
    {"consumer", "stream", "dlq", "concurrency", "batch", "handler_timeout", "stop_within", *OF_A_CONSUMER}
    | set(Serving.__slots__)
)
"""Parameters that mean something on a durable consumer, which has a configuration of its own."""


# -- single values -----------------------------------------------------------------------------------------------------


def _delays(text: str) -> tuple[float, ...]:
    found = tuple(seconds(part) for part in text.split(","))
    Retries(backoff=found)  # refuses what makes no sense
    return found


def _above_zero(text: str) -> float:
    if not (found := seconds(text)):
        raise ConfigError(f"{text!r} is no time at all: give one above 0")
    return found


def _label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ConfigError(f"{text!r} cannot be a label: letters, digits and _ . : / - can")
    return text


def _partition(text: str) -> Partition:
    id_, equals, subject = text.partition("=")
    if not (id_ and equals and subject):
        raise ConfigError(f"{text!r}: a partition is written as ID=SUBJECT")
    return Partition(id_, (subject,))


def _weight(text: str) -> tuple[str, int]:
    id_, _, number = text.rpartition("=")  # an id may have a = in it
    if not (id_ and _WEIGHT.fullmatch(number)):
        raise ConfigError(f"{text!r}: a weight is written as ID=N, such as etch7=5; N is a whole number from 1 on")
    return id_, int(number)


def _partition_label(text: str) -> tuple[str, str]:
    id_, _, label = text.rpartition("=")
    if not id_:
        raise ConfigError(f"{text!r}: the label of a partition is written as ID=LABEL, such as etch7=gpu")
    return id_, _label(label)


SOME_TIME = Read("duration", _above_zero)
NAME, GROUP = Read("name", part_of_name), Read("name", group_name)

OPTIONS = [
    click.option("--stream", type=NAME, metavar="NAME", help="The stream to work on."),
    click.option("--consumer", metavar="NAME",
                 help="No partitions: the messages of this durable consumer, which instances compete for."),
    click.option("--group", type=GROUP, metavar="NAME", help="The group that shares the partitions."),
    click.option("--alone", "worker_id", type=NAME, metavar="ID", help="No group: all partitions are this worker's."),
    click.option("--pattern", metavar="PATTERN", help="Subjects with the partition in them: 'dc.{tool}.completion'."),
    click.option("--partition", "listed", type=Read("partition", _partition), multiple=True, metavar="ID=SUBJECT",
                 help="A partition; repeatable."),
    click.option("--hashed", type=click.IntRange(1, MOST_PARTITIONS), metavar="N",
                 help="N partitions; {partition} in the pattern."),
    click.option("--in-bucket", is_flag=True, help="The partitions in the group's bucket, as a migration lists them."),
    click.option("--weight", "weights", type=Read("weight", _weight), multiple=True, metavar="ID=N",
                 help="How much work a partition is, for --strategy weighted; * in ID for many; repeatable."),
    click.option("--partition-label", "partition_labels", type=Read("label", _partition_label), multiple=True,
                 metavar="ID=LABEL", help="Only workers with that --label may have the partition; repeatable."),
    click.option("--overlap", is_flag=True, help="Pass over what old consumers handle: see `group migrate`."),
    click.option("--start", type=click.Choice(["all", "new"]), default="all", show_default=True,
                 help="Where a partition begins that nobody ever handled."),
    click.option("--dlq", metavar="SUBJECT", help="Where messages go that are given up."),
    click.option("--max-deliver", type=click.IntRange(1), default=MAX_DELIVER, show_default=True, metavar="N",
                 help="Tries of a message."),
    click.option("--backoff", type=Read("durations", _delays), default=",".join(f"{s:g}s" for s in BACKOFF),
                 show_default=True, metavar="DURATIONS", help="Waits between tries; the last one repeats."),
    click.option("--ack-wait", type=DURATION, default="30s", show_default=True, metavar="DURATION",
                 help="When the server delivers again what got no answer."),
    click.option("--max-ack-pending", type=click.IntRange(1, INT32), default=500, show_default=True, metavar="N",
                 help="Messages out at a time."),
    click.option("--max-subjects", type=click.IntRange(1, INT32), default=500, show_default=True, metavar="N",
                 help="Filter subjects of a consumer."),
    click.option("--max-consumers", type=click.IntRange(1, INT32), default=1, show_default=True, metavar="N",
                 help="Consumers of the worker, when there are too many subjects for one."),
    click.option("--wildcards", is_flag=True,
                 help="Wildcards instead of subjects, when there are too many and all that match are the worker's."),
    click.option("--max-in-flight", type=click.IntRange(1), default=64, show_default=True, metavar="N",
                 help="Messages that a slow partition may hold."),
    click.option("--concurrency", type=click.IntRange(1), default=256, show_default=True, metavar="N",
                 help="Partitions handled at the same time."),
    click.option("--batch", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Hand lists of up to N messages of one partition to the handler; 0: one message."),
    click.option("--processes", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Processes for a handler that computes."),
    click.option("--threads", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                 help="Threads for a plain function that waits, as for a database."),
    click.option("--stop-within", type=SOME_TIME, default="60s", show_default=True, metavar="DURATION",
                 help="How long handlers may take to finish when the worker stops or a partition moves."),
    click.option("--inactive-threshold", type=SOME_TIME, default="24h", show_default=True, metavar="DURATION",
                 help="When the server removes the consumer of a worker that is away."),
    click.option("--handler-timeout", type=SOME_TIME, metavar="DURATION", help="How long a handler may take."),
    click.option("--label", "labels", type=Read("label", _label), multiple=True, metavar="LABEL",
                 help="Of this worker: it may have partitions of that label; repeatable."),
    click.option("--strategy", type=click.Choice(sorted(STRATEGIES)),
                 help="How the group shares its partitions; the same for all workers.  [default: consistent-hash]"),
    click.option("--capacity", type=click.IntRange(1, INT32), metavar="N",
                 help="How much this worker can take, for --strategy weighted.  [default: 1]"),
    click.option("--instance", metavar="NAME", help="A name that stays over restarts.  [default: chosen]"),
    click.option("--ttl", type=SOME_TIME, metavar="DURATION",
                 help=f"When the group gives up a worker that is not heard of.  [default: {TTL:g}s]"),
    click.option("--cold-start", type=DURATION, metavar="DURATION",
                 help="How long the first workers of a group wait for more of them.  [default: 10s]"),
    click.option("--planned", type=DURATION, metavar="DURATION",
                 help="How long a change of workers or partitions must have lasted.  [default: 3s]"),
    click.option("--leave-within", type=SOME_TIME, metavar="DURATION",
                 help="How long a worker that stops may take to hand over.  [default: --stop-within and 15s]"),
    click.option("--within", type=DURATION, metavar="DURATION",
                 help="With --consumer and --batch: how long a list waits to become full.  [default: 1s]"),
    click.option("--ordered-by", type=click.Choice(["subject"]),
                 help="With --consumer: messages of one subject one after the other."),
    click.option("--once", is_flag=True, help="With --consumer: pass over events that were handled before."),
    click.option("--keep", type=SOME_TIME, metavar="DURATION",
                 help="With --once: how long their ids are kept.  [default: 1d]"),
    *SERVING_OPTIONS,
]  # fmt: skip


def work_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


# -- all of them together ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for; it makes sense as far as one can tell without a server."""

    handler: Handler
    stream: str
    group: GroupOptions | None
    worker_id: str
    """Of a worker that is alone; else empty."""
    consumer: dict[str, Any]
    """Fields of `ConsumerOptions`, besides its names."""
    worker: WorkerOptions
    source: SourceMaker
    known: tuple[Partition, ...]
    """The partitions that the command line names; none when they are to be found."""


def asked(handler: str, given: dict[str, Any]) -> Asked:
    """What was asked for. Raises `ConfigError` for what makes no sense."""
    _refuse_contradictions(given)
    known = _known(given)
    found = Asked(
        handler=handlers.load(handler),
        stream=given["stream"],
        group=_group(given) if given["group"] else None,
        worker_id=given["worker_id"] or "",
        consumer={name: given[name] for name in CONSUMER},
        worker=_worker(given),
        source=partial(_source, given),
        known=known,
    )
    _check(found, given["wildcards"])
    return found


def _check(found: Asked, wildcards: bool) -> None:
    """Raise for what a worker would refuse when it starts."""
    if found.worker.processes:
        handlers.refuse_what_no_process_can_run(found.handler)
    if found.group:
        check_times(found.group, found.consumer)
        return
    alone = ConsumerOptions(stream=found.stream, worker_id=found.worker_id, **found.consumer)
    if not wildcards:
        filters.plan(found.known, (), alone.max_subjects, alone.max_consumers, ())


def declared_values(spec: GroupSpec, chosen: Collection[str]) -> dict[str, Any]:
    """What the platform file says about a group, by the parameters of the flags; flags that were chosen win."""
    listed = () if spec.pattern else tuple(Partition(subject, (subject,)) for subject in spec.partitions)
    found: dict[str, Any] = {
        "stream": spec.stream,
        "dlq": spec.dlq,
        "max_deliver": spec.max_deliver,
        "backoff": tuple(one.total_seconds() for one in spec.backoff),
        "ack_wait": spec.ack_wait and spec.ack_wait.total_seconds(),
        "max_ack_pending": spec.max_ack_pending,
        "start": spec.start,
        "strategy": spec.strategy.replace("_", "-"),
    }
    if not {"pattern", "listed", "hashed", "in_bucket"} & set(chosen):
        found |= {"pattern": spec.pattern, "listed": listed, "hashed": spec.hashed}
    return {name: value for name, value in found.items() if value and name not in chosen}


def consumer_options(given: dict[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """Arguments of `App.consumer`, from the flags that were chosen. Raises `ConfigError` for one that means nothing."""
    useless = sorted(f"--{name.replace('_', '-')}" for name in chosen if name not in ON_A_CONSUMER)
    if useless:
        raise ConfigError(
            f"{' and '.join(useless)}: a durable consumer has no partitions, and has its own ack_wait, max_deliver and "
            "backoff; leave that out with --consumer"
        )
    renamed = {"handler_timeout": "timeout"}
    others = {"consumer", *Serving.__slots__}
    return {renamed.get(name, name): given[name] for name in chosen if name not in others}


def _refuse_contradictions(given: dict[str, Any]) -> None:
    if not given["stream"]:
        raise ConfigError("name the stream with --stream, or declare the group in the platform file")
    if elsewhere := [flag for name, flag in OF_A_CONSUMER.items() if given[name]]:
        raise ConfigError(f"{' and '.join(elsewhere)}: only with --consumer")
    if bool(given["group"]) == bool(given["worker_id"]):
        raise ConfigError("name the group with --group, or give the worker an id of its own with --alone")
    lonely = [flag for name, flag in OF_A_GROUP.items() if given[name]]
    if lonely and not given["group"]:
        raise ConfigError(f"{' and '.join(lonely)}: only a group has that; give --group instead of --alone")
    if [bool(given[one]) for one in ("pattern", "listed", "in_bucket")].count(True) != 1:
        raise ConfigError(
            "say what the partitions are: --pattern 'dc.{tool}.completion', --partition ID=SUBJECT, or --in-bucket"
        )
    if given["hashed"] and not given["pattern"]:
        raise ConfigError("--hashed goes with --pattern, such as 'orders.{partition}.>'")
    if given["in_bucket"] and (given["weights"] or given["partition_labels"]):
        raise ConfigError("the list in the bucket has its own weights and labels: no --weight, no --partition-label")
    if (given["weights"] or given["capacity"]) and given["strategy"] != "weighted":
        raise ConfigError("--weight and --capacity count with --strategy weighted only")
    if given["wildcards"] and not (given["listed"] or given["hashed"]):
        raise ConfigError("--wildcards goes with --partition or --hashed: it must know all subjects there will be")
    if given["threads"] and given["processes"]:
        raise ConfigError("a handler runs in threads or in processes: leave out --threads or --processes")
    if given["overlap"] and given["batch"]:
        raise ConfigError("--overlap marks one message at a time: leave out --batch")
    if given["overlap"] and given["processes"]:
        raise ConfigError("--overlap keeps its marks in the event loop: leave out --processes")


def _known(given: dict[str, Any]) -> tuple[Partition, ...]:
    if given["pattern"] and not given["hashed"]:
        SubjectPattern(given["pattern"])  # refuses one that makes no sense
    known = Hashed(given["hashed"], given["pattern"]).all if given["hashed"] else Listed(given["listed"]).listed
    for flag, named in (("--weight", given["weights"]), ("--partition-label", given["partition_labels"])):
        for ids, value in named if known else ():
            if not any(fnmatchcase(partition.id, ids) for partition in known):
                raise ConfigError(f"{flag} {ids}={value}: there is no such partition")
    return known


def _source(given: dict[str, Any], jetstream: JetStream) -> PartitionSource:
    named: PartitionSource
    if given["listed"]:
        named = Listed(given["listed"])
    elif given["hashed"]:
        named = Hashed(given["hashed"], given["pattern"])
    else:
        named = SeenInStream(jetstream, given["stream"], SubjectPattern(given["pattern"]))
    return Described(named, given["weights"], given["partition_labels"])


def _worker(given: dict[str, Any]) -> WorkerOptions:
    return WorkerOptions(
        retries=Retries(max_deliver=given["max_deliver"], backoff=given["backoff"]),
        dlq=given["dlq"],
        concurrency=given["concurrency"],
        handler_timeout=given["handler_timeout"],
        processes=given["processes"],
        threads=given["threads"],
        batch=given["batch"],
        stop_within=given["stop_within"],
        max_in_flight=given["max_in_flight"],
    )


def _windows(given: dict[str, Any]) -> Windows:
    """What is given; a window that is not is no longer than one that comes after it, and no shorter than one before."""
    usual = Windows()
    cold_start, planned = given["cold_start"], given["planned"]
    if planned is None:
        planned = usual.planned if cold_start is None else min(usual.planned, cold_start)
    if cold_start is None:
        cold_start = max(usual.cold_start, planned)
    return Windows(cold_start=cold_start, planned=planned)


def _group(given: dict[str, Any]) -> GroupOptions:
    return GroupOptions(
        group=given["group"],
        stream=given["stream"],
        source=lambda control, bucket: InBucket(bucket) if given["in_bucket"] else _source(given, control.jetstream),
        start=given["start"],
        strategy=STRATEGIES[given["strategy"] or "consistent-hash"],
        windows=_windows(given),
        leave_within=given["leave_within"] or given["stop_within"] + LEAVE_AFTER_STOP,
        ttl=given["ttl"] or TTL,
        labels=frozenset(given["labels"]),
        capacity=given["capacity"] or 1,
        instance=given["instance"] or new_instance(),
    )
