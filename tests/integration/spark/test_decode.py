"""Messages into events and bad records, on real Spark."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError
from penstock.spark.decode import MESSAGE, decode
from penstock.topology.model import PipelineEvent

SCHEMA = (
    "event_id string NOT NULL, occurred_at timestamp,"
    " payload struct<project_id:string NOT NULL,gpu_seconds:bigint,price:double>, tags array<string>"
)
MESSAGES = (
    "stream string, subject string, sequence bigint, timestamp timestamp,"
    " headers map<string,array<string>>, data binary"
)
ARRIVAL = datetime(2026, 1, 2, tzinfo=UTC)

GOOD = [
    b'{"event_id":"1","occurred_at":"2026-01-01T00:00:00.5Z","payload":{"project_id":"a","gpu_seconds":1,"price":1}}',
    b' {"event_id":"2","payload":{"project_id":"a"},"not_in_the_schema":{"x":[1]}}\n',
    b'{"event_id":"3","payload":{"project_id":"a","price":null},"tags":[]}',
    b'{"event_id":"4","payload":{"project_id":"} ]{ \\" \xc3\xa9"},"tags":["x","y"]}',
]
BAD = [
    (b"not json", "is not JSON"),
    (b"", "is empty"),
    (b"null", "null, not an object"),
    (b"[]", "not an object"),
    (b'"x"', "not an object"),
    (b'[{"event_id":"1","payload":{"project_id":"a"}}]', "not an object"),
    (b'{"event_id":"1","payload":{"project_id":"a"}} trailing', "Extra data"),
    (b'{"event_id":"1","payload":{"project_id":"a"}}{"event_id":"2"}', "Extra data"),
    (b'{"event_id":"1","payload":{"project_id":"a"}},{"event_id":"2"}', "Extra data"),
    (b'{"event_id":"1","payload":{"project_id":"a"}}]', "Extra data"),
    (b'{"event_id":"1","payload":{"project_id":"a"}', "is not JSON"),
    (b'{"event_id":"1","payload":{"project_id":"a","gpu_seconds":"12"}}', 'payload.gpu_seconds is "12", not bigint'),
    (b'{"event_id":"1","payload":{"project_id":"a","gpu_seconds":1.5}}', "payload.gpu_seconds is 1.5, not bigint"),
    (b'{"event_id":"1","payload":{"project_id":"a","price":true}}', "payload.price is true, not double"),
    (b'{"event_id":"1","payload":{"project_id":"a","price":"NaN"}}', 'payload.price is "NaN", not double'),
    (b'{"event_id":"1","payload":"text"}', 'payload is "text", not struct'),
    (b'{"event_id":"1","payload":{"project_id":"a"},"tags":"x"}', 'tags is "x", not array'),
    (b'{"event_id":"1","payload":{"project_id":"a"},"occurred_at":"yesterday"}', "occurred_at is .*, not timestamp"),
    (b'{"event_id":"1","payload":{"project_id":"a","gpu_seconds":99999999999999999999}}', "not bigint"),
    (b'{"event_id":"\xff","payload":{"project_id":"a"}}', "is not UTF-8"),
    (b'{"payload":{"project_id":"a"}}', "event_id is missing"),
    (b'{"event_id":null,"payload":{"project_id":"a"}}', "event_id is missing"),
    (b'{"event_id":"1"}', "payload.project_id is missing"),
    (b'{"event_id":"1","payload":{}}', "payload.project_id is missing"),
    (b"{}", "event_id is missing"),
]


def messages(spark: SparkSession, bodies: list[bytes]) -> DataFrame:
    rows = [("S", "s.x", n, ARRIVAL, {"h": ["v"]}, bytearray(body)) for n, body in enumerate(bodies, 1)]
    return spark.createDataFrame(rows, MESSAGES)


def test_every_message_is_an_event_or_a_bad_record_with_its_reason(spark: SparkSession) -> None:
    bodies = [*GOOD, *(body for body, _ in BAD)]
    decoded = decode(messages(spark, bodies), PipelineEvent("json", SCHEMA), Path())
    assert decoded.bad is not None
    good = sorted(decoded.events.collect(), key=lambda row: row.event_id)
    bad = {row.sequence: row for row in decoded.bad.collect()}
    assert [row.event_id for row in good] == ["1", "2", "3", "4"]
    assert good[3].payload.project_id == '} ]{ " é'
    about = good[0][MESSAGE]
    assert (about.stream, about.subject, about.sequence, about.headers) == ("S", "s.x", 1, {"h": ["v"]})
    assert sorted(bad) == list(range(len(GOOD) + 1, len(bodies) + 1))
    for (body, reason), (_, row) in zip(BAD, sorted(bad.items()), strict=True):
        assert bytes(row.data) == body
        assert row.headers == {"h": ["v"]}
        assert re.search(reason, row.reason), f"{body!r}: {row.reason}"


def test_a_missing_dedupe_key_makes_a_record_bad(spark: SparkSession) -> None:
    schema = PipelineEvent("json", "id string, payload struct<key:string>")
    read = decode(messages(spark, [b'{"payload":{"key":"k"}}', b'{"payload":{}}']), schema, Path(), key="payload.key")
    assert read.bad is not None
    assert [row.payload.key for row in read.events.collect()] == ["k"]
    assert [row.reason for row in read.bad.collect()] == ["field payload.key is missing"]


def test_without_a_schema_messages_are_taken_as_they_are(spark: SparkSession) -> None:
    read = decode(messages(spark, [b"\xff\x00"]), PipelineEvent("json", None), Path())
    assert read.bad is None
    assert [(row.stream, bytes(row.data)) for row in read.events.collect()] == [("S", b"\xff\x00")]


def test_text_is_utf8_or_bad(spark: SparkSession) -> None:
    read = decode(messages(spark, ["é".encode(), b"\xff"]), PipelineEvent("text"), Path())
    assert read.bad is not None
    assert [row.data for row in read.events.collect()] == ["é"]
    assert [row.reason for row in read.bad.collect()] == ["the body is not UTF-8"]


def test_a_schema_may_lie_in_a_file(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "usage.ddl").write_text("id string,\n  n int\n")
    read = decode(messages(spark, [b'{"id":"a","n":7}']), PipelineEvent("json", "usage.ddl"), tmp_path)
    assert [(row.id, row.n) for row in read.events.collect()] == [("a", 7)]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("id strng", "not a Spark schema"),
        ("missing.ddl", "no file"),
        ("jetstream string", "rename it"),
        ("a array<struct<b:int NOT NULL>>", "inside an array"),
    ],
)
def test_a_wrong_schema_is_an_error_that_names_it(spark: SparkSession, tmp_path: Path, schema: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decode(messages(spark, []), PipelineEvent("json", schema), tmp_path)


def test_a_record_that_fails_the_check_is_bad(spark: SparkSession) -> None:
    event = PipelineEvent("json", "id string, data struct<n:int>, timestamp string", check="data.n > 1")
    bodies = [b'{"id":"a","data":{"n":2},"timestamp":"own"}', b'{"id":"b","data":{"n":1}}', b'{"id":"c"}']
    read = decode(messages(spark, bodies), event, Path())
    assert read.bad is not None
    assert [(row.id, row.timestamp) for row in read.events.collect()] == [("a", "own")]
    assert [row.reason for row in read.bad.collect()] == ["it is not true that data.n > 1"] * 2
