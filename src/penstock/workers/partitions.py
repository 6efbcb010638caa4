"""Partitions, the pattern that finds a partition in a subject, and where a group's partitions come from.

A source is a list, a KV key that may change, the subjects in the stream, or a number. Only the leader queries it,
repeatedly: when its result changes, a new assignment is published.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Protocol

from penstock import subjects
from penstock.errors import ConfigError, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import Json
from penstock.retry import retrying

log = logging.getLogger(__name__)


_NAMED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a stream that one worker at a time handles, in order."""

    id: str
    subjects: tuple[str, ...]
    """Its filter subjects. No other partition's may overlap them."""
    weight: int = 1
    """Relative amount of work."""
    labels: frozenset[str] = frozenset()
    """If not empty, only workers that have one of these labels may own it."""

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

    @property
    def mark(self) -> int:
        """Distinguishes its subjects from others."""
        return fnv1a(" ".join(sorted(self.subjects)).encode("utf-8", "surrogateescape"))

    def overlaps(self, other: Partition) -> bool:
        """Whether a message may be of both."""
        return any(subjects.overlap(one, another) for one in self.subjects for another in other.subjects)


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
        """Names of its tokens, in order."""
        return tuple(_NAMED.findall(self.text))

    @cached_property
    def filter(self) -> str:
        """The filter that matches every subject of the pattern."""
        return _NAMED.sub(subjects.ONE, self.text)

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        return tuple(i for i, token in enumerate(self.text.split(".")) if _NAMED.fullmatch(token))

    def partition_id(self, subject: str) -> str | None:
        """Return the partition id of a message's subject; None when the subject does not match the pattern."""
        if not subjects.matches(self.filter, subject):
            return None
        tokens = subject.split(".")
        return ".".join(tokens[i] for i in self._positions)

    def subject(self, partition_id: str) -> str:
        """Return the filter subject of a partition."""
        values = partition_id.split(".")
        if len(values) != len(self._positions):
            raise ConfigError(f"{partition_id!r} has {len(values)} tokens; {self.text!r} names {len(self.names)}")
        tokens = self.text.split(".")
        for position, value in zip(self._positions, values, strict=True):
            tokens[position] = value
        return ".".join(tokens)

    def partition(self, partition_id: str, weight: int = 1, labels: Iterable[str] = ()) -> Partition:
        """Return the partition with that id."""
        return Partition(partition_id, (self.subject(partition_id),), weight, frozenset(labels))

    def partitions(self, seen: Iterable[str]) -> list[Partition]:
        """Return the partitions of the subjects seen, ordered by id; subjects that do not match are left out, and so
        are those that cannot be a filter: see `refused`."""
        ids = {self.partition_id(subject) for subject in seen if not refused(subject)} - {None}
        return [self.partition(found_id) for found_id in sorted(i for i in ids if i)]


def refused(subject: str) -> str | None:
    """Return why a message's subject cannot be a partition; None when it can.

    Servers store what publishers send: control characters, and wildcards, which as a filter would match other
    partitions.
    """
    if not subjects.is_literal(subject):
        return "it has a wildcard in it"
    return subjects.problem(subject)


LIST_KEY = "partitions.list"
VERSION = 1
WRITTEN_WITHIN = 5.0
"""Seconds that writing the list is retried while no server accepts it."""
TOLD = 3
"""Maximum number of unusable subjects named in one log line."""
MAX_PARTITIONS = 10_000
MAX_BYTES, PARTITION_BYTES = 900_000, 40
"""All partitions of a group, and the JSON around one: a worker may get all, and its share is one value in KV, of 1 MiB
at most."""
FNV_PRIME, FNV_START, FNV_MASK = 0x01000193, 0x811C9DC5, 0xFFFFFFFF


class NoPartitionList(Unavailable):
    """The group takes its partitions from its bucket, and no list was written there."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.bucket = bucket

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket!r} has no list of partitions under {LIST_KEY!r}; `penstock group migrate GROUP "
            "shadow` puts it there, or `InBucket.write` from Python, and the group goes on by itself"
        )


class PartitionSource(Protocol):
    """Returns the current partitions."""

    async def partitions(self) -> Sequence[Partition]: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A list that never changes."""

    listed: tuple[Partition, ...]

    def __post_init__(self) -> None:
        _refuse_twins(self.listed)

    async def partitions(self) -> Sequence[Partition]:
        return self.listed


@dataclass(slots=True)
class SeenInStream:
    """One partition for every subject that the stream holds, or has held since this process first read it.

    On streams that delete finished messages subjects come and go; their partitions stay.
    """

    jetstream: JetStream
    stream: str
    pattern: SubjectPattern
    _seen: set[str] = field(default_factory=set)

    @property
    def wildcard(self) -> str:
        """Filter that matches messages of partitions not seen yet."""
        return self.pattern.filter

    async def partitions(self) -> Sequence[Partition]:
        info = await self.jetstream.stream_info(self.stream, subjects_filter=self.pattern.filter)
        self._tell_refused(info.state.subjects.keys() - self._seen)
        self._seen |= info.state.subjects.keys()
        if not self._seen:
            _refuse_strangers(self.stream, info.config, self.pattern.filter)
        return self.pattern.partitions(self._seen)

    def _tell_refused(self, new: Iterable[str]) -> None:
        """Log which messages will not be handled. A publisher may invent any number of such subjects."""
        why = {subject: reason for subject in new if (reason := refused(subject))}
        for subject, reason in sorted(why.items())[:TOLD]:
            rest = f" (and {len(why) - TOLD} more)" if len(why) > TOLD else ""
            log.warning("messages on %r of %r are of no partition: %s%s", subject, self.stream, reason, rest)


@dataclass(frozen=True, slots=True)
class Hashed:
    """`count` partitions `0`, `1`, … for any number of keys: `partition_of` maps a key to its partition.

    `subject` contains `{partition}`, such as `orders.{partition}.>`. The count is chosen once: another count maps keys
    to other partitions, and their order is lost over the change.
    """

    count: int
    subject: str

    def __post_init__(self) -> None:
        rest = self.subject.replace("{partition}", "", 1)
        if self.count < 1 or len(rest) == len(self.subject) or "{" in rest:
            raise ConfigError(f"hashing needs a count and a subject with {{partition}} in it, got {self}")

    async def partitions(self) -> Sequence[Partition]:
        return self.all

    @property
    def all(self) -> tuple[Partition, ...]:
        """Every partition. Raises `ConfigError` when the subject is invalid."""
        return tuple(Partition(str(n), (self.subject.replace("{partition}", str(n)),)) for n in range(self.count))

    def partition_of(self, key: str) -> int:
        """Return the partition of a key, as the server's own `{{partition(count,…)}}` mapping computes it."""
        return fnv1a(key.encode()) % self.count

    def subject_of(self, key: str) -> str:
        """Return the subject to publish a message of this key to, with `>` and `*` still to be filled in."""
        return self.subject.replace("{partition}", str(self.partition_of(key)))


@dataclass(frozen=True, slots=True)
class InBucket:
    """The list in the key `partitions.list` of the group's bucket; it may change while the group runs."""

    bucket: Bucket

    async def partitions(self) -> Sequence[Partition]:
        entry = await self.bucket.get(LIST_KEY)
        if entry is None:  # not the same as an empty list: no worker may release anything for it
            raise NoPartitionList(self.bucket.name)
        try:
            listed = parse_partitions(entry.value["partitions"])
        except (KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{LIST_KEY!r} in bucket {self.bucket.name!r} is no list of partitions: {exc!r}") from exc
        _refuse_twins(listed)
        return listed

    async def write(self, partitions: Iterable[Partition]) -> None:
        """Replace the list. Retries for a short time: the servers of a cluster learn of a new bucket with a delay."""
        listed = tuple(partitions)
        _refuse_twins(listed)
        value = {"v": VERSION, "partitions": [partition_json(p) for p in listed]}
        await retrying(lambda: self.bucket.put(LIST_KEY, value), WRITTEN_WITHIN)


@dataclass(frozen=True, slots=True)
class Described:
    """Adds weights and labels, by partition id, to the partitions of another source; `*` in an id matches anything.

    Of several matching weights the last one counts. Labels add up.
    """

    source: PartitionSource
    weights: tuple[tuple[str, int], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    async def partitions(self) -> Sequence[Partition]:
        return [self.described(partition) for partition in await self.source.partitions()]

    @property
    def wildcard(self) -> str | None:
        return wildcard_of(self.source)

    def described(self, partition: Partition) -> Partition:
        weights = [weight for ids, weight in self.weights if fnmatchcase(partition.id, ids)]
        labels = {label for ids, label in self.labels if fnmatchcase(partition.id, ids)}
        if not weights and not labels:
            return partition
        weight = weights[-1] if weights else partition.weight
        return replace(partition, weight=weight, labels=partition.labels | labels)


def wildcard_of(source: PartitionSource) -> str | None:
    """Return the filter for partitions that a source discovers in the stream; None for a source that does not read the
    stream."""
    found: str | None = getattr(source, "wildcard", None)
    return found


def usable(partitions: Iterable[Partition], known: Mapping[str, Partition]) -> tuple[list[Partition], list[str]]:
    """Return the partitions that can be assigned beside the assigned ones, and the problems of the others. Pure.

    A claim records how far a partition is done. With other subjects that would cover messages that no worker has seen;
    and a message of two partitions would be handled twice.
    """
    chosen, wrong, taken, beyond, size = list[Partition](), list[str](), subjects.Index[str](), 0, 0
    for partition in sorted(partitions, key=lambda one: one.id not in known):
        before = known.get(partition.id)
        if before and set(before.subjects) != set(partition.subjects):
            wrong.append(
                f"partition {partition.id!r} has other subjects than before ({', '.join(partition.subjects)}), and "
                f"keeps {', '.join(before.subjects)}: give a partition with other subjects another id"
            )
            partition = replace(partition, subjects=before.subjects)
        if other := next((found for s in partition.subjects for found in taken.overlapping(s)), None):
            wrong.append(
                f"partition {partition.id!r} is left out: its subjects overlap those of {other!r}, and a message that "
                "is of both would be handled twice"
            )
            continue
        size += PARTITION_BYTES + len(partition.id) + sum(map(len, (*partition.subjects, *partition.labels)))
        if len(chosen) == MAX_PARTITIONS or size > MAX_BYTES:
            beyond += 1
            continue
        chosen.append(partition)
        for subject in partition.subjects:
            taken.add(subject, partition.id)
    if beyond:
        wrong.append(
            f"{beyond} partitions are left out: a group has {MAX_PARTITIONS} at most, and {MAX_BYTES // 1000} kB of "
            "ids and subjects. Hash the keys to a fixed number of partitions (--hashed), or use several groups with a "
            "pattern each"
        )
    return chosen, wrong


def _refuse_strangers(stream: str, config: Mapping[str, Any], filter_: str) -> None:
    """Raise when the stream can never hold a message that matches."""
    if any(config.get(key) for key in ("mirror", "sources", "subject_transform")):
        return  # its stored messages may have other subjects than its configured ones
    taken = config.get("subjects") or [stream]
    if not any(subjects.overlap(filter_, subject) for subject in taken):
        raise ConfigError(f"stream {stream!r} takes {', '.join(taken)}: no message in it will ever match {filter_!r}")


def _refuse_twins(partitions: Sequence[Partition]) -> None:
    ids = [partition.id for partition in partitions]
    if len(set(ids)) < len(ids):
        raise ConfigError("two partitions have the same id; give each its own")


def fnv1a(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash."""
    value = FNV_START
    for byte in data:
        value = (value ^ byte) * FNV_PRIME & FNV_MASK
    return value


def partition_json(partition: Partition) -> Json:
    made: Json = {"id": partition.id, "subjects": list(partition.subjects)}
    if partition.weight != 1:
        made["weight"] = partition.weight
    if partition.labels:
        made["labels"] = sorted(partition.labels)
    return made


def parse_partitions(raw: Iterable[Mapping[str, Any]]) -> tuple[Partition, ...]:
    return tuple(
        Partition(one["id"], tuple(one["subjects"]), one.get("weight", 1), frozenset(one.get("labels", ())))
        for one in raw
    )
