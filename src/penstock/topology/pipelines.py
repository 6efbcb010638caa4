"""Read the pipelines of a platform file."""

from __future__ import annotations

from typing import Any

from penstock.topology.document import FilePlace, Node, Problems
from penstock.topology.fields import PIPELINE_FIELDS
from penstock.topology.kinds import name_problem, read_record
from penstock.topology.model import (
    Dedupe,
    Json,
    PackingSpec,
    PipelineEvent,
    PipelineSink,
    PipelineSource,
    PipelineSpec,
    Trigger,
)
from penstock.units import from_nanoseconds

PLAIN = ("sql", "function", "each_batch", "bad_records", "checkpoint", "owner", "purpose", "ignore")
"""Fields that are taken as they are read."""


def pipeline(name: str, node: Node, place: FilePlace, problems: Problems) -> PipelineSpec | None:
    """One pipeline of the file; None when it is too wrong to build, after saying so."""
    if wrong := name_problem(name):
        problems.add(place, f"{name!r} cannot be the name of a pipeline: {wrong}")
    values = read_record(node, f"pipeline {name!r}", PIPELINE_FIELDS, problems)
    if not values or not values.get("from") or not values.get("to"):
        return None
    if "sql" in values and "function" in values:
        problems.add(node.keys["function"], f"pipeline {name!r} has both sql and function: keep one")
    return PipelineSpec(
        name=name,
        source=_source(node, values["from"], problems),
        sinks=_sinks(node, values["to"], problems),
        event=PipelineEvent(**values.get("event", {})),
        dedupe=_dedupe(values.get("dedupe")),
        trigger=_trigger(node.get("trigger"), values.get("trigger"), problems),
        line=place.line,
        lines={key: where.line for key, where in node.keys.items()},
        **{key: values[key] for key in PLAIN if key in values},
    )


def _source(node: Node, values: Json, problems: Problems) -> PipelineSource:
    where = node.get("from") or node
    if ("stream" in values) == ("streams" in values):
        problems.add(where, "a pipeline reads one `stream` or several `streams`: write one of the two")
    streams = (values["stream"],) if "stream" in values else tuple(values.get("streams", ()))
    rest = {key: value for key, value in values.items() if key not in ("stream", "streams", "subjects")}
    return PipelineSource(streams, tuple(values.get("subjects", ())), line=where.place.line, **rest)


def _sinks(node: Node, many: list[Json], problems: Problems) -> tuple[PipelineSink, ...]:
    listed = node.get("to") or node
    nodes = listed.value if isinstance(listed.value, list) else [listed]
    return tuple(_sink(where, values, problems) for where, values in zip(nodes, many, strict=False))


def _sink(node: Node, values: Json, problems: Problems) -> PipelineSink:
    into_stream, into_files = "stream" in values, "format" in values or "path" in values
    if into_stream == into_files:
        problems.add(node, "a pipeline writes to files (format and path) or to a stream (stream and subject)")
    elif into_files and values.get("format") != "console" and not {"format", "path"} <= values.keys():
        problems.add(node, "files are written with a format and a path: add the one that is missing")
    elif into_files and "packing" in values:
        problems.add(node.keys["packing"], "packing is for streams: files have rows anyway; leave it out")
    lists = {key: tuple(values.get(key, ())) for key in ("partition_by", "key")}
    packing = PackingSpec(**values["packing"]) if "packing" in values else None
    return PipelineSink(**{**values, **lists, "packing": packing}, line=node.place.line)


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
