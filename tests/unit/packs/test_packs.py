"""Packs: many rows in one message, read back as they were, and refused when they are not what they say."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import packs
from penstock.errors import ConfigError
from penstock.packs import MalformedPack, PackedRow, codec, marks

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
packed_rows = st.lists(
    st.builds(
        PackedRow,
        data=st.binary(max_size=40),
        subject=st.none() | text.filter(bool),
        headers=st.dictionaries(text, st.lists(text, max_size=3), max_size=3),
        timestamp=st.none() | st.datetimes(timezones=st.just(UTC)),
    ),
    min_size=1,
    max_size=20,
)
EVENTS = pa.table(
    {
        "id": pa.array(["a", "b", None]),
        "seconds": pa.array([1, 2, 3], pa.int64()),
        "price": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(10, 2)),
        "at": pa.array([NOON, NOON, None], pa.timestamp("ns", tz="Europe/Vienna")),
        "tags": pa.array([["x", None], [], None], pa.list_(pa.string())),
        "place": pa.array([{"zone": 1, "raw": b"\xff"}, None, {"zone": None, "raw": None}]),
        "counts": pa.array([[("n", 1)], [], None], pa.map_(pa.string(), pa.int32())),
    }
)


def decoded(encoded: packs.EncodedPack) -> packs.Pack:
    return packs.decode(encoded.headers, encoded.body)


@given(packed_rows, st.sampled_from(packs.CODECS))
def test_rows_come_back_as_they_were(rows: list[PackedRow], codec: str) -> None:
    assert list(decoded(packs.encode_rows(rows, codec)).rows()) == rows


@given(st.lists(st.tuples(st.none() | text, st.none() | st.integers(-5, 5), st.binary()), min_size=1, max_size=9))
def test_events_come_back_as_they_were(values: list[tuple[Any, ...]]) -> None:
    schema = pa.schema([("s", pa.string()), ("n", pa.int8()), ("raw", pa.binary())])
    table = pa.table([list(column) for column in zip(*values, strict=True)], schema=schema)
    assert decoded(packs.encode_events(table)).batch.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("codec", packs.CODECS)
def test_columns_of_every_kind_go_into_a_typed_pack(codec: str) -> None:
    pack = decoded(packs.encode_events(EVENTS, codec))
    assert (pack.kind, len(pack), pack.mark.codec) == (packs.TYPED, 3, codec)
    assert pack.batch.schema == EVENTS.schema
    assert pack.batch.equals(EVENTS.combine_chunks().to_batches()[0])


def test_a_row_without_subject_and_time_has_those_of_its_message() -> None:
    pack = decoded(packs.encode_rows([PackedRow(b"1"), PackedRow(b"2", "own", {"A": ["b"]}, NOON)]))
    later = datetime(2026, 4, 1, tzinfo=UTC)
    assert list(pack.rows("orders.new", later)) == [
        PackedRow(b"1", "orders.new", {}, later),
        PackedRow(b"2", "own", {"A": ["b"]}, NOON),
    ]


def test_columns_that_no_row_has_are_left_out() -> None:
    assert decoded(packs.encode_rows([PackedRow(b"1")])).batch.schema.names == ["data"]


def test_the_message_id_of_a_row_is_among_its_headers() -> None:
    assert PackedRow(b"", headers={"Nats-Msg-Id": ["7"]}).message_id == "7"
    assert PackedRow(b"").message_id is None


def test_events_are_shown_as_documents() -> None:
    first, second, third = decoded(packs.encode_events(EVENTS)).rows("usage")
    assert json.loads(first.data) == {
        "id": "a",
        "seconds": 1,
        "price": "1.50",
        "at": "2026-03-01T12:00:00Z",
        "tags": ["x", None],
        "place": {"zone": 1, "raw": "/w=="},
        "counts": {"n": 1},
    }
    assert json.loads(second.data)["place"] is None
    assert (third.subject, json.loads(third.data)["at"]) == ("usage", None)


def test_documents_have_no_values_that_json_lacks() -> None:
    odd = pa.table({"f": [float("nan"), float("inf"), -float("inf")], "d": [date(2026, 1, 2)] * 3})
    assert [json.loads(row.data) for row in decoded(packs.encode_events(odd)).rows()] == [
        {"f": word, "d": "2026-01-02"} for word in ("NaN", "Infinity", "-Infinity")
    ]


def test_equal_columns_have_one_id_and_others_another() -> None:
    ids = [
        packs.schema_id(pa.schema(fields))
        for fields in (
            [("a", pa.int64()), ("b", pa.list_(pa.string()))],
            [("a", pa.int64()), ("b", pa.list_(pa.binary()))],
            [("b", pa.list_(pa.string())), ("a", pa.int64())],
            [pa.field("a", pa.int64(), nullable=False), ("b", pa.list_(pa.string()))],
        )
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == packs.schema_id(pa.schema([("a", pa.int64()), ("b", pa.list_(pa.string()))]))
    assert ids[0] == "d943f971544d9cc1", "the id is part of the format"


def test_another_writer_may_name_the_columns_as_it_likes() -> None:
    encoded = packs.encode_events(EVENTS)
    pack = packs.decode({**encoded.headers, marks.SCHEMA: "usage/3"}, encoded.body)
    assert pack.mark.schema == "usage/3"


def test_headers_tell_a_pack_whether_they_have_one_value_a_name_or_several() -> None:
    encoded = packs.encode_rows([PackedRow(b"1")], packs.NONE)
    several = {name: [value] for name, value in encoded.headers.items()}
    assert packs.mark_of(encoded.headers) == packs.mark_of(several) == encoded.mark
    assert packs.is_pack(encoded.headers)
    assert not packs.is_pack({"Kind": "rows"})
    assert not packs.is_pack(None)
    assert packs.mark_of({}) is packs.mark_of(None) is None


def test_packs_are_told_apart_without_arrow() -> None:
    program = "import sys; sys.modules['pyarrow'] = None; from penstock import packs; print(packs.is_pack({}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({marks.PACK: "2"}, "version is '2'"),
        ({marks.KIND: "other"}, "kind is 'other'"),
        ({marks.CODEC: "gzip"}, "codec 'gzip'"),
        ({marks.COUNT: "0"}, "from 1 to"),
        ({marks.COUNT: "-1"}, "from 1 to"),
        ({marks.COUNT: "9" * 30}, "from 1 to"),
        ({marks.COUNT: "3"}, "says that it has 3 rows, and has 2"),
        ({marks.SCHEMA: ""}, "from 1 to 64"),
        ({marks.SCHEMA: "x" * 65}, "from 1 to 64"),
        ({marks.KIND: ""}, "kind is ''"),
        ({marks.KIND: ["rows", "typed"]}, "2 headers"),
        ({marks.KIND: []}, "0 headers"),
    ],
)
def test_a_pack_that_is_not_what_its_headers_say_is_refused(changed: dict[str, Any], problem: str) -> None:
    encoded = packs.encode_rows([PackedRow(b"1"), PackedRow(b"2")])
    with pytest.raises(MalformedPack, match=problem):
        packs.decode({**encoded.headers, **changed}, encoded.body)


def test_a_message_that_is_no_pack_is_refused() -> None:
    with pytest.raises(MalformedPack, match="no header"):
        packs.decode({}, b"{}")


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def claimed(batch: pa.RecordBatch, kind: str = packs.TYPED, codec: str = packs.NONE) -> dict[str, str]:
    try:
        schema = packs.schema_id(batch.schema)
    except ConfigError:
        schema = "x"
    return packs.PackMark(kind, batch.num_rows, codec, schema).headers()


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "a"]).dictionary_encode(),
        pa.nulls(2),
        pa.array([{}, {}], pa.struct([])),
        pa.array([b"", b""], pa.binary(0)),
        pa.array([[], []], pa.list_(pa.int8(), 0)),
        pa.array([[None], []], pa.list_(pa.null())),
        pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["a"])),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_whose_values_need_no_room_are_neither_packed_nor_read(column: pa.Array) -> None:
    batch = pa.record_batch([column], ["c"])
    with pytest.raises(ConfigError, match="cannot be packed"):
        packs.encode_events(batch)
    with pytest.raises(MalformedPack):
        packs.decode(claimed(batch), stream(batch))


def test_a_body_with_two_batches_is_refused() -> None:
    batch = pa.record_batch({"data": pa.array([b"1"])})
    with pytest.raises(MalformedPack, match="one record batch"):
        packs.decode(claimed(batch), stream(batch, batch))


def test_rows_with_other_columns_are_refused() -> None:
    batch = pa.record_batch({"data": pa.array(["text"])})
    with pytest.raises(MalformedPack, match="columns are data string"):
        packs.decode(claimed(batch, packs.ROWS), stream(batch))
    with pytest.raises(ConfigError, match="columns are data string"):
        packs.encode_batch(batch, packs.ROWS)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_pack_that_would_fill_the_memory_is_refused_before_it_is_decompressed(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = packs.encode_rows([PackedRow(bytes(1_000_000))], compression)
    assert len(encoded.body) < 10_000
    monkeypatch.setattr(marks, "MAX_PLAIN_BYTES", 999_999)
    monkeypatch.setattr(pa.ipc, "read_record_batch", lambda *_: pytest.fail("decompressed"))
    with pytest.raises(MalformedPack, match="bytes after decompression"):
        decoded(encoded)


def test_the_size_after_decompression_is_that_of_the_buffers() -> None:
    batch = pa.record_batch({"data": pa.array([bytes(70_000)]), "n": pa.array([1], pa.int64())})
    _, message = codec._messages(pa.py_buffer(stream(batch, compression="zstd")))
    assert 70_000 + 8 + 8 <= codec._plain_size(message) < 70_200


@given(st.data())
@settings(max_examples=300)
def test_whatever_is_changed_in_a_body_is_refused_or_read_whole(data: st.DataObject) -> None:
    rows = [PackedRow(b"%d" % index * 3, "s", {"A": ["b", "c"]}, NOON) for index in range(5)]
    encoded = packs.encode_rows(rows, data.draw(st.sampled_from(packs.CODECS)))
    body = bytearray(encoded.body)
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
    try:
        found = packs.decode(encoded.headers, bytes(body[:cut]))
    except MalformedPack:
        return
    assert len(list(found.rows())) == len(rows)


def test_offsets_that_lead_elsewhere_are_refused() -> None:
    encoded = packs.encode_rows([PackedRow(b"abc"), PackedRow(b"def")], packs.NONE)
    wrong = encoded.body.replace(struct.pack("<iii", 0, 3, 6), struct.pack("<iii", 0, 2**30, 6))
    assert wrong != encoded.body
    with pytest.raises(MalformedPack, match="no Arrow stream"):
        packs.decode(encoded.headers, wrong)


def test_what_cannot_be_packed_is_told() -> None:
    wrong: list[Callable[[], object]] = [
        lambda: packs.encode_rows([]),
        lambda: packs.encode_rows([PackedRow(b"", subject="\ud800")]),
        lambda: packs.encode_rows([PackedRow(b"")], "gzip"),
        lambda: packs.encode_events(pa.table({})),
        lambda: packs.encode_events(pa.table([[1], [2]], ["a", "a"])),
    ]
    for make in wrong:
        with pytest.raises(ConfigError):
            make()


def test_the_error_survives_pickling() -> None:
    error = MalformedPack("it is empty")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
