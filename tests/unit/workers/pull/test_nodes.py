"""Nodes that come back."""

from __future__ import annotations

from penstock.workers.pull.consumer import TIMES, Absence


def test_nothing_is_written_while_somebody_is_away() -> None:
    absence = Absence()
    assert not any(absence.over(True) for _ in range(5))


def test_who_has_just_come_writes_too_for_an_absence_that_it_did_not_see() -> None:
    absence = Absence()
    assert [absence.over(False) for _ in range(TIMES + 2)] == [True] * TIMES + [False] * 2


def test_after_an_absence_consumers_are_written_a_few_times() -> None:
    absence = Absence()
    for _ in range(2):
        absence.over(True)
        assert [absence.over(False) for _ in range(TIMES + 2)] == [True] * TIMES + [False] * 2


def test_a_node_that_goes_once_more_begins_it_anew() -> None:
    absence = Absence()
    looks = [absence.over(away) for away in (True, False, True, *[False] * TIMES, False)]
    assert looks == [False, True, False, *[True] * TIMES, False]
