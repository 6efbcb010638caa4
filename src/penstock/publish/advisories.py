"""Atomic batches that the server abandoned: it publishes one advisory for each, and keeps nothing.

There are two ways to learn of them. `Abandonments` subscribes and counts from the moment it starts. A stream that
stores the subject (`keeper`) keeps the advisories, and then `kept` also counts those from while no process subscribed;
`penstock status` shows them, and `penstock batches` lists them. `penstock apply` creates one for a platform with atomic
streams.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from penstock.errors import DeadlineExceeded, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import reconnect
from penstock.jetstream.model import NO_ADVISORY, StreamInfo, parse_time
from penstock.publish.model import publisher_of
from penstock.settings import Settings
from penstock.subjects import matches
from penstock.wire import aio, frames

PREFIX = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED."
SUBJECT = f"{PREFIX}*"
KEEPER = "BATCH_ADVISORIES"


@dataclass(frozen=True, slots=True)
class Abandonment:
    """One batch that the server dropped: nothing of it is stored."""

    stream: str
    batch_id: str
    reason: str
    """`timeout` (10 s of silence), `incomplete` (a gap, or dropped by its publisher), `large`, or `unsupported`."""
    time: datetime | None

    @property
    def publisher(self) -> str | None:
        """The name of its publisher, if it has one: taken from the batch id, since the server does not report it."""
        return publisher_of(self.batch_id)

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Parse an advisory; None for anything else: any publisher with permission can write there."""
        try:
            raw = json.loads(data)
            texts = str(raw["stream"]), str(raw.get("batch", "")), str(raw.get("reason", "unknown"))
            return cls(*texts, parse_time(raw.get("timestamp", "")))
        except NO_ADVISORY:
            return None


@dataclass(frozen=True, slots=True)
class AbandonmentCounts:
    """The counts, and their start time."""

    since: datetime
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Batches by stream and reason."""
    interruptions: int = 0
    """How often the connection was lost: batches abandoned meanwhile are not counted."""

    @property
    def total(self) -> int:
        return sum(number for reasons in self.counts.values() for number in reasons.values())


class Abandonments:
    """Subscribes to advisories of abandoned batches on its own connection, and counts them.

    An `async with` block subscribes; `statistics` returns the counts so far. The callback runs in the event loop and
    must not block. A lost connection is reopened, for as long as the block lasts, and counted as an interruption.
    """

    def __init__(self, settings: Settings, callback: Callable[[Abandonment], None] | None = None) -> None:
        self._settings = settings
        self._callback = callback
        self._counter: Counter[tuple[str, str]] = Counter()
        self._since = datetime.now(UTC)
        self._interruptions = 0
        self._connection: aio.Connection | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._connection = await aio.connect(self._settings, name="penstock advisories")
        await self._listen(self._connection)
        self._task = asyncio.create_task(self._receive(self._connection))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task
        assert self._connection
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._connection.close()

    def statistics(self) -> AbandonmentCounts:
        """Return the counts so far."""
        counts: dict[str, dict[str, int]] = {}
        for (stream, reason), number in sorted(self._counter.items()):
            counts.setdefault(stream, {})[reason] = number
        return AbandonmentCounts(self._since, counts, self._interruptions)

    async def _listen(self, connection: aio.Connection) -> None:
        await connection.subscribe(SUBJECT)
        await connection.flush()

    async def _receive(self, connection: aio.Connection) -> None:
        while True:
            try:
                self._count(await connection.receive())
            except DeadlineExceeded:
                continue  # no batch was abandoned
            except Unavailable:
                self._interruptions += 1
                await reconnect(connection, None, lambda: self._listen(connection))

    def _count(self, message: frames.Message) -> None:
        abandoned = Abandonment.parse(message.data)
        if abandoned is None:
            return
        self._counter[abandoned.stream, abandoned.reason] += 1
        if self._callback:
            self._callback(abandoned)


# -- stored advisories -------------------------------------------------------------------------------------------------


def keeper(name: str = KEEPER, max_age_days: int = 7, replicas: int = 1) -> dict[str, Any]:
    """The configuration of a stream that keeps the advisories. A platform with atomic streams has one."""
    return {
        "name": name,
        "description": "Atomic batches that the server dropped, as it says it",
        "subjects": [SUBJECT],
        "retention": "limits",
        "storage": "file",
        "max_age": max_age_days * 24 * 3600 * 1_000_000_000,
        "max_bytes": 16 * 1024 * 1024,
        "num_replicas": replicas,
    }


def keepers(streams: Iterable[StreamInfo]) -> list[str]:
    """The streams that keep advisories of abandoned batches, by name."""
    probe = f"{PREFIX}any"
    return [s.name for s in streams if any(matches(subject, probe) for subject in s.config.get("subjects") or ())]


async def kept(jetstream: JetStream, streams: Iterable[StreamInfo]) -> dict[str, int] | None:
    """Abandoned batches by stream, as far back as they are kept; None when no stream keeps them."""
    names = keepers(streams)
    if not names:
        return None
    counts: Counter[str] = Counter()
    for name in names:
        subjects = (await jetstream.stream_info(name, subjects_filter=SUBJECT)).state.subjects
        counts.update({subject.removeprefix(PREFIX): number for subject, number in subjects.items()})
    return dict(counts)
