"""From partitions to filters: deduplicated, compressed, placed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import subjects
from penstock.workers.partitions import Partition
from penstock.workers.pull.filters import SubjectCapExceeded, compressed, placed, plan, subject_set

TOKENS = st.sampled_from("abc")
LITERALS = st.frozensets(st.tuples(TOKENS, TOKENS, TOKENS).map(".".join), max_size=20)

WILD = st.lists(st.sampled_from("ab*"), min_size=1, max_size=3).map(".".join)
FILTERS = st.frozensets(st.one_of(WILD, WILD.map(lambda subject: f"{subject}.>")), max_size=12)


def test_a_subject_that_two_partitions_have_comes_once_and_is_noticed() -> None:
    found = subject_set([Partition("1", ("a.x", "a.y")), Partition("2", ("a.x",))])
    assert found.subjects == {"a.x", "a.y"}
    assert found.duplicates == 1


def test_a_subject_that_a_wildcard_covers_is_left_out() -> None:
    found = subject_set([Partition("1", ("a.>",)), Partition("2", ("a.x",)), Partition("3", ("b.x",))])
    assert found.subjects == {"a.>", "b.x"}
    assert found.duplicates == 1


@given(FILTERS)
def test_what_is_left_out_is_what_another_covers(wanted: frozenset[str]) -> None:
    found = subject_set([Partition(str(n), (subject,)) for n, subject in enumerate(sorted(wanted))]).subjects
    assert found == {s for s in wanted if not any(w != s and subjects.covers(w, s) for w in wanted)}


@given(wanted=LITERALS, others=LITERALS, cap=st.integers(1, 10))
def test_compression_matches_what_is_wanted_and_nothing_else(
    wanted: frozenset[str], others: frozenset[str], cap: int
) -> None:
    found = compressed(wanted, wanted | others, cap)
    assert all(subjects.covered(subject, found) for subject in wanted)
    assert not [subject for subject in others - wanted if subjects.covered(subject, found)]
    assert len(found) <= len(wanted)
    assert not [(a, b) for a in found for b in found if a < b and subjects.overlap(a, b)]


def test_a_whole_family_becomes_one_filter() -> None:
    wanted = frozenset(f"dc.tool{n}.done" for n in range(900))
    assert compressed(wanted, wanted, 500) == {"dc.*.done"}


def test_one_foreign_subject_keeps_the_family_apart() -> None:
    wanted = frozenset(f"dc.tool{n}.done" for n in range(20))
    assert compressed(wanted, wanted | {"dc.other.done"}, 5) == wanted


@given(LITERALS, st.lists(LITERALS, max_size=3), st.integers(1, 12), st.integers(1, 3))
def test_placing_keeps_every_subject_where_it_is_and_within_the_cap(
    wanted: frozenset[str], lists: list[frozenset[str]], cap: int, most: int
) -> None:
    taken: set[str] = set()
    current = []
    for one in lists:
        current.append(frozenset(sorted(one - taken)[:cap]))
        taken |= one
    if len(wanted) > cap * most:
        with pytest.raises(SubjectCapExceeded):
            placed(wanted, tuple(current), cap, most)
        return
    found = placed(wanted, tuple(current), cap, most)
    assert frozenset().union(*found) == wanted
    assert sum(map(len, found)) == len(wanted)
    assert all(len(shard) <= cap for shard in found)
    for before, after in zip(current[:most], (*found, *[frozenset()] * 3), strict=False):
        assert before & wanted <= after


def test_the_cap_is_an_error_that_names_the_numbers() -> None:
    many = [Partition(str(n), (f"a.{n}",)) for n in range(501)]
    with pytest.raises(SubjectCapExceeded, match=r"501 filter subjects .* cap of 500"):
        plan(many, (), 500, 1, ())


def test_too_many_subjects_go_to_a_second_consumer_where_that_is_allowed() -> None:
    many = [Partition(f"{n:03}", (f"a.{n:03}",)) for n in range(7)]
    first, second = plan(many, (), 5, 2, ())
    assert (len(first), len(second)) == (5, 2)
