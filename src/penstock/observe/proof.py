"""What can be counted again: a sink's micro-batch by its ledger, and a bridge by the marks of its copies.

Nothing here trusts what a writer reported. The ledger says which rows were announced, by their digests; the recount
reads the output stream and compares. A copy says which message of the origin it is; the recount reads both streams,
where both are on this server, and compares their bodies.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any

from penstock.errors import ConfigError, MessageNotFound, NotFound, StreamNotFound
from penstock.jetstream import kv
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StreamInfo
from penstock.jetstream.reader import read_messages
from penstock.jetstream.rows import Range
from penstock.settings import Settings
from penstock.sourcing.copies import Mark, mark_of
from penstock.spark.history import History, Intent, history_of, unpacked
from penstock.spark.stored import stored_row_digests

LEDGER = "penstock_ledger"
LEDGER_STREAM = kv.stream_of(LEDGER)
LEDGER_SUBJECTS = kv.write_prefix(LEDGER)
MAX_KEYS = 5_000
"""Keys of the ledger that are listed."""
MAX_ENTRIES = 20_000
"""Entries of a batch's logs that are read."""
MAX_COUNTED = 100_000
"""Messages that one recount reads of a stream."""
MAX_LOOKED = 500
"""Streams that are asked whether a bridge writes them."""
AT_ONCE = 32
PATIENCE = 10.0
NAMED = 5
"""Sequences that a problem names."""


# -- sinks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkSeries:
    """The writes of one streaming query, or one batch write, into one stream."""

    stream: str
    created: str
    """When the stream was made, as the ledger's keys have it."""
    name: str
    closed: int | None
    """The last micro-batch that was closed; None when none was."""
    rows: int | None
    """That it had; None when that is not known."""
    batches: tuple[int, ...]
    """Micro-batches whose logs are kept: the last one closed, and those under way."""

    @property
    def key(self) -> str:
        return f"{self.stream}.{self.created}.{self.name}"


@dataclass(frozen=True, slots=True)
class AnnouncedChunk:
    """A chunk of a task, as it was announced before it was written."""

    partition: int
    intent: Intent
    last: int | None
    """Sequence of its last message; 0: not noted; None: nobody knows whether it was written."""

    @property
    def first(self) -> int | None:
        return self.last - (self.intent.messages or self.intent.rows) + 1 if self.last else None


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """One micro-batch of a sink."""

    series: SinkSeries
    number: int
    chunks: tuple[AnnouncedChunk, ...]
    refused: int
    """Rows that the server had already, by their message ids."""

    @property
    def is_closed(self) -> bool:
        return self.series.closed is not None and self.series.closed >= self.number

    @property
    def rows(self) -> int:
        """Announced, and written as far as the ledger knows."""
        return sum(chunk.intent.rows for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Recount:
    """What a recount found."""

    expected: int
    found: int
    problems: tuple[str, ...] = ()
    """Where input and output differ."""
    notes: tuple[str, ...] = ()
    """What could not be compared, and why."""

    @property
    def agrees(self) -> bool:
        return not self.problems


async def sinks(js: JetStream) -> list[SinkSeries]:
    """Every series of the ledger, by stream and name. Those of version 1 of the ledger are passed over."""
    try:
        if await js.subject_count(LEDGER_STREAM, f"{LEDGER_SUBJECTS}>") > MAX_KEYS:
            raise ConfigError(f"the ledger has more than {MAX_KEYS:,} keys, too many to list them")
        keys = (await js.stream_info(LEDGER_STREAM, subjects_filter=f"{LEDGER_SUBJECTS}>")).state.subjects
    except StreamNotFound:
        return []
    found: dict[tuple[str, str, str], set[int]] = {}
    for key in keys:
        parts = key.removeprefix(LEDGER_SUBJECTS).split(".")
        if len(parts) in (3, 5) and parts[1].isdecimal():
            batches = found.setdefault((parts[0], parts[1], parts[2]), set())
            if len(parts) == 5 and parts[3].isdecimal() and parts[4].isdecimal():
                batches.add(int(parts[3]))
    made = [SinkSeries(*parts, None, None, tuple(sorted(some))) for parts, some in sorted(found.items())]
    return list(await asyncio.gather(*(_with_record(js, one) for one in made)))


async def _with_record(js: JetStream, series: SinkSeries) -> SinkSeries:
    try:
        record = json.loads((await js.get_message(LEDGER_STREAM, last_of=LEDGER_SUBJECTS + series.key)).data)
    except (NotFound, MessageNotFound):
        return series
    return replace(series, closed=int(record["closed"]), rows=record.get("rows"))


async def sink_batch(js: JetStream, series: SinkSeries, batch: int) -> SinkBatch:
    """What the logs of a batch say. Nothing, once the batch after it is closed: they are not kept any more."""
    logs: dict[int, list[Any]] = {}
    position, subject = 1, f"{LEDGER_SUBJECTS}{series.key}.{batch}.*"
    for _ in range(MAX_ENTRIES):
        try:
            entry = await js.get_message(LEDGER_STREAM, position, next_of=subject)
        except MessageNotFound:
            break
        position, partition = entry.sequence + 1, entry.subject.rpartition(".")[2]
        if partition.isdecimal():
            logs.setdefault(int(partition), []).append(json.loads(entry.data))
    histories = {partition: history_of(entries) for partition, entries in sorted(logs.items())}
    chunks = [chunk for partition, history in histories.items() for chunk in _chunks(partition, history)]
    refused = sum(len(one.row_digests) for history in histories.values() for one in history.refused)
    return SinkBatch(series, batch, tuple(chunks), refused)


def _chunks(partition: int, history: History) -> Iterator[AnnouncedChunk]:
    for written in history.written:
        yield AnnouncedChunk(partition, written.intent, written.last)
    if history.doubtful:
        yield AnnouncedChunk(partition, history.doubtful, None)


async def recount_sink(js: JetStream, settings: Settings, batch: SinkBatch) -> Recount:
    """Read every chunk back from the output stream, and compare its rows with what was announced."""
    info = await js.stream_info(batch.series.stream)
    return await asyncio.to_thread(_recounted, settings, info, batch)


def _recounted(settings: Settings, info: StreamInfo, batch: SinkBatch) -> Recount:
    problems: list[str] = []
    notes: list[str] = []
    expected = found = read = 0
    for chunk in batch.chunks:
        name = f"chunk {chunk.intent.number} of partition {chunk.partition}"
        expected += chunk.intent.rows
        read += chunk.intent.rows
        if chunk.first is None or chunk.last is None:
            notes.append(f"{name}: the ledger does not say where it lies")
        elif chunk.first < info.state.first_seq:
            notes.append(f"{name}: its messages have left the stream, by its limits or by being acknowledged")
        elif read > MAX_COUNTED:
            notes.append(f"{name}: not counted, since {MAX_COUNTED:,} messages were")
        else:
            wanted, there = Counter(unpacked(chunk.intent.row_digests)), _digests(settings, info, chunk)
            found += sum(there.values())
            problems += _compared(name, chunk, wanted, there)
    if batch.is_closed and batch.number == batch.series.closed and batch.series.rows is not None:
        total = batch.rows + batch.refused
        if batch.series.rows != total:
            problems.append(
                f"{batch.series.rows:,} rows came in when the batch was closed, and {total:,} were announced"
            )
    return Recount(expected, found, tuple(problems), tuple(notes))


def _digests(settings: Settings, info: StreamInfo, chunk: AnnouncedChunk) -> Counter[bytes]:
    assert chunk.first is not None
    assert chunk.last is not None
    rows = _read(settings, info, chunk.first, chunk.last)
    return Counter(chain.from_iterable(stored_row_digests(*row[1:]) for row in rows))


def _compared(name: str, chunk: AnnouncedChunk, wanted: Counter[bytes], there: Counter[bytes]) -> Iterator[str]:
    if not wanted:  # an entry of an earlier version
        if there.total() != chunk.intent.rows:
            yield f"{name}: {chunk.intent.rows:,} rows were announced, and {there.total():,} messages are there"
    elif missing := (wanted - there).total():
        yield f"{name}: {missing:,} of {wanted.total():,} rows that were announced are not there as they were announced"


def _read(
    settings: Settings, info: StreamInfo, first: int, last: int, subjects: Sequence[str] = ()
) -> Iterator[tuple[int, str, dict[str, list[str]], bytes]]:
    """Messages of a range, without a consumer where the stream allows that."""
    last = min(last, info.state.last_seq)
    if first > last:
        return
    direct = bool(info.config.get("allow_direct"))
    if not direct and info.config.get("retention", "limits") != "limits":
        raise ConfigError(
            f"stream {info.name!r} cannot be read without disturbing its consumers: set allow_direct on it"
        )
    wanted = Range(stream=info.name, first=first, last=last, subjects=tuple(subjects), direct=direct)
    for one in read_messages(settings, wanted, PATIENCE):
        yield one.sequence, one.subject, one.headers, one.data


# -- bridges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BridgeProof:
    """A stream that a bridge writes."""

    destination: str
    bridge: str
    origin: str
    """The stream that the copies come from."""
    copied_up_to: int
    """Sequence of the origin of the newest copy."""
    copies: int
    """Messages in the destination."""
    is_here: bool
    """Whether the origin is on this server too."""


async def bridges(js: JetStream) -> list[BridgeProof]:
    """The streams of this server whose newest message is a bridge's copy."""
    streams = await js.streams()
    names = {one.name for one in streams}
    asked = [one for one in streams if one.state.messages and one.config.get("allow_atomic")][:MAX_LOOKED]
    gate = asyncio.Semaphore(AT_ONCE)

    async def newest(info: StreamInfo) -> Mark | None:
        async with gate:
            try:
                return mark_of((await js.get_message(info.name, info.state.last_seq)).headers)
            except (NotFound, MessageNotFound):
                return None

    marks = await asyncio.gather(*map(newest, asked))
    return [
        await _bridge(js, info, mark, mark.stream in names) for info, mark in zip(asked, marks, strict=True) if mark
    ]


async def _bridge(js: JetStream, info: StreamInfo, mark: Mark, is_here: bool) -> BridgeProof:
    if is_here:  # a stream of that name need not be the one that is copied: its bridge has a consumer there
        try:
            is_here = (await js.consumer_info(mark.stream, mark.bridge)).config.get("ack_policy") == "flow_control"
        except NotFound:
            is_here = False
    return BridgeProof(info.name, mark.bridge, mark.stream, mark.sequence, info.state.messages, is_here)


@dataclass(frozen=True, slots=True)
class BridgeRecount:
    """What a recount of a bridge found."""

    first: int
    """Sequences of the origin that the copies which were read are of."""
    last: int
    digest_in: str
    """Of the bodies in the origin, in order; empty when the origin is not on this server."""
    digest_out: str
    count: Recount

    @property
    def agrees(self) -> bool:
        return self.count.agrees


async def recount_bridge(js: JetStream, settings: Settings, bridge: BridgeProof) -> BridgeRecount:
    """Count the newest copies, and what they are copies of, where that is on this server."""
    destination = await js.stream_info(bridge.destination)
    origin: StreamInfo | None = None
    filters: Sequence[str] = ()
    if bridge.is_here:
        origin = await js.stream_info(bridge.origin)
        filters = (await js.consumer_info(bridge.origin, bridge.bridge)).filters
    return await asyncio.to_thread(_bridge_recounted, settings, destination, origin, filters, bridge)


def _bridge_recounted(
    settings: Settings,
    destination: StreamInfo,
    origin: StreamInfo | None,
    filters: Sequence[str],
    bridge: BridgeProof,
) -> BridgeRecount:
    first = max(destination.state.first_seq, destination.state.last_seq - MAX_COUNTED + 1)
    copies: dict[int, bytes] = {}
    twice, swapped, strange, newest = [], [], [], 0
    for sequence, _, headers, data in _read(settings, destination, first, destination.state.last_seq):
        mark = mark_of(headers)
        if mark is None or (mark.bridge, mark.stream) != (bridge.bridge, bridge.origin):
            strange.append(sequence)
            continue
        if mark.sequence in copies:
            twice.append(mark.sequence)
        elif mark.sequence < newest:
            swapped.append(mark.sequence)
        newest = max(newest, mark.sequence)
        copies[mark.sequence] = _digest(data)
    problems = [*_named("copied more than once", twice), *_named("copied out of order", swapped)]
    problems += _named("messages of the destination are not copies of this bridge", strange)
    low, high = min(copies, default=0), max(copies, default=0)
    if origin is None:
        note = f"{bridge.origin} is not on this server: its side was not counted"
        missing = high - low + 1 - len(copies) if copies else 0
        gaps = f"{missing:,} sequences from {low:,} to {high:,} have no copy: deleted there, of other subjects, or lost"
        count = Recount(len(copies), len(copies), tuple(problems), (note, *([gaps] if missing else [])))
        return BridgeRecount(low, high, "", _together(copies), count)
    there = {
        sequence: _digest(data)
        for sequence, _, _, data in _read(settings, origin, max(low, origin.state.first_seq), high, filters)
    }
    problems += _named("have no copy", [one for one in there if one not in copies])
    problems += _named(
        "have a copy with another body", [one for one in there if copies.get(one, there[one]) != there[one]]
    )
    gone = len(copies.keys() - there.keys())
    notes = [f"{gone:,} messages that were copied are no longer in {origin.name}"] if gone else []
    same = {one: digest for one, digest in copies.items() if one in there}
    return BridgeRecount(
        low, high, _together(there), _together(same), Recount(len(there), len(same), tuple(problems), tuple(notes))
    )


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


def _together(digests: Mapping[int, bytes]) -> str:
    """One digest of many, in the order of their sequences."""
    made = blake2b(digest_size=12)
    for sequence in sorted(digests):
        made.update(digests[sequence])
    return made.hexdigest() if digests else ""


def _named(what: str, sequences: Sequence[int]) -> list[str]:
    if not sequences:
        return []
    some = ", ".join(f"{one:,}" for one in sequences[:NAMED])
    return [f"{len(sequences):,} {what}: {some}{', …' if len(sequences) > NAMED else ''}"]
