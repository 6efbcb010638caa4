"""Which messages of an origin are missing in its copy, from headers and from what the origin still has."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.jetstream.model import StreamInfo
from penstock.sourcing.holes import _never_stored, holes_between


def origin(first: int = 1, last: int = 100, deleted: tuple[int, ...] = (), **config: Any) -> StreamInfo:
    state = {"messages": 1, "bytes": 1, "first_seq": first, "last_seq": last, "deleted": list(deleted)}
    return StreamInfo.parse({"config": {"name": "O", **config}, "state": state})


def test_what_has_no_copy_between_two_others_is_a_hole() -> None:
    marks = ["A 1 > > a", "A 2 > > a", "B:x 7 > > b", "A 6 > > a", "B:x 8 > > b", "C 1 c.* > c", "C 9 c.* > c"]
    assert holes_between(marks) == {"A": [range(3, 6)], "B:x": []}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (origin(), 3),
        (origin(first=4), 2),
        (origin(deleted=(2, 4, 9)), 2),
        (origin(first=50), 0),
        (origin(first=50, retention="workqueue"), 3),
        (origin(first=50, retention="interest", max_age=0, max_msgs=-1), 3),
        (origin(first=50, retention="workqueue", max_age=10), 0),
        (None, 0),
    ],
)
def test_what_the_origin_may_have_removed_before_it_was_read_is_not_counted(
    found: StreamInfo | None, expected: int
) -> None:
    assert _never_stored([range(3, 6)], found, known=False) == expected


def test_of_an_origin_that_cannot_be_asked_all_are_counted_where_the_cause_is_known() -> None:
    assert _never_stored([range(3, 6), range(8, 9)], None, known=True) == 4
