"""Partitions and subject patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.workers.partitions import Partition, SubjectPattern, refused

TOKEN = st.text("abcXYZ019_-", min_size=1, max_size=6)


def test_the_named_tokens_are_the_partition_id() -> None:
    pattern = SubjectPattern("dc.{tool}.{chamber}.completion")
    assert pattern.partition_id("dc.etch7.c2.completion") == "etch7.c2"
    assert pattern.subject("etch7.c2") == "dc.etch7.c2.completion"
    assert pattern.filter == "dc.*.*.completion"
    assert pattern.names == ("tool", "chamber")


def test_a_subject_of_another_form_has_no_partition() -> None:
    pattern = SubjectPattern("dc.{tool}.{chamber}.completion")
    assert pattern.partition_id("dc.etch7.completion") is None
    assert pattern.partition_id("xx.etch7.c2.completion") is None


def test_subjects_that_can_be_no_filter_are_no_partitions() -> None:
    """Servers store them. A publisher would end every worker with one, or send all messages to one partition."""
    pattern = SubjectPattern("w.{id}")
    hostile = ["w.\0", "w.a\x1bb", "w.*", "w.>", "w.\x7f"]
    assert pattern.partitions([*hostile, "w.a", "w.a*b"]) == [Partition("a", ("w.a",)), Partition("a*b", ("w.a*b",))]
    assert all(map(refused, hostile))


def test_wildcards_in_a_pattern_are_no_part_of_the_id() -> None:
    pattern = SubjectPattern("orders.{region}.*.>")
    assert pattern.partition_id("orders.eu.17.created.v2") == "eu"
    assert pattern.partition("eu") == Partition("eu", ("orders.eu.*.>",))


@given(TOKEN, TOKEN)
def test_a_partition_found_in_a_subject_has_that_subject(tool: str, chamber: str) -> None:
    pattern = SubjectPattern("dc.{tool}.{chamber}.completion")
    subject = f"dc.{tool}.{chamber}.completion"
    found = pattern.partition_id(subject)
    assert found is not None
    assert pattern.subject(found) == subject


def test_partitions_seen_come_once_and_in_order() -> None:
    pattern = SubjectPattern("dc.{tool}.completion")
    seen = ["dc.b.completion", "dc.a.completion", "other", "dc.b.completion"]
    assert [p.id for p in pattern.partitions(seen)] == ["a", "b"]


@pytest.mark.parametrize("text", ["", "dc.x", "dc.{a}.{a}", "dc.x{a}.b", "dc.{a", "dc..{a}", "dc.{a} .b", "{a}.>.b"])
def test_a_pattern_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        SubjectPattern(text)


@pytest.mark.parametrize(
    ("id_", "subjects", "weight"),
    [("", ("a",), 1), ("a b", ("a",), 1), ("a..b", ("a",), 1), ("a", (), 1), ("a", ("x y",), 1), ("a", ("x",), 0)],
)
def test_a_partition_that_makes_no_sense_is_refused(id_: str, subjects: tuple[str, ...], weight: int) -> None:
    with pytest.raises(ConfigError):
        Partition(id_, subjects, weight)
