"""What a leader makes of what it sees, and what an outsider does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.jetstream.kv import Entry
from penstock.jetstream.model import ConsumerInfo
from penstock.workers.group.assignment import Published, Situation
from penstock.workers.group.claims import Claim
from penstock.workers.group.identity import ACTIVE, LEAVING, RETIRED, WorkerRecord
from penstock.workers.group.leader import first_claim, situation
from penstock.workers.group.overview import movement, overview
from penstock.workers.partitions import Partition

P, Q = Partition("p", ("s.p",)), Partition("q", ("s.q",))
IN_FORCE = Published(version=3, members=("a", "b"), partitions={"a": (P,), "b": (Q,)}, stream="S", leader="a")


def workers(**states: str) -> dict[str, WorkerRecord]:
    return {name: WorkerRecord("i", state=state) for name, state in states.items()}


@pytest.mark.parametrize(
    ("seen", "partitions", "expected"),
    [
        (workers(a=ACTIVE, b=ACTIVE), [P, Q], Situation.NONE),
        (workers(a=ACTIVE, b=ACTIVE, c=ACTIVE), [P, Q], Situation.PLANNED),
        (workers(a=ACTIVE, b=LEAVING), [P, Q], Situation.PLANNED),
        (workers(a=ACTIVE, b=RETIRED), [P, Q], Situation.EMERGENCY),
        (workers(a=ACTIVE), [P, Q], Situation.EMERGENCY),
        (workers(a=ACTIVE, b=ACTIVE), [P], Situation.PLANNED),
        (workers(a=ACTIVE, b=ACTIVE), [P, Partition("q", ("s.q", "s.r"))], Situation.PLANNED),
    ],
    ids=["nothing", "joined", "leaving", "retired", "gone", "one partition less", "another subject"],
)
def test_the_situation_is_told_from_members_and_partitions(
    seen: dict[str, WorkerRecord], partitions: list[Partition], expected: Situation
) -> None:
    assert situation(IN_FORCE, seen, partitions) is expected


def test_without_an_assignment_it_is_a_cold_start() -> None:
    assert situation(Published(), workers(a=ACTIVE), [P]) is Situation.COLD_START


def test_a_parked_partition_is_no_reason_for_a_new_assignment() -> None:
    lonely = Partition("x", ("s.x",), labels=frozenset({"gpu"}))
    parked = Published(version=1, members=("a",), partitions={"a": (P,)}, parked=("x",))
    assert situation(parked, workers(a=ACTIVE), [P, lonely]) is Situation.NONE
    assert situation(parked, workers(a=ACTIVE), [P]) is Situation.PLANNED


def test_a_partition_that_is_not_where_an_operator_wants_it_is_a_reason_as_far_as_that_can_be() -> None:
    everyone = workers(a=ACTIVE, b=ACTIVE)
    assert situation(replace(IN_FORCE, pins={"p": "b"}), everyone, [P, Q]) is Situation.PLANNED
    assert situation(replace(IN_FORCE, pins={"p": "a", "gone": "b", "q": "c"}), everyone, [P, Q]) is Situation.NONE
    labelled = replace(P, labels=frozenset({"gpu"}))
    tied = replace(IN_FORCE, partitions={"a": (labelled,), "b": (Q,)}, pins={"p": "b"})
    assert situation(tied, everyone, [labelled, Q]) is Situation.NONE


def consumer(worker: str, floor: int, *filters: str) -> ConsumerInfo:
    at = {"stream_seq": floor, "consumer_seq": floor}
    config = {"filter_subjects": list(filters), "metadata": {"penstock.worker": worker, "penstock.group": "g"}}
    counts = {"num_pending": 4, "num_ack_pending": 1, "num_redelivered": 0}
    return ConsumerInfo.parse(
        {"stream_name": "S", "name": f"g-{worker}", "config": config, "delivered": at, "ack_floor": at, **counts}
    )


def test_a_partition_without_a_claim_begins_where_a_consumer_of_the_group_left_it() -> None:
    known = [consumer("a", 40, "s.q"), consumer("b", 30, "s.p", "s.q")]
    assert first_claim(P, known, start=7) == Claim("p", 30, holders=("b",))
    assert first_claim(Q, known, start=7) == Claim("q", 30, holders=("a", "b"))
    assert first_claim(P, known[:1], start=7) == Claim("p", 7)


def test_a_consumer_that_has_passed_over_messages_of_a_partition_does_not_say_where_it_begins() -> None:
    catching_up = consumer("a", 40, "s.p", "s.q")
    catching_up.config["metadata"]["penstock.behind"] = "s.p"
    assert first_claim(P, [catching_up, consumer("b", 20, "s.p")], start=7) == Claim("p", 20, holders=("a", "b"))
    assert first_claim(P, [catching_up], start=7) == Claim("p", 0, holders=("a",)), "repeated rather than lost"
    assert first_claim(Q, [catching_up], start=7) == Claim("q", 40, holders=("a",))


@pytest.mark.parametrize(
    ("assigned", "claim", "expected"),
    [
        (None, None, "parked: no worker has its labels"),
        ("a", None, "free: waits for a to take it"),
        ("a", Claim("p", 5, "b", "b-1", settled=True), "b hands over to a"),
        ("a", Claim("p", 5, "a", "a-1"), "a catches up from 5"),
        ("a", Claim("p", 5, "a", "a-1", settled=True), None),
    ],
)
def test_an_overview_says_what_a_partition_waits_for(
    assigned: str | None, claim: Claim | None, expected: str | None
) -> None:
    assert movement(assigned, claim) == expected


def test_an_overview_counts_partitions_and_lag_and_sorts_by_number() -> None:
    entries = {
        "workers.worker-10": Entry(WorkerRecord("i").to_json(), 1),
        "workers.worker-2": Entry(WorkerRecord("j").to_json(), 2),
        "claims.p": Entry(Claim("p", 9, "worker-2", "x", settled=True, acquired=3).to_json(), 4),
        "leader.lease": Entry({"worker": "worker-10"}, 5),
    }
    both = [consumer("worker-2", 1, "s.p"), consumer("worker-2", 1, "s.q")]
    found = overview("g", entries, {"worker-2": both})
    assert [(w.id, w.leads, w.partitions, w.lag) for w in found.workers] == [
        ("worker-2", False, 1, 10),
        ("worker-10", True, 0, None),
    ]
    assert (found.active, found.lag) == (2, 10)


def test_what_waits_for_a_worker_that_is_gone_is_lag_of_its_group() -> None:
    found = overview("g", {}, {"worker-2": [consumer("worker-2", 1, "s.p")]})
    assert (found.state, found.active, found.lag) == ("no workers", 0, 5)


@pytest.mark.parametrize(
    ("entries", "paused", "state"),
    [
        ({"workers.worker-0": WorkerRecord("i", state="retired")}, False, "no workers"),
        ({"workers.worker-0": WorkerRecord("i")}, False, "at work"),
        ({"workers.worker-0": WorkerRecord("i")}, True, "paused"),
    ],
)
def test_the_state_of_a_group_in_a_word(entries: dict[str, WorkerRecord], paused: bool, state: str) -> None:
    known = {key: Entry(one.to_json(), 1) for key, one in entries.items()}
    assigned = Entry({**ASSIGNED, "paused": paused}, 3)
    assert overview("g", {**known, "assignment.head": assigned}, {}).state == state
    assert not paused or overview("g", known, {}).state == "waits"


WORKER = {"workers.worker-0": Entry(WorkerRecord("i").to_json(), 1)}
LED = {**WORKER, "leader.lease": Entry({"worker": "worker-0"}, 2)}
ASSIGNED = {"version": 1, "members": ["worker-0"], "parked": [], "stream": "S", "leader": "worker-0"}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, "its first worker"),
        (WORKER, "to choose a leader"),
        (LED, "its first assignment: worker-0 makes it"),
        ({**LED, "migration.state": Entry({"phase": "shadow"}, 3)}, "`penstock group migrate g switch`"),
        ({**LED, "migration.state": Entry({"phase": "legacy"}, 3)}, "`penstock group migrate g shadow`"),
    ],
)
def test_an_overview_says_what_a_group_without_an_assignment_waits_for(entries: dict[str, Entry], says: str) -> None:
    assert says in (overview("g", entries, {}).waits_for or "")


def test_a_group_with_an_assignment_waits_for_nothing() -> None:
    assert overview("g", {**LED, "assignment.head": Entry(ASSIGNED, 3)}, {}).waits_for is None
