"""Rules about sources and mirrors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock import subjects
from penstock.sourcing import modes
from penstock.topology.document import nearest
from penstock.topology.model import Platform, SourceSpec, StreamSpec
from penstock.topology.resource import deliver_subject
from penstock.topology.rules.rule import Case, Hit, Severity, rule

MOVED = ("opt_start_seq", "opt_start_time", "filter_subject")
"""Fields that belong to the consumer once it is the user's own."""


def each(case: Case) -> Iterator[tuple[StreamSpec, SourceSpec]]:
    """Every source and mirror with its stream."""
    for stream in case.platform.streams.values():
        for origin in stream.origins:
            yield stream, origin


def at(stream: StreamSpec, origin: SourceSpec, message: str, fix: str) -> Hit:
    key = "mirror" if stream.mirror else "sources"
    return Hit(message, fix, origin.line, f"streams.{stream.name}.{key}", stream.ignore)


def local(platform: Platform, origin: SourceSpec) -> StreamSpec | None:
    """The origin where this file declares it."""
    return None if origin.is_external else platform.streams.get(origin.name)


@rule(
    "O01",
    Severity.ERROR,
    "ephemeral source over workqueue or interest",
    "Such a stream deletes what its reader has taken. An ephemeral reader takes without waiting for the copy: what is "
    "lost on the way is lost. Newer servers make a durable with a random name, which nobody can find or move.",
)
def ephemeral(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        source = local(case.platform, origin)
        if source and source.retention != "limits" and not origin.consumer:
            yield at(
                stream,
                origin,
                f"stream {stream.name!r} reads the {source.retention} stream {source.name!r} without a durable",
                f"add `consumer: {{name: {stream.name.lower()}-{source.name.lower()}, server_managed: true}}`",
            )


@rule(
    "O02",
    Severity.ERROR,
    "start or filter beside a consumer of your own",
    "The server refuses it: a consumer that you make yourself holds its own start and filter.",
)
def moved_fields(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        extra = [key for key in MOVED if key in origin.config]
        if origin.consumer and not origin.server_managed and extra:
            yield at(
                stream,
                origin,
                f"the source {origin.name!r} of {stream.name!r} has {', '.join(extra)} and a consumer of your own",
                "move it to the consumer, or write `server_managed: true`",
            )


@rule(
    "O03",
    Severity.ERROR,
    "the source's consumer does not fit",
    "A source can only read through a consumer of its origin with `ack_policy: flow_control` that delivers where the "
    "source listens.",
)
def fitting_consumer(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        source = local(case.platform, origin)
        if source and origin.consumer and not origin.server_managed:
            for fault in _misfits(case.platform, origin):
                message = (
                    f"the source {origin.name!r} of {stream.name!r} reads through {origin.consumer.name!r}: {fault}"
                )
                yield at(stream, origin, message, _remedy(case.platform, origin))


def _remedy(platform: Platform, origin: SourceSpec) -> str:
    assert origin.consumer is not None
    if origin.consumer.name in platform.consumers:
        return "correct the consumer, or write `server_managed: true`"
    keys = f"stream: {origin.name}, ack_policy: flow_control, deliver_subject: {origin.consumer.deliver_subject}"
    return f"declare it: `{origin.consumer.name}: {{{keys}}}`, or write `server_managed: true`"


def _misfits(platform: Platform, origin: SourceSpec) -> Iterator[str]:
    assert origin.consumer is not None
    declared = platform.consumers.get(origin.consumer.name)
    if declared is None:
        yield "it is not declared under consumers"
        return
    if declared.stream != origin.name:
        yield f"it belongs to stream {declared.stream!r}"
    if declared.ack_policy != "flow_control":
        yield f"its ack_policy is {declared.ack_policy}, not flow_control"
    if not declared.is_push:
        yield "it is a pull consumer, and a source needs a push consumer"
    elif declared.config["deliver_subject"] != origin.consumer.deliver_subject:
        yield "its deliver_subject is another one"
    if declared.config.get("deliver_group"):
        yield "it delivers to a queue group, of which a source is no member"
    if declared.config.get("headers_only"):
        yield "headers_only is on: the copies would have no data"


@rule(
    "O04",
    Severity.WARNING,
    "unknown origin",
    "The server accepts a source that does not exist, and waits for it without a word.",
)
def unknown_origin(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        if not origin.is_external and origin.name not in case.platform.streams:
            hint = nearest(origin.name, list(case.platform.streams))
            yield at(
                stream,
                origin,
                f"stream {stream.name!r} reads {origin.name!r}, which is not declared here; {hint}",
                "declare it, correct the name, or say in which `domain:` it lives",
            )


@rule(
    "O05",
    Severity.ERROR,
    "streams in a circle",
    "The server refuses sources and mirrors that lead back to where they started.",
)
def circles(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        if stream.name in _upstream(case.platform, origin):
            message = f"stream {stream.name!r} reads {origin.name!r}, which leads back to {stream.name!r}"
            yield at(stream, origin, message, "take one source out of the circle")


def _upstream(platform: Platform, origin: SourceSpec) -> set[str]:
    """Every stream of this file that flows into the origin, the origin included."""
    seen: set[str] = set()
    ahead = [origin]
    while ahead:
        source = local(platform, ahead.pop())
        if source and source.name not in seen:
            seen.add(source.name)
            ahead.extend(source.origins)
    return seen


@rule(
    "O06",
    Severity.ERROR,
    "filter and transforms together",
    "The server takes a `filter_subject` or `subject_transforms`, for a transform filters too.",
)
def two_filters(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        if "filter_subject" in origin.config and origin.config.get("subject_transforms"):
            message = f"the source {origin.name!r} of {stream.name!r} has a filter_subject and subject_transforms"
            yield at(stream, origin, message, "say the filter as `from:` of a transform")


@rule(
    "O07",
    Severity.ERROR,
    "one consumer for two sources",
    "Each source needs a consumer of its own: two readers of one consumer each get half.",
)
def shared_consumer(case: Case) -> Iterator[Hit]:
    pairs = [(stream, origin) for stream, origin in each(case) if origin.consumer]
    used = Counter(_consumer_key(origin) for _, origin in pairs)
    for stream, origin in pairs:
        if used[_consumer_key(origin)] > 1:
            assert origin.consumer is not None
            message = f"consumer {origin.consumer.name!r} of {origin.name!r} serves more than one source"
            yield at(stream, origin, message, "give each source a consumer of its own")


def _consumer_key(origin: SourceSpec) -> tuple[str, str, str]:
    assert origin.consumer is not None
    return origin.consumer.name, origin.name, str(origin.config.get("external", {}).get("api", ""))


@rule(
    "O08",
    Severity.WARNING,
    "ephemeral source from elsewhere",
    "Whether the origin is a workqueue or interest stream cannot be seen from here; if it is, an ephemeral reader may "
    "lose messages. Newer servers make a durable with a random name, which nobody can find or move.",
)
def ephemeral_from_elsewhere(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        if origin.is_external and not origin.consumer:
            yield at(
                stream,
                origin,
                f"stream {stream.name!r} reads {origin.name!r} of another domain or account without a durable",
                f"add `consumer: {{name: {stream.name.lower()}-{origin.name.lower()}, server_managed: true}}`, or say "
                "with `ignore:` that the origin has retention limits",
            )


@rule(
    "O09",
    Severity.ERROR,
    "two starts",
    "A source begins at a sequence or at a time; the server takes the sequence and forgets the time.",
)
def two_starts(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        if "opt_start_seq" in origin.config and "opt_start_time" in origin.config:
            message = f"the source {origin.name!r} of {stream.name!r} has an opt_start_seq and an opt_start_time"
            yield at(stream, origin, message, "keep one of them")


@rule(
    "O10",
    Severity.ERROR,
    "deliver subject captured by a stream",
    "What the consumer of a source delivers would be stored by that stream too: the server refuses it where it sees "
    "the circle, and elsewhere every message is stored a second time.",
)
def captured_deliveries(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        subject = origin.consumer.deliver_subject if origin.consumer else None
        for captured, other in case.captures.overlapping(subject) if subject else ():
            message = f"the source {origin.name!r} of {stream.name!r} delivers to {subject!r}, which {other.name!r}"
            fix = "choose a deliver_subject that no stream captures, or leave it out with `server_managed: true`"
            yield at(stream, origin, f"{message} captures with {captured!r}", fix)


@rule(
    "O11",
    Severity.ERROR,
    "filter of a source matches nothing",
    "No subject of the origin passes the filter, so nothing is ever copied, and nobody complains.",
)
def filter_matches(case: Case) -> Iterator[Hit]:
    for stream, origin in each(case):
        source, filter_ = local(case.platform, origin), origin.config.get("filter_subject")
        if not source or not filter_ or source.origins or "subject_transform" in source.config:
            continue  # stored subjects can then differ from the captured ones
        if not subjects.any_overlap([filter_], source.subjects):
            message = f"no subject of stream {source.name!r} ({', '.join(source.subjects)}) passes {filter_!r}"
            yield at(stream, origin, message, "correct the filter_subject, or add the subject to the origin")


@rule(
    "O12",
    Severity.ERROR,
    "two sources with one deliver subject",
    "Linked domains share their subjects: each source gets what is meant for the other, stores some of it twice, and "
    "the origins delete what was never stored.",
)
def shared_deliveries(case: Case) -> Iterator[Hit]:
    pairs = [(stream, origin, deliver_subject(stream.name, origin)) for stream, origin in each(case) if origin.consumer]
    used = Counter(subject for _, _, subject in pairs)
    consumers = {subject: {_consumer_key(one) for _, one, other in pairs if other == subject} for subject in used}
    for stream, origin, subject in pairs:
        if used[subject] > 1 and len(consumers[subject]) > 1:  # the same consumer twice: O07
            message = f"the source {origin.name!r} of {stream.name!r} receives on {subject!r}, and so does another one"
            yield at(stream, origin, message, "give each a deliver_subject of its own, or write `server_managed: true`")


@rule(
    "O13",
    Severity.WARNING,
    "duplicate window over several origins",
    "The window compares message ids, whatever origin they come from: of two messages with one id the second is "
    "dropped in silence, and its origin is told that it is stored. A stream with sources has no window without it.",
)
def shared_window(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        if modes.shares_window(stream.config):
            message = f"stream {stream.name!r} has a duplicate_window, and messages of several origins in it"
            fix = "leave duplicate_window out, or say with `ignore:` that no id is used at two origins"
            yield at(stream, stream.sources[0], message, fix)
