"""Pipelines as the platform file declares them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.topology.load import load
from penstock.topology.model import Dedupe, Platform

STREAMS = "streams:\n  A: {subjects: [a.>]}\n  B: {subjects: [b.>]}\n"


def platform(tmp_path: Path, pipeline: str) -> Platform:
    path = tmp_path / "penstock.yaml"
    path.write_text(f"{STREAMS}pipelines:\n  p: {pipeline}\n")
    return load(path, variables={})


def test_the_full_form_is_read(tmp_path: Path) -> None:
    spec = platform(
        tmp_path,
        "{from: {stream: A, subjects: [a.x], consumer: p}, event: {format: json, schema: 'id string'},"
        " dedupe: {key: id, within: 1h}, sql: 'SELECT * FROM events', bad_records: dlq.a, trigger: {every: 10s},"
        " to: [{format: parquet, path: lake, partition_by: [day]}, {stream: B, subject: b.out}, {format: console}]}",
    ).pipelines["p"]
    assert spec.source.streams == ("A",)
    assert spec.dedupe == Dedupe("id", timedelta(hours=1))
    assert [(s.format, s.stream, s.partition_by) for s in spec.sinks] == [
        ("parquet", None, ("day",)),
        (None, "B", ()),
        ("console", None, ()),
    ]
    assert spec.trigger.every == timedelta(seconds=10)


@pytest.mark.parametrize(("streams", "read"), [("'*'", ("A", "B")), ("[B]", ("B",)), ("[B, A]", ("B", "A"))])
def test_several_streams_are_named_or_all(tmp_path: Path, streams: str, read: tuple[str, ...]) -> None:
    declared = platform(tmp_path, f"{{from: {{streams: {streams}}}, to: [{{format: console}}]}}")
    assert declared.streams_read_by(declared.pipelines["p"]) == read


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("{from: {stream: A, streams: [B]}, to: [{format: console}]}", "one of the two"),
        ("{from: {consumer: c}, to: [{format: console}]}", "one of the two"),
        ("{from: {streams: [A, C]}, to: [{format: console}]}", "'C', which is not declared"),
        ("{from: {stream: A}, sql: 'x', function: 'm:f', to: [{format: console}]}", "both sql and function"),
        ("{from: {stream: A}, to: [{format: parquet}]}", "format and a path"),
        ("{from: {stream: A}, to: [{format: parquet, path: x, mode: updat}]}", "append or upsert"),
        ("{from: {stream: A}, to: [{format: parquet, path: x}], functoin: 'm:f'}", "'function'"),
    ],
)
def test_a_wrong_pipeline_is_refused_with_the_reason(tmp_path: Path, pipeline: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        platform(tmp_path, pipeline)
