"""Assignments are complete, balanced, stable, and move as little as balance allows."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.group.assignment import Candidate, ConsistentHash, RoundRobin, Strategy, Weighted, assign
from penstock.workers.partitions import Partition


def moves(previous: Mapping[str, str], following: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the partitions whose owner changes, with the old and the new owner."""
    both = previous.keys() & following.keys()
    return {p: (previous[p], following[p]) for p in sorted(both) if previous[p] != following[p]}


STRATEGIES: list[Strategy] = [ConsistentHash(), RoundRobin(), Weighted()]
counts = st.integers(0, 120)
crowds = st.integers(1, 12)


def partitions(count: int, **more: object) -> list[Partition]:
    return [Partition(f"p{n}", (f"s.{n}",), **more) for n in range(count)]  # type: ignore[arg-type]  # test shorthand


def members(count: int) -> list[Candidate]:
    return [Candidate(f"worker-{n}") for n in range(count)]


def sizes(owners: dict[str, str], crowd: list[Candidate]) -> list[int]:
    return [sum(owner == m.id for owner in owners.values()) for m in crowd]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@given(count=counts, crowd=crowds, seed=st.integers())
@settings(max_examples=40, deadline=None)
def test_every_partition_has_one_owner_whatever_the_order_of_the_input(
    strategy: Strategy, count: int, crowd: int, seed: int
) -> None:
    some, all_members = partitions(count), members(crowd)
    first = assign(some, all_members, strategy=strategy)
    assert set(first.owners) == {p.id for p in some}
    assert set(first.owners.values()) <= {m.id for m in all_members}
    random.Random(seed).shuffle(some)
    random.Random(seed).shuffle(all_members)
    assert assign(some, all_members, strategy=strategy) == first


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@given(count=counts, crowd=crowds)
@settings(max_examples=40, deadline=None)
def test_nothing_moves_when_nothing_has_changed(strategy: Strategy, count: int, crowd: int) -> None:
    some, all_members = partitions(count), members(crowd)
    first = assign(some, all_members, strategy=strategy)
    assert assign(some, all_members, first.owners, strategy) == first


@given(count=counts, before=crowds, after=crowds, seed=st.integers())
@settings(max_examples=150, deadline=None)
def test_round_robin_is_even_and_moves_the_least_possible(count: int, before: int, after: int, seed: int) -> None:
    """From any previous owners, even uneven ones."""
    rng = random.Random(seed)
    some, remaining = partitions(count), members(after)
    previous = {p.id: f"worker-{rng.randrange(before)}" for p in some}
    following = assign(some, remaining, previous, RoundRobin()).owners
    found = sizes(dict(following), remaining)
    assert max(found) - min(found) <= 1
    kept = sorted(sizes(previous, remaining), reverse=True)
    floor, extra = divmod(count, after)
    best = sum(min(had, floor + (n < extra)) for n, had in enumerate(kept))
    assert len(moves(previous, following)) == count - best


@given(count=counts, before=crowds, after=crowds)
@settings(max_examples=100, deadline=None)
def test_consistent_hashing_stays_within_its_bounds(count: int, before: int, after: int) -> None:
    some, crowd = partitions(count), members(after)
    previous = assign(some, members(before)).owners
    following = assign(some, crowd, previous)
    found, slack = sizes(dict(following.owners), crowd), ConsistentHash().slack
    assert max(found) <= -(-count * (1 + slack) // after)
    assert min(found) >= count * (1 - slack) / after - 1


@given(count=counts, crowd=st.integers(2, 12), gone=st.integers(0, 11))
@settings(max_examples=100, deadline=None)
def test_when_a_member_leaves_only_its_own_partitions_move(count: int, crowd: int, gone: int) -> None:
    everyone = members(crowd)
    left = everyone[gone % crowd].id
    some = partitions(count)
    previous = assign(some, everyone, strategy=RoundRobin()).owners
    for strategy in STRATEGIES:
        following = assign(some, [m for m in everyone if m.id != left], previous, strategy).owners
        assert {old for old, _ in moves(previous, following).values()} <= {left}


@given(count=counts, crowd=crowds)
@settings(max_examples=100, deadline=None)
def test_when_a_member_joins_partitions_move_only_to_it(count: int, crowd: int) -> None:
    some = partitions(count)
    for strategy in STRATEGIES:
        previous = assign(some, members(crowd), strategy=RoundRobin()).owners
        following = assign(some, members(crowd + 1), previous, strategy).owners
        moved = moves(previous, following)
        assert {new for _, new in moved.values()} <= {f"worker-{crowd}"}
        assert len(moved) <= -(-count // (crowd + 1))


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacities=st.lists(st.integers(1, 4), min_size=1)
)
@settings(max_examples=100, deadline=None)
def test_weights_follow_the_capacities(weights: list[int], capacities: list[int]) -> None:
    some = [Partition(f"p{n}", (f"s.{n}",), weight) for n, weight in enumerate(weights)]
    crowd = [Candidate(f"worker-{n}", capacity) for n, capacity in enumerate(capacities)]
    owners = assign(some, crowd, strategy=Weighted()).owners
    level = (sum(weights) + len(crowd) * max(weights)) / sum(capacities)
    for member in crowd:
        load = sum(p.weight for p in some if owners[p.id] == member.id)
        assert load <= member.capacity * level


def test_labels_tie_partitions_to_the_members_that_have_them() -> None:
    gpu = [Partition(f"g{n}", (f"g.{n}",), labels=frozenset({"gpu"})) for n in range(6)]
    crowd = [Candidate("a", labels=frozenset({"gpu"})), Candidate("b"), Candidate("c", labels=frozenset({"gpu", "eu"}))]
    owners = assign([*gpu, *partitions(6)], crowd, strategy=RoundRobin()).owners
    assert {owners[p.id] for p in gpu} == {"a", "c"}
    assert sizes(dict(owners), crowd) == [4, 4, 4], "what can go anywhere fills the gaps"


def test_a_partition_that_nobody_may_have_is_parked() -> None:
    lonely = Partition("x", ("x.y",), labels=frozenset({"fpga"}))
    assert assign([lonely], members(3)).parked == ("x",)
    assert assign([lonely], []).parked == ("x",)


def test_a_member_that_loses_a_label_loses_its_partitions() -> None:
    labelled = Partition("x", ("x.y",), labels=frozenset({"gpu"}))
    crowd = [Candidate("a"), Candidate("b", labels=frozenset({"gpu"}))]
    assert assign([labelled], crowd, {"x": "a"}).owners == {"x": "b"}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@given(count=st.integers(0, 40), before=crowds, after=crowds)
@settings(max_examples=150, deadline=None)
def test_nobody_is_idle_while_another_has_two(strategy: Strategy, count: int, before: int, after: int) -> None:
    some = partitions(count)
    first = assign(some, members(before), strategy=strategy)
    for owners, crowd in [(first.owners, before), (assign(some, members(after), first.owners, strategy).owners, after)]:
        shares = sizes(dict(owners), members(crowd))
        assert min(shares) > 0 or max(shares) < 2, shares


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@given(count=st.integers(2, 40), crowd=st.integers(2, 8), pinned=st.integers(0, 39))
@settings(max_examples=60, deadline=None)
def test_a_pinned_partition_is_where_it_should_be_and_the_rest_makes_up_for_it(
    strategy: Strategy, count: int, crowd: int, pinned: int
) -> None:
    some, pins = partitions(count), {f"p{pinned % count}": "worker-1"}
    before = assign(some, members(crowd), strategy=strategy)
    after = assign(some, members(crowd), before.owners, strategy, pins)
    assert after.owners[f"p{pinned % count}"] == "worker-1"
    assert assign(some, members(crowd), after.owners, strategy, pins) == after, "it stays like that"
    shares = sizes(dict(after.owners), members(crowd))
    assert min(shares) > 0 or max(shares) < 2
    gone = assign(some, members(1), after.owners, strategy, pins)
    assert set(gone.owners.values()) == {"worker-0"}, "nobody waits for a worker that is not there"


def test_a_pin_does_not_overrule_labels() -> None:
    some = partitions(2, labels=frozenset({"gpu"}))
    crowd = [Candidate("worker-0", labels=frozenset({"gpu"})), Candidate("worker-1")]
    assert set(assign(some, crowd, pins={"p0": "worker-1"}).owners.values()) == {"worker-0"}
