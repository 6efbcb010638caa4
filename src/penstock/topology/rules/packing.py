"""Rules about packs: the server sees messages, and what is asked of it for rows does not happen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock import packs
from penstock.topology.model import PipelineSpec, StreamSpec
from penstock.topology.rules.pipelines import written
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule
from penstock.units import format_size

AS_MESSAGES = "write messages (`packing: none`)"
MESSAGE_ID = re.compile(r"\bmessage_id\b", re.IGNORECASE)


def packed(case: Case) -> Iterator[StreamSpec]:
    """Every stream that holds packs, its own or those of its sources."""
    return (stream for stream in case.platform.streams.values() if stream.name in case.packed)


@rule(
    "K01",
    Severity.ERROR,
    "keeps one pack a subject",
    "With `max_msgs_per_subject: 1` a pack replaces the one before it, with all of that one's rows.",
)
def last_values(case: Case) -> Iterator[Hit]:
    for stream in packed(case):
        if stream.config.get("max_msgs_per_subject") == 1:
            message = f"stream {stream.name!r} holds packs and keeps one message of each subject: many rows go for one"
            yield at(stream, "max_msgs_per_subject", message, f"{AS_MESSAGES}, or leave max_msgs_per_subject out")


@rule(
    "K02",
    Severity.WARNING,
    "TTL with packs",
    "The server does not see the headers of rows: a row with `Nats-TTL` stays as long as its pack.",
)
def ttl(case: Case) -> Iterator[Hit]:
    for stream in packed(case):
        if stream.config.get("allow_msg_ttl"):
            fix = f"let max_age delete all rows alike, or {AS_MESSAGES} where rows have a TTL"
            message = f"stream {stream.name!r} allows a TTL, which rows in its packs cannot have"
            yield at(stream, "allow_msg_ttl", message, fix)


@rule(
    "K03",
    Severity.WARNING,
    "message ids with packs",
    "A row's `message_id` is stored in its pack and compared with nothing: an event that comes twice is written twice.",
)
def message_ids(case: Case) -> Iterator[Hit]:
    for flow in _writers(case):
        if flow.sql and MESSAGE_ID.search(flow.sql):
            message = f"pipeline {flow.name!r} gives ids to rows that it writes in packs"
            fix = f"take the same event once with `dedupe: {{key: …, within: …}}`, or {AS_MESSAGES} to that sink"
            yield at(flow, "sql", message, fix)


def _writers(case: Case) -> Iterator[PipelineSpec]:
    """The pipelines that write packs."""
    for flow in case.platform.pipelines.values():
        if any(case.platform.packing_of(sink) for sink in flow.sinks):
            yield flow


@rule(
    "K04",
    Severity.INFO,
    "duplicate window with packs",
    "The window compares the ids of messages. A pack of `client.packed()` has one; its rows' own are not compared.",
)
def duplicate_window(case: Case) -> Iterator[Hit]:
    for stream in packed(case):
        if stream.config.get("duplicate_window"):
            message = f"the duplicate_window of stream {stream.name!r} does not see the ids of rows in packs"
            fix = "keep it for ids of packs and messages; for rows, use `dedupe:` in the pipelines that read them"
            yield at(stream, "duplicate_window", message, fix)


@rule(
    "K05",
    Severity.WARNING,
    "work queue of packs",
    "A handler acknowledges a pack, not a row: one row that fails brings all of its pack again, and a dead letter "
    "holds the whole pack. Pipelines read rows, and are not affected.",
)
def acknowledged_whole(case: Case) -> Iterator[Hit]:
    for_spark = {flow.source.consumer for flow in case.platform.pipelines.values()}
    for reader in case.platform.handled:
        stream = case.platform.streams[reader.stream]
        machinery = reader.name in for_spark or (stream.name, reader.name) in case.read_by_sources
        if stream.retention != "limits" and stream.name in case.packed and not machinery:
            yield at(
                reader,
                "stream",
                f"{reader.name!r} acknowledges whole packs of the {stream.retention} stream {stream.name!r}",
                f"handle `message.rows()` so that a row may come twice, and say so with `ignore:`; or {AS_MESSAGES}",
            )


@rule(
    "K06",
    Severity.WARNING,
    "starts at a last pack",
    "`deliver: last` and `last_per_subject` deliver a whole pack: up to as many rows as it holds, not the last one.",
)
def last_delivered(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        policy = consumer.config["deliver_policy"]
        if policy in ("last", "last_per_subject") and consumer.stream in case.packed:
            message = f"consumer {consumer.name!r} delivers {policy}, which is a pack of stream {consumer.stream!r}"
            fix = f"take the last of `message.rows()` and say so with `ignore:`, or {AS_MESSAGES}"
            yield at(consumer, "deliver", message, fix)


@rule(
    "K07",
    Severity.ERROR,
    "headers only, of packs",
    "The rows of a pack, with their headers, are in its body: a consumer with `headers_only` gets none of them.",
)
def headers_only(case: Case) -> Iterator[Hit]:
    for consumer in case.platform.consumers.values():
        if consumer.config.get("headers_only") and consumer.stream in case.packed:
            message = f"consumer {consumer.name!r} gets no rows: stream {consumer.stream!r} holds packs"
            yield at(consumer, "headers_only", message, f"leave headers_only out, or {AS_MESSAGES}")


@rule(
    "K08",
    Severity.ERROR,
    "packs that cannot be written",
    "Typed packs hold columns, and messages as they are have none; the server refuses what is above `max_msg_size`.",
)
def writable(case: Case) -> Iterator[Hit]:
    for flow, sink, stream in written(case):
        packing = case.platform.packing_of(sink)
        if packing is None:
            continue
        computed = flow.event.schema or flow.sql or flow.function or flow.each_batch
        if packing.kind == packs.TYPED and not computed:
            message = f"pipeline {flow.name!r} writes messages as they are to stream {stream.name!r}, in typed packs"
            yield at(flow, "to", message, "give its events a schema (`event:`), or write `packing: rows`")
        most = stream.config.get("max_msg_size", -1)
        if packing.bytes and 0 < most < packing.bytes:
            message = f"pipeline {flow.name!r} writes packs of {format_size(packing.bytes)} to stream {stream.name!r}"
            yield at(
                flow, "to", message, f"lower `bytes:` below its max_msg_size, {format_size(most)}, or leave it out"
            )


@rule(
    "K09",
    Severity.WARNING,
    "packing without effect",
    "Nobody writes to a mirror, which copies packs as they are; dead letters are looked at and replayed one by one, "
    "and are never packed.",
)
def without_effect(case: Case) -> Iterator[Hit]:
    for stream in case.platform.streams.values():
        if stream.packs and (stream.mirror or stream.is_dead_letters):
            what = "is a mirror" if stream.mirror else "holds dead letters"
            message = f"stream {stream.name!r} {what}: packing does nothing there"
            yield at(stream, "packing", message, "leave packing out")
