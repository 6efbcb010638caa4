"""The algebra of subjects, against a matcher that tries every subject of a small alphabet."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import subjects

ALPHABET = ("a", "b", "c")
DEPTH = 4
UNIVERSE = tuple(".".join(tokens) for n in range(1, DEPTH + 1) for tokens in itertools.product(ALPHABET, repeat=n))
"""Filters below use only `a` and `b` and are shorter than the longest subject, so that this universe decides."""


@st.composite
def filters(draw: st.DrawFn) -> str:
    tokens = draw(st.lists(st.sampled_from(("a", "b", "*")), min_size=1, max_size=DEPTH - 1))
    if draw(st.booleans()):
        tokens[-1] = ">"
    return ".".join(tokens)


def passes(filter_: str, subject: str) -> bool:
    """The definition, written out token by token."""
    wanted, given_ = filter_.split("."), subject.split(".")
    if wanted[-1] == ">":
        head = wanted[:-1]
        return len(given_) > len(head) and all(w in ("*", g) for w, g in zip(head, given_, strict=False))
    return len(wanted) == len(given_) and all(w in ("*", g) for w, g in zip(wanted, given_, strict=True))


def matched(filter_: str) -> set[str]:
    return {subject for subject in UNIVERSE if passes(filter_, subject)}


@given(filters(), st.sampled_from(UNIVERSE))
def test_matching_agrees_with_the_definition(filter_: str, subject: str) -> None:
    assert subjects.matches(filter_, subject) == passes(filter_, subject)


@given(filters(), filters())
def test_overlap_means_that_some_subject_passes_both(one: str, other: str) -> None:
    assert subjects.overlap(one, other) == bool(matched(one) & matched(other))
    assert subjects.overlap(one, other) == subjects.overlap(other, one)


@given(filters(), filters())
def test_covering_means_that_no_subject_passes_only_the_narrow_one(wide: str, narrow: str) -> None:
    assert subjects.covers(wide, narrow) == (matched(narrow) <= matched(wide))


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a.>.b", "a b", "a.\tb"])
def test_a_subject_the_server_would_refuse_is_said_to_be_wrong(subject: str) -> None:
    assert subjects.problem(subject)


@pytest.mark.parametrize("subject", ["a", "a.b", "a.*.c", "a.>", ">", "*", "a.b*", "$JS.EVENT.>"])
def test_a_subject_the_server_accepts_is_fine(subject: str) -> None:
    assert subjects.problem(subject) is None


def test_only_subjects_without_wildcard_tokens_are_literal() -> None:
    assert subjects.is_literal("a.b*")
    assert not subjects.is_literal("a.*")
    assert not subjects.is_literal("a.>")


@given(st.lists(filters(), max_size=8), filters())
def test_an_index_finds_what_overlaps_and_nothing_else(many: list[str], one: str) -> None:
    index: subjects.Index[int] = subjects.Index()
    for number, filter_ in enumerate(many):
        index.add(filter_, number)
    assert sorted(index.overlapping(one)) == [n for n, filter_ in enumerate(many) if subjects.overlap(filter_, one)]


def test_dead_letters_are_told_by_their_first_token() -> None:
    mine = ["dlq", "dlq.a", "dlq_audit.letters.x"]
    assert [one for one in (*mine, "dlqs.a", "a.dlq", "dlq_", "") if subjects.is_dead_letter(one)] == mine


def test_a_stream_holds_dead_letters_when_it_captures_nothing_else() -> None:
    assert subjects.holds_dead_letters(["dlq.>"])
    assert subjects.holds_dead_letters(["dlq.a.*", "dlq.b"])
    for other in ([], ["dlq.>", "s.a"], [">"], ["dlq_audit.>"]):
        assert not subjects.holds_dead_letters(other)
