"""Bodies as documents, by schema and as JSON, and what is looked for in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.binary_events import AVRO, avro_datum, descriptor_set, protobuf_usage

from penstock.events.documents import MISSING, Documents, FieldFilter, field_of, field_text
from penstock.topology.load import load

FILE = """
environments: {dev: {servers: ["nats://localhost"]}}
streams:
  S: {subjects: [s.>]}
pipelines:
  usage: {from: {stream: S, subjects: [s.avro.*]}, event: {format: avro, schema: usage.avsc}, to: [{format: console}]}
  other: {from: {stream: S, subjects: [s.proto]}, event: {format: protobuf, schema: b.desc, message: billing.Usage},
          to: [{format: console}]}
  gone: {from: {stream: S, subjects: [s.gone]}, event: {format: avro, schema: gone.avsc}, to: [{format: console}]}
  text: {from: {stream: S}, event: {format: json}, to: [{format: console}]}
"""


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    (tmp_path / "usage.avsc").write_text(json.dumps(AVRO))
    (tmp_path / "b.desc").write_bytes(descriptor_set())
    (tmp_path / "penstock.yaml").write_text(FILE)
    return Documents.of(load(tmp_path / "penstock.yaml"))


def test_bodies_are_read_by_the_schema_of_their_subject(documents: Documents) -> None:
    read = documents.read("S", "s.avro.x", avro_datum())
    assert (read["id"], read["price"], read["at"]) == ("a", "12.34", "2026-01-02T03:04:05.600000+00:00")
    assert (read["tags"], read["who"]) == ({"x": [1, 2]}, {"raw": "00ff"})
    read = documents.read("S", "s.proto", protobuf_usage())
    assert (read["big"], read["who"]["raw"], read["note"]) == (str(2**64 - 1), "ff", "n")
    json.dumps(read)


def test_a_body_with_more_than_its_event_is_not_read_by_the_schema(documents: Documents) -> None:
    assert documents.read("S", "s.avro.x", avro_datum() + b"\xff") is MISSING


def test_other_subjects_and_streams_are_json_or_nothing(documents: Documents) -> None:
    assert documents.read("T", "s.avro.x", avro_datum()) is MISSING
    assert documents.read("S", "s.other", b"\xff") is MISSING
    assert documents.read("S", "s.avro.x", b'{"a": 1}') == {"a": 1}, "what the schema cannot read may be JSON"
    assert documents.read("S", "s.gone", b"[1]") == [1], "a schema that is not there does not hide the rest"
    assert documents.read("S", "s.x", b"null") is None


@pytest.mark.parametrize(
    ("text", "document", "fits"),
    [
        ("a.b", {"a": {"b": None}}, True),
        ("a.c", {"a": {"b": None}}, False),
        ("a.1.x=7", {"a": [0, {"x": 7}]}, True),
        ("a.2", {"a": [0, 1]}, False),
        ("a=true", {"a": True}, True),
        ("a=x=y", {"a": "x=y"}, True),
        ("a=", {"a": ""}, True),
        ("a=", {"a": 0}, False),
        ("a", "text", False),
        ("a", MISSING, False),
    ],
)
def test_a_filter_compares_a_field_with_a_text(text: str, document: Any, fits: bool) -> None:
    assert FieldFilter.parse(text).matches(document) == fits


def test_a_field_that_is_not_there_is_shown_as_nothing() -> None:
    assert field_text(field_of({"a": 1}, "b")) == ""
    assert field_text(field_of({"a": {"b": [1]}}, "a")) == '{"b": [1]}'
