"""How much is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.pull.session import FIRST_BATCH, BatchSize, capacity, next_pull, pending_needed


@given(size=st.integers(1, 1000), asked=st.integers(0, 1000), held=st.integers(0, 1000), limit=st.integers(1, 1000))
def test_what_waits_and_what_is_asked_for_never_exceed_the_room(size: int, asked: int, held: int, limit: int) -> None:
    room = capacity(limit)
    count = next_pull(size, asked, held, room)
    assert count >= 0
    assert count == 0 or held + asked + count <= room <= limit


def test_pulling_stops_at_four_fifths_of_max_ack_pending() -> None:
    assert next_pull(500, 0, 399, capacity(500)) == 1
    assert next_pull(500, 0, 400, capacity(500)) == 0


def test_nothing_is_asked_while_half_a_batch_is_under_way() -> None:
    assert next_pull(50, 26, 0, 400) == 0
    assert next_pull(50, 25, 0, 400) == 25


def test_batches_grow_with_quick_handlers_and_shrink_with_slow_ones() -> None:
    batch = BatchSize(400)
    assert batch.size == FIRST_BATCH
    for _ in range(10):
        batch.observe(5000, 0.25, idle=False)
    assert batch.size == 400
    for _ in range(30):
        batch.observe(2, 0.25, idle=False)
    assert batch.size == 4


def test_a_lull_does_not_shrink_the_batch() -> None:
    batch = BatchSize(400)
    for _ in range(10):
        batch.observe(5000, 0.25, idle=False)
    for _ in range(10):
        batch.observe(1, 0.25, idle=True)
        batch.observe(0, 0.25, idle=True)
    assert batch.size == 400


@given(st.integers(1, 2000), st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 2), st.booleans()), max_size=50))
def test_a_batch_is_never_empty_and_never_larger_than_allowed(most: int, seen: list[tuple[int, float, bool]]) -> None:
    batch = BatchSize(most)
    for handled, seconds, idle in seen:
        batch.observe(handled, seconds, idle)
        assert 1 <= batch.size <= most


@given(st.integers(0, 100_000), st.integers(1, 5000), st.integers(1, 50_000))
def test_parked_messages_leave_the_others_their_budget(parked: int, limit: int, most: int) -> None:
    needed = pending_needed(parked, limit, most)
    assert limit <= needed <= max(most, limit)
    assert needed == max(most, limit) or needed - parked >= limit / 2
