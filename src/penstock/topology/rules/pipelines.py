"""Rules about Spark pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import subjects
from penstock.topology.model import PipelineSink, PipelineSpec, StreamSpec
from penstock.topology.rules.rule import Case, Hit, Severity, at, rule

NEEDS = {"atomic": "allow_atomic", "fast": "allow_batched"}
"""What a stream must allow for each way of writing to it."""


def written(case: Case) -> Iterator[tuple[PipelineSpec, PipelineSink, StreamSpec]]:
    """Every sink that is a stream, with that stream."""
    for flow in case.platform.pipelines.values():
        for sink in flow.sinks:
            if sink.stream:
                yield flow, sink, case.platform.streams[sink.stream]


@rule(
    "P01",
    Severity.ERROR,
    "stream does not allow batches",
    "The server refuses atomic batches without `allow_atomic`, and fast ingest without `allow_batched`.",
)
def batches(case: Case) -> Iterator[Hit]:
    for flow, sink, stream in written(case):
        needed = NEEDS[sink.delivery]
        if not stream.config.get(needed):
            yield at(
                flow,
                "to",
                f"pipeline {flow.name!r} writes {sink.delivery} batches to stream {stream.name!r}",
                f"add `{needed}: true` to stream {stream.name!r} (line {stream.line})",
            )


@rule(
    "P02",
    Severity.ERROR,
    "stream does not capture what is written",
    "A message on a subject that its stream does not capture is not stored there.",
)
def captured(case: Case) -> Iterator[Hit]:
    for flow, sink, stream in written(case):
        if sink.subject and not subjects.covered(sink.subject, stream.subjects):
            yield at(
                flow,
                "to",
                f"stream {stream.name!r} ({', '.join(stream.subjects)}) does not capture {sink.subject!r}",
                "correct the subject, or add it to the stream",
            )


@rule(
    "P03",
    Severity.ERROR,
    "reads what does not exist",
    "No subject of its streams passes the filter, so the pipeline never gets an event of it.",
)
def readable(case: Case) -> Iterator[Hit]:
    for flow in case.platform.pipelines.values():
        streams = [case.platform.streams[name] for name in case.platform.streams_read_by(flow)]
        if any(stream.origins for stream in streams):
            continue  # what flows in from elsewhere is not in the file
        there = [subject for stream in streams for subject in stream.subjects]
        for filter_ in flow.source.subjects:
            if not subjects.any_overlap([filter_], there):
                message = f"nothing that pipeline {flow.name!r} reads ({', '.join(there)}) passes {filter_!r}"
                yield at(flow, "from", message, "correct the filter, or add the subject to the stream")


@rule(
    "P04",
    Severity.ERROR,
    "reads its own output",
    "What the pipeline writes comes back as its input, without end.",
)
def feeds_itself(case: Case) -> Iterator[Hit]:
    for flow, sink, stream in written(case):
        reads = flow.source.subjects or (">",)
        if stream.name in case.platform.streams_read_by(flow) and subjects.any_overlap([sink.subject or ">"], reads):
            wrote = repr(sink.subject) if sink.subject else "whatever its rows say"
            message = f"pipeline {flow.name!r} writes {wrote} to stream {stream.name!r}, which it reads"
            yield at(flow, "from", message, "read narrower `subjects:`, or write elsewhere")


@rule(
    "P05",
    Severity.ERROR,
    "needs a durable consumer",
    "On a workqueue or interest stream only acknowledging through a durable keeps and removes the right messages.",
)
def durable(case: Case) -> Iterator[Hit]:
    for flow in case.platform.pipelines.values():
        for name in case.platform.streams_read_by(flow):
            retention = case.platform.streams[name].retention
            if retention != "limits" and not flow.source.consumer:
                message = f"pipeline {flow.name!r} reads the {retention} stream {name!r} without a consumer"
                yield at(flow, "from", message, f"add `consumer: pipeline_{flow.name}` to `from:`")
