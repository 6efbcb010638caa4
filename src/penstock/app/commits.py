"""Stores many small batches for one stream together: a commit costs the server the same whether it has 2 or 1,000
messages (about 15 ms with files), so batches that arrive during one commit are stored with the next.

A commit is stored whole or not at all, which is more than each batch needs. When the server refuses a commit, batches
in it that were stored before are recognised by their markers, and the rest is retried; when that is not the reason,
each is stored alone, so that one cannot fail the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.consume.verdicts import RetryLater
from penstock.errors import ConfigError, MessageNotFound
from penstock.publish.atomic import AtomicBatch, Publisher
from penstock.publish.errors import BatchOutcomeUnknown, BatchRejected, TooLarge, WrongSequence
from penstock.publish.model import MAX_MESSAGES
from penstock.wire.headers import Headers

MAX_BYTES = 8 * 2**20
"""Of one commit, unless a single batch is larger."""
WITHIN = 30.0
"""Seconds that a commit may take, including retries."""
UNDER_WAY = 2
"""Maximum concurrent commits for one stream."""


@dataclass(slots=True)
class PendingCommit:
    """One batch to be stored, unless its marker is stored already."""

    marker: str
    members: list[tuple[str, bytes, Headers | None]] = field(default_factory=list)
    check: Callable[[], None] = lambda: None
    """Called right before it is sent; raises when it must not be."""
    stored: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Whether this call stored it; False: it was stored before."""

    @property
    def size(self) -> int:
        return sum(len(data) for _, data, _ in self.members)

    def settle(self, outcome: bool | BaseException) -> None:
        """Set the outcome for the waiting handler, unless that was cancelled."""
        if self.stored.done():
            return
        if isinstance(outcome, BaseException):
            self.stored.set_exception(outcome)
        else:
            self.stored.set_result(outcome)


class Commits:
    """Stores batches in one stream."""

    def __init__(self, publisher: Publisher, stream: str) -> None:
        self._publisher = publisher
        self._stream = stream
        self._waiting: deque[PendingCommit] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def store(self, wanted: PendingCommit) -> bool:
        """Store a batch; returns whether this call stored it. Raises why it is not stored."""
        if len(wanted.members) >= MAX_MESSAGES:
            raise TooLarge(self._stream, wanted.marker, 400, 0, "with its marker")
        self._waiting.append(wanted)
        self._start()
        return await wanted.stored

    def _start(self) -> None:
        if self._waiting and len(self._running) < UNDER_WAY:
            task = asyncio.create_task(self._work())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()  # a batch that arrived since its last check found all slots taken

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let other ready handlers add their batches
            group = self._next()
            try:
                async with asyncio.timeout(WITHIN):  # then each is retried, and its marker tells whether it is stored
                    await self._commit(group)
            except BaseException as exc:
                for one in group:
                    one.settle(exc)
                if isinstance(exc, asyncio.CancelledError):
                    raise

    def _next(self) -> list[PendingCommit]:
        """Return as many as fit into one commit; of one marker only the first."""
        group: list[PendingCommit] = []
        markers: set[str] = set()
        messages = size = 0
        while self._waiting:
            one = self._waiting[0]
            messages, size = messages + len(one.members) + 1, size + one.size
            if group and (messages > MAX_MESSAGES or size > MAX_BYTES or one.marker in markers):
                break
            group.append(self._waiting.popleft())
            markers.add(one.marker)
        return group

    async def _commit(self, group: Sequence[PendingCommit]) -> None:
        left = _allowed(group)
        while left:
            try:
                await self._send(left)
                return
            except WrongSequence:
                old = await asyncio.gather(*(self._is_stored(one) for one in left))
                for one, is_stored in zip(left, old, strict=True):
                    if is_stored:
                        one.settle(False)
                if not any(old):
                    raise
                left = _allowed([one for one, is_stored in zip(left, old, strict=True) if not is_stored])
            except (BatchRejected, ConfigError) as exc:
                if len(left) == 1:
                    left[0].settle(exc)
                    return
                for one in left:
                    await self._commit([one])
                return

    async def _send(self, group: Sequence[PendingCommit]) -> None:
        batch = self._publisher.atomic(self._stream)
        for one in group:
            for subject, data, headers in one.members:
                batch.content.add(subject, data, headers)
            batch.content.add(one.marker, b"", expected_last_subject_sequence=0)
        try:
            await batch.commit()
        except BatchOutcomeUnknown as exc:
            await self._resolve(batch, exc)
        for one in group:
            one.settle(True)

    async def _resolve(self, batch: AtomicBatch, error: BatchOutcomeUnknown) -> None:
        if await batch.resolve() is None:
            raise RetryLater(f"results for {self._stream} are not stored: {error}") from error

    async def _is_stored(self, wanted: PendingCommit) -> bool:
        try:
            await self._publisher.jetstream.get_message(self._stream, last_of=wanted.marker)
        except MessageNotFound:
            return False
        return True


def _allowed(group: Sequence[PendingCommit]) -> list[PendingCommit]:
    """Return those that may be sent now; the others get the error."""
    allowed = []
    for one in group:
        try:
            one.check()
            allowed.append(one)
        except Exception as exc:  # noqa: BLE001 -- it is raised where the batch is waited for
            one.settle(exc)
    return allowed
