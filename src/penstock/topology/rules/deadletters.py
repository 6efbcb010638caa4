"""Rules about dead letters."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import subjects
from penstock.subjects import DLQ, DLQ_SUBJECTS
from penstock.topology.model import ConsumerSpec, GroupSpec, StreamSpec
from penstock.topology.rules.consumers import each
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule


def holds_dead_letters(stream: StreamSpec) -> bool:
    """Whether all that the stream captures are dead letters; one without subjects of its own may hold anything."""
    return not stream.subjects or stream.is_dead_letters


def is_captured(case: Case, subject: str) -> bool:
    """Whether some stream captures subjects of this form."""
    return next(case.captures.overlapping(subject), None) is not None


def _kind(spec: ConsumerSpec | GroupSpec) -> str:
    return "group" if isinstance(spec, GroupSpec) else "consumer"


@rule(
    "D01",
    Severity.ERROR,
    "max_deliver without a dead-letter subject",
    "After the last delivery the server never mentions the message again: without a dead letter it is as good as lost.",
)
def needs_dlq(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        limited = (consumer.max_deliver or -1) > 0
        if limited and not consumer.dlq and consumer.ack_policy != "none" and not holds_dead_letters(stream):
            domain = consumer.name.split("_")[0]
            yield at(
                consumer,
                "max_deliver",
                f"consumer {consumer.name!r} gives up after {consumer.max_deliver} deliveries and has no dlq",
                f"add `dlq: {DLQ}.<domain>.<event>`, such as {DLQ}.{domain}.failed",
            )


@rule(
    "D02",
    Severity.ERROR,
    "nobody captures the dead letters",
    "Dead letters published to a subject that no stream captures are gone.",
)
def captured(case: Case) -> Iterator[Hit]:
    for spec in case.platform.handled:
        if spec.dlq and not is_captured(case, f"{spec.dlq}.*.*"):  # each letter on a subject of its own
            yield at(
                spec,
                "dlq",
                f"no stream captures '{spec.dlq}.>', the dead letters of {_kind(spec)} {spec.name!r}",
                f"declare a stream with `subjects: [{DLQ_SUBJECTS}]`, or correct the subject",
            )
    for flow in case.platform.pipelines.values():
        if flow.bad_records and not is_captured(case, flow.bad_records):
            yield at(
                flow,
                "bad_records",
                f"no stream captures {flow.bad_records!r}, the bad records of pipeline {flow.name!r}",
                f"declare a stream with `subjects: [{DLQ_SUBJECTS}]`, or correct the subject",
            )


@rule(
    "D03",
    Severity.WARNING,
    "unusual dead-letter subject",
    "Tools find dead letters under `dlq.<domain>.<event>`.",
)
def convention(case: Case) -> Iterator[Hit]:
    for spec in case.platform.handled:
        tokens = (spec.dlq or "").split(".")
        if tokens[0] == DLQ and len(tokens) != 3:
            yield at(
                spec,
                "dlq",
                f"{spec.dlq!r} is not of the form {DLQ}.<domain>.<event>",
                "use that form",
            )


@rule(
    "D04",
    Severity.ERROR,
    "publishes into the dead letters",
    "`dlq.>` is filled when deliveries run out and by nothing else: other messages there cannot be told from failures.",
)
def direct(case: Case) -> Iterator[Hit]:
    for flow in case.platform.pipelines.values():
        for sink in flow.sinks:
            if sink.subject and into_dlq(sink.subject):
                message = f"pipeline {flow.name!r} publishes to {sink.subject!r}"
                yield at(flow, "to", message, "choose another subject; broken events go to `bad_records:`")
    for stream in case.platform.streams.values():
        for key, destination in _destinations(stream):
            if into_dlq(destination):
                message = f"{key} of stream {stream.name!r} publishes to {destination!r}"
                yield at(stream, key, message, "choose another destination")


def into_dlq(destination: str) -> bool:
    """Whether messages for this destination, a subject or a template for one, land among the dead letters."""
    return subjects.is_dead_letter(destination) or destination.split(".")[0] in (subjects.ONE, subjects.REST)


def _destinations(stream: StreamSpec) -> Iterator[tuple[str, str]]:
    """Where a stream publishes or renames to, with the key that says so; its own capture of dead letters aside."""
    if "republish" in stream.config:
        yield "republish", stream.config["republish"]["dest"]
    if holds_dead_letters(stream):
        return
    if "subject_transform" in stream.config:
        yield "subject_transform", stream.config["subject_transform"]["dest"]
    for origin in stream.origins:
        for transform in origin.config.get("subject_transforms", ()):
            yield "mirror" if stream.mirror else "sources", transform["dest"]


@rule(
    "D05",
    Severity.WARNING,
    "dead letters mixed with events",
    "A stream that holds events and dead letters expires both together, and a replay can meet its own output.",
)
def mixed(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        catches = any(subjects.overlap(subject, DLQ_SUBJECTS) for subject in stream.subjects)
        if catches and not holds_dead_letters(stream):
            message = f"stream {stream.name!r} captures dead letters together with other subjects"
            yield at(stream, "subjects", message, f"give `{DLQ_SUBJECTS}` a stream of its own")


@rule(
    "D06",
    Severity.ERROR,
    "dead letters come back",
    "The consumer reads its own dead letters: each failure becomes a new message, without end.",
)
def loops(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        if not consumer.dlq or not subjects.covered(consumer.dlq, stream.subjects):
            continue
        if not consumer.filters or subjects.covered(consumer.dlq, consumer.filters):
            message = f"consumer {consumer.name!r} reads {consumer.dlq!r}, where its own dead letters go"
            yield at(consumer, "dlq", message, "leave dlq out of a consumer of dead letters")


@rule(
    "D07",
    Severity.WARNING,
    "dead letters never written",
    "Without a `max_deliver` a message that always fails is delivered for ever and never becomes a dead letter.",
)
def unreachable(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        if consumer.dlq and (consumer.max_deliver or -1) <= 0:
            message = f"consumer {consumer.name!r} has a dlq and no max_deliver"
            yield at(consumer, "dlq", message, "add `max_deliver:`")


@rule(
    "D08",
    Severity.WARNING,
    "letters out of sight",
    "A consumer of dead letters with a `max_deliver` never delivers a letter again that was fetched and not confirmed. "
    "The letter stays in its stream: `penstock dlq ls` lists it, the consumer does not.",
)
def out_of_sight(case: Case) -> Iterator[Hit]:
    for consumer, stream in each(case):
        if stream.is_dead_letters and (consumer.max_deliver or -1) > 0:
            message = f"consumer {consumer.name!r} of dead letters delivers each {consumer.max_deliver} times at most"
            fix = "leave max_deliver out, or look at letters with `penstock dlq`, and say so with `ignore:`"
            yield at(consumer, "max_deliver", message, fix)


@rule(
    "D09",
    Severity.ERROR,
    "dead letters that no command finds",
    "`penstock dlq`, `status` and the pages look for dead letters in streams whose subjects are all below `dlq.`.",
)
def not_found(case: Case) -> Iterator[Hit]:
    for spec in case.platform.handled:
        if spec.dlq and not into_dlq(spec.dlq):
            yield at(spec, "dlq", f"{spec.dlq!r} is not below {DLQ}.", f"use {DLQ}.<domain>.<event>")
    for flow in case.platform.pipelines.values():
        if flow.bad_records and not into_dlq(flow.bad_records):
            message = f"{flow.bad_records!r}, the bad records of pipeline {flow.name!r}, is not below {DLQ}."
            yield at(flow, "bad_records", message, f"use {DLQ}.<domain>.<event>")
