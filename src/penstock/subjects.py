"""Subjects and filters: what is valid, what matches, what overlaps, what covers what. Pure.

A subject is tokens between dots. In a filter, `*` stands for one token and a final `>` for one or more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ONE = "*"
REST = ">"

DLQ = "dlq"
"""First token of the subjects that dead letters live on."""
DLQ_AUDIT = "dlq_audit"
"""First token of the subjects of the audit, which decides what becomes of dead letters."""
DLQ_SUBJECTS = f"{DLQ}.>"

UNPRINTABLE = re.compile(r"[\s\x00-\x20\x7f]")
"""What Penstock puts into no subject. A server takes all but space, tab, CR and LF, so others may have published it."""

T = TypeVar("T")


def api_prefix(domain: str | None) -> str:
    """What the requests to JetStream begin with: that of the own server, or that of another domain."""
    return f"$JS.{domain}.API" if domain else "$JS.API"


def problem(subject: str) -> str | None:
    """Why this cannot be a subject or filter that Penstock publishes to or reads by; None when it can."""
    if not subject:
        return "a subject cannot be empty"
    if UNPRINTABLE.search(subject):
        return "a subject cannot contain white space or control characters"
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


def is_dead_letter(subject: str) -> bool:
    """Whether a message on the literal `subject` would lie among the dead letters, or in their audit."""
    return subject.partition(".")[0] in (DLQ, DLQ_AUDIT)


def holds_dead_letters(captured: Sequence[str]) -> bool:
    """Whether a stream of these subjects holds dead letters and nothing else."""
    return bool(captured) and all(covers(DLQ_SUBJECTS, subject) for subject in captured)


def any_overlap(some: Iterable[str], others: Sequence[str]) -> tuple[str, str] | None:
    """The first pair of the two lists that overlaps."""
    return next(((a, b) for a in some for b in others if overlap(a, b)), None)


def covered(narrow: str, wides: Iterable[str]) -> bool:
    """Whether one of `wides` covers `narrow`. A filter that only several of them together cover counts as not."""
    return any(covers(wide, narrow) for wide in wides)


@dataclass(slots=True)
class Index(Generic[T]):
    """Values by subjects or filters, a token a level: finds what overlaps without a look at all the rest."""

    here: list[T] = field(default_factory=list)
    """Values whose subject ends here."""
    below: dict[str, Index[T]] = field(default_factory=dict)

    def add(self, subject: str, value: T) -> None:
        node = self
        for token in subject.split("."):
            node = node.below.setdefault(token, Index())
        node.here.append(value)

    def overlapping(self, subject: str) -> Iterator[T]:
        """The values of every subject that overlaps this one; a value once for each of its subjects that does."""
        level = [self]
        for token in subject.split("."):
            if token == REST:
                yield from (value for node in level for value in node._beneath())
                return
            yield from (value for node in level if REST in node.below for value in node.below[REST].here)
            level = [below for node in level for below in node._step(token)]
        yield from (value for node in level for value in node.here)

    def _step(self, token: str) -> list[Index[T]]:
        fitting = [t for t in self.below if t != REST] if token == ONE else dict.fromkeys((token, ONE))
        return [self.below[t] for t in fitting if t in self.below]

    def _beneath(self) -> Iterator[T]:
        open_ = list(self.below.values())
        while open_:
            node = open_.pop()
            yield from node.here
            open_.extend(node.below.values())
