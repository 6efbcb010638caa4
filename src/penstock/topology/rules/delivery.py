"""Rules about how a consumer delivers: combinations that the server refuses, and redelivery that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock import subjects
from penstock.topology.model import ConsumerSpec
from penstock.topology.rules.consumers import SECOND, each
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule
from penstock.units import format_duration, from_nanoseconds

PUSH_ONLY = {
    "deliver_group": "deliver_group",
    "flow_control": "flow_control",
    "idle_heartbeat": "idle_heartbeat",
    "rate_limit_bps": "rate_limit",
}
PULL_ONLY = {
    "max_waiting": "max_waiting",
    "max_batch": "max_batch",
    "max_expires": "max_expires",
    "max_bytes": "max_bytes",
    "priority_policy": "priority_policy",
}
"""The server's name of a field to its name in the file."""


@rule(
    "C11",
    Severity.ERROR,
    "pull and push mixed",
    "Fields that only make sense for the other way of delivery are refused by the server, or do nothing.",
)
def one_mode(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        wrong, mode = (PULL_ONLY, "push") if consumer.is_push else (PUSH_ONLY, "pull")
        for wire, key in wrong.items():
            if consumer.config.get(wire) not in (None, False, "none"):
                yield at(
                    consumer,
                    key,
                    f"{key} does not go with the {mode} consumer {consumer.name!r}",
                    f"leave {key} out" + ("" if consumer.is_push else ", or add a deliver_subject"),
                )


def flow_control_faults(consumer: ConsumerSpec) -> Iterator[tuple[str, str]]:
    """The fields of a `flow_control` consumer that the server refuses or replaces, with what they must be."""
    config = consumer.config
    if not consumer.is_push:
        yield "deliver_subject", "needs a deliver_subject: the policy is for push consumers only"
    if config.get("flow_control") is False:
        yield "flow_control", "always has flow_control: the server switches it on"
    if config.get("idle_heartbeat", SECOND) != SECOND:
        yield "idle_heartbeat", "always has an idle_heartbeat of 1s: the server replaces any other"
    if config.get("max_ack_pending", 1) <= 0:
        yield "max_ack_pending", "needs a limited max_ack_pending"
    for key in ("ack_wait", "backoff"):
        if config.get(key):
            yield key, f"cannot have {key}: flow control messages are its acknowledgements"
    if config.get("max_deliver", -1) > 0:
        yield "max_deliver", "cannot have a max_deliver: what is lost on the way must come again"


@rule(
    "C12",
    Severity.ERROR,
    "flow_control acks not set up",
    "The server accepts `ack_policy: flow_control` only for push consumers with a limited `max_ack_pending` and no "
    "`ack_wait`, `backoff` nor `max_deliver`; flow control and a heartbeat of 1 s it sets itself, whatever is written.",
)
def flow_control(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        if consumer.ack_policy != "flow_control":
            continue
        for key, must in flow_control_faults(consumer):
            message = f"consumer {consumer.name!r} with ack_policy flow_control {must}"
            yield at(consumer, key, message, f"correct {key}, or use another ack_policy")


@rule(
    "C13",
    Severity.ERROR,
    "backoff longer than max_deliver",
    "The server refuses more waits than deliveries.",
)
def backoff_length(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        waits, most = len(consumer.config.get("backoff", ())), consumer.config.get("max_deliver", -1)
        if waits and most != -1 and waits > most:
            yield at(
                consumer,
                "backoff",
                f"consumer {consumer.name!r} has {waits} waits for {most} deliveries",
                f"raise max_deliver to {waits} or more, or shorten backoff",
            )


@rule(
    "C14",
    Severity.WARNING,
    "backoff replaces ack_wait",
    "The server takes the first wait of `backoff` as the ack wait and forgets the one that is written.",
)
def backoff_first(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        waits, declared = consumer.config.get("backoff"), consumer.config.get("ack_wait")
        if waits and declared is not None and waits[0] != declared:
            first = format_duration(from_nanoseconds(waits[0]))
            yield at(
                consumer,
                "ack_wait",
                f"ack_wait of consumer {consumer.name!r} is replaced by the first backoff, {first}",
                f"write `ack_wait: {first}`, or leave it out",
            )


@rule(
    "C15",
    Severity.ERROR,
    "start that the server refuses",
    "`last_per_subject` needs a filter; a workqueue stream is always read from its beginning.",
)
def start(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        policy = consumer.config["deliver_policy"]
        if policy == "last_per_subject" and not consumer.filters:
            message = f"consumer {consumer.name!r} delivers last_per_subject without a filter"
            yield at(consumer, "deliver", message, "add `filter:`; `>` means every subject")
        if stream.retention == "workqueue" and policy != "all":
            message = f"consumer {consumer.name!r} delivers {policy} on the workqueue stream {stream.name!r}"
            yield at(consumer, "deliver", message, "write `deliver: all`, or leave it out")


@rule(
    "C16",
    Severity.ERROR,
    "acks that a workqueue refuses",
    "A workqueue deletes what is acknowledged: the server takes explicit acks or flow control only.",
)
def workqueue_acks(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        if stream.retention == "workqueue" and consumer.ack_policy not in ("explicit", "flow_control"):
            yield at(
                consumer,
                "ack_policy",
                f"consumer {consumer.name!r} has ack_policy {consumer.ack_policy} on a workqueue stream",
                "leave ack_policy out",
            )


@rule(
    "C17",
    Severity.ERROR,
    "overlapping readers of a workqueue",
    "Every message of a workqueue has one consumer: the server refuses a second one whose filter overlaps.",
)
def workqueue_filters(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        if stream.retention != "workqueue":
            continue
        for one, other, subject in _competing(_readers(case, stream.name)):
            yield Hit(
                f"{one.who} and {other.who} both read {subject!r} of the workqueue stream {stream.name!r}",
                "give them filters that do not overlap, or make the stream `retention: interest`",
                one.line,
                one.path,
            )


@dataclass(frozen=True, slots=True)
class DeclaredReader:
    """Who reads a stream through a durable."""

    who: str
    filters: tuple[str, ...]
    line: int
    path: str


def _competing(readers: Sequence[DeclaredReader]) -> Iterator[tuple[DeclaredReader, DeclaredReader, str]]:
    """Each pair of readers that share a subject, in the order of the readers, with the filter of the first."""
    index: subjects.Index[int] = subjects.Index()
    for number, reader in enumerate(readers):
        for filter_ in reader.filters or (subjects.REST,):
            index.add(filter_, number)
    for number, reader in enumerate(readers):
        seen: set[int] = set()
        for filter_ in reader.filters or (subjects.REST,):
            for other in sorted({o for o in index.overlapping(filter_) if o > number} - seen):
                seen.add(other)
                yield reader, readers[other], filter_


def _readers(case: Case, stream: str) -> list[DeclaredReader]:
    """Everyone who reads the stream through a consumer of its own."""
    platform = case.platform
    readers = [
        DeclaredReader(f"consumer {spec.name!r}", spec.filters, spec.line, f"consumers.{spec.name}")
        for spec in case.readers[stream]
    ]
    readers += [
        DeclaredReader(f"group {spec.name!r}", spec.filters, spec.line, f"groups.{spec.name}")
        for spec in platform.groups_of(stream)
    ]
    for flow in platform.pipelines.values():
        if stream in platform.streams_read_by(flow) and flow.source.consumer not in platform.consumers:
            where = f"pipelines.{flow.name}.from"
            readers.append(DeclaredReader(f"pipeline {flow.name!r}", flow.source.subjects, flow.source.line, where))
    for other in platform.streams.values():
        for origin in other.origins:
            if origin.name == stream and not origin.is_external and origin.server_managed:
                only = origin.config.get("filter_subject")
                filters = (only,) if only else ()
                where = f"streams.{other.name}.{'mirror' if other.mirror else 'sources'}"
                readers.append(DeclaredReader(f"stream {other.name!r} as a source", filters, origin.line, where))
    return readers


@rule(
    "C18",
    Severity.ERROR,
    "priority groups without a policy",
    "The server refuses groups or a timeout without a policy, and a policy without groups.",
)
def priority(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        policy = consumer.config.get("priority_policy", "none")
        groups = consumer.config.get("priority_groups")
        if policy != "none" and not groups:
            message = f"consumer {consumer.name!r} has priority_policy {policy} and no priority_groups"
            yield at(consumer, "priority_policy", message, "name at least one group in `priority_groups:`")
        if policy == "none" and (groups or consumer.config.get("priority_timeout")):
            message = f"consumer {consumer.name!r} has priority groups or a timeout and no policy"
            yield at(consumer, "priority_groups", message, "add `priority_policy:`, or leave them out")
