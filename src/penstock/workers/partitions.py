"""Partitions, and the pattern that finds a partition in a subject. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock import subjects
from penstock.errors import ConfigError

_NAMED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Partition:
    """A share of a stream that one worker at a time handles, in order."""

    id: str
    subjects: tuple[str, ...]
    """Its filter subjects. No other partition's may overlap them."""
    weight: int = 1
    """How much work it is, compared with others."""
    labels: frozenset[str] = frozenset()
    """When there are some, only workers that have one of them may own it."""

    def __post_init__(self) -> None:
        if wrong := subjects.problem(self.id):
            raise ConfigError(f"{self.id!r} cannot be a partition's id: {wrong}")
        if not self.subjects:
            raise ConfigError(f"partition {self.id!r} has no subjects: name at least one")
        for subject in self.subjects:
            if wrong := subjects.problem(subject):
                raise ConfigError(f"partition {self.id!r}, subject {subject!r}: {wrong}")
        if self.weight < 1:
            raise ConfigError(f"partition {self.id!r} weighs {self.weight}: the least is 1")


@dataclass(frozen=True)
class SubjectPattern:
    """Subjects with named tokens, such as `dc.{tool}.{chamber}.completion`.

    The named tokens, joined by dots in their order, are the partition's id. `*` and a final `>` stand for tokens that
    do not matter, as in filters.
    """

    text: str

    def __post_init__(self) -> None:
        plain = _NAMED.sub("x", self.text)
        if (wrong := subjects.problem(plain)) or "{" in plain or "}" in plain:
            raise ConfigError(f"{self.text!r} is not a subject pattern: {wrong or 'braces enclose a name'}")
        if any(_NAMED.search(token) and not _NAMED.fullmatch(token) for token in self.text.split(".")):
            raise ConfigError(f"{self.text!r} is not a subject pattern: a name in braces is a whole token")
        if not self.names:
            raise ConfigError(f"{self.text!r} names no token: write one as {{name}}, such as dc.{{tool}}.completion")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"{self.text!r} names a token twice: each name stands for one token")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its tokens, in order."""
        return tuple(_NAMED.findall(self.text))

    @cached_property
    def filter(self) -> str:
        """The filter that matches every subject of the pattern."""
        return _NAMED.sub(subjects.ONE, self.text)

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        return tuple(i for i, token in enumerate(self.text.split(".")) if _NAMED.fullmatch(token))

    def partition_id(self, subject: str) -> str | None:
        """The id in a message's subject; None when the subject is not of this pattern."""
        if not subjects.matches(self.filter, subject):
            return None
        tokens = subject.split(".")
        return ".".join(tokens[i] for i in self._positions)

    def subject(self, partition_id: str) -> str:
        """The filter subject of a partition."""
        values = partition_id.split(".")
        if len(values) != len(self._positions):
            raise ConfigError(f"{partition_id!r} has {len(values)} tokens; {self.text!r} names {len(self.names)}")
        tokens = self.text.split(".")
        for position, value in zip(self._positions, values, strict=True):
            tokens[position] = value
        return ".".join(tokens)

    def partition(self, partition_id: str, weight: int = 1, labels: Iterable[str] = ()) -> Partition:
        """The partition of that id."""
        return Partition(partition_id, (self.subject(partition_id),), weight, frozenset(labels))

    def partitions(self, seen: Iterable[str]) -> list[Partition]:
        """The partitions of the subjects seen, in the order of their ids; subjects of another form are left out, and so
        are those that can be no filter of their own: see `refused`."""
        ids = {self.partition_id(subject) for subject in seen if not refused(subject)} - {None}
        return [self.partition(found_id) for found_id in sorted(i for i in ids if i)]


def refused(subject: str) -> str | None:
    """Why a message's subject cannot be a partition; None when it can.

    Servers store what publishers send: control characters, and wildcards, which as a filter would be everybody's.
    """
    if not subjects.is_literal(subject):
        return "it has a wildcard in it"
    return subjects.problem(subject)
