"""Rules about streams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from penstock import subjects
from penstock.topology.model import ConsumerSpec, StreamSpec
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule
from penstock.units import counted, format_duration, format_size, from_nanoseconds

DEFAULT_ACK_WAIT = 30_000_000_000
RESERVED = (("$JS.>", "$JS.EVENT.>"), ("$JSC.>", None), ("$NRG.>", None), ("$SYS.>", "$SYS.ACCOUNT.>"))
"""Subjects that the server keeps for itself, each with the part that a stream may capture all the same."""


@rule(
    "S01",
    Severity.ERROR,
    "streams overlap",
    "The server refuses two streams that capture the same subject.",
)
def overlapping_streams(case: Case) -> Iterator[Hit]:
    place = {name: number for number, name in enumerate(case.platform.streams)}
    for stream in case.platform.streams.values():
        for subject, theirs, other in _overlaps(case, stream):
            if place[other.name] < place[stream.name]:
                yield at(
                    stream,
                    "subjects",
                    f"{subject!r} of stream {stream.name!r} overlaps {theirs!r} of {other.name!r} (line {other.line})",
                    "let one stream capture it; others can have it through `sources:`",
                )


def _overlaps(case: Case, stream: StreamSpec) -> Iterator[tuple[str, str, StreamSpec]]:
    """Each other stream that captures what this one does, once: with a subject of both."""
    seen = {stream.name}
    for subject in stream.config.get("subjects", ()):
        for theirs, other in case.captures.overlapping(subject):
            if other.name not in seen:
                seen.add(other.name)
                yield subject, theirs, other


@rule(
    "S02",
    Severity.ERROR,
    "subjects of one stream overlap",
    "The server refuses a stream whose own subjects overlap.",
)
def own_subjects(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        for one, other in combinations(stream.config.get("subjects", ()), 2):
            if subjects.overlap(one, other):
                message = f"{one!r} and {other!r} of stream {stream.name!r} overlap"
                yield at(stream, "subjects", message, "keep the wider one, or make them distinct")


@rule(
    "S03",
    Severity.WARNING,
    "discards what was not read",
    "At its size limit the stream deletes the oldest messages, read or not: a consumer that lags loses them silently.",
)
def discards_unread(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        capped = [key for key in ("max_bytes", "max_msgs", "max_msgs_per_subject") if stream.config.get(key, -1) > 0]
        careful = [c for c in case.readers[stream.name] if must_not_miss(c)]
        if capped and careful and stream.config.get("discard", "old") == "old":
            who = f"consumer {careful[0].name!r}" if len(careful) == 1 else f"its {len(careful)} consumers"
            yield at(
                stream,
                capped[0],
                f"stream {stream.name!r} discards the oldest at {_cap(stream, capped[0])}, unread by {who} or not",
                "write `discard: new`, leave the limit to max_age, or say `may_miss: true` on the consumers",
            )


def must_not_miss(consumer: ConsumerSpec) -> bool:
    """Whether the consumer acknowledges what it reads, and does not say that it may miss some."""
    return consumer.ack_policy != "none" and not consumer.may_miss


def _cap(stream: StreamSpec, key: str) -> str:
    value = stream.config[key]
    return format_size(value) if key == "max_bytes" else f"{value} messages ({key})"


@rule(
    "S04",
    Severity.WARNING,
    "expires before its retries end",
    "A message that keeps failing is deleted by age before its last delivery, so it never reaches the dead letters.",
)
def expires_in_retries(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        stream = case.platform.streams[consumer.stream]
        age, patience = stream.config.get("max_age", 0), retries_take(consumer)
        if age and patience and patience > age:
            yield at(
                consumer,
                "max_deliver",
                f"{consumer.max_deliver} deliveries of consumer {consumer.name!r} take "
                f"{format_duration(from_nanoseconds(patience))}, stream {stream.name!r} keeps messages for "
                f"{format_duration(from_nanoseconds(age))}",
                "shorten ack_wait or max_deliver, or keep messages longer",
            )


def retries_take(consumer: ConsumerSpec) -> int:
    """Nanoseconds from the first delivery to the end of the last, when every one times out; 0 without a limit."""
    most = consumer.max_deliver or -1
    if most < 1:
        return 0
    waits: list[int] = list(consumer.config.get("backoff", ())) or [consumer.config.get("ack_wait", DEFAULT_ACK_WAIT)]
    return sum(waits[:most]) + max(0, most - len(waits)) * waits[-1]


@rule(
    "S05",
    Severity.ERROR,
    "a combination the server refuses",
    "The server answers with an error when it is asked for this.",
)
def refused(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        for key, message, fix in _conflicts(stream):
            yield at(stream, key, f"stream {stream.name!r}: {message}", fix)


Conflict = tuple[str, str, str]
"""The key to point at, what is wrong, what to do."""


def _conflicts(stream: StreamSpec) -> Iterator[Conflict]:
    yield from _subject_conflicts(stream)
    yield from _limit_conflicts(stream)
    yield from _feature_conflicts(stream)
    if stream.mirror:
        taken = (
            "first_seq",
            "allow_msg_counter",
            "allow_atomic",
            "allow_batched",
            "allow_msg_schedules",
            "subject_delete_marker_ttl",
        )
        for key in taken:
            if stream.config.get(key):
                yield key, f"a mirror cannot have {key}", f"leave {key} out: a mirror takes what its origin has"


def _subject_conflicts(stream: StreamSpec) -> Iterator[Conflict]:
    declared = stream.config.get("subjects", ())
    if len(set(declared)) < len(declared):
        yield "subjects", "a subject is listed twice", "list it once"
    if stream.config.get("no_ack"):
        return
    for subject in declared:
        for space, allowed in RESERVED:
            if subjects.overlap(subject, space) and not (allowed and subjects.covers(allowed, subject)):
                message = f"{subject!r} captures {space}, the server's own subjects"
                yield "subjects", message, "choose narrower subjects"


def _limit_conflicts(stream: StreamSpec) -> Iterator[Conflict]:
    config = stream.config
    if config.get("discard_new_per_subject") and (
        config.get("discard") != "new" or config.get("max_msgs_per_subject", -1) <= 0
    ):
        fix = "add `discard: new` and `max_msgs_per_subject:`"
        yield "discard_new_per_subject", "discard_new_per_subject needs discard new and a limit by subject", fix
    window, age = config.get("duplicate_window", 0), config.get("max_age", 0)
    if age and window > age:
        yield "duplicate_window", "duplicate_window is longer than max_age", "shorten it to max_age or less"
    if config.get("deny_purge") and config.get("allow_rollup_hdrs"):
        yield "deny_purge", "allow_rollup needs the purge that deny_purge forbids", "leave one of them out"


def _feature_conflicts(stream: StreamSpec) -> Iterator[Conflict]:
    config = stream.config
    if config.get("allow_msg_counter"):
        others = {
            "discard": config.get("discard") == "new",
            "allow_msg_ttl": config.get("allow_msg_ttl"),
            "allow_msg_schedules": config.get("allow_msg_schedules"),
            "retention": stream.retention != "limits",
        }
        for key in (key for key, clash in others.items() if clash):
            yield key, f"counters do not go with {key} {config[key]}", f"leave {key} out, or allow_msg_counter"
    if config.get("allow_msg_schedules"):
        if config.get("discard") == "new":
            yield "discard", "message schedules do not go with discard new", "write `discard: old`"
        if stream.sources:
            yield "allow_msg_schedules", "message schedules do not go with sources", "schedule on the origin"
    if config.get("persist_mode") == "async":
        if config.get("storage") == "memory":
            yield "persist_mode", "persist_mode async is for file storage", "leave it out"
        if stream.replicas > 1:
            yield "persist_mode", "persist_mode async is for one replica", "leave it out, or write `replicas: 1`"
        if config.get("allow_atomic"):
            yield "persist_mode", "persist_mode async does not go with atomic batches", "leave one of them out"


@rule(
    "S06",
    Severity.ERROR,
    "more replicas than servers",
    "The server refuses more copies than the cluster has servers.",
)
def too_many_replicas(case: Case) -> Iterator[Hit]:
    environment = case.platform.environment
    most = environment.nodes or environment.replicas
    for stream in case.platform.streams.values():
        if stream.replicas > most:
            yield at(
                stream,
                "replicas",
                f"stream {stream.name!r} wants {stream.replicas} replicas, environment {environment.name!r} has "
                f"{counted(most, 'server')}",
                f"write `nodes: {stream.replicas}` in the environment if it has them, or use fewer replicas",
            )


@rule(
    "S07",
    Severity.WARNING,
    "even number of replicas",
    "An even number survives no more failures than one less, and costs more.",
)
def even_replicas(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        if stream.replicas % 2 == 0:
            message = f"stream {stream.name!r} has {stream.replicas} replicas"
            yield at(stream, "replicas", message, f"use {stream.replicas - 1} or {stream.replicas + 1}")


@rule(
    "S08",
    Severity.WARNING,
    "nothing limits the stream",
    "A stream without any limit grows until the disk is full, and then every stream of the server stops.",
)
def unlimited(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        limits = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")
        if stream.retention == "limits" and not any(stream.config.get(key, -1) > 0 for key in limits):
            message = f"stream {stream.name!r} has no limit by age, size or number"
            yield at(stream, None, message, "add `max_age:` or `max_bytes:`")


@rule(
    "S09",
    Severity.WARNING,
    "a crash of the server loses messages",
    "Memory on one server, or `persist_mode: async`, does not survive a kill of the server.",
)
def volatile(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        if stream.config.get("storage") == "memory" and stream.replicas == 1:
            message = f"stream {stream.name!r} lives in the memory of one server"
            yield at(stream, "storage", message, "write `storage: file`, or use more replicas")
        if stream.config.get("persist_mode") == "async":
            message = f"stream {stream.name!r} acknowledges messages before they are on disk"
            yield at(stream, "persist_mode", message, "leave persist_mode out")


@rule(
    "S10",
    Severity.WARNING,
    "interest without a consumer",
    "An interest stream keeps only what some consumer waits for: without one, every message goes at once.",
)
def no_interest(case: Case) -> Iterator[Hit]:
    read = {one.stream for one in case.platform.handled}
    read |= {name for flow in case.platform.pipelines.values() for name in case.platform.streams_read_by(flow)}
    read |= {origin.name for stream in case.platform.streams.values() for origin in stream.origins}
    for stream in case.platform.streams.values():
        if stream.retention == "interest" and stream.name not in read:
            message = f"nobody reads the interest stream {stream.name!r}, so it keeps nothing"
            yield at(stream, "retention", message, "declare its consumers, or write `retention: limits`")
