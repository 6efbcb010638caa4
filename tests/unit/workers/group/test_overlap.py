"""Who may handle a message during an overlap, and when an overlap may begin and end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.jetstream.kv import Entry
from penstock.jetstream.model import ConsumerInfo
from penstock.workers.group.claims import Claim
from penstock.workers.group.migration import not_passed, unmarked
from penstock.workers.group.overlap import may_begin, passed

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def consumer(name: str, *, delivered: int, acked: int, in_flight: int = 0, worker: str = "") -> ConsumerInfo:
    raw: dict[str, Any] = {
        "stream_name": "S",
        "name": name,
        "config": {"metadata": {"penstock.worker": worker}},
        "delivered": {"stream_seq": delivered, "consumer_seq": delivered},
        "ack_floor": {"stream_seq": acked, "consumer_seq": acked},
        "num_pending": 0,
        "num_ack_pending": in_flight,
        "num_redelivered": 0,
    }
    return ConsumerInfo.parse(raw)


@pytest.mark.parametrize(
    ("state", "silent", "may"),
    [
        (None, False, True),
        ("begun", False, False),
        ("begun", True, True),
        ("open", False, True),
        ("done", False, False),
        ("done", True, False),
    ],
)
def test_only_what_is_new_open_or_left_behind_may_be_begun(state: str | None, silent: bool, may: bool) -> None:
    assert may_begin(Entry({"state": state}, 7) if state else None, silent) is may


def test_a_key_is_there_for_certain_within_its_window_from_message_or_bucket_whichever_is_later() -> None:
    hour, old = 3600.0, NOON - timedelta(days=3)
    assert not passed(old, NOON - timedelta(minutes=50), hour, NOON), "no key is older than the bucket"
    assert passed(old, NOON - timedelta(minutes=55), hour, NOON)
    assert not passed(NOON - timedelta(minutes=50), old, hour, NOON), "no key is older than its message"
    assert passed(NOON - timedelta(minutes=55), old, hour, NOON)


def test_an_overlap_waits_for_what_was_in_flight_before_the_marks() -> None:
    stuck = consumer("old-a", delivered=12, acked=4, in_flight=1)
    assert "acknowledged up to 4" in (unmarked([stuck], {"old-a": 10}, marks=5) or "")
    beyond = consumer("old-a", delivered=12, acked=10, in_flight=1)
    assert unmarked([beyond], {"old-a": 10}, marks=5) is None
    idle = consumer("old-a", delivered=12, acked=4)  # what it skipped of other subjects counts as delivered
    assert unmarked([idle], {"old-a": 12}, marks=0) is None
    assert "came after `shadow`" in (unmarked([idle], {}, marks=5) or "")


def test_an_overlap_is_refused_while_the_old_side_leaves_no_marks() -> None:
    at_work = consumer("old-a", delivered=12, acked=11, in_flight=1)
    assert "left no marks" in (unmarked([at_work], {"old-a": 10}, marks=0) or "")
    assert unmarked([at_work], {"old-a": 10}, marks=1) is None


def test_marks_count_until_the_group_has_passed_what_the_old_side_can_have_done() -> None:
    legacy = {"a": consumer("old-a", delivered=20, acked=20), "b": consumer("old-b", delivered=9, acked=9)}
    claims = {"a": Claim("a", 0, owner="worker-0", settled=True), "b": Claim("b", 0, owner="worker-0", settled=True)}
    behind = consumer("g-worker-0", delivered=15, acked=12, in_flight=3, worker="worker-0")
    assert not_passed(legacy, claims, [behind]) == ["a"]
    shard = consumer("g-worker-0-2", delivered=15, acked=3, in_flight=3, worker="worker-0")
    assert not_passed(legacy, claims, [behind, shard]) == ["a", "b"], "the slowest of its consumers counts"
    idle = consumer("g-worker-0", delivered=15, acked=12, worker="worker-0")
    assert not_passed(legacy, claims, [idle]) == []
