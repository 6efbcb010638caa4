"""Fast ingest from blocking code, such as a Spark task: the same series over a blocking connection."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Self, TypeVar

from penstock.coroutines import blocked, finished, passed
from penstock.errors import PenstockError
from penstock.publish.fast import CONNECTION_NAME, TICK, FastIngest, OnLost
from penstock.publish.options import FastAck, IngestOptions
from penstock.publish.rows import Publication, Row
from penstock.settings import Settings
from penstock.wire import blocking
from penstock.wire.headers import Headers

T = TypeVar("T")


class BlockingFastIngest:
    """`FastIngest` for blocking code: `with publisher.fast("ORDERS") as ingest: ingest.add(…)`.

    A background thread sends and settles remaining rows while the caller does something else.
    """

    def __init__(
        self, settings: Settings, stream: str, options: IngestOptions | None = None, on_lost: OnLost | None = None
    ) -> None:
        connection = blocking.BlockingConnection(settings, name=CONNECTION_NAME)
        self.inner = FastIngest(settings, stream, options, on_lost, connection.inner)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name=CONNECTION_NAME, daemon=True)

    settings = passed[Settings]()
    ack = passed[FastAck | None]()
    stored = passed[int]()
    added = passed[int]()
    in_doubt = passed[int]()
    max_payload = passed[int]()
    sequence = passed[int]()
    maybe_twice = passed[int]()
    flush = blocked(FastIngest.flush)
    ping = blocked(FastIngest.ping)
    commit = blocked(FastIngest.commit)

    def __enter__(self) -> Self:
        self.run(self.inner.open())
        self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.run(self.inner.leave(kind))
        finally:
            self._closed.set()
            self.run(self.inner.close())
            if self._ticker.is_alive():
                self._ticker.join()

    def add(self, subject: str, data: bytes, headers: Headers | None = None, message_id: str | None = None) -> int:
        """Add one message and return its position. Waits only while the server is behind.

        It may wait in memory for a moment, to be sent with others; it is stored once `stored` has reached the position.
        """
        row = self.inner.row(subject, data, headers, message_id)
        with self._lock:
            position = self.inner.queue(row)
            if self.inner.is_due(position):
                finished(self.inner.send_queued())
            return position

    def add_many(self, messages: Iterable[Publication]) -> int:
        """Add many messages, the fast way; see `FastIngest.add_many`."""
        return self._add(self.inner.encoded(messages))

    def add_data(self, subject: str, data: Iterable[bytes]) -> int:
        """Add messages of one subject without headers: the fastest way."""
        return self._add(self.inner.encoded_data(subject, data))

    def add_prepared(self, messages: Iterable[tuple[str, bytes, bytes]]) -> int:
        """Add `(subject, header block, data)` tuples, for callers that have encoded the headers themselves."""
        return self._add(self.inner.prepared(messages))

    def _add(self, rows: Iterator[list[Row]]) -> int:
        for chunk in rows:
            self.run(self.inner.add_rows(chunk))
        return self.added

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call while the thread that sends pings and reads acknowledgements in the background is paused."""
        with self._lock:
            return finished(call)

    def _tick(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                if self.inner.failed or self._closed.is_set():
                    return
                try:
                    finished(self.inner.catch_up())
                except PenstockError as exc:
                    self.inner.fail(exc)
