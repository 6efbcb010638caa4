"""Which DataFrames can be written, and how their rows become messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.publish.reserved import ReservedSubject
from penstock.spark.output import RowMaker, columns_of


def schema(ddl: str) -> StructType:
    # Parsed without a Spark session.
    parts = [field.strip().split(" ", 1) for field in ddl.split(";")]
    return StructType.fromJson(
        {"fields": [{"name": n, "type": _type(t), "nullable": True, "metadata": {}} for n, t in parts]}
    )


def _type(text: str) -> object:
    array = {"type": "array", "elementType": "string", "containsNull": True}
    maps = {
        "map<string,string>": {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True},
        "map<string,array<string>>": {
            "type": "map",
            "keyType": "string",
            "valueType": array,
            "valueContainsNull": True,
        },
        "map<string,bigint>": {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True},
    }
    return maps.get(text, text)


@pytest.mark.parametrize(
    ("ddl", "subject", "complaint"),
    [
        ("subject string", None, "no column `data`"),
        ("data binary", None, "add a column `subject`, or give the option"),
        ("data binary; subject long", None, "'subject' must be string, not bigint"),
        ("data double; subject string", None, "'data' must be binary or string, not double"),
        ("data binary; subject string; message_id long", None, "'message_id' must be string"),
        (
            "data binary; subject string; headers map<string,bigint>",
            None,
            "map<string,array<string>> or map<string,string>",
        ),
        ("data binary; subject string; header string", None, "did you mean 'headers'"),
        ("data binary; subject string; amount double", None, "'amount' has no place in a message"),
        ("data binary", "elsewhere.x", r"does not take subject 'elsewhere\.x'; it takes o\.>"),
        ("data binary", "o.*", "has a wildcard"),
        ("data binary", "o..x", "empty token"),
    ],
)
def test_a_frame_that_cannot_be_written_is_refused_with_the_reason(ddl: str, subject: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        columns_of(schema(ddl), "OUT", ["o.>"], subject)


def test_only_the_bad_records_of_a_pipeline_go_among_the_dead_letters() -> None:
    for ddl, fixed in (("data binary", "dlq.a"), ("data binary; subject string", None)):
        rows = pa.record_batch({"data": [b"x"], "subject": ["dlq.a"]})
        with pytest.raises(ReservedSubject, match="belongs to dead letters"):
            RowMaker(columns_of(schema(ddl), "DLQ", ["dlq.>"], fixed)).rows(rows)
        allowed = RowMaker(columns_of(schema(ddl), "DLQ", ["dlq.>"], fixed, dead_letters=True)).rows(rows)
        assert allowed.subjects.to_pylist() == ["dlq.a"]


def test_columns_of_the_source_are_passed_over() -> None:
    columns = columns_of(
        schema("stream string; subject string; sequence long; timestamp timestamp; data binary"), "OUT", ["o.>"], None
    )
    assert columns.subject is None


def test_text_becomes_bytes_and_missing_bodies_empty_ones() -> None:
    maker = RowMaker(columns_of(schema("data string"), "OUT", ["o.>"], "o.x"))
    rows = maker.rows(pa.record_batch({"data": pa.array(["ä", None])}))
    assert rows.bodies.to_pylist() == ["ä".encode(), b""]
    assert rows.subjects.to_pylist() == ["o.x", "o.x"]
    assert rows.headers is None


@pytest.mark.parametrize(
    ("kind", "value"), [("map<string,string>", "1"), ("map<string,array<string>>", ["1"])], ids=["single", "several"]
)
def test_headers_become_lines_without_those_that_steer_the_transport(kind: str, value: object) -> None:
    maker = RowMaker(columns_of(schema(f"data string; headers {kind}; message_id string"), "OUT", ["o.>"], "o.x"))
    arrow = pa.map_(pa.string(), pa.string() if isinstance(value, str) else pa.list_(pa.string()))
    headers = [[("A", value), ("Nats-Batch-Id", value), ("nats-msg-id", value), ("Nats-TTL", value)], None]
    batch = pa.record_batch(
        {"data": pa.array(["", ""]), "headers": pa.array(headers, arrow), "message_id": pa.array([None, "m"])}
    )
    rows = maker.rows(batch)
    assert rows.headers is not None
    assert rows.headers.to_pylist() == [b"A: 1\r\nNats-TTL: 1\r\n", b"Nats-Msg-Id: m\r\n"]


def header_lines(headers: dict[str, str], **columns: Any) -> bytes:
    """What becomes of the headers of a row."""
    found = columns_of(schema("data string; headers map<string,string>"), "OUT", ["o.>"], "o.x")
    arrow = pa.array([list(headers.items())], pa.map_(pa.string(), pa.string()))
    rows = RowMaker(replace(found, **columns)).rows(pa.record_batch({"data": pa.array([""]), "headers": arrow}))
    assert rows.headers is not None
    lines: bytes = rows.headers[0].as_py()
    return lines


def test_headers_that_a_message_cannot_have_are_refused_replaced_or_dropped() -> None:
    headers = {"My Header": "1", "B": "2\r\nForged: 3", "C": "4"}
    with pytest.raises(ConfigError, match="set invalidHeaders=replace or invalidHeaders=drop"):
        header_lines(headers)
    assert header_lines(headers, invalid_headers="replace") == b"My_Header: 1\r\nB: 2  Forged: 3\r\nC: 4\r\n"
    assert header_lines(headers, invalid_headers="drop") == b"C: 4\r\n"
    assert header_lines({"": "1"}, invalid_headers="replace") == b"_: 1\r\n"


def test_orders_to_the_server_are_left_out_unless_they_are_wanted() -> None:
    headers = {"Nats-Rollup": "all", "Nats-Schedule-Target": "o.y", "Nats-TTL": "1h", "A": "1"}
    assert header_lines(headers) == b"Nats-TTL: 1h\r\nA: 1\r\n"
    assert header_lines(headers, ttl=False) == b"A: 1\r\n", "the stream would refuse it"
    kept = b"Nats-Rollup: all\r\nNats-Schedule-Target: o.y\r\nNats-TTL: 1h\r\nA: 1\r\n"
    assert header_lines(headers, orders=True) == kept


def test_an_empty_message_id_is_none() -> None:
    maker = RowMaker(columns_of(schema("data string; message_id string"), "OUT", ["o.>"], "o.x"))
    rows = maker.rows(pa.record_batch({"data": pa.array(["", "", ""]), "message_id": pa.array(["", " ", "m"])}))
    assert rows.headers is not None
    assert rows.headers.to_pylist() == [b"", b"", b"Nats-Msg-Id: m\r\n"]


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        (None, "is null there"),
        ("p.x", "does not take subject"),
        ("o. x", "white space"),
        ("o." + 4000 * "x", "at most"),
    ],
)
def test_a_row_with_an_unusable_subject_is_refused(subject: str | None, complaint: str) -> None:
    maker = RowMaker(columns_of(schema("data string; subject string"), "OUT", ["o.>"], None))
    batch = pa.record_batch({"data": pa.array(["", ""]), "subject": pa.array(["o.x", subject], pa.string())})
    with pytest.raises(ConfigError, match=complaint):
        maker.rows(batch)
