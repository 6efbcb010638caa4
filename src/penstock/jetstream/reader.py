"""Reads a range of a stream as record batches: complete by sequence, despite any failure of a server.

A range is complete when a message at or beyond its last sequence was seen, or when the stream's leader says that
nothing of it is left. The end of an answer proves neither: the replica that answers may lag. When something fails in
between (a connection, a server, the consumer), reading resumes after the last row returned, so no row is repeated or
left out. The range fails only when there is no progress for `patience` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PenstockError, Unavailable
from penstock.jetstream import direct, pull
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StoredMessage
from penstock.jetstream.rows import Range, RowScanner, ScannerMaker
from penstock.retry import Backoff, Tries, is_retryable
from penstock.settings import Settings
from penstock.wire.blocking import BlockingConnection, connect, run

if TYPE_CHECKING:
    from penstock.wire.scan import RecordBatch

PATIENCE = 60.0  # seconds
KEPT_FOR = 60.0  # seconds; the server asks only after two minutes whether we are still there
_idle: dict[Settings, tuple[BlockingConnection, float]] = {}
"""Idle connections kept for another read, and since when: one per settings."""


class ReadStalled(Unavailable):
    """A range could not be read to its end in time."""

    def __init__(self, stream: str, first: int, last: int, reason: str) -> None:
        super().__init__(stream, first, last, reason)
        self.stream = stream
        self.first = first
        self.last = last
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"no progress reading {self.stream!r} (sequences {self.first} to {self.last}): {self.reason}; "
            "check that the stream's servers are up and have a leader"
        )


class Attempt(Protocol):
    """One attempt to read a range, over one connection."""

    def batches(self) -> Iterator[Any]:
        """Yield rows in order, until everything that this connection can see was returned."""
        ...

    def release(self) -> None:
        """Release the connection to other readers when everything was returned."""
        ...


def read_range(
    settings: Settings, wanted: Range, patience: float = PATIENCE, keep: bool = False
) -> Iterator[RecordBatch]:
    """Yield the messages of the range, in order, each once, as Arrow record batches bounded in rows and in bytes.

    With `keep` the connection stays open for the next read of this process.

    Raises `ReadStalled` when nothing arrives for `patience` seconds although the leader has more, and permanent errors,
    such as `StreamNotFound` or `AccessDenied`, at once.
    """
    from penstock.wire.scan import Scanner  # needs NumPy and Arrow, which not every installation has

    yield from _read(settings, wanted, patience, keep, Scanner, lambda batch: batch.column("sequence")[-1].as_py())


def read_messages(settings: Settings, wanted: Range, patience: float = PATIENCE) -> Iterator[StoredMessage]:
    """Yield the messages of the range as objects; otherwise like `read_range`. Needs only the standard library."""
    for batch in _read(settings, wanted, patience, False, RowScanner, lambda batch: batch[-1].sequence):
        yield from batch


def _read(
    settings: Settings,
    wanted: Range,
    patience: float,
    keep: bool,
    scanner: ScannerMaker,
    last_sequence: Callable[[Any], int],
) -> Iterator[Any]:
    position = wanted.first - 1
    quiet_since, tries = time.monotonic(), Tries(backoff=Backoff(first=0.1))
    while position < wanted.last:
        try:
            for batch in _attempt(settings, wanted, position, keep, scanner):
                position = last_sequence(batch)
                yield batch
                quiet_since = time.monotonic()
                tries.succeeded()
            if not something_left(settings, wanted, position):
                return
            reason: PenstockError = Unavailable("the replica that answers lags behind the stream's leader")
        except pull.ConsumersUsedUp as exc:
            if not exc.allows_direct:
                raise
            wanted = replace(wanted, direct=True)
            continue
        except PenstockError as exc:
            reason = exc
        if is_retryable(reason) and time.monotonic() - quiet_since > patience:
            raise ReadStalled(wanted.stream, position + 1, wanted.last, str(reason)) from reason
        tries.failed_blocking(reason)


def _attempt(settings: Settings, wanted: Range, position: int, keep: bool, scanner: ScannerMaker) -> Iterator[Any]:
    """Resume after `position`, on our own connection."""
    with _opened(settings, keep) as connection:
        kind = direct.DirectRead if wanted.direct else pull.PullRead
        read: Attempt = kind(connection, replace(wanted, first=position + 1), scanner)
        yield from read.batches()
        if keep:
            read.release()


@contextmanager
def _opened(settings: Settings, keep: bool) -> Iterator[BlockingConnection]:
    """Yield a connection kept by an earlier read, or a new one; kept when the block succeeds, otherwise closed."""
    connection = _kept(settings) if keep else None
    connection = connection or connect(settings, name="penstock reader", shuffle=True)
    try:
        yield connection
        if keep and connection.connected:
            _idle[settings] = connection, time.monotonic()
            return
    finally:
        if _idle.get(settings, (None,))[0] is not connection:
            connection.close()


def _kept(settings: Settings) -> BlockingConnection | None:
    """Return the connection kept by an earlier read, if it is still usable."""
    connection, since = _idle.pop(settings, (None, 0.0))
    if connection is None:
        return None
    try:
        if time.monotonic() - since < KEPT_FOR:
            connection.settle()
            return connection
    except PenstockError:
        pass  # closed by the server meanwhile
    connection.close()
    return None


def something_left(settings: Settings, wanted: Range, position: int) -> bool:
    """Whether the leader has a message of the range after `position`, or may still get one."""
    if position >= wanted.last:
        return False
    with connect(settings, name="penstock reader") as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        info = run(jetstream.stream_info(wanted.stream))
        # The last sequence existed when the range was chosen: a leader that does not have it lags.
        if info.state.last_seq < wanted.last:
            return True
        return any(
            0 < run(jetstream.next_sequence(wanted.stream, position + 1, subject)) <= wanted.last
            for subject in wanted.subjects or (">",)
        )
