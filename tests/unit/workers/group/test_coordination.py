"""Leases, pools of ids, windows, publications and sources: decisions without a server."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.jetstream.kv import Entry
from penstock.workers.group.assignment import (
    HEAD,
    OF,
    Assignment,
    Draft,
    Published,
    Situation,
    Stabilizer,
    Windows,
    writes,
)
from penstock.workers.group.identity import RETIRED, IdPool, Lease, Sightings, WorkerRecord, candidates
from penstock.workers.partitions import Hashed, Listed, Partition, fnv1a, parse_partitions, partition_json


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_when_it_was_asked_for(now: FakeClock) -> None:
    lease = Lease(10, now)
    assert not lease.valid
    now.time = 104
    lease.renewed(asked_at=100)
    now.time = 109.9
    valid = [lease.valid]
    now.time = 110
    valid.append(lease.valid)
    assert valid == [True, False]


def test_a_lease_lasts_while_nobody_answers_but_not_over_a_time_of_being_stopped(now: FakeClock) -> None:
    lease = Lease(10, now)
    lease.renewed(100)
    for asked in (105, 112, 120):
        lease.unanswered(asked)
        now.time = asked + 9
        assert lease.valid
    now.time = 200
    lease.unanswered(121)  # asked before it was stopped
    assert not lease.valid
    lease.unanswered(199)
    assert not lease.valid


def test_a_key_is_silent_only_when_it_was_seen_unchanged_for_a_whole_lease(now: FakeClock) -> None:
    sightings = Sightings(10, now)
    sightings.look({"a": 1, "b": 1})
    now.time += 8
    sightings.look({"a": 1, "b": 2})
    now.time += 3
    assert sightings.silent("a")
    assert not sightings.silent("b")
    sightings.forget_heartbeats()
    assert not sightings.silent("a"), "we could not have seen it change"


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_an_id_of_our_own_comes_first_then_free_ones_then_stale_ones() -> None:
    pool = IdPool(size=4)
    taken = {
        "worker-0": WorkerRecord("other"),
        "worker-1": WorkerRecord("me"),
        "worker-2": WorkerRecord("dead"),
    }
    found = candidates(pool, taken, "me", frozenset({"worker-2"}))
    assert found == ["worker-1", "worker-3", "worker-2"]


def test_a_retired_id_is_not_for_the_taking_until_it_is_cleared_away() -> None:
    taken = {"worker-0": WorkerRecord("me", state=RETIRED)}
    assert candidates(IdPool(size=1), taken, "me", frozenset({"worker-0"})) == []


def test_a_record_survives_its_way_through_the_bucket() -> None:
    record = WorkerRecord("i", labels=frozenset({"gpu"}), capacity=2, beat=7)
    assert WorkerRecord.parse(record.to_json()) == record
    assert WorkerRecord.parse({**record.to_json(), "of a later version": 1}) == record


# -- windows -----------------------------------------------------------------------------------------------------------

WINDOWS = Windows(cold_start=10, planned=4, emergency=0, min_interval=2, patience=3)


def test_a_planned_change_waits_until_nothing_has_changed_for_a_window(now: FakeClock) -> None:
    stabilizer = Stabilizer(WINDOWS, now)
    assert not stabilizer.due(Situation.PLANNED, "2 workers")
    now.time += 3
    assert not stabilizer.due(Situation.PLANNED, "3 workers")
    now.time += 3
    assert not stabilizer.due(Situation.PLANNED, "3 workers")
    now.time += 1
    assert stabilizer.due(Situation.PLANNED, "3 workers")


def test_a_change_that_never_ends_is_acted_on_all_the_same(now: FakeClock) -> None:
    stabilizer, looks = Stabilizer(WINDOWS, now), 0
    while not stabilizer.due(Situation.PLANNED, looks):
        looks += 1
        now.time += 1
    assert looks == 12


def test_an_emergency_does_not_wait(now: FakeClock) -> None:
    stabilizer = Stabilizer(WINDOWS, now)
    stabilizer.acted()
    assert stabilizer.due(Situation.EMERGENCY, "1 worker")
    assert not stabilizer.due(Situation.PLANNED, "1 worker")


def test_a_cold_start_waits_longer_than_a_planned_change(now: FakeClock) -> None:
    stabilizer = Stabilizer(WINDOWS, now)
    assert not stabilizer.due(Situation.COLD_START, "1 worker")
    now.time += 9
    assert not stabilizer.due(Situation.COLD_START, "1 worker")
    now.time += 1
    assert stabilizer.due(Situation.COLD_START, "1 worker")


def test_windows_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="ordered"):
        Windows(cold_start=1, planned=2)


# -- publication -------------------------------------------------------------------------------------------------------

P, Q = Partition("p", ("s.p",), 2, frozenset({"gpu"})), Partition("q", ("s.q",))


def test_a_publication_is_read_as_it_was_written_and_leaves_out_what_has_not_changed() -> None:
    both = {"p": P, "q": Q}
    first = writes(Published(), Draft(Assignment({"p": "a", "q": "b"}), both, ("a", "b"), "S", "a"))
    read = Published.parse({one.key: Entry(one.value, n) for n, one in enumerate(first, 1)})
    assert read.owners == {"p": "a", "q": "b"}
    assert read.partitions["a"] == (P,)
    assert (read.version, read.members) == (1, ("a", "b"))
    second = writes(read, Draft(Assignment({"p": "a", "q": "a"}), both, ("a",), "S", "a"))
    assert [(one.key, one.expected) for one in second] == [(OF + "a", 1), (OF + "b", 2), (HEAD, 3)]
    third = writes(read, Draft(Assignment({"p": "a", "q": "b"}), both, ("a", "b", "c"), "S", "a"))
    assert [one.key for one in third] == [OF + "c", HEAD]


# -- sources -----------------------------------------------------------------------------------------------------------


def test_partitions_survive_json() -> None:
    assert parse_partitions([partition_json(P), partition_json(Q)]) == (P, Q)


def test_keys_are_hashed_as_the_server_does_it() -> None:
    """Known values of 32-bit FNV-1a."""
    assert fnv1a(b"") == 0x811C9DC5
    assert fnv1a(b"a") == 0xE40C292C
    assert fnv1a(b"foobar") == 0xBF9CF968


async def test_a_key_space_becomes_a_fixed_number_of_partitions() -> None:
    source = Hashed(8, "orders.{partition}.>")
    assert [p.subjects for p in await source.partitions()][:2] == [("orders.0.>",), ("orders.1.>",)]
    assert {source.partition_of(f"key {n}") for n in range(200)} == set(range(8))
    assert source.subject_of("a") == f"orders.{0xE40C292C % 8}.>"


def test_two_partitions_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="same id"):
        Listed((P, P))
