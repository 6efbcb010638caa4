"""Offsets, splits, losses and pushed filters: decisions without a server."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.spark.loss import Holes, MessagesGone, StreamReplaced, is_sparse, missing
from penstock.spark.offsets import CheckpointMismatch, Offset, TaskLimits, span, split, task_count


def offset(sequence: int, *, created: str = "then", tasks: int = 1, end: int = 0, gone: int = 0) -> Offset:
    return Offset(stream="S", created=created, sequence=sequence, tasks=tasks, backlog_end=end, backlog_missing=gone)


def test_offsets_survive_the_log() -> None:
    written = offset(17, tasks=3, end=20, gone=2)
    assert Offset.parse(json.loads(json.dumps(written.json())), "S") == written


def test_offsets_of_version_1_stay_readable() -> None:
    logged = '{"version": 1, "stream": "S", "created": "then", "sequence": 5, "tasks": 2}'
    assert Offset.parse(json.loads(logged), "S") == offset(5, tasks=2)
    newer = '{"version": 1, "stream": "S", "created": "then", "sequence": 5, "tasks": 2, "backlogEnd": 9, '
    newer += '"backlogMissing": 1, "openStart": true}'
    assert Offset.parse(json.loads(newer), "S") == replace(offset(5, tasks=2, end=9, gone=1), open_start=True)


def test_a_checkpoint_of_another_stream_or_version_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="belongs to stream 'S', the query reads 'T'"):
        Offset.parse(offset(1).json(), "T")
    with pytest.raises(ConfigError, match="version 2"):
        Offset.parse({**offset(1).json(), "version": 2}, "S")


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 64))
def test_a_split_covers_the_range_once_in_order_and_evenly(first: int, count: int, tasks: int) -> None:
    parts = split(first, first + count - 1, tasks)
    assert len(parts) == min(tasks, count)
    sizes = [high - low + 1 for low, high in parts]
    assert sum(sizes) == count
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(parts))
    if parts:
        assert (parts[0][0], parts[-1][1]) == (first, first + count - 1)
        assert max(sizes) - min(sizes) <= 1


def test_a_recreated_stream_is_read_from_its_start() -> None:
    assert span(offset(10), offset(20)) == (11, 20)
    assert span(offset(10, created="before"), offset(20)) == (1, 20)


def test_small_ranges_get_one_task_and_large_ones_as_many_as_their_bytes_are_worth() -> None:
    limits = TaskLimits()
    assert [task_count(rows, 0, limits, 4) for rows in (0, 10, 100_001, 10**9)] == [1, 1, 2, 4]
    assert task_count(50_000, 10e9, limits, 2) == 75
    assert [task_count(100, size, limits, 4) for size in (10e6, 20e6, 100e6)] == [1, 2, 4], "a row can be a pack"
    assert task_count(10, 10e9, TaskLimits(exactly=7), 4) == 7
    assert task_count(10, 0, TaskLimits(at_least=3), 1) == 3
    assert task_count(1000, 0, TaskLimits(at_least=3, rows_each=100), 1) == 10


@pytest.mark.parametrize(
    ("start", "end", "holes", "count"),
    [
        (offset(10), offset(20), Holes(1, 30), 0),
        (offset(10), offset(20), Holes(11, 30), 0),
        (offset(10), offset(20), Holes(15, 30), 4),  # 11 to 14 expired
        (offset(10), offset(20), Holes(31, 30), 10),  # purged
        (offset(10), offset(20), Holes(1, 30, [5, 12, 13, 25]), 2),  # deleted since the query began
        (offset(10, end=30, gone=3), offset(20), Holes(1, 30, [12, 13, 25]), 0),  # gone before the query began
        (offset(10, end=30, gone=2), offset(20), Holes(1, 30, [12, 13, 25]), 1),
        (offset(4, end=30, gone=2), offset(20), Holes(7, 30), 0),  # 5 and 6 were gone, 1 to 4 expired after the read
        (offset(10, end=15, gone=0), offset(20), Holes(1, 30, [12, 17]), 2),
        (offset(500, created="before"), offset(20), Holes(1, 30), 0),
        (replace(offset(10), open_start=True), offset(20), Holes(15, 30), 0),  # the oldest there was, and it expired
        (replace(offset(10), open_start=True), offset(20), Holes(15, 30, [17]), 1),
    ],
)
def test_losses_are_counted(start: Offset, end: Offset, holes: Holes, count: int) -> None:
    found = missing(start, end, holes)
    assert (found.count if found else 0) == count


def test_losses_say_how_many_and_what_to_do() -> None:
    error = MessagesGone("S", 4, 11, 14, "expired")
    assert "4 messages of stream 'S' are gone" in str(error)
    assert "failOnDataLoss=false" in str(error)
    again = pickle.loads(pickle.dumps(StreamReplaced("S", "now", "then", 7)))
    assert "deleted and recreated" in str(again)


def test_streams_that_drop_messages_by_nature_have_no_losses() -> None:
    assert is_sparse({"max_msgs_per_subject": 1})
    assert is_sparse({"mirror": {"name": "O", "filter_subject": "a.>"}})
    assert is_sparse({"mirror": {"name": "O", "subject_transforms": [{"src": "a.>", "dest": "b.>"}]}})
    assert not is_sparse({"mirror": {"name": "O"}, "allow_msg_ttl": True, "allow_rollup_hdrs": True})
    assert not is_sparse({"retention": "limits", "max_msgs_per_subject": -1, "max_age": 5})
