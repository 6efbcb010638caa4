"""Where a group's partitions come from: a list, a KV key that may change, what the stream holds, or a number.

Asked by the leader only, again and again: a source whose answer changes makes a new assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

from penstock import subjects
from penstock.broker.jetstream import JetStream
from penstock.broker.model import Json
from penstock.errors import ConfigError, Unavailable
from penstock.retry import retrying
from penstock.workers.kv import Bucket
from penstock.workers.partitions import Partition, SubjectPattern

KEY = "partitions.list"
VERSION = 1
WRITTEN_WITHIN = 5.0
"""Seconds in which a list that nobody takes is written again."""
FNV_PRIME, FNV_START, FNV_MASK = 0x01000193, 0x811C9DC5, 0xFFFFFFFF


class NoPartitionList(Unavailable):
    """A group is to take its partitions from its bucket, and nobody has put a list there."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.bucket = bucket

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket!r} has no list of partitions under {KEY!r}; `penstock group migrate GROUP shadow` "
            "puts it there, or `InBucket.write` from Python, and the group goes on by itself"
        )


class PartitionSource(Protocol):
    """Says which partitions there are."""

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
    """A partition for every subject that the stream holds, or has held since this process first looked.

    On streams that delete what is done subjects come and go; their partitions stay where they are.
    """

    jetstream: JetStream
    stream: str
    pattern: SubjectPattern
    _seen: set[str] = field(default_factory=set)

    async def partitions(self) -> Sequence[Partition]:
        info = await self.jetstream.stream_info(self.stream, subjects_filter=self.pattern.filter)
        self._seen |= info.state.subjects.keys()
        if not self._seen:
            _refuse_strangers(self.stream, info.config, self.pattern.filter)
        return self.pattern.partitions(self._seen)


@dataclass(frozen=True, slots=True)
class Hashed:
    """`count` partitions `0`, `1`, … for any number of keys: `partition_of` says where a key belongs.

    `subject` has `{partition}` in it, such as `orders.{partition}.>`. The count is chosen once: another count sends
    keys elsewhere, and their order is lost over the change.
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
        """Every partition. Raises `ConfigError` when the subject is none."""
        return tuple(Partition(str(n), (self.subject.replace("{partition}", str(n)),)) for n in range(self.count))

    def partition_of(self, key: str) -> int:
        """The partition of a key, as the server's own `{{partition(count,…)}}` mapping computes it."""
        return fnv1a(key.encode()) % self.count

    def subject_of(self, key: str) -> str:
        """The subject under which a message of this key is published, with `>` and `*` still to be filled in."""
        return self.subject.replace("{partition}", str(self.partition_of(key)))


@dataclass(frozen=True, slots=True)
class InBucket:
    """The list under the key `partitions.list` of the group's bucket, which may be changed while the group runs."""

    bucket: Bucket

    async def partitions(self) -> Sequence[Partition]:
        entry = await self.bucket.get(KEY)
        if entry is None:  # not the same as an empty list: nobody should give anything up for it
            raise NoPartitionList(self.bucket.name)
        return parse_partitions(entry.value["partitions"])

    async def write(self, partitions: Iterable[Partition]) -> None:
        """Replace the list. Retries for a moment: the servers of a cluster hear of a new bucket with a delay."""
        listed = tuple(partitions)
        _refuse_twins(listed)
        value = {"v": VERSION, "partitions": [partition_json(p) for p in listed]}
        await retrying(lambda: self.bucket.put(KEY, value), WRITTEN_WITHIN)


@dataclass(frozen=True, slots=True)
class Described:
    """The partitions of another source, with weights and labels by their ids; `*` in an id stands for anything.

    Of several weights that are meant for a partition the last one counts. Labels add up.
    """

    source: PartitionSource
    weights: tuple[tuple[str, int], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    async def partitions(self) -> Sequence[Partition]:
        return [self.described(partition) for partition in await self.source.partitions()]

    def described(self, partition: Partition) -> Partition:
        weights = [weight for ids, weight in self.weights if fnmatchcase(partition.id, ids)]
        labels = {label for ids, label in self.labels if fnmatchcase(partition.id, ids)}
        if not weights and not labels:
            return partition
        weight = weights[-1] if weights else partition.weight
        return replace(partition, weight=weight, labels=partition.labels | labels)


def _refuse_strangers(stream: str, config: Mapping[str, Any], filter_: str) -> None:
    """Raise when the stream can never hold a message that matches."""
    if any(config.get(key) for key in ("mirror", "sources", "subject_transform")):
        return  # what it holds may have other subjects than what is published to it
    taken = config.get("subjects") or [stream]
    if not any(subjects.overlap(filter_, subject) for subject in taken):
        raise ConfigError(f"stream {stream!r} takes {', '.join(taken)}: no message in it will ever match {filter_!r}")


def _refuse_twins(partitions: Sequence[Partition]) -> None:
    ids = [partition.id for partition in partitions]
    if len(set(ids)) < len(ids):
        raise ConfigError("two partitions have the same id; give each its own")


def fnv1a(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
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
