"""Ownership and progress of partitions: one KV key per partition, and one record per process.

The key `claims.<partition>` is replaced only with its known revision, so of two writers one is refused.

    free      no owner; everything of the partition up to `handoff` is done
    taken     its owner catches up: `handoff` still says how far it is certainly done
    settled   its owner's consumer delivers everything not done: a crash now repeats what is above its ack floor
              (on a work queue the backlog may not be delivered yet, and `handoff` stays where it was)

The token is the revision with which the partition was taken. It only increases, also when the bucket is recreated.

While one message waits for its next attempt, or a partition catches up, the ack floor stands still, however much is
done above it. So a process regularly records the progress of all its partitions in one key
`progress.<worker>.<incarnation>`. The next owner, after a crash or a restart, skips what that record says is done. A
record counts only under the fencing token and for the stream that it was written for.

A message that kills its worker leaves no other trace. So after a crash the first message of each partition that made no
progress is handled on trial: one at a time, and recorded before. If the worker dies again, that counts as an attempt of
this message and of no other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from penstock.errors import StreamNotFound
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import BATCH, Bucket, Entry, Write
from penstock.jetstream.model import Json
from penstock.workers.group.identity import Lease

log = logging.getLogger(__name__)


PROGRESS = "progress"
VERSION = 1
RECORD_EVERY = 0.5
"""Minimum seconds between two writes of the progress record."""
CALM_RECORD_EVERY = 5.0
"""Seconds between two writes while the ack floor of the consumer says as much: somebody may delete the consumer."""
ALONE = "penstock-workers"
"""The bucket of workers that belong to no group. No group's own bucket can have that name."""

Tries = tuple[int, int]
"""A sequence and its number of failed attempts; (0, 0) when there are none."""
NO_TRIES: Tries = (0, 0)
Trial = tuple[str, int]
"""Partition and sequence of a message on trial: only one message that may kill its worker is handled at a time."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Progress of one partition."""

    done: int
    """Everything of the partition up to this stream sequence is done."""
    tries: Tries = NO_TRIES
    """Failed attempts of the next message."""
    token: int = 0
    """The fencing token under which this progress was made; without a group, `Partition.mark`."""
    suspect: bool = False
    """Whether its worker died before it finished any message of it: the next message may kill workers."""

    def to_json(self) -> list[int]:
        return [self.token, self.done, *self.tries]

    @classmethod
    def parse(cls, raw: Any) -> Self:
        token, done, sequence, tries = (int(number) for number in raw)
        return cls(done, (sequence, tries), token)


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """The last progress record of one process of a worker."""

    stream: str = ""
    """The creation time of its stream: a recreated stream of the same name has other messages."""
    partitions: Mapping[str, Reached] = field(default_factory=dict)
    trial: Trial | None = None
    """The message that was handled on trial."""
    ended: bool = False
    """Whether the process shut down cleanly."""

    def of(self, partition: str, token: int, stream: str) -> Reached | None:
        """Return the progress of a partition under that token; None when the record does not say."""
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
        """Return the failed attempts of the next message: `before`, plus the one its worker died of, if any."""
        if self.trial is None or self.trial[0] != partition:
            return before
        sequence = self.trial[1]
        return sequence, (before[1] if before[0] == sequence else 0) + 1


def progress_key(worker_id: str, incarnation: str) -> str:
    """Return the key of one process of a worker: a replaced process does not overwrite its successor's record."""
    return f"{PROGRESS}.{worker_id}.{incarnation}"


def records_in(entries: Mapping[str, Entry]) -> dict[str, ProgressRecord]:
    """Return the records by key. An unreadable record counts as empty."""
    found = {}
    for key, entry in entries.items():
        if key.startswith(f"{PROGRESS}."):
            try:
                found[key] = ProgressRecord.parse(entry.value)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
    return found


class ProgressRecorder:
    """Writes the record of one process. Overwrites without a revision check: no other process uses its key."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.key = key
        self.trial: Trial | None = None
        """The message on trial now."""
        self._bucket = bucket
        self._last = ProgressRecord()
        self._there = False
        """Whether the bucket is known to exist."""

    async def load(self) -> ProgressRecord:
        """Read the stored record."""
        try:
            entry = await self._bucket.get(self.key)
        except StreamNotFound:
            return self._last
        self._last = records_in({self.key: entry}).get(self.key, self._last) if entry else self._last
        return self._last

    @property
    def is_due(self) -> bool:
        """Whether the stored trial is out of date."""
        return self._last.trial != self.trial

    async def save(self, stream: str, partitions: Mapping[str, Reached], ended: bool = False) -> None:
        """Record the progress of partitions, unless it is unchanged."""
        record = ProgressRecord(stream, partitions, self.trial, ended)
        if record == self._last or not stream:
            return
        if not self._there:
            await self._bucket.ensure()
        self._there = False
        await self._bucket.put(self.key, record.to_json())
        self._last, self._there = record, True


async def clear(bucket: Bucket, keys: Iterable[str]) -> None:
    """Delete records that are no longer needed."""
    for key in keys:
        if entry := await bucket.get(key):
            await bucket.delete(key, entry.revision)


CLAIMS = "claims"
VERSION = 1
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_=.-]")
_ESCAPED = re.compile(rb"/([0-9A-F]{2})")


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim on one partition, as it was read."""

    partition: str
    handoff: int
    """Everything of the partition up to this stream sequence is done."""
    owner: str | None = None
    incarnation: str | None = None
    """The process of that worker id."""
    settled: bool = False
    holders: tuple[str, ...] = ()
    """Previous owners whose consumers keep covering it until the new owner has settled."""
    acquired: int | None = None
    """The revision with which the owner took it; None when that is this revision."""
    tries: Tries = NO_TRIES
    """Failed attempts of the first message after `handoff`."""
    suspect: bool = False
    """Its last owner died before it finished any message of it."""
    stream: str = ""
    """The creation time of its stream; empty when that was not recorded."""
    revision: int = 0
    mark: int = 0
    """`Partition.mark` of the partition that it is about; 0 when that was not recorded."""

    @property
    def token(self) -> int:
        """Fencing token of the owner."""
        return self.acquired or self.revision

    def is_of(self, owner: str, incarnation: str) -> bool:
        return self.owner == owner and self.incarnation == incarnation

    def __str__(self) -> str:
        state = "free" if self.owner is None else f"{self.owner}'s ({'settled' if self.settled else 'taken'})"
        held = f", held by {', '.join(self.holders)}" if self.holders else ""
        return f"claim {self.partition}: {state}, done up to {self.handoff}{held}, revision {self.revision}"

    # -- transitions ---------------------------------------------------------------------------------------------------

    def taken(self, owner: str, incarnation: str) -> Self:
        """Return the claim as taken by a worker."""
        return replace(self, owner=owner, incarnation=incarnation, settled=False, acquired=None)

    def settled_at(self, through: int) -> Self:
        """Return the claim as settled: its owner has caught up to there, and its consumer delivers the rest."""
        handoff = max(self.handoff, through)
        return replace(self, settled=True, handoff=handoff, holders=(), acquired=self.token)

    def freed(self, reached: Reached) -> Self:
        """Return the claim as free: its owner released it, or is dead."""
        done = max(self.handoff, reached.done)
        tries = reached.tries if reached.tries[0] else self.tries
        held = (*(name for name in self.holders if name != self.owner), self.owner)
        holders = tuple(name for name in held if name)
        free = replace(self, owner=None, incarnation=None, settled=False, acquired=None, suspect=reached.suspect)
        return replace(free, holders=holders, handoff=done, tries=tries)

    def about(self, stream: str, mark: int) -> Self:
        """Return the claim for the stream created then, and a partition with those subjects: of another stream with the
        same name, or of other subjects, nothing is done."""
        if self.stream in ("", stream) and self.mark in (0, mark):
            return replace(self, stream=stream, mark=mark)
        return replace(self, stream=stream, mark=mark, handoff=0, tries=NO_TRIES)

    # -- in the bucket -------------------------------------------------------------------------------------------------

    def to_json(self) -> Json:
        kept = [name for name in self.__slots__ if name not in ("partition", "revision")]
        return {"v": VERSION, **{name: getattr(self, name) for name in kept}}

    def write(self) -> Write:
        """Return the write that replaces the revision that was read."""
        return Write(claim_key(self.partition), self.to_json(), self.revision)

    @classmethod
    def parse(cls, partition: str, raw: Mapping[str, Any], revision: int) -> Self:
        fields: dict[str, Any] = {name: raw[name] for name in ("owner", "incarnation", "settled", "acquired")}
        sequence, tries = map(int, raw.get("tries", NO_TRIES))
        fields |= {name: raw[name] for name in ("suspect", "stream", "mark") if name in raw} | {
            "tries": (sequence, tries)
        }
        return cls(partition, int(raw["handoff"]), holders=tuple(raw["holders"]), revision=revision, **fields)


def claim_key(partition: str) -> str:
    """Return the key of a partition's claim; characters that KV keys cannot have become `/` and their bytes."""
    return f"{CLAIMS}.{_NOT_IN_KEYS.sub(lambda found: _escaped(found[0]), partition)}"


def _escaped(character: str) -> str:
    return "".join(f"/{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))


def _partition_of(key: str) -> str:
    escaped = key.removeprefix(f"{CLAIMS}.").encode()
    plain = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), escaped)
    return plain.decode("utf-8", "surrogateescape")


def claims_in(entries: Mapping[str, Entry]) -> dict[str, Claim]:
    """Return the claims by partition, from all keys of the family."""
    found = {}
    for key, entry in entries.items():
        if key.startswith(f"{CLAIMS}."):
            partition = _partition_of(key)
            try:
                found[partition] = Claim.parse(partition, entry.value, entry.revision)
            except (KeyError, TypeError, ValueError) as exc:
                log.warning("the claim of %s cannot be read (%r): it begins anew", partition, exc)
                found[partition] = Claim(partition, 0, revision=entry.revision)
    return found


async def store(bucket: Bucket, changed: Iterable[Claim]) -> list[Claim]:
    """Write claims in atomic batches; returns those that were written, with their new revisions.

    If one claim of a batch has changed meanwhile, the server refuses the whole batch: its claims are then written one
    by one.
    """
    waiting, written = iter(changed), list[Claim]()
    while chunk := list(islice(waiting, BATCH)):
        written += await _store_chunk(bucket, chunk)
    return written


async def _store_chunk(bucket: Bucket, chunk: Sequence[Claim]) -> list[Claim]:
    try:
        revisions = await bucket.commit([claim.write() for claim in chunk])
    except WrongRevision:
        if len(chunk) == 1:
            return []
        half = len(chunk) // 2
        return await _store_chunk(bucket, chunk[:half]) + await _store_chunk(bucket, chunk[half:])
    written = [replace(claim, revision=revision) for claim, revision in zip(chunk, revisions, strict=True)]
    for claim in written if log.isEnabledFor(logging.DEBUG) else ():
        log.debug("%s", claim)
    return written


class KVClaims:
    """One worker's claims on partitions, and the `Ownership` that is checked for every message."""

    def __init__(self, bucket: Bucket, worker_id: str, incarnation: str, lease: Lease) -> None:
        self._bucket = bucket
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._lease = lease
        self.mine: dict[str, Claim] = {}
        """The partitions that we own, as far as we know."""
        self.made = 0
        """Partitions claimed so far."""
        self.lost = 0
        """Partitions that turned out to be owned by another worker."""
        self._left: dict[str, int] = {}
        """Partitions we no longer own, with the revision up to which claims are stale."""

    def token(self, partition_id: str) -> int | None:
        """Return the fencing token while we own the partition and our lease is valid."""
        claim = self.mine.get(partition_id)
        return claim.token if claim and self._lease.valid else None

    def before(self, partition_id: str) -> Reached:
        """Return the progress of a partition when we took it, and what is known of its next message."""
        claim = self.mine.get(partition_id)
        return Reached(claim.handoff, claim.tries, suspect=claim.suspect) if claim else Reached(0)

    # -- changes ------------------------------------------------------------------------------------------------------

    async def take(self, free: Iterable[Claim]) -> list[Claim]:
        """Take those of these claims that have not changed meanwhile. When it fails, see `found_again`."""
        got = await store(self._bucket, (claim.taken(self._worker_id, self._incarnation) for claim in free))
        self.mine |= {claim.partition: claim for claim in got}
        self.made += len(got)
        return got

    async def settle(self, through: Mapping[str, int]) -> list[Claim]:
        """Mark partitions as caught up to these sequences. Those that another worker owns are dropped; see `lost`."""
        wanted = [self.mine[p].settled_at(sequence) for p, sequence in through.items() if p in self.mine]
        return await self._change(wanted)

    async def give(self, handoffs: Mapping[str, Reached]) -> list[Claim]:
        """Release partitions. No message of them may be handled any more: drain first. A claim that could not be
        written stays ours."""
        wanted = [self.mine[p].freed(done) for p, done in handoffs.items() if p in self.mine]
        freed = await store(self._bucket, wanted)
        for claim in freed:
            self.mine.pop(claim.partition, None)
            self._left[claim.partition] = claim.revision
        await self._look_at({claim.partition for claim in wanted} - {claim.partition for claim in freed})
        return freed

    async def _change(self, wanted: list[Claim]) -> list[Claim]:
        got = await store(self._bucket, wanted)
        self.mine |= {claim.partition: claim for claim in got}
        await self._look_at({claim.partition for claim in wanted} - {claim.partition for claim in got})
        return got

    async def _look_at(self, refused: Set[str]) -> None:
        """Re-read claims with an unknown revision: another worker's, or our own after a write whose answer was lost."""
        found = claims_in(await self._bucket.values([claim_key(p) for p in sorted(refused)]))
        ours = {p: claim for p, claim in found.items() if claim.is_of(self._worker_id, self._incarnation)}
        self.mine |= ours
        self.drop(refused - ours.keys())

    def found_again(self, found: Mapping[str, Claim]) -> set[str]:
        """Adopt claims that the bucket says are ours and that we did not know, since the answer to a write was lost.

        Returns them. Their progress is not known here: they must catch up from their handoff sequence. A claim from
        before we released the partition was read from a lagging replica.
        """
        ours = {p: claim for p, claim in found.items() if claim.is_of(self._worker_id, self._incarnation)}
        new = {p for p in ours.keys() - self.mine.keys() if ours[p].revision > self._left.get(p, 0)}
        self.mine |= {p: replace(ours[p], settled=False) for p in new}
        return new

    # -- after a lost connection ---------------------------------------------------------------------------------------

    def compare(self, found: Mapping[str, Claim]) -> set[str]:
        """Return which of our partitions another worker owns by now, or have no claim; the caller must `drop` or
        `renew` them.

        A claim that is older than the one we wrote was read from a lagging replica, and is ignored.
        """
        return {p for p, own in self.mine.items() if p not in found or self._is_anothers(found[p], own)}

    def _is_anothers(self, found: Claim, own: Claim) -> bool:
        return found.revision > own.revision and not found.is_of(self._worker_id, self._incarnation)

    def drop(self, partitions: Iterable[str]) -> None:
        """Drop partitions that other workers own."""
        for partition in partitions:
            if own := self.mine.pop(partition, None):
                self._left[partition] = own.revision
                self.lost += 1

    async def assert_again(self, done: Callable[[str], int], missing: Iterable[str]) -> list[Claim]:
        """Claim again what we own when its claims were lost with the bucket; `done` returns the progress of each."""
        wanted = []
        for partition in missing:
            old = self.mine[partition]
            handoff = max(old.handoff, done(partition) if old.settled else 0)
            wanted.append(replace(old, handoff=handoff, acquired=None, revision=0))
        return await self._change(wanted)
