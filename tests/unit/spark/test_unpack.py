"""Messages as Spark's rows: packs one by one, in order, with what a row does not say taken from its message."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import packs
from penstock.packs import PackedRow
from penstock.spark import unpack
from penstock.spark.unpack import Shape, shaped
from penstock.wire.scan import SCHEMA

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ONE = datetime(2026, 3, 1, 13, tzinfo=UTC)
EVENT = pa.struct([("id", pa.string()), ("n", pa.int64())])
WITH_ROW = pa.schema([*SCHEMA, pa.field("row", pa.int32())])
WITH_EVENT = pa.schema([*SCHEMA, pa.field("row", pa.int32()), pa.field("event", EVENT)])

Message = tuple[str, dict[str, Any], bytes]


def batch(*messages: Message) -> pa.RecordBatch:
    """Messages as the reader hands them out, from sequence 10 on."""
    rows = [
        ("S", subject, 10 + index, NOON, [(k, [v] if isinstance(v, str) else v) for k, v in headers.items()], data)
        for index, (subject, headers, data) in enumerate(messages)
    ]
    columns = [
        pa.array(list(column), field.type) for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def pack(subject: str, *rows: PackedRow, codec: str = packs.LZ4) -> Message:
    encoded = packs.encode_rows(rows, codec)
    return subject, {"Other": "x", **encoded.headers}, encoded.body


def typed(subject: str, table: pa.Table) -> Message:
    encoded = packs.encode_events(table)
    return subject, encoded.headers, encoded.body


def rows(shape: Shape, *messages: Message) -> list[dict[str, Any]]:
    found = list(shaped([batch(*messages)], shape))
    assert all(one.schema.equals(shape.schema) for one in found)
    for one in found:
        one.validate(full=True)
    return [row for one in found for row in one.to_pylist()]


def test_rows_of_packs_stand_between_the_messages_around_them() -> None:
    found = rows(
        Shape(WITH_ROW),
        ("a", {"K": "v"}, b"1"),
        pack("b", PackedRow(b"2"), PackedRow(b"3", headers={"H": ["x", "y"]}, timestamp=ONE)),
        ("c", {}, b"4"),
        ("c", {}, b"5"),
        pack("d", PackedRow(b"6", "own"), PackedRow(b"7")),
    )
    told = [(row["subject"], row["sequence"], row["row"], row["data"]) for row in found]
    assert told == [
        ("a", 10, 0, b"1"),
        ("b", 11, 0, b"2"),
        ("b", 11, 1, b"3"),
        ("c", 12, 0, b"4"),
        ("c", 13, 0, b"5"),
        ("own", 14, 0, b"6"),
        ("d", 14, 1, b"7"),
    ]
    assert [row["timestamp"] for row in found] == [NOON, NOON, ONE, NOON, NOON, NOON, NOON]
    assert [row["headers"] for row in found] == [[("K", ["v"])], [], [("H", ["x", "y"])], [], [], [], []]
    assert {row["stream"] for row in found} == {"S"}


packed_rows = st.builds(
    PackedRow,
    data=st.binary(max_size=9),
    subject=st.none() | st.sampled_from("xy"),
    headers=st.dictionaries(st.sampled_from("AB"), st.lists(st.sampled_from("12"), min_size=1, max_size=2), max_size=2),
    timestamp=st.none() | st.just(ONE),
)


@given(st.lists(st.binary(max_size=9) | st.lists(packed_rows, min_size=1, max_size=6), min_size=1, max_size=9))
def test_every_row_comes_out_as_the_pack_itself_tells_it(given_: list[bytes | list[PackedRow]]) -> None:
    messages: list[Message] = [("s", {}, one) if isinstance(one, bytes) else pack("s", *one) for one in given_]
    wanted = []
    for one in given_:
        for row in [PackedRow(one)] if isinstance(one, bytes) else one:
            wanted.append((row.subject or "s", row.timestamp or NOON, list(row.headers.items()), row.data))
    found = rows(Shape(), *messages)
    assert [(row["subject"], row["timestamp"], row["headers"], row["data"]) for row in found] == wanted


def test_a_batch_without_packs_is_handed_on_as_it_is() -> None:
    given_ = batch(("a", {"K": "v"}, b"1"))
    assert next(shaped([given_], Shape())) is given_


def test_packs_are_joined_to_batches_and_large_ones_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    some = batch(*(pack("s", PackedRow(b"x" * 40), PackedRow(b"y")) for _ in range(9)))
    assert [one.num_rows for one in shaped([some], Shape())] == [18]
    monkeypatch.setattr(unpack, "ROWS_AT_ONCE", 4)
    assert [one.num_rows for one in shaped([some], Shape())] == [4, 4, 4, 4, 2]
    monkeypatch.setattr(unpack, "BYTES_AT_ONCE", 1)
    assert [one.num_rows for one in shaped([some], Shape())] == [2] * 9


def test_a_pack_that_cannot_be_read_comes_as_the_message_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    subject, headers, body = pack("b", PackedRow(b"2"), PackedRow(b"3"))
    broken = {**headers, "Penstock-Pack-Rows": "7"}
    found = rows(Shape(WITH_ROW), ("a", {}, b"1"), (subject, broken, body), (subject, headers, body))
    assert [(row["sequence"], row["row"]) for row in found] == [(10, 0), (11, 0), (12, 0), (12, 1)]
    assert found[1]["data"] == body
    assert packs.is_pack(dict(found[1]["headers"]))
    assert "sequence 11 of S is handed out as it is: malformed pack: it says that it has 7 rows" in caplog.text


def test_packs_stay_messages_where_they_are_not_asked_for() -> None:
    message = pack("b", PackedRow(b"2"), PackedRow(b"3"))
    assert [row["data"] for row in rows(Shape(unpack=False), message)] == [message[2]]


def test_rows_of_subjects_that_are_not_asked_for_are_left_out() -> None:
    found = rows(Shape(subjects=("o.a",)), pack("o.a", PackedRow(b"1"), PackedRow(b"2", "o.b"), PackedRow(b"3", "o.a")))
    assert [row["data"] for row in found] == [b"1", b"3"]
    assert rows(Shape(subjects=("o.a",)), pack("o.a", PackedRow(b"2", "o.b"))) == []


def test_events_come_as_columns_and_everything_else_as_it_is() -> None:
    table = pa.table({"n": pa.array([1, None], pa.int32()), "id": ["a", "b"], "more": [1.5, 2.5]})
    lacking = pa.table({"n": pa.array([3])})
    found = rows(
        Shape(WITH_EVENT), ("p", {}, b"{}"), typed("u", table), pack("r", PackedRow(b"1")), typed("u", lacking)
    )
    assert [(row["event"], row["data"], row["row"]) for row in found] == [
        (None, b"{}", 0),
        ({"id": "a", "n": 1}, None, 0),
        ({"id": "b", "n": None}, None, 1),
        (None, b"1", 0),
        ({"id": None, "n": 3}, None, 0),
    ]


def test_events_that_are_not_asked_for_as_columns_come_as_documents() -> None:
    found = rows(Shape(), typed("u", pa.table({"n": [1, 2]})))
    assert [json.loads(row["data"]) for row in found] == [{"n": 1}, {"n": 2}]


def test_events_whose_types_do_not_fit_come_as_the_message_that_they_are(caplog: pytest.LogCaptureFixture) -> None:
    message = typed("u", pa.table({"n": ["no number"]}))
    with caplog.at_level(logging.WARNING):
        (found,) = rows(Shape(WITH_EVENT), message)
    assert (found["data"], found["event"]) == (message[2], None)
    assert "handed out as it is" in caplog.text


def test_bodies_that_are_not_asked_for_are_null_and_packs_stay_closed() -> None:
    message = pack("b", PackedRow(b"2"), PackedRow(b"3"))
    found = rows(Shape(unpack=False, data=False), ("a", {"K": "v"}, b"1"), message)
    assert [(row["subject"], row["data"]) for row in found] == [("a", None), ("b", None)]
