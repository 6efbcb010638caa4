"""Which of the partitions that a source names can be assigned."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from penstock import subjects
from penstock.jetstream.kv import Entry
from penstock.jetstream.model import Json
from penstock.workers.group.claims import claim_key, claims_in
from penstock.workers.partitions import MAX_PARTITIONS, Partition, partition_json, usable

TOKENS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3)
SUBJECTS = st.builds(lambda tokens, rest: ".".join([*tokens, *rest]), TOKENS, st.sampled_from([(), (">",)]))


def test_a_partition_keeps_the_subjects_that_its_claim_is_about() -> None:
    before = Partition("p", ("s.a",))
    chosen, wrong = usable([Partition("p", ("s.a", "s.b")), Partition("q", ("s.c",))], {"p": before})
    assert chosen == [before, Partition("q", ("s.c",))]
    assert len(wrong) == 1
    assert "another id" in wrong[0]


def test_a_partition_that_overlaps_one_at_work_is_left_out() -> None:
    wide, narrow = Partition("eu", ("p14.eu",)), Partition("all", ("p14.>",))
    chosen, wrong = usable([narrow, wide], {"eu": wide})
    assert chosen == [wide]
    assert "handled twice" in wrong[0]


def test_more_partitions_than_a_group_can_have_are_told_and_those_at_work_stay() -> None:
    partitions = [Partition(f"p{n}", (f"s.p{n}",)) for n in range(MAX_PARTITIONS + 3)]
    last = partitions[-1]
    chosen, wrong = usable(partitions, {last.id: last})
    assert (len(chosen), last in chosen, len(wrong)) == (MAX_PARTITIONS, True, 1)
    assert "3 partitions are left out" in wrong[0]


def test_no_more_partitions_are_chosen_than_fit_into_the_share_of_one_worker() -> None:
    labels = frozenset({"gpu", "large"})
    partitions = [Partition(f"p{n}", (f"s.{n}.{'x' * 60}", f"t.{n}.{'y' * 60}"), labels=labels) for n in range(9000)]
    chosen, wrong = usable(partitions, {})
    size = len(json.dumps([partition_json(partition) for partition in chosen]))
    assert 2**19 < size < 2**20 - 10_000
    assert f"{9000 - len(chosen)} partitions are left out" in wrong[0]


@given(st.lists(SUBJECTS, min_size=1, max_size=6))
def test_no_two_of_the_chosen_overlap_and_no_other_is_left_out(listed: list[str]) -> None:
    partitions = [Partition(f"p{n}", (subject,)) for n, subject in enumerate(listed)]
    expected: list[Partition] = []
    for one in partitions:
        if not any(subjects.overlap(other.subjects[0], one.subjects[0]) for other in expected):
            expected.append(one)
    assert usable(partitions, {})[0] == expected


@given(st.text(min_size=1).filter(lambda text: subjects.problem(text) is None))
def test_whatever_nats_allows_in_a_subject_can_be_claimed(partition: str) -> None:
    key = claim_key(partition)
    assert set(key) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=./")
    raw: Json = {"handoff": 7, "owner": None, "incarnation": None, "settled": False, "acquired": None, "holders": []}
    found = claims_in({key: Entry(raw, 3)})
    assert [(claim.partition, claim.handoff) for claim in found.values()] == [(partition, 7)]


def test_a_claim_that_cannot_be_read_begins_anew() -> None:
    assert claims_in({"claims.p": Entry({"v": 1}, 9)})["p"].handoff == 0
