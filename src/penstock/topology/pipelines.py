"""Read the pipelines of a platform file."""

from __future__ import annotations

from typing import Any

from penstock.topology.document import Node, Place, Problems
from penstock.topology.fields import PIPELINE_FIELDS
from penstock.topology.kinds import name_problem, read_record
from penstock.topology.model import (
    Dedupe,
    Json,
    PipelineEvent,
    PipelineSink,
    PipelineSource,
    PipelineSpec,
    Trigger,
)
from penstock.units import from_nanoseconds


def pipeline(name: str, node: Node, place: Place, problems: Problems) -> PipelineSpec | None:
    """One pipeline of the file; None when it is too wrong to build, after saying so."""
    if wrong := name_problem(name):
        problems.add(place, f"{name!r} cannot be the name of a pipeline: {wrong}")
    values = read_record(node, f"pipeline {name!r}", PIPELINE_FIELDS, problems)
    if not values or not values.get("from", {}).get("stream") or not values.get("to"):
        return None
    return PipelineSpec(
        name=name,
        source=_source(node, values["from"]),
        sinks=_sinks(node, values["to"], problems),
        event=PipelineEvent(**values.get("event", {})),
        dedupe=_dedupe(values.get("dedupe")),
        trigger=_trigger(node.get("trigger"), values.get("trigger"), problems),
        line=place.line,
        lines={key: where.line for key, where in node.keys.items()},
        **{key: values[key] for key in ("sql", "bad_records", "owner", "purpose", "ignore") if key in values},
    )


def _source(node: Node, values: Json) -> PipelineSource:
    where = node.get("from") or node
    return PipelineSource(**{**values, "subjects": tuple(values.get("subjects", ()))}, line=where.place.line)


def _sinks(node: Node, many: list[Json], problems: Problems) -> tuple[PipelineSink, ...]:
    listed = node.get("to") or node
    nodes = listed.value if isinstance(listed.value, list) else [listed]
    return tuple(_sink(where, values, problems) for where, values in zip(nodes, many, strict=False))


def _sink(node: Node, values: Json, problems: Problems) -> PipelineSink:
    into_stream, into_files = "stream" in values, "format" in values or "path" in values
    if into_stream == into_files:
        problems.add(node, "a pipeline writes to files (format and path) or to a stream (stream and subject)")
    elif into_stream and "subject" not in values:
        problems.add(node, "a stream is written with a subject: add `subject`")
    elif into_files and not {"format", "path"} <= values.keys():
        problems.add(node, "files are written with a format and a path: add the one that is missing")
    return PipelineSink(**{**values, "partition_by": tuple(values.get("partition_by", ()))}, line=node.place.line)


def _dedupe(values: Json | None) -> Dedupe | None:
    if not values or values.keys() != {"key", "within"}:
        return None
    return Dedupe(values["key"], from_nanoseconds(values["within"]))


def _trigger(node: Node | None, values: dict[str, Any] | None, problems: Problems) -> Trigger:
    if not values or node is None:
        return Trigger()
    if bool(values.get("available_now")) == ("every" in values):
        problems.add(node, "a trigger is `available_now: true` or `every: 10s`, one of the two")
    every = values.get("every")
    return Trigger(available_now=every is None, every=None if every is None else from_nanoseconds(every))
