"""Loading many messages from lines: plainly, as atomic batches, or by fast ingest, with the same calls and report."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from penstock.errors import ConfigError, ConnectionLost, OutcomeUnknown, PenstockError, ServerBusy, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json
from penstock.publish.atomic import AtomicBatch, Publisher
from penstock.publish.errors import BatchOutcomeUnknown, DuplicateId, RepeatedId
from penstock.publish.fast import FastIngest
from penstock.publish.lines import Numbered
from penstock.publish.model import MAX_MESSAGES, BatchAck
from penstock.publish.options import IngestOptions, Lost
from penstock.publish.packed import HEADER_ROOM, PackedPublisher
from penstock.publish.plain import PlainPublisher, PubAck
from penstock.retry import retrying
from penstock.settings import Settings

REMEMBERED_LINES = 100_000
"""How far back a position in a fast ingest can be turned into the number of its line."""


@dataclass(slots=True)
class StoredRange:
    """What was stored in one stream."""

    stream: str
    first: int | None = None
    """Sequence of the first message; None when it is not known for sure."""
    last: int = 0
    count: int = 0
    duplicates: int = 0
    """Messages that were there before, by their id; not counted in `count`."""

    def include(self, first: int, last: int, count: int) -> None:
        self.first = first if self.first is None else min(self.first, first)
        self.last = max(self.last, last)
        self.count += count


@dataclass(slots=True)
class LoadReport:
    """What is stored where, also when the load ended early."""

    mode: str
    ranges: dict[str, StoredRange] = field(default_factory=dict)
    batches: int = 0
    rows: int = 0
    """Lines in the packs that are stored."""
    maybe_twice: int = 0
    in_doubt: list[tuple[int, int]] = field(default_factory=list)
    """First and last of lines whose messages were sent and may be stored: no answer came."""
    lost: list[Lost] = field(default_factory=list)

    def of(self, stream: str) -> StoredRange:
        return self.ranges.setdefault(stream, StoredRange(stream))

    @property
    def count(self) -> int:
        return sum(one.count for one in self.ranges.values())

    def doubt(self, line: int) -> None:
        """Note that the message of a line, behind those noted before, may be stored."""
        if self.in_doubt and self.in_doubt[-1][1] == line - 1:
            self.in_doubt[-1] = self.in_doubt[-1][0], line
        else:
            self.in_doubt.append((line, line))


class RefusedLine(PenstockError):
    """The server would not store the message of a line."""

    def __init__(self, line: int, error: PenstockError) -> None:
        super().__init__(line, error)
        self.line = line
        self.error = error

    def __str__(self) -> str:
        return f"line {self.line}: {self.error}"


class Load(Protocol):
    """A way to load messages; an async context manager."""

    report: LoadReport

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, with its headers."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: Any) -> None: ...

    async def add(self, messages: Sequence[Numbered]) -> None:
        """Take messages, in order; waits while the server is behind."""

    async def finish(self) -> None:
        """Return when everything that was added is stored."""

    async def stop(self) -> None:
        """Called before a bad line: store what may be stored without it."""


class PlainLoad:
    """Each message by itself. The first refused one ends the load; some behind it may be stored."""

    def __init__(self, settings: Settings) -> None:
        self.report = LoadReport("plain")
        self._publisher = PlainPublisher(settings)
        self._lines: deque[int] = deque()

    async def __aenter__(self) -> Self:
        await self._publisher.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._publisher.__aexit__(*error)
        for line, outcome in zip(self._lines, self._publisher.left(), strict=False):  # lines that were not sent follow
            if isinstance(outcome, PubAck):
                _include(self.report.of(outcome.stream), outcome)
            elif outcome is None:
                self.report.doubt(line)

    @property
    def max_payload(self) -> int:
        return self._publisher.max_payload

    async def add(self, messages: Sequence[Numbered]) -> None:
        refused: RefusedLine | None = None
        for line, subject, data, headers, message_id in messages:
            self._lines.append(line)
            refused = self._noted(await self._publisher.add(subject, data, headers, message_id))
            if refused:
                break
        else:
            await self._publisher.send()
        if refused:
            self._noted(await self._publisher.finish())
            raise refused

    async def finish(self) -> None:
        if refused := self._noted(await self._publisher.finish()):
            raise refused

    async def stop(self) -> None:
        await self.finish()

    def _noted(self, outcomes: Sequence[PubAck | PenstockError]) -> RefusedLine | None:
        """Add outcomes to the report; returns the first refusal."""
        refused = None
        for outcome in outcomes:
            line = self._lines.popleft()
            if isinstance(outcome, PubAck):
                _include(self.report.of(outcome.stream), outcome)
            else:
                refused = refused or RefusedLine(line, outcome)
        return refused


class PackingClient(Protocol):
    """A connection that publishes packs; the front door's client is one."""

    @property
    def max_payload(self) -> int: ...
    def packed(self, **choices: Any) -> PackedPublisher: ...


class PackedLoad:
    """Lines of a subject in packs. A pack that is refused ends the load."""

    def __init__(self, client: PackingClient, rows: int) -> None:
        self.report = LoadReport("packed")
        self._client = client
        self._packed = client.packed(rows=rows, on_stored=self._note)
        self._lines: dict[str, deque[int]] = defaultdict(deque)
        """Lines that are not known to be stored, by subject."""

    async def __aenter__(self) -> Self:
        await self._packed.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._packed.__aexit__(*error)
        for line in sorted(line for lines in self._lines.values() for line in lines):
            self.report.doubt(line)

    @property
    def max_payload(self) -> int:
        return self._client.max_payload - HEADER_ROOM

    async def add(self, messages: Sequence[Numbered]) -> None:
        for line, subject, data, headers, _ in messages:
            self._lines[subject].append(line)
            await self._packed.add(subject, data, headers=headers)

    async def finish(self) -> None:
        await self._packed.flush()

    async def stop(self) -> None:
        await self.finish()

    def _note(self, subject: str, rows: int, answer: Json) -> None:
        for _ in range(rows):
            self._lines[subject].popleft()
        self.report.rows += rows
        self.report.of(answer["stream"]).include(answer["seq"], answer["seq"], 1)


class FastLoad:
    """Fast ingest into one stream: in order, nothing lost, not atomic."""

    def __init__(self, settings: Settings, stream: str, jetstream: JetStream, options: IngestOptions) -> None:
        self.report = LoadReport("fast")
        self._stream = stream
        self._jetstream = jetstream
        self._ingest = FastIngest(settings, stream, options, self.report.lost.append)
        self._lines: deque[int] = deque(maxlen=REMEMBERED_LINES)
        self._taken = 0
        """Messages whose lines were remembered."""
        self._before = 0

    async def __aenter__(self) -> Self:
        self._before = (await self._jetstream.stream_info(self._stream)).state.last_seq
        await self._ingest.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            await self._ingest.__aexit__(kind, *error)
        finally:
            self._note()
        first = self._ingest.stored + 1
        for position in range(first, first + self._ingest.in_doubt):
            if line := self._line_of(position):
                self.report.doubt(line)

    @property
    def max_payload(self) -> int:
        return self._ingest.max_payload

    async def add(self, messages: Sequence[Numbered]) -> None:
        self._lines.extend(message.line for message in messages)
        self._taken += len(messages)
        try:
            await self._ingest.add_many([message[1:] for message in messages])
        except PenstockError as exc:
            raise self._located(exc) from exc

    async def finish(self) -> None:
        try:
            await self._ingest.flush()
        except PenstockError as exc:
            raise self._located(exc) from exc
        finally:
            self._note()

    async def stop(self) -> None:
        await self.finish()

    def _note(self) -> None:
        ingest = self._ingest
        found = self.report.of(self._stream)
        found.count = ingest.stored - sum(one.count for one in self.report.lost)
        found.last = ingest.sequence
        # The first sequence is certain only when no other publisher wrote meanwhile.
        alone = found.count > 0 and ingest.sequence - self._before == found.count
        found.first = self._before + 1 if alone else None
        self.report.maybe_twice = ingest.maybe_twice

    def _located(self, error: PenstockError) -> PenstockError:
        """The error with the number of the line, when it is about a single message."""
        position = getattr(error, "position", None)
        if position is None and (stored := getattr(error, "stored", None)) is not None:
            position = stored + 1
        line = self._line_of(position) if position is not None else None
        return error if line is None else RefusedLine(line, error)

    def _line_of(self, position: int) -> int | None:
        back = self._taken - position
        return self._lines[-1 - back] if 0 <= back < len(self._lines) else None


class AtomicLoad:
    """Atomic batches into one stream. Without a size: one batch, or chunks of 1,000 when there are more."""

    def __init__(self, publisher: Publisher, stream: str, batch_size: int | None) -> None:
        if batch_size is not None and not 1 <= batch_size <= MAX_MESSAGES:
            raise ConfigError(f"an atomic batch has 1 to {MAX_MESSAGES} messages, not {batch_size}")
        self.report = LoadReport("atomic")
        self._publisher = publisher
        self._stream = stream
        self._size = batch_size or MAX_MESSAGES
        self._waiting: list[Numbered] = []
        self._max_payload = publisher.connection.info.max_payload

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._publisher.close()

    @property
    def max_payload(self) -> int:
        """As the server said when the load began: it is asked for while there may be no connection."""
        return self._max_payload

    async def add(self, messages: Sequence[Numbered]) -> None:
        self._waiting.extend(messages)
        while len(self._waiting) > self._size:
            await self._commit()

    async def finish(self) -> None:
        while self._waiting:
            await self._commit()

    async def stop(self) -> None:
        self._waiting.clear()

    async def _commit(self) -> None:
        chunk = self._waiting[: self._size]
        try:
            ack = await retrying(lambda: self._stored(chunk), self._publisher.patience, retry_on=_may_go_again)
        except StoredBefore as exc:
            del self._waiting[: self._size]
            found = self.report.of(self._stream)
            found.duplicates += exc.count
            return
        except BaseException as exc:
            if isinstance(exc, OutcomeUnknown | asyncio.CancelledError):
                for message in chunk:
                    self.report.doubt(message.line)
            if not isinstance(exc, PenstockError):
                raise
            raise RefusedLines(chunk[0].line, chunk[-1].line, exc) from exc
        del self._waiting[: self._size]
        self.report.batches += 1
        self.report.of(ack.stream).include(ack.first_sequence, ack.sequence, ack.count)

    async def _stored(self, chunk: Sequence[Numbered]) -> BatchAck:
        """Commit the chunk as a batch; when its answer was lost, look whether it is stored."""
        batch = self._publisher.atomic(self._stream)
        for _, subject, data, headers, message_id in chunk:
            await batch.add(subject, data, headers=headers, message_id=message_id)
        try:
            return await batch.commit()
        except BatchOutcomeUnknown as unknown:
            if ack := await self._resolved(batch, unknown):
                return ack
            raise ConnectionLost(self._stream, f"before batch {batch.batch_id!r} was stored") from unknown
        except RepeatedId:
            raise
        except DuplicateId as duplicate:
            await self._check_none_stored(chunk, duplicate)
            raise

    async def _check_none_stored(self, chunk: Sequence[Numbered], duplicate: DuplicateId) -> None:
        """Raise whether all messages of a chunk are stored, or some: an earlier load was cut off."""
        asked = [(message.subject, message.message_id) for message in chunk if message.message_id is not None]
        stored = await self._publisher.stored_ids(asked)
        if len(stored) == len(chunk):
            raise StoredBefore(len(chunk))
        if stored:
            raise PartlyStored(*duplicate.told, tuple(id_ for _, id_ in asked if id_ in stored), len(chunk))

    async def _resolved(self, batch: AtomicBatch, unknown: BatchOutcomeUnknown) -> BatchAck | None:
        try:
            return await retrying(batch.resolve, self._publisher.patience)
        except Unavailable:
            raise unknown from None


def _may_go_again(error: BaseException) -> bool:
    """Whether nothing of a batch is stored because the server was unavailable."""
    return isinstance(error, Unavailable | ServerBusy) and error.retryable


class StoredBefore(PenstockError):
    """All messages of a batch are stored already, by an earlier load."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class PartlyStored(DuplicateId):
    """Some messages of a batch are stored already, so that it cannot be stored as a whole."""

    def __init__(
        self, stream: str, batch_id: str, code: int, err_code: int, description: str, ids: tuple[str, ...], count: int
    ) -> None:
        super().__init__(stream, batch_id, code, err_code, description, ids)
        self.args = (*self.args, count)
        self.count = count

    @property
    def reason(self) -> str:
        some = ", ".join(map(repr, self.ids[:5])) + (", …" if len(self.ids) > 5 else "")
        return (
            f"{len(self.ids)} of its {self.count} messages are stored already ({some}), the others are not; load with "
            "the --batch-size that stored them, or without --atomic"
        )


class RefusedLines(PenstockError):
    """A batch was not stored, or it is not known whether it was."""

    def __init__(self, first: int, last: int, error: PenstockError) -> None:
        super().__init__(first, last, error)
        self.first = first
        self.last = last
        self.error = error

    def __str__(self) -> str:
        return f"lines {self.first} to {self.last}: {self.error}"


async def stream_of(jetstream: JetStream, subject: str) -> str:
    """The stream that stores messages of this subject."""
    names = await jetstream.stream_names(subject)
    if not names:
        raise ConfigError(f"no stream takes subject {subject!r}; create one, or check the subject")
    if len(names) > 1:
        raise ConfigError(f"subject {subject!r} fits streams {', '.join(names)}; name one with --stream")
    return names[0]


def _include(found: StoredRange, ack: PubAck) -> None:
    if ack.duplicate:
        found.duplicates += 1
    else:
        found.include(ack.sequence, ack.sequence, 1)
