"""Subjects and filters: what is valid, what matches, what overlaps, what covers what. Pure.

A subject is tokens between dots. In a filter, `*` stands for one token and a final `>` for one or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ONE = "*"
REST = ">"


def problem(subject: str) -> str | None:
    """Why the server would refuse this subject or filter; None when it would not."""
    if not subject:
        return "a subject cannot be empty"
    if any(c.isspace() for c in subject):
        return "a subject cannot contain white space"
    tokens = subject.split(".")
    if "" in tokens:
        return "a subject cannot have an empty token: dots stand between tokens only"
    if REST in tokens[:-1]:
        return "`>` can only be the last token"
    return None


def is_literal(subject: str) -> bool:
    """Whether the subject has no wildcard, so that one can publish to it."""
    return not any(token in (ONE, REST) for token in subject.split("."))


def matches(filter_: str, subject: str) -> bool:
    """Whether a message on the literal `subject` passes the filter."""
    return covers(filter_, subject)


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject that `narrow` matches is matched by `wide` too."""
    a, b = wide.split("."), narrow.split(".")
    for i, token in enumerate(a):
        if token == REST:
            return len(b) > i
        if i >= len(b) or b[i] == REST or (token != ONE and token != b[i]):
            return False
    return len(a) == len(b)


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both."""
    a, b = one.split("."), other.split(".")
    for x, y in zip(a, b, strict=False):
        if REST in (x, y):
            return True
        if x != y and ONE not in (x, y):
            return False
    return len(a) == len(b)


def any_overlap(some: Iterable[str], others: Sequence[str]) -> tuple[str, str] | None:
    """The first pair of the two lists that overlaps."""
    return next(((a, b) for a in some for b in others if overlap(a, b)), None)


def covered(narrow: str, wides: Iterable[str]) -> bool:
    """Whether one of `wides` covers `narrow`. A filter that only several of them together cover counts as not."""
    return any(covers(wide, narrow) for wide in wides)
