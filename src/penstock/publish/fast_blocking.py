"""Fast ingest from blocking code, such as a Spark task: the same series over a blocking connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from penstock.errors import (
    AccessDenied,
    ConnectionLost,
    DeadlineExceeded,
    PenstockError,
    ProtocolError,
    Unavailable,
)
from penstock.jetstream import features
from penstock.jetstream.connection import reconnect_blocking
from penstock.publish.fast import CHUNK, INBOX_BYTES, TICK, FastIngestBase, OnLost, chunks
from penstock.publish.options import FastAck, IngestOptions
from penstock.publish.rows import Publication, Row
from penstock.settings import Settings
from penstock.wire import blocking
from penstock.wire.headers import Headers


class BlockingFastIngest(FastIngestBase):
    """The blocking publisher, with the same calls: `with publisher.fast("ORDERS") as ingest: ingest.add(…)`.

    A thread of its own sends what was left behind, and settles it, while the caller does something else.
    """

    def __init__(
        self, settings: Settings, stream: str, options: IngestOptions | None = None, on_lost: OnLost | None = None
    ) -> None:
        super().__init__(settings, stream, options, on_lost)
        self._connection = blocking.BlockingConnection(settings, name="penstock fast ingest")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="penstock fast ingest", daemon=True)

    def __enter__(self) -> Self:
        self._check_new()
        try:
            reconnect_blocking(self._connection, 0, self._begin)
        except BaseException:
            self._connection.close()
            raise
        self._ticker.start()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
            elif self._core.error is None:
                self._let_go()
        finally:
            self._close()

    def add(self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None) -> int:
        """Add one message and return its position. Waits only while the server is behind.

        It may wait in memory for a moment, to be sent with others; it is stored once `stored` has reached the position.
        """
        if not self._is_open:
            self._check_open()
        row = self._rows.one(subject, data, headers, message_id)
        with self._lock:
            self._check_open()
            position = self._core.add_one(row)
            if position >= self._send_at:
                self._until(lambda: self._core.unsent < CHUNK)
                self._send_at = self._core.added + CHUNK
            return position

    def add_many(self, messages: Iterable[Publication]) -> int:
        """Add `(subject, data)`, `(subject, data, headers)` or `(subject, data, headers, message_id)` tuples.

        The fast way for many messages; returns the position of the last. Takes them as the server does: an endless
        iterable needs no more memory than a short one.
        """
        for chunk in chunks(messages):
            self._add_rows(self._rows.many(chunk))
        return self.added

    def add_data(self, subject: str, data: Iterable[bytes]) -> int:
        """Add messages of one subject without headers: the fastest way."""
        for chunk in chunks(data):
            self._add_rows(self._rows.of_subject(subject, chunk))
        return self.added

    def add_prepared(self, messages: Iterable[tuple[str, bytes, bytes]]) -> int:
        """Add `(subject, header block, data)` tuples, for callers that have encoded the headers themselves."""
        for chunk in chunks(messages):
            self._add_rows(self._rows.prepared(chunk))
        return self.added

    def flush(self) -> int:
        """Return once everything added so far is stored; returns its last position, and `sequence` is up to date."""
        with self._lock:
            if self.ack:
                return self.added
            self._check_open()
            target = self._core.end()
            self._until(lambda: self._core.stored >= target and not self._core.ending)
            return target

    def ping(self) -> None:
        """Ask the server for its last ack again; also keeps a batch alive. Done by itself when an ack is late."""
        with self._lock:
            self._check_open()
            self._send(self._core.ping(time.monotonic()))

    def commit(self) -> FastAck:
        """Store everything that was added, end the ingest, and say where the messages are."""
        with self._lock:
            if self.ack:
                return self.ack
            self._check_open()
            self._core.end()
            self._until(lambda: self._core.settled)
            return self._committed()

    def _add_rows(self, rows: list[Row]) -> None:
        with self._lock:
            self._check_open()
            self._core.add(rows)
            self._until(lambda: self._core.unsent < CHUNK)

    def _until(self, done: Callable[[], bool]) -> None:
        """Send and take answers until it is done."""
        self._step()
        while not done():
            self._take(TICK)
            self._step()

    def _step(self) -> None:
        if self._core.stalled or not self._connection.connected:
            self._reconnect()
        self._check()
        self._send(self._core.outgoing(time.monotonic()))
        self._check()

    def _send(self, data: bytes) -> None:
        if not data:
            return
        try:
            self._connection.send(data)
        except ConnectionLost:
            self._reconnect()

    def _take(self, timeout: float) -> bool:
        """Take one answer, if one comes in time."""
        try:
            self._core.receive(self._connection.receive(timeout), time.monotonic())
        except (ConnectionLost, DeadlineExceeded):
            return False  # the next step opens a new connection, if this one is gone
        except (AccessDenied, ProtocolError) as exc:  # a message is missing that no later call can account for
            self._core.error = self._core.error or exc
            raise
        return True

    def _tick(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                if self._core.error or self._closed.is_set():
                    return
                try:
                    while self._take(0):
                        pass
                    self._step()
                except PenstockError as exc:  # the caller is told at the next call
                    self._core.error = self._core.error or exc

    def _reconnect(self) -> None:
        try:
            reconnect_blocking(self._connection, self._core.options.patience, self._begin)
        except Unavailable as exc:
            self._core.error = exc
            raise

    def _begin(self) -> None:
        features.require(self._connection.info, features.FAST_INGEST)
        self._rows.max_payload = self._core.max_payload = self._connection.info.max_payload
        inbox = self.settings.new_inbox(INBOX_BYTES)
        self._connection.subscribe(f"{inbox}.>")
        self._core.connected(inbox, time.monotonic())

    def _let_go(self) -> None:
        """Tell the server, without waiting, that nothing more comes."""
        with self._lock, suppress(PenstockError):
            self._core.end()
            if self._connection.connected:
                self._connection.send(self._core.outgoing(time.monotonic()))

    def _close(self) -> None:
        self._is_open = False
        self._closed.set()
        with self._lock:
            self._connection.close()
        if self._ticker.is_alive():
            self._ticker.join()
