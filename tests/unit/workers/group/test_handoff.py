"""The steps of a handoff: which are due for whom, on which retention, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from penstock.jetstream.model import ConsumerInfo, Retention
from penstock.workers.group.claims import Claim, ProgressRecord, Reached
from penstock.workers.group.handoff import (
    Steps,
    View,
    ack_floor,
    after_crash,
    dead_claims,
    freed,
    is_needed,
    left_behind,
    may_let_go,
    next_steps,
)
from penstock.workers.group.identity import RETIRED, WorkerRecord
from penstock.workers.partitions import Partition

FREE = Claim("p", 10, holders=("a",), revision=5)
OWNED = Claim("p", 10, "a", "a-1", settled=True, acquired=3, revision=4)


def view(
    wanted: set[str] | None, claim: Claim | None, running: Collection[str] = (), held: Collection[str] = ()
) -> View:
    claims = {"p": claim} if claim else {}
    some = None if wanted is None else frozenset(wanted)
    return View("b", some, claims, frozenset(running), frozenset(held))


def test_a_free_partition_is_taken_and_a_taken_one_waited_for() -> None:
    assert next_steps(view({"p"}, FREE), Retention.LIMITS) == Steps(take=(FREE,))
    assert next_steps(view({"p"}, OWNED), Retention.LIMITS) == Steps(wait=("p",))
    assert next_steps(view({"p"}, None), Retention.LIMITS) == Steps(wait=("p",)), "the leader makes the first claim"


def test_a_restarted_worker_frees_what_the_process_before_it_had() -> None:
    before = replace(OWNED, owner="b", incarnation="b-0")
    claims = {"p": before, "q": replace(OWNED, partition="q", owner="b", incarnation="b-1"), "r": FREE}
    assert left_behind(claims, "b", "b-1") == [before]
    known = {"p": Partition("p", ("s.p",))}
    (claim,) = freed([before], known, {"b": [consumer(30, "s.p")]}, {})
    assert claim == replace(
        before, owner=None, incarnation=None, settled=False, acquired=None, holders=("b",), handoff=30
    )
    assert next_steps(view({"p"}, claim), Retention.LIMITS).take == (claim,)


@pytest.mark.parametrize("retention", Retention)
def test_what_a_predecessor_had_is_not_let_go_before_it_is_freed(retention: Retention) -> None:
    """Its ack floor counts for it as long as nobody has: the filters must not change before."""
    before = replace(OWNED, owner="b", incarnation="b-0")
    assert next_steps(view(set(), before, held={"p"}), retention).nothing
    assert next_steps(view(None, before), retention).nothing, "nothing is known yet of who should have what"


@pytest.mark.parametrize("retention", Retention)
def test_what_the_claim_says_is_ours_is_never_let_go(retention: Retention) -> None:
    """As after a write whose answer was lost: it is not worked on, and yet nobody else will."""
    mine = replace(OWNED, owner="b", incarnation="b-1")
    assert not may_let_go(mine, "b", retention)
    assert next_steps(view(set(), mine, held={"p"}), retention).let_go == ()


def consumer(floor: int, *filters: str) -> ConsumerInfo:
    at = {"stream_seq": floor, "consumer_seq": floor}
    raw = {"stream_name": "S", "name": "g-a", "config": {"filter_subjects": list(filters)}}
    counts = {"num_pending": 0, "num_ack_pending": 0, "num_redelivered": 0}
    return ConsumerInfo.parse({**raw, "delivered": at, "ack_floor": at, **counts})


def test_a_consumer_says_nothing_about_a_partition_that_it_does_not_cover() -> None:
    both = Partition("p", ("s.p", "s.q"))
    assert ack_floor(both, [consumer(70, "s.p", "s.q")]) == 70
    assert ack_floor(both, [consumer(70, "s.>")]) == 70
    assert ack_floor(both, [consumer(70, "s.p")]) is None, "it has passed over the other subject"
    assert ack_floor(both, [consumer(70, "s.r")]) is None
    assert ack_floor(both, []) is None
    assert ack_floor(None, [consumer(70, "s.p", "s.q")]) is None, "nobody knows its subjects"
    assert ack_floor(both, [consumer(70, "s.p"), consumer(50, "s.q")]) == 50, "one consumer is not enough for it"


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
        (None, False),
    ],
    ids=["free", "being caught up", "settled by another", "lost with the bucket"],
)
def test_interest_keeps_the_filter_until_the_new_owner_has_settled(claim: Claim | None, safe: bool) -> None:
    assert may_let_go(claim, "b", Retention.INTEREST) is safe
    assert may_let_go(claim, "b", Retention.LIMITS), "the stream keeps everything"
    assert may_let_go(claim, "b", Retention.WORKQUEUE)
    assert next_steps(view(set(), claim, held={"p"}), Retention.INTEREST).let_go == (("p",) if safe else ())


def test_a_partition_that_comes_back_before_another_took_it_is_taken_and_not_let_go() -> None:
    steps = next_steps(view({"p"}, replace(FREE, holders=("b",)), held={"p"}), Retention.LIMITS)
    assert [claim.partition for claim in steps.take] == ["p"]
    assert steps.let_go == ()


def test_the_ack_floor_counts_only_for_what_is_settled() -> None:
    assert after_crash(OWNED, 70, None).handoff == 70
    assert after_crash(OWNED, 3, None).handoff == 10
    assert after_crash(OWNED, None, None).handoff == 10
    catching_up = replace(OWNED, settled=False)
    assert after_crash(catching_up, 70, None).handoff == 10, "its consumer has passed over what it was reading"
    assert after_crash(OWNED, 70, None).holders == ("a",)


def test_a_record_counts_under_its_token_and_for_its_stream() -> None:
    owned = replace(OWNED, stream="then")
    record = ProgressRecord("then", {OWNED.partition: Reached(90, (93, 2), OWNED.token)})
    assert after_crash(owned, 70, record).handoff == 90
    assert after_crash(owned, 70, record).tries == (93, 2)
    assert after_crash(owned, 95, record).handoff == 95
    assert after_crash(replace(owned, settled=False), 70, record).handoff == 90, "what was caught up with is done"
    other_token = ProgressRecord("then", {OWNED.partition: Reached(90, (93, 2), OWNED.token - 1)})
    assert after_crash(owned, 70, other_token).handoff == 70
    assert after_crash(replace(owned, stream="now"), 70, record).handoff == 70


def test_of_a_stream_that_was_made_anew_nothing_is_done() -> None:
    owned = replace(OWNED, tries=(11, 2))
    assert owned.about("then", 7) == replace(owned, stream="then", mark=7), "it did not say which"
    assert owned.about("then", 7).about("now", 7) == replace(OWNED, handoff=0, stream="now", mark=7)
    assert owned.about("then", 7).about("then", 8) == replace(OWNED, handoff=0, stream="then", mark=8)


def test_tokens_rise_with_every_owner_and_stay_when_one_settles() -> None:
    taken = replace(FREE.taken("b", "b-1"), revision=6)
    settled = replace(taken.settled_at(50), revision=7)
    again = replace(settled.freed(Reached(60)).taken("c", "c-1"), revision=9)
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
    after = FREE.taken("b", "b-1").freed(Reached(0))
    assert after.holders == ("a", "b")
    assert after.taken("a", "a-2").settled_at(30).holders == ()


def test_a_claim_survives_its_way_through_the_bucket() -> None:
    for claim in (FREE, OWNED):
        assert Claim.parse("p", claim.to_json(), claim.revision) == claim
