"""Rows of a chunk as packs: one subject each, within their bounds, and nothing lost on the way."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import packs
from penstock.errors import ConfigError
from penstock.spark.chunks import ChunkRows, Limits, cut
from penstock.spark.packing import Packing, identity, packed_messages, typed_rows
from penstock.spark.stored import stored_row_digests
from penstock.wire import headers as header_block

LINES = st.sampled_from([b"", b"A: 1\r\n", b"A: 1\r\nA: 2\r\nB: \r\n", b"C: x\r\nNats-Msg-Id: 7\r\n"])
MESSAGES = st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=30), LINES), min_size=1, max_size=40)


def rows(messages: list[tuple[str, bytes, bytes]]) -> ChunkRows:
    subjects, bodies, lines = zip(*messages, strict=True)
    return ChunkRows(pa.array(subjects, pa.string()), pa.array(bodies, pa.binary()), pa.array(lines, pa.binary()))


def stored(messages: list[tuple[bytes, bytes, bytes]]) -> list[tuple[str, dict[str, list[str]], bytes]]:
    return [
        (subject.decode(), header_block.parse(header_block.block(lines)), body) for subject, lines, body in messages
    ]


def unpacked(subject: str, headers: dict[str, list[str]], body: bytes) -> list[packs.PackedRow]:
    if not packs.is_pack(headers):
        return [packs.PackedRow(body, subject, headers)]
    return list(packs.decode(headers, body).rows(subject))


@given(MESSAGES, st.integers(1, 9), st.integers(1, 200), st.sampled_from(packs.CODECS))
def test_every_row_is_in_one_pack_of_its_subject_in_its_order(
    messages: list[tuple[str, bytes, bytes]], most_rows: int, most_bytes: int, codec: str
) -> None:
    packing = Packing(packs.ROWS, most_rows, most_bytes, codec)
    found: defaultdict[str, list[tuple[bytes, Any]]] = defaultdict(list)
    for message in stored(list(packed_messages(rows(messages), packing))):
        some = unpacked(*message)
        assert len(some) <= most_rows
        assert len(some) == 1 or sum(len(row.data) for row in some) <= most_bytes
        found[message[0]] += [(row.data, dict(row.headers)) for row in some]
    wanted: defaultdict[str, list[tuple[bytes, Any]]] = defaultdict(list)
    for subject, body, lines in messages:
        wanted[subject].append((body, header_block.parse(header_block.block(lines))))
    assert found == wanted


@given(MESSAGES)
def test_what_is_stored_tells_which_rows_it_came_from(messages: list[tuple[str, bytes, bytes]]) -> None:
    chunk = rows(messages)
    there = [one for message in stored(list(packed_messages(chunk, Packing(packs.ROWS)))) for one in
             stored_row_digests(*message)]  # fmt: skip
    assert Counter(there) == Counter(chunk.row_digests())


def test_a_row_that_is_alone_and_has_only_a_body_stays_a_message() -> None:
    found = list(packed_messages(rows([("a", b"1", b""), ("b", b"2", b"A: 1\r\n")]), Packing(packs.ROWS)))
    assert found[0] == (b"a", b"", b"1")
    assert [packs.is_pack(headers) for _, headers, _ in stored(found)] == [False, True]


def test_a_pack_that_the_server_would_refuse_is_halved() -> None:
    noise = random.Random(7)
    chunk = rows([("a", noise.randbytes(1000), b"") for _ in range(40)])
    packing = Packing(packs.ROWS, bytes=40_000, codec=packs.LZ4, body_bytes=12_000)
    found = list(packed_messages(chunk, packing))
    assert all(len(body) <= 12_000 for _, _, body in found)
    assert sum(len(unpacked(*message)) for message in stored(found)) == 40


def test_a_row_that_fits_into_no_message_is_told() -> None:
    with pytest.raises(ConfigError, match="max_payload"):
        list(packed_messages(rows([("a", bytes(9000), b"A: 1\r\n")]), Packing(packs.ROWS, body_bytes=8000)))


@pytest.mark.parametrize(("most", "size", "subjects"), [(1, 5000, 600), (2, 100, 600), (50, 300, 7), (9, 1, 1)])
def test_a_chunk_never_becomes_more_packs_than_a_batch_may_have(most: int, size: int, subjects: int) -> None:
    limits = Packing(packs.ROWS, most, size).within(Limits())
    messages = [(f"s{n % subjects}", b"x" * (n % 90), b"") for n in range(3000)]
    chunks = list(cut([rows(messages)], limits))
    assert sum(map(len, chunks)) == len(messages)
    for chunk in chunks:
        assert len(list(packed_messages(chunk, Packing(packs.ROWS, most, size)))) <= 1000


# -- typed rows --------------------------------------------------------------------------------------------------------

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENT = pa.struct(
    [
        ("id", pa.string()),
        ("n", pa.int32()),
        ("ok", pa.bool_()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", tz="UTC")),
        ("tags", pa.list_(pa.string())),
        ("inner", pa.struct([("raw", pa.binary()), ("more", pa.map_(pa.string(), pa.list_(pa.int64())))])),
    ]
)
small = st.integers(0, 2)
events = st.fixed_dictionaries(
    {
        "id": st.sampled_from([None, "", "a", "\0"]),
        "n": st.none() | small,
        "ok": st.none() | st.booleans(),
        "price": st.sampled_from([None, Decimal("0.00"), Decimal("1.50")]),
        "at": st.sampled_from([None, NOON]),
        "tags": st.none() | st.lists(st.sampled_from([None, "", "a"]), max_size=2),
        "inner": st.none()
        | st.fixed_dictionaries(
            {
                "raw": st.sampled_from([None, b"", b"\0"]),
                "more": st.none() | st.dictionaries(st.sampled_from("ab"), st.lists(small, max_size=2), max_size=2),
            }
        ),
    }
)


def as_column(values: list[dict[str, Any]]) -> pa.Array:
    return pa.array([_with_pairs(one) for one in values], EVENT)


def _with_pairs(event: dict[str, Any]) -> dict[str, Any]:
    inner = event["inner"]
    if inner and inner["more"] is not None:
        inner = {**inner, "more": list(inner["more"].items())}
    return {**event, "inner": inner}


@given(events, events, st.integers(0, 2))
def test_events_have_the_same_identity_exactly_when_they_are_equal(
    one: dict[str, Any], two: dict[str, Any], at: int
) -> None:
    column = as_column([one, two, one]).slice(at)
    found = identity(column).to_pylist()
    values = column.to_pylist()
    for left, a in zip(values, found, strict=True):
        for right, b in zip(values, found, strict=True):
            assert (left == right) == (a == b)
    assert found[-1] == identity(as_column([one]))[0].as_py(), "whatever stands beside it"


@given(st.lists(events, min_size=1, max_size=20), st.integers(1, 7))
def test_typed_packs_have_the_events_and_name_them_as_they_were(values: list[dict[str, Any]], most: int) -> None:
    chunk = typed_rows(pa.array(["u"] * len(values)), as_column(values))
    found = stored(list(packed_messages(chunk, Packing(packs.TYPED, most))))
    batches = [packs.decode(headers, body).batch for _, headers, body in found]
    assert pa.Table.from_batches(batches).to_pylist() == as_column(values).to_pylist()
    assert [digest for message in found for digest in stored_row_digests(*message)] == chunk.row_digests()


def test_a_row_without_an_event_is_told() -> None:
    with pytest.raises(ConfigError, match="column `event` is null"):
        typed_rows(pa.array(["u"]), pa.nulls(1, EVENT))
