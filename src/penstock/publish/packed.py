"""Collects rows by subject, and publishes them as packs of one message each."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, Self

from penstock.errors import ConfigError, PenstockError
from penstock.jetstream.connection import NoStream
from penstock.jetstream.model import Json
from penstock.packs import CODECS, LZ4, MAX_ROWS, PackedRow, need_arrow
from penstock.publish.batch import literal_subject
from penstock.retry import is_retryable, retrying

if TYPE_CHECKING:
    from penstock.packs import EncodedPack

ROWS = 500
"""Rows of a pack."""
MAX_BYTES = 512 * 1024
"""Bytes of a pack before compression, about: half of what a server takes by default."""
WITHIN = 0.2
"""Seconds that a row waits for others."""
PATIENCE = 30.0
"""Seconds that a pack is retried while the server is unavailable."""
HEADER_ROOM = 1024
"""Bytes of a message that are left to the headers of a pack."""


class PackStore(Protocol):
    """Publishes one message, and returns the answer of its stream. May be called again with the same message id."""

    def __call__(self, subject: str, data: bytes, headers: Mapping[str, str], message_id: str) -> Awaitable[Json]: ...


class OnStored(Protocol):
    """Called for each stored pack with its subject, its rows, and the stream's answer."""

    def __call__(self, subject: str, rows: int, answer: Json) -> None: ...


def _may_heal(error: BaseException) -> bool:
    """Whether a retry may store the pack: the server is unavailable or busy. A missing stream is permanent."""
    return is_retryable(error) and not isinstance(error.__cause__, NoStream)


@dataclass(slots=True)
class Collected:
    """Rows of one subject that wait to be sent."""

    rows: list[PackedRow] = field(default_factory=list)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A pack that is being sent. Its id stays the same when it is sent again, so it is stored once."""

    subject: str
    pack: EncodedPack
    message_id: str


class PackedPublisher:
    """Publishes rows in packs, each of which is one message.

    async with client.packed(rows=500) as packed:
        await packed.add("orders.placed", b"...")

    A pack goes out when it has `rows` rows or `max_bytes` bytes, or when its first row has waited for `within` seconds.
    Rows of one subject keep their order. `add` may return before its row is stored; `flush`, and the end of the block,
    return when everything is. A pack that cannot be stored raises at the next call; `flush` sends it again. After an
    exception inside the block, rows that were not sent are dropped. A crash loses the rows that were added since the
    last `flush`, at most. A pack is stored once, as long as the server comes back within the stream's duplicate window.
    """

    def __init__(
        self,
        store: PackStore,
        max_payload: Callable[[], int],
        *,
        rows: int = ROWS,
        max_bytes: int = MAX_BYTES,
        within: float = WITHIN,
        codec: str = LZ4,
        patience: float = PATIENCE,
        on_stored: OnStored | None = None,
    ) -> None:
        need_arrow("publishing packs")
        if not 1 <= rows <= MAX_ROWS or max_bytes < 1 or within <= 0:
            raise ConfigError(f"a pack has 1 to {MAX_ROWS} rows, 1 byte or more, and waits for more than 0 seconds")
        if codec not in CODECS:
            raise ConfigError(f"a pack cannot be compressed with {codec!r}; use {' or '.join(CODECS)}")
        self.stored = 0
        """Rows that are stored."""
        self.packs = 0
        """Messages that hold them."""
        self._store = store
        self._max_payload = max_payload
        self._rows = rows
        self._max_bytes = max_bytes
        self._within = within
        self._codec = codec
        self._patience = patience
        self._on_stored = on_stored
        self._collected: dict[str, Collected] = {}
        self._outgoing: list[Outgoing] = []
        """Packs in the order in which they go out; the first may have been sent already, without an answer."""
        self._sending = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None
        """Sends rows that have waited long enough."""
        self._failed: PenstockError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.flush()
        self._stop_timer()
        if self._late:
            await self._late

    async def add(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str | Sequence[str]] | None = None,
        timestamp: datetime | None = None,
    ) -> None:
        """Add a row. Waits for the server when its pack is full."""
        literal_subject(subject)
        self._raise_failure()
        if type(data) is not bytes:
            raise ConfigError(f"data must be bytes, not {type(data).__name__}: encode it first")
        waiting = self._collected.setdefault(subject, Collected())
        values = {name: [one] if isinstance(one, str) else list(one) for name, one in (headers or {}).items()}
        waiting.rows.append(PackedRow(data, None, values, timestamp))
        waiting.size += len(data)
        if len(waiting.rows) >= self._rows or waiting.size >= self._max_bytes:
            self._close(subject)
            await self._send()
        elif not self._timer:
            self._timer = asyncio.get_running_loop().call_later(self._within, self._begin_late)

    async def add_table(self, subject: str, events: Any) -> None:
        """Publish the rows of an Arrow table as packs of their columns; they are stored when this returns."""
        from penstock.packs import encode_events

        literal_subject(subject)
        self._raise_failure()
        if subject in self._collected:
            self._close(subject)  # rows that were added before stay before these
        for start in range(0, events.num_rows, self._rows):
            part = events.slice(start, self._rows)
            self._outgoing += [self._named(subject, pack) for pack in self._fitting(encode_events, part)]
        await self._send()

    async def flush(self) -> None:
        """Return when every row that was added is stored."""
        self._stop_timer()
        for subject in list(self._collected):
            self._close(subject)
        self._failed = None  # it is retried here
        await self._send()

    # -- from rows to packs --------------------------------------------------------------------------------------------

    def _close(self, subject: str) -> None:
        from penstock.packs import encode_rows

        rows = self._collected.pop(subject).rows
        self._outgoing += [self._named(subject, pack) for pack in self._fitting(encode_rows, rows)]

    def _fitting(self, encode: Callable[[Any, str], EncodedPack], rows: Any) -> list[EncodedPack]:
        """The rows as one pack, or as several when one would be larger than the server takes."""
        pack, count = encode(rows, self._codec), len(rows)
        if len(pack.body) + HEADER_ROOM <= self._max_payload() or count == 1:
            return [pack]
        half = count // 2
        return [*self._fitting(encode, rows[:half]), *self._fitting(encode, rows[half:])]

    def _named(self, subject: str, pack: EncodedPack) -> Outgoing:
        return Outgoing(subject, pack, f"pack-{secrets.token_hex(8)}")

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        async with self._sending:
            while self._outgoing:
                await self._send_one(self._outgoing[0])
                del self._outgoing[0]

    async def _send_one(self, one: Outgoing) -> None:
        async def store() -> Json:
            return await self._store(one.subject, one.pack.body, one.pack.headers, one.message_id)

        answer = await retrying(store, self._patience, retry_on=_may_heal)
        self.stored += one.pack.rows
        self.packs += 1
        if self._on_stored:
            self._on_stored(one.subject, one.pack.rows, answer)

    def _begin_late(self) -> None:
        self._timer = None
        self._late = asyncio.ensure_future(self._send_late())

    async def _send_late(self) -> None:
        try:
            for subject in list(self._collected):
                self._close(subject)
            await self._send()
        except PenstockError as exc:
            self._failed = exc

    def _raise_failure(self) -> None:
        if self._failed:
            failed, self._failed = self._failed, None
            raise failed

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
