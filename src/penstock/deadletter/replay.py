"""Replays dead letters: every letter's message is stored again, once, and only then is the letter deleted.

What happens, in order, to a chunk of letters:
    1. the audit says what is about to be published, and where the streams end now
    2. the messages are published, each with an id of its own that is the same whenever this letter is replayed
    3. the audit says of each letter where its message lies
    4. the letters are removed
    5. the audit says that the chunk is done
A crash after 1 or 2 leaves letters whose messages are, or are not, in their streams; the next run looks behind the ends
of step 1 and finds out, however long ago that was. Inside the stream's duplicate window the message id alone would do.
A crash after 3 leaves letters that the audit knows as replayed: they are removed without being published. On WorkQueue
and Interest streams a message that was processed meanwhile cannot be found any more: there, after a crash and outside
the window, an event can come twice, as its consumer must expect.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Final

from penstock.deadletter import addresses, audit, headers, inventory, steps, streams
from penstock.deadletter.addresses import Address, Addresses
from penstock.deadletter.audit import AuditRecord, Deed, FiledPlace, ReplayChunk
from penstock.deadletter.editing import Edit, NotEditable, edited
from penstock.deadletter.letters import EPOCH, FiledLetter
from penstock.deadletter.selection import Selection
from penstock.deadletter.tally import Tally
from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StreamInfo
from penstock.publish.plain import PlainPublisher, PubAck
from penstock.publish.reserved import LetterSubject
from penstock.settings import Settings
from penstock.subjects import is_dead_letter, is_literal, problem
from penstock.wire import aio
from penstock.wire.frames import MAX_SUBJECT_BYTES

CHUNK: Final = 256
AT_ONCE: Final = 64
"""Letters that are removed at the same time."""
MAX_REPLAYS: Final = 3
"""An event that failed again after this many replays is not replayed again."""
CLOCKS_APART: Final = timedelta(hours=1)
"""How far the clocks of two servers of a cluster may be apart."""
EXPECT_STREAM: Final = "Nats-Expected-Stream"

Place = tuple[str, int]
"""Stream and sequence of a stored message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How letters are replayed."""

    only_failed: bool = False
    """Deliver only to the consumer that gave up."""
    rate: float | None = None
    """Messages a second, at most."""
    max_replays: int = MAX_REPLAYS
    edit: Edit | None = None
    limit: int | None = None
    to: str | None = None
    """Subject for letters whose original subject is unknown."""


OnProgress = Callable[[Tally], None]


def obstacle(filed: FiledLetter, options: ReplayOptions) -> str | None:
    """Why this letter cannot be replayed; None when it can."""
    letter = filed.letter
    if letter.body_gone:
        return "its body is gone: the message had left its stream before it was captured"
    if not letter.subject or problem(letter.subject) or not is_literal(letter.subject):
        return "its original subject is not known: name one with --to"
    if len(letter.subject.encode()) > MAX_SUBJECT_BYTES:
        return f"its original subject is longer than what Penstock publishes to ({MAX_SUBJECT_BYTES} bytes)"
    if is_dead_letter(letter.subject):
        return "it was a dead letter itself: nothing is published among those"
    if letter.replays >= options.max_replays:
        return f"replayed {letter.replays} times already (--max-replays {options.max_replays})"
    if options.only_failed and not letter.consumer:
        return "no consumer gave up on it that a replay could be meant for"
    return None


def message_headers(filed: FiledLetter, options: ReplayOptions) -> dict[str, list[str] | str]:
    """The headers of a replayed message: its own, without orders to the server, and where it comes from."""
    letter = filed.letter
    own = {name: list(values) for name, values in letter.headers.items() if not name.lower().startswith("nats-")}
    first = letter.first_failure or letter.last_failure
    added = {
        headers.LETTER: filed.message_id,
        headers.REPLAYS: str(letter.replays + 1),
        headers.FIRST_FAILURE: first.isoformat() if first else None,
        headers.EVENT_ID: letter.event_id,
        headers.ONLY: f"{letter.stream}/{letter.worker or letter.consumer}" if options.only_failed else None,
        EXPECT_STREAM: letter.stream or None,
    }
    return {**own, **{name: value for name, value in added.items() if value}}


async def replay(
    settings: Settings,
    wanted: Selection,
    options: ReplayOptions,
    *,
    actor: str,
    reason: str = "",
    on_progress: OnProgress = lambda _: None,
) -> Tally:
    """Replay the existing letters that match. Unfinished work of an earlier run is finished first."""
    deed = Deed(run=secrets.token_hex(6), actor=actor, reason=reason)
    async with opened(settings) as room:
        await room.finish_interrupted()
        await room.load_settled()
        await room.load_addresses(options.to)
        return await room.replay_all(room.chosen(room.letters(), wanted), deed, options, on_progress)


async def discard(
    settings: Settings,
    wanted: Selection,
    *,
    actor: str,
    reason: str,
    seen: Collection[FiledLetter] | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Tally:
    """Delete letters permanently: first the audit records it (crash after: the next run deletes them), then they are
    deleted.

    With `seen`, only those of them: a letter that arrived while the user was asked was not confirmed.
    """
    if not reason.strip():
        raise ConfigError("say why these dead letters may go: the audit keeps it")
    deed = Deed(run=secrets.token_hex(6), actor=actor, reason=reason)
    async with opened(settings) as room:
        await room.finish_interrupted()
        await room.load_settled()
        await room.load_addresses()
        letters = room.chosen(room.letters(), wanted)
        if seen is not None:
            agreed = {audit.place(filed) for filed in seen}
            letters = (filed for filed in letters if audit.place(filed) in agreed)
        while chunk := await asyncio.to_thread(_next_chunk, letters, CHUNK):
            await room.discard(chunk, deed)
            await room.clear()
            on_progress(room.tally)
        await room.clear()
        return room.tally


def _next_chunk(letters: Iterator[FiledLetter], size: int) -> list[FiledLetter]:
    return list(islice(letters, size))


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Room]:
    """The connections of one run."""
    async with (
        await aio.connect(settings, name="penstock dlq") as connection,
        PlainPublisher(settings) as publisher,
    ):
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        yield Room(settings, jetstream, publisher)


class Room:
    """The connections and the state of one run."""

    def __init__(self, settings: Settings, jetstream: JetStream, publisher: PlainPublisher) -> None:
        self._settings = settings
        self._jetstream = jetstream
        self._publisher = publisher
        self._letters: list[StreamInfo] = []
        self._addresses: Addresses | None = None
        self._otherwise: Address | None = None
        self._leftovers: list[FiledLetter] = []
        self.settled: set[FiledPlace] = set()
        """Existing letters that the audit records as replayed or discarded, as far as it was read."""
        self._free_at = time.monotonic()
        self.tally = Tally()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def finish_interrupted(self, run: str = "*") -> None:
        """Find what earlier runs, or earlier attempts of one `run`, had published before they were interrupted.

        Letters that turn out to be replayed are removed as `chosen` comes across them.
        """
        info = await audit.audit_stream(self._jetstream)
        self._letters = await inventory.letter_streams(self._jetstream)
        open_ = await asyncio.to_thread(audit.open_chunks, self._records(info, streams.run_subject(run)))
        if open_:
            by_id = await asyncio.to_thread(self._named, {id_ for chunk in open_ for id_ in chunk.letters})
            places = {audit.place(filed) for filed in by_id.values()}
            await asyncio.to_thread(self._load, info, places.__contains__)
            there = await self._published(open_)
            for chunk in open_:
                await self._finish(chunk, by_id, there)

    async def load_settled(self) -> None:
        """Read from the audit which letters were replayed or discarded, as far as they may still be there."""
        states = {one.name: one.state for one in self._letters if one.state.messages}
        if not states:
            return
        info = await audit.audit_stream(self._jetstream)
        # The record of a letter is younger than the letter, by the clocks of two servers.
        oldest = min(state.first_time or EPOCH for state in states.values()) - CLOCKS_APART
        first = await audit.first_since(self._jetstream, info, oldest)

        def may_be_there(place: FiledPlace) -> bool:
            return place[0] in states and place[1] >= states[place[0]].first_seq

        await asyncio.to_thread(self._load, info, may_be_there, first)

    def _load(self, info: StreamInfo, wanted: Callable[[FiledPlace], bool], first: int = 0) -> None:
        told = audit.settled(self._records(info, streams.settled_subject(">"), first))
        self.settled.update(place for place in told if wanted(place))

    def _named(self, message_ids: set[str]) -> dict[str, FiledLetter]:
        everything = inventory.letters(self._settings, self._letters)
        return {filed.message_id: filed for filed in everything if filed.message_id in message_ids}

    def _records(self, info: StreamInfo, subject: str, first: int = 0) -> Iterator[Json]:
        return (raw for _, raw in audit.records(self._settings, info, subject, first))

    async def _finish(self, chunk: ReplayChunk, letters: Mapping[str, FiledLetter], there: Mapping[str, Place]) -> None:
        found = [(letters[id_], there[id_]) for id_ in chunk.letters if id_ in letters and id_ in there]
        new = [(filed, at) for filed, at in found if audit.place(filed) not in self.settled]
        await self._note([_replayed(filed, at, chunk) for filed, at in new])
        self.settled |= {audit.place(filed) for filed, _ in new}
        await self._say(chunk.subject, chunk.ended("found by a later run"))

    async def _published(self, chunks: Sequence[ReplayChunk]) -> dict[str, Place]:
        """Which messages of interrupted chunks are in their streams, and where."""
        expected = {id_ for chunk in chunks for id_ in chunk.letters}
        there: dict[str, Place] = {}
        for stream in sorted({stream for chunk in chunks for stream in chunk.floors}):
            floor = min(chunk.floors[stream] for chunk in chunks if stream in chunk.floors)
            with suppress(NotFound):
                info = await self._jetstream.stream_info(stream)
                there |= await asyncio.to_thread(self._behind, info, floor, expected)
        return there

    def _behind(self, info: StreamInfo, floor: int, expected: Collection[str]) -> dict[str, Place]:
        """The replays among the messages behind `floor`, of which there may be very many."""
        messages = inventory.messages(self._settings, info, floor + 1, info.state.last_seq)
        letters = ((next(iter(one.headers.get(headers.LETTER, ())), ""), one.sequence) for one in messages)
        return {id_: (info.name, sequence) for id_, sequence in letters if id_ in expected}

    async def load_addresses(self, to: str | None = None) -> None:
        """Load the origins of letters without such headers from the consumers; `to` is for unknown ones."""
        self._addresses = await addresses.declared(self._jetstream)
        self._otherwise = await addresses.named(self._jetstream, to) if to else None

    def letters(self) -> Iterator[FiledLetter]:
        """Yield every letter. Blocking."""
        return map(self._addressed, inventory.letters(self._settings, self._letters))

    def _addressed(self, filed: FiledLetter) -> FiledLetter:
        return addresses.addressed(filed, self._addresses or {}, self._otherwise)

    def chosen(self, letters: Iterable[FiledLetter], wanted: Selection) -> Iterator[FiledLetter]:
        """Yield the letters that match. Those that the audit records as settled are set aside, only to be deleted."""
        for filed in letters:
            if audit.place(filed) in self.settled:
                self._leftovers.append(filed)
            elif wanted.matches(filed):
                yield filed

    async def clear(self) -> None:
        """Delete the letters that were set aside."""
        leftovers, self._leftovers = self._leftovers, []
        await self._remove(leftovers)
        self.tally.found_done += len(leftovers)

    # -- actions -----------------------------------------------------------------------------------------------------

    async def replay_all(
        self, letters: Iterator[FiledLetter], deed: Deed, options: ReplayOptions, on_progress: OnProgress
    ) -> Tally:
        """Replay letters in chunks, in their order."""
        wanted = islice(letters, options.limit) if options.limit else letters
        size = CHUNK if not options.rate else max(1, min(CHUNK, int(options.rate)))
        for number in itertools.count():
            chunk = await asyncio.to_thread(_next_chunk, wanted, size)
            await self.replay(chunk, deed, number, options)
            await self.clear()
            on_progress(self.tally)
            if not chunk:
                break
        return self.tally

    async def replay(self, letters: Sequence[FiledLetter], deed: Deed, number: int, options: ReplayOptions) -> None:
        """Replay a chunk of letters, step by step."""
        if self._addresses is None and any(map(addresses.is_foreign, letters)):
            await self.load_addresses(options.to)
        ready = self._ready(list(map(self._addressed, letters)), options)
        if not ready:
            return
        chunk = await self._chunk(ready, deed, number, options)
        await self._say(chunk.subject, chunk.begun())
        steps.reached(steps.REPLAY_BEGUN)
        stored = await self._publish(ready, options)
        steps.reached(steps.REPLAY_PUBLISHED)
        await self._note([_replayed(filed, at, chunk) for filed, at in stored])
        steps.reached(steps.REPLAY_NOTED)
        await self._remove([filed for filed, _ in stored])
        steps.reached(steps.LETTERS_REMOVED)
        await self._say(chunk.subject, chunk.ended("done"))
        self.tally.done += len(stored)

    def _ready(self, letters: Sequence[FiledLetter], options: ReplayOptions) -> list[tuple[FiledLetter, bytes]]:
        """Letters that can be replayed, with the bodies to publish; the others are counted."""
        ready = []
        for filed in letters:
            if why := obstacle(filed, options):
                self.tally.skipped[why] += 1
                continue
            try:
                ready.append((filed, edited(filed.letter, options.edit)))
            except NotEditable as exc:
                self.tally.skipped[str(exc)] += 1
        return ready

    async def _chunk(
        self, ready: Sequence[tuple[FiledLetter, bytes]], deed: Deed, number: int, options: ReplayOptions
    ) -> ReplayChunk:
        floors = {}
        for stream in sorted({filed.letter.stream for filed, _ in ready} - {""}):
            with suppress(NotFound):
                floors[stream] = (await self._jetstream.stream_info(stream)).state.last_seq
        return ReplayChunk(
            deed=deed,
            number=number,
            letters=tuple(filed.message_id for filed, _ in ready),
            floors=floors,
            edited=options.edit is not None,
            only_failed=options.only_failed,
        )

    async def _publish(
        self, ready: Sequence[tuple[FiledLetter, bytes]], options: ReplayOptions
    ) -> list[tuple[FiledLetter, Place]]:
        """Publish in the order of the letters; returns those that are stored, and where."""
        outcomes: list[PubAck | PenstockError] = []
        for filed, body in ready:
            await self._pace(options.rate)
            made = message_headers(filed, options)
            outcomes += await self._publisher.add(filed.letter.subject, body, made, filed.message_id)
            steps.reached(steps.MESSAGE_SENT)
        outcomes += await self._publisher.finish()
        stored = []
        for (filed, _), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, PubAck):
                stored.append((filed, (outcome.stream, outcome.sequence)))
            else:
                self.tally.refuse(filed.id, str(outcome))
        return stored

    async def discard(self, letters: Sequence[FiledLetter], deed: Deed) -> None:
        await self._note([AuditRecord(action=audit.DISCARDED, deed=deed, letter=filed) for filed in letters])
        steps.reached(steps.REPLAY_NOTED)
        await self._remove(letters)
        self.tally.done += len(letters)

    async def _note(self, records: Sequence[AuditRecord]) -> None:
        """Write what was done, and return when all of it is stored."""
        outcomes: list[PubAck | PenstockError] = []
        for record in records:
            id_ = f"{record.action}.{record.letter.message_id}"
            outcomes += await self._publisher.add(record.subject, record.encode(), None, id_)
        outcomes += await self._publisher.finish()
        for outcome in outcomes:
            if isinstance(outcome, PenstockError):
                raise outcome

    async def _say(self, subject: LetterSubject, data: bytes) -> None:
        outcomes = [*await self._publisher.add(subject, data), *await self._publisher.finish()]
        for outcome in outcomes:
            if isinstance(outcome, PenstockError):
                raise outcome

    async def _remove(self, letters: Sequence[FiledLetter]) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(filed: FiledLetter) -> None:
            async with gate:
                with suppress(NotFound):  # another process has deleted it
                    await self._jetstream.delete_message(filed.stream, filed.sequence)

        await asyncio.gather(*(one(filed) for filed in letters))

    async def _pace(self, rate: float | None) -> None:
        if not rate:
            return
        now = time.monotonic()
        if self._free_at > now:
            await self._publisher.send()
            await asyncio.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + 1 / rate


def _replayed(filed: FiledLetter, at: Place, chunk: ReplayChunk) -> AuditRecord:
    return AuditRecord(
        action=audit.REPLAYED,
        deed=chunk.deed,
        letter=filed,
        target=at,
        edited=chunk.edited,
        only_failed=chunk.only_failed,
    )
