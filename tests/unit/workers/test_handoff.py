"""The steps of a handoff: which are due for whom, on which retention, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from penstock.workers.claims import Claim
from penstock.workers.handoff import (
    Retention,
    Steps,
    View,
    after_crash,
    dead_claims,
    is_needed,
    may_let_go,
    next_steps,
)
from penstock.workers.identity import RETIRED, WorkerRecord

FREE = Claim("p", 10, holders=("a",), revision=5)
OWNED = Claim("p", 10, "a", "a-1", settled=True, acquired=3, revision=4)


def view(
    wanted: set[str] | None, claim: Claim | None, running: Collection[str] = (), held: Collection[str] = ()
) -> View:
    claims = {"p": claim} if claim else {}
    some = None if wanted is None else frozenset(wanted)
    return View("b", "b-1", some, claims, frozenset(running), frozenset(held))


def test_a_free_partition_is_taken_and_a_taken_one_waited_for() -> None:
    assert next_steps(view({"p"}, FREE), Retention.LIMITS) == Steps(take=(FREE,))
    assert next_steps(view({"p"}, OWNED), Retention.LIMITS) == Steps(wait=("p",))
    assert next_steps(view({"p"}, None), Retention.LIMITS) == Steps(wait=("p",)), "the leader makes the first claim"


def test_a_restarted_worker_takes_over_from_the_process_before_it() -> None:
    before = replace(OWNED, owner="b", incarnation="b-0")
    assert next_steps(view({"p"}, before), Retention.LIMITS).take == (before,)


def test_without_an_assignment_everything_stays() -> None:
    mine = replace(OWNED, owner="b", incarnation="b-1")
    assert next_steps(view(None, mine, running={"p"}), Retention.LIMITS).nothing


@pytest.mark.parametrize("retention", Retention)
def test_a_partition_that_is_no_longer_wanted_is_given_up(retention: Retention) -> None:
    mine = replace(OWNED, owner="b", incarnation="b-1")
    assert next_steps(view(set(), mine, running={"p"}), retention).give == ("p",)


@pytest.mark.parametrize(
    ("claim", "safe"),
    [
        (replace(FREE, holders=("b",)), False),
        (Claim("p", 10, "a", "a-1", holders=("b",), revision=6), False),
        (OWNED, True),
        (None, True),
    ],
    ids=["free", "being caught up", "settled by another", "no longer a partition"],
)
def test_interest_keeps_the_filter_until_the_new_owner_has_settled(claim: Claim | None, safe: bool) -> None:
    assert may_let_go(claim, "b", Retention.INTEREST) is safe
    assert may_let_go(claim, "b", Retention.LIMITS)
    assert may_let_go(claim, "b", Retention.WORKQUEUE)
    assert next_steps(view(set(), claim, held={"p"}), Retention.INTEREST).let_go == (("p",) if safe else ())


def test_a_partition_that_comes_back_before_another_took_it_is_taken_and_not_let_go() -> None:
    steps = next_steps(view({"p"}, replace(FREE, holders=("b",)), held={"p"}), Retention.LIMITS)
    assert [claim.partition for claim in steps.take] == ["p"]
    assert steps.let_go == ()


def test_the_ack_floor_counts_only_for_what_is_settled() -> None:
    assert after_crash(OWNED, ack_floor=70).handoff == 70
    assert after_crash(OWNED, ack_floor=3).handoff == 10
    assert after_crash(OWNED, ack_floor=None).handoff == 10
    catching_up = replace(OWNED, settled=False)
    assert after_crash(catching_up, ack_floor=70).handoff == 10, "its consumer has passed over what it was reading"
    assert after_crash(OWNED, 70).holders == ("a",)


def test_tokens_rise_with_every_owner_and_stay_when_one_settles() -> None:
    taken = replace(FREE.taken("b", "b-1"), revision=6)
    settled = replace(taken.settled_at(50), revision=7)
    again = replace(settled.freed(60).taken("c", "c-1"), revision=9)
    assert (taken.token, settled.token, again.token) == (6, 6, 9)
    assert settled.handoff == 50
    assert settled.holders == ()
    assert again.holders == ("b",)


def test_claims_of_dead_retired_and_replaced_owners_are_found() -> None:
    claims = {
        p: replace(OWNED, partition=p, owner=owner) for p, owner in (("p", "a"), ("q", "b"), ("r", "c"), ("s", "d"))
    }
    workers = {
        "b": WorkerRecord("i", "a-1", RETIRED),
        "c": WorkerRecord("i", "another"),
        "d": WorkerRecord("i", "a-1"),
    }
    assert [claim.partition for claim in dead_claims(claims, workers)] == ["p", "q", "r"]


def test_the_consumer_of_a_dead_worker_stays_as_long_as_it_holds_something() -> None:
    assert is_needed("a", [OWNED], Retention.LIMITS), "its ack floor is to be read"
    assert not is_needed("a", [FREE], Retention.WORKQUEUE)
    assert is_needed("a", [FREE], Retention.INTEREST), "it keeps messages"
    assert not is_needed("a", [FREE.taken("b", "b-1").settled_at(20)], Retention.INTEREST)


def test_whoever_covered_a_partition_is_known_until_somebody_has_settled() -> None:
    """a frees it, b takes it and dies while it catches up: both of their consumers are still needed."""
    after = FREE.taken("b", "b-1").freed(None)
    assert after.holders == ("a", "b")
    assert after.taken("a", "a-2").settled_at(30).holders == ()


def test_a_claim_survives_its_way_through_the_bucket() -> None:
    for claim in (FREE, OWNED):
        assert Claim.parse("p", claim.to_json(), claim.revision) == claim
