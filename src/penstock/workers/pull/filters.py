"""Computes the filter subjects of a worker's consumers from its partitions: deduplicated, compressed, placed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock import subjects
from penstock.errors import ConfigError
from penstock.workers.partitions import Partition

Shards = tuple[frozenset[str], ...]
"""The filter subjects of each consumer, first to last; an empty set has no consumer."""


class SubjectCapExceeded(ConfigError):
    """A worker would need more filter subjects than its consumers may have."""

    def __init__(self, wanted: int, cap: int, consumers: int) -> None:
        super().__init__(wanted, cap, consumers)
        self.wanted, self.cap, self.consumers = wanted, cap, consumers

    def __str__(self) -> str:
        room = f"{self.cap} on each of {self.consumers} consumers" if self.consumers > 1 else str(self.cap)
        return (
            f"{self.wanted} filter subjects are more than the cap of {room}; nothing was changed. Add workers, give "
            "partitions wildcard subjects, raise max_subjects, or allow another consumer with max_consumers"
        )


@dataclass(frozen=True, slots=True)
class SubjectSet:
    """The deduplicated filters of a set of partitions."""

    subjects: frozenset[str]
    duplicates: int
    """Subjects that occur more than once, or that another one covers: a sign that partitions overlap."""


def subject_set(partitions: Iterable[Partition]) -> SubjectSet:
    """Return the subjects of all partitions; covered ones are dropped, since the server refuses overlapping filters."""
    listed = [subject for partition in partitions for subject in partition.subjects]
    unique = set(listed)
    wide = subjects.Index[str]()  # thousands of wildcards take too long to compare with each other
    for subject in unique:
        if not subjects.is_literal(subject):
            wide.add(subject, subject)
    covered = {s for s in unique if any(w != s and subjects.covers(w, s) for w in wide.overlapping(s))}
    kept = frozenset(unique - covered)
    return SubjectSet(kept, len(listed) - len(kept))


def compressed(wanted: frozenset[str], universe: Collection[str], cap: int) -> frozenset[str]:
    """Return at most `cap` filters, if wildcards can achieve that; otherwise as few as they can.

    A wildcard is used only where every subject of `universe` that it matches is wanted: a worker must not receive
    another's messages. Subjects that are not in the universe must not exist in the stream.
    """
    others = [subject for subject in universe if not subjects.covered(subject, wanted)]
    filters = wanted
    while len(filters) > cap and (best := _best_wildcard(filters, others)):
        filters = frozenset(f for f in filters if not subjects.covers(best, f)) | {best}
    return filters


def _best_wildcard(filters: frozenset[str], others: Sequence[str]) -> str | None:
    """Return the wildcard in one token that replaces most filters, and overlaps neither others nor the remaining
    filters."""
    replaced: Counter[str] = Counter()
    for filter_ in filters:
        tokens = filter_.split(".")
        for i, token in enumerate(tokens):
            if token not in (subjects.ONE, subjects.REST):
                replaced[".".join([*tokens[:i], subjects.ONE, *tokens[i + 1 :]])] += 1
    for candidate, count in sorted(replaced.items(), key=lambda item: (-item[1], item[0])):
        if count < 2:
            return None
        kept = [filter_ for filter_ in filters if not subjects.covers(candidate, filter_)]
        if not any(subjects.overlap(candidate, other) for other in (*others, *kept)):
            return candidate
    return None


def placed(wanted: frozenset[str], current: Shards, cap: int, most: int) -> Shards:
    """Distribute the subjects over at most `most` consumers with at most `cap` each. Raises `SubjectCapExceeded`.

    A subject stays on the consumer that has it: moving it would be a handoff from one cursor to another.
    """
    if len(wanted) > cap * most:
        raise SubjectCapExceeded(len(wanted), cap, most)
    kept = [shard & wanted for shard in current[:most]]
    kept += [frozenset()] * (most - len(kept))
    new = sorted(wanted.difference(*kept))
    result: list[frozenset[str]] = []
    for shard in kept:
        room = max(cap - len(shard), 0)
        result.append(shard | frozenset(new[:room]))
        new = new[room:]
    while result and not result[-1]:
        result.pop()
    return tuple(result)


def fitting(
    partitions: Collection[Partition], kept: Collection[str], fits: Callable[[list[Partition]], bool]
) -> list[Partition]:
    """Return as many of the partitions as fit, kept ones first, then by id. Pure."""
    ordered = sorted(partitions, key=lambda partition: (partition.id not in kept, partition.id))
    if fits(ordered):
        return ordered
    few, many = 0, len(ordered)  # this many fit, this many do not
    while many - few > 1:
        half = (few + many) // 2
        few, many = (half, many) if fits(ordered[:half]) else (few, half)
    return ordered[:few]


def plan(partitions: Iterable[Partition], current: Shards, cap: int, most: int, universe: Collection[str]) -> Shards:
    """Return the filters of each consumer of the worker. Wildcards only when a universe is given, and only if needed.

    Compression is not used with more than one consumer: it would have to know which subjects are on which.
    """
    wanted = subject_set(partitions).subjects
    if universe and len(wanted) > cap:
        wanted = compressed(wanted, universe, cap)
    return placed(wanted, current, cap, most)


def left_out(count: int) -> list[str]:
    """Describe partitions that are not served because of the subject cap."""
    if not count:
        return []
    return [
        f"{count} partitions are not served: their subjects do not fit. Add workers, give partitions wildcard "
        "subjects, raise max_subjects, or allow another consumer with max_consumers"
    ]
