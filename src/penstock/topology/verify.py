"""The start-up health check: is everything as declared, and well? Pure; `actual.read` does the asking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType

from penstock.jetstream.model import ConsumerInfo, ReplicaInfo, SourceInfo, StreamInfo
from penstock.sourcing import modes
from penstock.topology import delivery, ownership
from penstock.topology.compare import FieldChange
from penstock.topology.plan import Change, ChangeKind, Unreached, plan
from penstock.topology.resource import Actual, Desired, Resource
from penstock.topology.risk import Risk
from penstock.units import counted

SOURCE_SILENT_AFTER = timedelta(seconds=30)
"""A source is heard every few seconds, also when its origin is idle: this long without a sign means trouble."""


class Check(StrEnum):
    """What is looked at."""

    STREAMS = "streams as declared"
    CONSUMERS = "consumers as declared"
    REPLICAS = "replicas healthy"
    SOURCES = "sources active"
    GIVEN_UP = "given-up messages captured"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One thing that is not as it should be."""

    check: Check
    resource: Resource
    problem: str
    fields: tuple[FieldChange, ...] = ()
    """What differs: `before` is what the server has, `after` what is declared."""


def verify(
    desired: Desired,
    actual: Actual,
    given_up: Mapping[tuple[str, str], int] = MappingProxyType({}),
    missing: Mapping[str, int] = MappingProxyType({}),
) -> list[Deviation]:
    """Everything that is wrong with what the platform declares, check by check.

    `given_up` counts messages by stream and consumer of which there should be a dead letter, and is none; `missing`
    counts by stream the messages of its origins that it has not stored.
    """
    readers: dict[str, list[ConsumerInfo]] = defaultdict(list)
    for resource, consumer in actual.consumers.items():
        if resource in desired.configs:
            readers[resource.stream].append(consumer)
    streams = [actual.streams[r.stream] for r in desired.configs if r.consumer is None and r.stream in actual.streams]
    return [
        *_drift(desired, actual),
        *(_leaderless(resource) for resource in sorted(actual.unanswered, key=str) if not resource.api),
        *(finding for stream in streams for finding in _replicas(stream, readers[stream.name])),
        *(finding for stream in streams for finding in _sources(stream)),
        *_consumers_of_sources(delivery.keeping_subjects(desired, actual), actual),
        *_shared_deliveries(desired, actual),
        *_missing(desired, missing),
        *_given_up(desired, given_up),
        *_unsafe_readers(desired, actual),
    ]


def undeclared(desired: Desired, actual: Actual) -> list[Resource]:
    """Durable consumers of declared streams that the file does not know, that are no workers of a declared group, and
    that Penstock does not keep itself."""
    return sorted(
        (
            resource
            for resource, info in actual.consumers.items()
            if resource not in desired.configs
            and resource.its_stream in desired.configs
            and info.config.get("durable_name")
            and modes.reader_of(info.config) is None
            and not any(
                stream == resource.stream and (resource.consumer or "").startswith(f"{name}-")
                for stream, name in desired.groups
            )
        ),
        key=str,
    )


def _unsafe_readers(desired: Desired, actual: Actual) -> Iterator[Deviation]:
    """Undeclared durables that can lose messages: pushed ones, and those that acknowledge nothing.

    Flow control acknowledges what is stored: sources of other domains and bridges read so.
    """
    for resource in undeclared(desired, actual):
        config = actual.consumers[resource].config
        if config.get("ack_policy") == "none":
            yield Deviation(
                Check.CONSUMERS, resource, "is not declared, and acknowledges nothing: what it misses is lost"
            )
        elif config.get("deliver_subject") and config.get("ack_policy") != "flow_control":
            problem = "is not declared, and is pushed to whoever listens: declare it with a `why`, or delete it"
            yield Deviation(Check.CONSUMERS, resource, problem)


def _missing(desired: Desired, counts: Mapping[str, int]) -> Iterator[Deviation]:
    for stream, count in sorted(counts.items()):
        if count and (resource := Resource(stream)) in desired.configs:
            cause = (
                "its duplicate_window drops what has an id that came before, from whatever origin; leave it out"
                if modes.shares_window(desired.configs[resource])
                else "the server passed over them when it took up reading after a break; see docs/sourcing.md"
            )
            are = "is" if count == 1 else "are"
            yield Deviation(
                Check.SOURCES, resource, f"{counted(count, 'message')} of its origins {are} not stored here: {cause}"
            )


def _given_up(desired: Desired, counts: Mapping[tuple[str, str], int]) -> Iterator[Deviation]:
    for (stream, name), count in sorted(counts.items()):
        if (resource := Resource(stream, name)) in desired.configs:
            problem = f"gave up on {counted(count, 'message')}, not captured: run `penstock dlq capture`"
            yield Deviation(Check.GIVEN_UP, resource, problem)


def may_settle(findings: Sequence[Deviation]) -> bool:
    """Whether time alone may heal some of it: a source or a replica that was made a moment ago is not heard yet."""
    return any(finding.check in (Check.REPLICAS, Check.SOURCES) for finding in findings)


def _drift(desired: Desired, actual: Actual) -> Iterator[Deviation]:
    made = plan(desired, actual)
    yield from (_not_looked_at(one, actual) for one in made.unreached)
    for change in made.changes:
        check = Check.STREAMS if change.resource.consumer is None else Check.CONSUMERS
        fields = tuple(field for field in change.fields if not ownership.is_mark(field.name))
        if change.kind is ChangeKind.CREATE:
            yield Deviation(check, change.resource, "does not exist; run `penstock apply`")
        elif fields:
            yield Deviation(check, change.resource, _drifted(change, fields), fields)


def _not_looked_at(one: Unreached, actual: Actual) -> Deviation:
    """Of what could not be looked at nobody knows that it is as declared: neither of an origin nor of what needs it."""
    if one.resource.api:
        return Deviation(Check.SOURCES, one.resource, one.reason)
    check = Check.STREAMS if one.resource.consumer is None else Check.CONSUMERS
    state = "does not exist yet" if actual.config(one.resource) is None else "was not compared"
    return Deviation(check, one.resource, f"{state}: it {one.reason}")


def _drifted(change: Change, fields: Sequence[FieldChange]) -> str:
    names = ", ".join(field.name for field in fields)
    cost = "" if change.risk is Risk.SAFE else f" ({change.risk} to bring back: {change.reason})"
    return f"{names} {'differs' if len(fields) == 1 else 'differ'} from what is declared{cost}"


def _leaderless(resource: Resource) -> Deviation:
    return Deviation(Check.REPLICAS, resource, "nobody answers for it: it has no leader")


def _replicas(stream: StreamInfo, readers: Sequence[ConsumerInfo]) -> Iterator[Deviation]:
    wanted = stream.config.get("num_replicas", 1)
    if wanted < 2:
        return
    yield from _group(Resource(stream.name), wanted, stream.leader, stream.replicas)
    known = {replica.name for replica in stream.replicas if _ill(replica)}
    for consumer in readers:
        # What is wrong with a server was said for the stream already.
        rest = [replica for replica in consumer.replicas if replica.name not in known]
        yield from _group(Resource(stream.name, consumer.name), 0, consumer.leader, rest)


def _group(
    resource: Resource, wanted: int, leader: str | None, followers: Sequence[ReplicaInfo]
) -> Iterator[Deviation]:
    if not leader:
        yield _leaderless(resource)
    if len(followers) + 1 < wanted:
        yield Deviation(Check.REPLICAS, resource, f"has {len(followers) + 1} of {wanted} replicas")
    for replica in followers:
        if problem := _ill(replica):
            yield Deviation(Check.REPLICAS, resource, f"replica on {replica.name} {problem}")


def _ill(replica: ReplicaInfo) -> str | None:
    if replica.offline:
        return "is offline"
    if replica.silent:
        return f"was last heard {replica.silent_for.total_seconds():.0f} s ago"
    return None if replica.current else f"is not current: {replica.lag} operations behind"


def _sources(stream: StreamInfo) -> Iterator[Deviation]:
    for role, source in [("mirror of", stream.mirror), *(("source", source) for source in stream.sources)]:
        if source is not None and (problem := _stuck(source)):
            yield Deviation(Check.SOURCES, Resource(stream.name), f"{role} {source.name} {problem}")


def _consumers_of_sources(desired: Desired, actual: Actual) -> Iterator[Deviation]:
    """Consumers that sources read through and that somebody else made: there, and as a source needs them."""
    for config in desired.configs.values():
        for origin in [config.get("mirror") or {}, *(config.get("sources") or ())]:
            wanted = origin.get("consumer")
            if not wanted:
                continue
            resource = Resource(origin["name"], wanted["name"], (origin.get("external") or {}).get("api"))
            if resource in desired.configs or actual.stream_of(resource) is None:
                continue  # compared as declared, or out of sight
            if problem := _unfit(actual.consumers.get(resource), wanted["deliver_subject"]):
                yield Deviation(Check.SOURCES, resource, problem)


def _shared_deliveries(desired: Desired, actual: Actual) -> Iterator[Deviation]:
    """Sources that receive on one subject: each gets what is meant for the other, and messages are lost."""
    for subject, users in sorted(delivery.shared_subjects(actual).items()):
        names = " and ".join(str(consumer) for consumer, _ in users)
        for stream in sorted({stream for _, stream in users if stream in desired.configs}, key=str):
            problem = f"{names} deliver to the same subject {subject!r}: messages are lost; run `penstock apply`"
            yield Deviation(Check.SOURCES, stream, problem)


def _unfit(consumer: ConsumerInfo | None, deliver_subject: str) -> str:
    if consumer is None:
        return "does not exist; `penstock sources create-consumer` makes it"
    return "; ".join(modes.misfits(consumer.config, deliver_subject))


def _stuck(source: SourceInfo) -> str | None:
    if source.error:
        return f"fails: {source.error}"
    if source.active is None:
        return "was never heard; does the origin exist, and can it be reached?"
    if source.active > SOURCE_SILENT_AFTER:
        return f"was last heard {source.active.total_seconds():.0f} s ago, and is {source.lag} messages behind"
    return None
