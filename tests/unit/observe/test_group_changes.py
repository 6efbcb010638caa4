"""What is told of a group between two looks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

from penstock.observe.group_changes import MOST, changes
from penstock.workers.group.overview import GroupOverview, PartitionOverview, WorkerOverview

NOW = datetime(2026, 11, 18, tzinfo=UTC)


def worker(name: str, state: str = "active", mode: str = "working") -> WorkerOverview:
    return WorkerOverview(name, state, mode, "host", 1, (), leads=False, partitions=1, applied=1, lag=0, redelivered=0)


def partition(name: str, owner: str | None, token: int | None = 1, move: str | None = None) -> PartitionOverview:
    return PartitionOverview(name, (f"s.{name}",), "w2", owner, 0, token, move)


def group(*workers: WorkerOverview, partitions: tuple[PartitionOverview, ...] = ()) -> GroupOverview:
    return GroupOverview("g", "S", 1, "w1", workers, partitions)


def told(before: GroupOverview, now: GroupOverview) -> list[tuple[str, str]]:
    return [(one.what, one.text) for one in changes(before, now, NOW)]


def test_a_worker_that_was_degraded_comes_or_goes_is_told() -> None:
    before = group(worker("w1"), worker("w2"))
    assert told(before, before) == []
    assert told(before, group(worker("w1", mode="degraded"), worker("w3"))) == [
        ("w2", "is gone"),
        ("w1", "was working, is degraded"),
        ("w3", "came, is working"),
    ]
    assert told(before, group(worker("w1", state="leaving"), worker("w2"))) == [("w1", "was working, is leaving")]


def test_a_handoff_is_told_step_by_step_with_its_token() -> None:
    steps = [
        partition("p", "w1", 1),
        partition("p", "w1", 1, "w1 hands over to w2"),
        partition("p", None, None, "free: waits for w2 to take it"),
        partition("p", "w2", 2, "w2 catches up from 7"),
        partition("p", "w2", 2),
    ]
    looks = [group(worker("w1"), partitions=(one,)) for one in steps]
    seen = [told(before, now) for before, now in pairwise(looks)]
    assert seen == [
        [("p", "w1 hands over to w2")],
        [("p", "free: waits for w2 to take it")],
        [("p", "w2 catches up from 7")],
        [("p", "w2 has it, token 2")],
    ]
    assert told(looks[0], group(worker("w1"))) == [("p", "is no partition any more")]


def test_a_new_leader_assignment_or_pause_is_told_and_a_large_group_is_cut() -> None:
    before = group(worker("w1"))
    now = replace(before, version=2, leader="w2", paused=True)
    assert [what for what, _ in told(before, now)] == ["assignment", "w2", "group"]
    many = tuple(partition(f"p{number}", "w1") for number in range(5 * MOST))
    assert len(told(before, group(worker("w1"), partitions=many))) == MOST
