"""How far each partition of a worker is, in KV: what a consumer's ack floor says too little about.

While one message waits for its next try, or a partition is caught up with, the ack floor stands still, however much is
done above it. So a worker writes down from time to time how far each of its partitions is, all of them in one key. Who
goes on with a partition, after a crash or a restart, passes over what is done by that record.

A message that kills its worker leaves no other trace. So after a crash the first message of each partition that had got
nowhere is handled on trial: one at a time, and written down before. If the worker dies again, that was a try of this
message and of no other.

A record counts only under the fencing token that it was written under, and for the stream that it was written about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.errors import StreamNotFound
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import Json

FAMILY = "progress"
VERSION = 1
RECORD_EVERY = 0.5
"""Seconds between two records, while there is something to record."""
ALONE = "penstock-workers"
"""The bucket of workers that belong to no group. No group's own bucket can have that name."""

Tries = tuple[int, int]
"""A sequence, and how many of its tries have ended badly; (0, 0) where none has."""
NO_TRIES: Tries = (0, 0)
Trial = tuple[str, int]
"""A partition and a sequence: a message that is handled while no other is that may kill its worker."""


@dataclass(frozen=True, slots=True)
class Reached:
    """How far one partition is."""

    done: int
    """Everything of it up to this stream sequence is done."""
    tries: Tries = NO_TRIES
    """Of the message that is next."""
    token: int = 0
    """The fencing token that it was reached under."""
    suspect: bool = False
    """Whether its worker died without having done anything of it: the next message may be what kills workers."""

    def to_json(self) -> list[int]:
        return [self.token, self.done, *self.tries]

    @classmethod
    def parse(cls, raw: Any) -> Self:
        token, done, sequence, tries = (int(number) for number in raw)
        return cls(done, (sequence, tries), token)


@dataclass(frozen=True, slots=True)
class Record:
    """What one process of a worker wrote down last."""

    stream: str = ""
    """Which stream it is about: when that was made. Another one of the same name has other messages."""
    partitions: Mapping[str, Reached] = field(default_factory=dict)
    trial: Trial | None = None
    """What was being handled under suspicion."""
    ended: bool = False
    """Whether the process has ended in order."""

    def of(self, partition: str, token: int, stream: str) -> Reached | None:
        """How far a partition came under that token; None when the record does not say."""
        found = self.partitions.get(partition) if self.stream == stream else None
        return found if found and found.token == token else None

    def to_json(self) -> Json:
        partitions = {id_: reached.to_json() for id_, reached in self.partitions.items()}
        about = {"v": VERSION, "stream": self.stream, "partitions": partitions}
        return {**about, "trial": self.trial, "ended": self.ended}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        partitions = {id_: Reached.parse(one) for id_, one in raw["partitions"].items()}
        trial = (str(raw["trial"][0]), int(raw["trial"][1])) if raw.get("trial") else None
        return cls(str(raw["stream"]), partitions, trial, bool(raw.get("ended")))

    def tries(self, partition: str, before: Tries) -> Tries:
        """The tries of a partition's next message, `before` counted, with the one that its worker died of, if any."""
        if self.trial is None or self.trial[0] != partition:
            return before
        sequence = self.trial[1]
        return sequence, (before[1] if before[0] == sequence else 0) + 1


def progress_key(worker_id: str, incarnation: str) -> str:
    """The key of one process of a worker: a process that was replaced does not write over its successor's."""
    return f"{FAMILY}.{worker_id}.{incarnation}"


def records_in(entries: Mapping[str, Entry]) -> dict[str, Record]:
    """The records by key. One that cannot be read says nothing."""
    found = {}
    for key, entry in entries.items():
        if key.startswith(f"{FAMILY}."):
            try:
                found[key] = Record.parse(entry.value)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
    return found


class Progress:
    """The record of one process. Written over without a condition: nobody else has its key."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.key = key
        self.trial: Trial | None = None
        """What is on trial now."""
        self._bucket = bucket
        self._last = Record()
        self._there = False
        """Whether the bucket is known to be there."""

    async def load(self) -> Record:
        """What is there."""
        try:
            entry = await self._bucket.get(self.key)
        except StreamNotFound:
            return self._last
        self._last = records_in({self.key: entry}).get(self.key, self._last) if entry else self._last
        return self._last

    @property
    def is_due(self) -> bool:
        """Whether what is written down about a trial is no longer so."""
        return self._last.trial != self.trial

    async def save(self, stream: str, partitions: Mapping[str, Reached], ended: bool = False) -> None:
        """Write down how far partitions are, unless that is what is there."""
        record = Record(stream, partitions, self.trial, ended)
        if record == self._last or not stream:
            return
        if not self._there:
            await self._bucket.ensure()
        self._there = False
        await self._bucket.put(self.key, record.to_json())
        self._last, self._there = record, True


async def clear(bucket: Bucket, keys: Iterable[str]) -> None:
    """Remove records that nobody needs any more."""
    for key in keys:
        if entry := await bucket.get(key):
            await bucket.delete(key, entry.revision)
