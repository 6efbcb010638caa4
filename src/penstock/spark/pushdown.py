"""Filters of a query that the server can apply: `WHERE subject …` as subject filters, `sequence …` as a shorter range.

Pure. What cannot be expressed exactly is left to Spark, which then filters what comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from penstock import subjects as rules

MAX_SUBJECTS = 100
"""A consumer with more filters than this is slower than Spark's own filter."""
EVERYTHING = (rules.REST,)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What is left to read after some filters were applied."""

    subjects: tuple[str, ...]
    """None: every subject."""
    first: int = 1
    last: int | None = None
    nothing: bool = False
    """No message can pass."""


def push(filters: Iterable[Filter], narrowed: Narrowed) -> tuple[Narrowed, list[Filter]]:
    """Apply the filters that can be applied; returns the rest, which Spark has to check."""
    rest: list[Filter] = []
    for one in filters:
        after = _by_sequence(one, narrowed) or _by_subject(one, narrowed)
        if after is None:
            rest.append(one)
        else:
            narrowed = after
    return narrowed, rest


def _by_sequence(one: Filter, now: Narrowed) -> Narrowed | None:
    if getattr(one, "attribute", None) != ("sequence",):
        return None
    value = getattr(one, "value", None)
    if not isinstance(value, int):
        return None
    low, high = _bounds(one, value)
    if low is None and high is None:
        return None
    last = high if now.last is None else now.last if high is None else min(now.last, high)
    return replace(now, first=max(now.first, low or 1), last=last)


def _bounds(one: Filter, value: int) -> tuple[int | None, int | None]:
    if isinstance(one, EqualTo):
        return value, value
    if isinstance(one, GreaterThan | GreaterThanOrEqual):
        return value + isinstance(one, GreaterThan), None
    if isinstance(one, LessThan | LessThanOrEqual):
        return None, value - isinstance(one, LessThan)
    return None, None


def _by_subject(one: Filter, now: Narrowed) -> Narrowed | None:
    if getattr(one, "attribute", None) != ("subject",):
        return None
    if isinstance(one, EqualTo):
        return _only([one.value], now)
    if isinstance(one, In):
        return _only(list(one.value), now)
    if isinstance(one, StringStartsWith):
        return _starting_with(one.value, now)
    return None


def _only(values: list[object], now: Narrowed) -> Narrowed | None:
    """Only these literal subjects; those that the filters so far exclude cannot come."""
    wanted = list(dict.fromkeys(values))
    if not all(isinstance(v, str) and not rules.problem(v) and rules.is_literal(v) for v in wanted):
        return None
    allowed = now.subjects or EVERYTHING
    kept = tuple(str(v) for v in wanted if any(rules.matches(one, str(v)) for one in allowed))
    if len(kept) > MAX_SUBJECTS:
        return None
    return replace(now, subjects=kept, nothing=now.nothing or not kept)


def _starting_with(prefix: str, now: Narrowed) -> Narrowed | None:
    """`LIKE 'a.b.%'` is the filter `a.b.>`, since no token is empty. Another prefix cuts a token: that is Spark's."""
    wanted = f"{prefix}{rules.REST}"
    if not prefix.endswith(".") or rules.problem(wanted) or not rules.is_literal(prefix[:-1]):
        return None
    allowed = now.subjects or EVERYTHING
    if any(rules.covers(one, wanted) for one in allowed):
        return replace(now, subjects=(wanted,))
    if any(rules.overlap(one, wanted) and not rules.covers(wanted, one) for one in allowed):
        return None  # partly inside: no list of filters says that
    kept = tuple(one for one in allowed if rules.covers(wanted, one))
    return replace(now, subjects=kept, nothing=now.nothing or not kept)
