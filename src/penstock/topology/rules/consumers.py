"""Rules about one consumer and its stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from penstock import subjects
from penstock.topology.model import ConsumerSpec, StreamSpec
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule
from penstock.units import format_duration, from_nanoseconds

SECOND = 1_000_000_000


def each(case: Case) -> Iterator[tuple[ConsumerSpec, StreamSpec]]:
    """Every consumer with its stream."""
    for consumer in case.platform.consumers.values():
        yield consumer, case.platform.streams[consumer.stream]


def feeds_a_source(case: Case, consumer: ConsumerSpec) -> bool:
    """Whether a declared source reads through this consumer, which makes it a push consumer by nature."""
    return (consumer.stream, consumer.name) in case.read_by_sources


@rule(
    "C01",
    Severity.ERROR,
    "not explicit ack",
    "Without explicit acks a message counts as done when it is sent, or when a later one is: a crash loses it.",
)
def explicit_ack(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        in_order = consumer.ack_policy == "all" and consumer.is_dedicated  # its pages are confirmed one after the other
        if consumer.ack_policy != "explicit" and not (in_order or consumer.why or feeds_a_source(case, consumer)):
            yield at(
                consumer,
                "ack_policy",
                f"consumer {consumer.name!r} has ack_policy {consumer.ack_policy}",
                "leave ack_policy out, or say `why:` it cannot be explicit",
            )


@rule(
    "C02",
    Severity.ERROR,
    "push consumer",
    "Push delivery to a subject cannot be shared fairly by workers, and the server cannot hold back for a slow one.",
)
def pull(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        if consumer.is_push and not consumer.why and not feeds_a_source(case, consumer):
            yield at(
                consumer,
                "deliver_subject",
                f"consumer {consumer.name!r} is a push consumer",
                "leave deliver_subject out to make it a pull consumer, or say `why:` it must push",
            )


@rule(
    "C03",
    Severity.WARNING,
    "ack_wait missing",
    "The server then assumes 30 s: work that takes longer is delivered to a second worker while the first is at it.",
)
def ack_wait(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        given = consumer.config.get("ack_wait") or consumer.config.get("backoff")
        if not given and consumer.ack_policy in ("explicit", "all"):
            yield at(
                consumer,
                None,
                f"consumer {consumer.name!r} does not say its ack_wait",
                "add `ack_wait:`, longer than the slowest message takes",
            )


@rule(
    "C04",
    Severity.ERROR,
    "filter matches nothing",
    "No subject of the stream passes the filter, so the consumer never gets a message, and nobody complains.",
)
def filter_matches(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        if stream.origins or "subject_transform" in stream.config:
            continue  # stored subjects can then differ from the captured ones
        for filter_ in consumer.filters:
            if not subjects.any_overlap([filter_], stream.subjects):
                yield at(
                    consumer,
                    "filters" if "filters" in consumer.lines else "filter",
                    f"no subject of stream {stream.name!r} ({', '.join(stream.subjects)}) passes {filter_!r}",
                    "correct the filter, or add the subject to the stream",
                )


@rule(
    "C05",
    Severity.ERROR,
    "filters of one consumer overlap",
    "The server refuses filters of one consumer that overlap.",
)
def own_filters(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        for one, other in combinations(consumer.filters, 2):
            if subjects.overlap(one, other):
                yield at(
                    consumer,
                    "filters",
                    f"filters {one!r} and {other!r} of consumer {consumer.name!r} overlap",
                    "keep the wider one, or make them distinct",
                )


@rule(
    "C06",
    Severity.WARNING,
    "one budget for several filters",
    "`max_ack_pending` is one budget for all filters of a consumer: messages stuck on one subject starve the others.",
)
def shared_budget(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        if len(consumer.filters) > 1 and "max_ack_pending" not in consumer.config and consumer.ack_policy != "none":
            yield at(
                consumer,
                "filters",
                f"the {len(consumer.filters)} filters of consumer {consumer.name!r} share a max_ack_pending of 1000",
                "set `max_ack_pending:` with all of them in mind, or use a consumer for each",
            )


@rule(
    "C07",
    Severity.ERROR,
    "replicas differ from the stream's",
    "The server refuses more copies than the stream has, and on workqueue and interest any other number.",
)
def replicas(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        own = consumer.config.get("num_replicas", 0)
        bound = stream.retention != "limits"
        if own and (own > stream.replicas or (bound and own != stream.replicas)):
            yield at(
                consumer,
                "replicas",
                f"consumer {consumer.name!r} wants {own} replicas, its {stream.retention} stream has {stream.replicas}",
                f"leave replicas out, or write {stream.replicas}",
            )


@rule(
    "C08",
    Severity.WARNING,
    "position does not last",
    "The server deletes an inactive consumer, or forgets one in memory at a restart: its position is gone.",
)
def lasting(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        if threshold := consumer.config.get("inactive_threshold"):
            after = format_duration(from_nanoseconds(threshold))
            yield at(
                consumer,
                "inactive_threshold",
                f"consumer {consumer.name!r} is deleted when nobody uses it for {after}",
                "leave inactive_threshold out of a durable consumer",
            )
        if consumer.config.get("mem_storage") and case.platform.environment.replicas == 1:
            yield at(
                consumer,
                "mem_storage",
                f"consumer {consumer.name!r} keeps its position in the memory of one server",
                "leave mem_storage out, or use more replicas",
            )


@rule(
    "C09",
    Severity.ERROR,
    "above the stream's consumer limits",
    "The server refuses a consumer that asks for more than the `consumer_limits` of its stream.",
)
def limits(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        for key, most in stream.config.get("consumer_limits", {}).items():
            if most and consumer.config.get(key, 0) > most:
                yield at(
                    consumer,
                    key,
                    f"{key} of consumer {consumer.name!r} is above the limit of stream {stream.name!r}",
                    "lower it, or raise the stream's consumer_limits",
                )


@rule(
    "C10",
    Severity.INFO,
    "service missing",
    "Nobody can see from the file which program reads through the consumer, and the totals by service miss it.",
)
def service(case: Case) -> Iterator[Hit]:
    for consumer, _ in each(case):
        if not consumer.service:
            yield at(consumer, None, f"consumer {consumer.name!r} does not say which service uses it", "add `service:`")
