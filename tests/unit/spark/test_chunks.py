"""Chunks: cut by rows alone, named by content."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.chunks import ROW_OVERHEAD, ChunkRows, Limits, chunk_id, cut, joined, without

Message = tuple[str, bytes, bytes | None]

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b.c", "d.e.f"]), st.binary(max_size=40), st.sampled_from([None, b"", b"X: 1\r\n"])
    ),
    max_size=60,
)
GROUPS = st.lists(st.integers(0, 20), max_size=12)


def rows(messages: list[Message]) -> ChunkRows:
    return ChunkRows(
        pa.array([m[0] for m in messages], pa.string()),
        pa.array([m[1] for m in messages], pa.binary()),
        pa.array([m[2] or b"" for m in messages], pa.binary()),
    )


def grouped(messages: list[Message], sizes: list[int]) -> list[ChunkRows]:
    """The messages in groups of these sizes, as slices of larger arrays, which is how Spark's come."""
    whole, groups, at = rows(messages), [], 0
    for size in [*sizes, len(messages)]:
        groups.append(whole.slice(at, min(size, len(messages) - at)))
        at += len(groups[-1])
    return groups


@given(MESSAGES, GROUPS, GROUPS)
def test_chunks_do_not_depend_on_how_rows_were_grouped(messages: list[Message], one: list[int], two: list[int]) -> None:
    limits = Limits(rows=7, bytes=4 * (ROW_OVERHEAD + 30))
    first = [chunk.digest() for chunk in cut(grouped(messages, one), limits)]
    assert first == [chunk.digest() for chunk in cut(grouped(messages, two), limits)]


@given(MESSAGES, GROUPS)
def test_cutting_keeps_every_row_in_order_and_the_limits(messages: list[Message], sizes: list[int]) -> None:
    limits = Limits(rows=5, bytes=3 * (ROW_OVERHEAD + 20))
    chunks = list(cut(grouped(messages, sizes), limits))
    assert all(1 <= len(chunk) <= limits.rows for chunk in chunks)
    assert all(len(chunk) == 1 or chunk.sizes().sum() <= limits.bytes for chunk in chunks)
    if messages:
        whole = joined(chunks)
        assert (whole.subjects.to_pylist(), whole.bodies.to_pylist()) == (
            [m[0] for m in messages],
            [m[1] for m in messages],
        )


def test_a_row_larger_than_a_chunk_is_a_chunk_of_its_own() -> None:
    messages: list[Message] = [("a", b"x", None), ("a", b"y" * 1000, None), ("a", b"z", None)]
    chunks = list(cut([rows(messages)], Limits(rows=10, bytes=2 * ROW_OVERHEAD + 100)))
    assert [chunk.bodies.to_pylist() for chunk in chunks] == [[b"x"], [b"y" * 1000], [b"z"]]


def test_the_digest_tells_rows_apart_whose_bytes_run_together_alike() -> None:
    assert (
        rows([("a", b"bc", None), ("a", b"d", None)]).digest() != rows([("a", b"b", None), ("a", b"cd", None)]).digest()
    )
    assert rows([("a", b"x", None)]).digest() != rows([("a", b"x", b"X: 1\r\n")]).digest()
    assert (
        rows([("a", b"1", None), ("a", b"2", None)]).digest() != rows([("a", b"2", None), ("a", b"1", None)]).digest()
    )


def test_a_chunk_is_named_by_its_place_and_content() -> None:
    digest = rows([("a", b"x", None)]).digest()
    assert chunk_id("query", 7, 2, 0, digest) == f"query.7.2.0.{digest}"
    assert len(digest) == 24


@given(MESSAGES, st.integers(0, 60), st.randoms(use_true_random=False))
def test_rows_stored_before_are_left_out_in_whatever_order_they_come(
    messages: list[Message], count: int, rng: random.Random
) -> None:
    stored = Counter(rows(messages[:count]).row_digests())
    shuffled = messages.copy()
    rng.shuffle(shuffled)
    left = [digest for part in without(grouped(shuffled, [3, 4]), stored) for digest in part.row_digests()]
    assert Counter(left) == Counter(rows(messages[count:]).row_digests())
    assert not +stored
