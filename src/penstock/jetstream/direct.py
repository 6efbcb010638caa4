"""Reads by direct get: leaves nothing on the server, and needs no consumer. For WorkQueue and Interest streams.

Any replica may answer, also one that lags: an answer that ends before the range does proves nothing about the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from penstock.jetstream.rows import Range, ScannerMaker
from penstock.subjects import api_prefix
from penstock.wire import frames
from penstock.wire.blocking import BlockingConnection
from penstock.wire.scanning import Stop

BATCH = 1000
"""Maximum messages of one request: a server does not answer larger ones."""
BATCH_BYTES = 16 * 1024 * 1024
ANSWER_WITHIN = 10.0  # seconds


class DirectGetRefused(ConfigError):
    """A stream does not allow direct get."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.stream = stream

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} does not answer direct get, by which WorkQueue and Interest streams are read; "
            f"allow it: `allow_direct: true` in the platform file, or `nats stream edit {self.stream} --allow-direct`"
        )


class DirectRead:
    """One attempt to read the messages of a range, over one connection."""

    def __init__(self, connection: BlockingConnection, wanted: Range, scanner: ScannerMaker) -> None:
        self._connection = connection
        self._stream = wanted.stream
        self._last = wanted.last
        self._subjects = wanted.subjects
        self._subject = f"{api_prefix(connection.settings.domain)}.DIRECT.GET.{wanted.stream}"
        self._inbox = connection.settings.new_inbox()
        self._position = wanted.first - 1
        self._more = True
        self._sid = connection.subscribe(f"{self._inbox}.*")
        self._scanner = wanted.scanned_by(scanner, self._sid)

    def batches(self) -> Iterator[Any]:
        """Yield rows in order, until the last one wanted, or until this replica has no more."""
        self._scanner.feed(self._connection.take_buffered())
        while self._more and self._position < self._last:
            self._connection.send(self._request())
            yield from self._answer()
        yield from self._taken()

    def release(self) -> None:
        """Release the connection to other readers. They ignore late messages of this read."""
        self._connection.give_back(self._scanner.rest())
        self._connection.unsubscribe(self._sid)

    def _request(self) -> bytes:
        ask: dict[str, int | str] = {"seq": self._position + 1, "batch": BATCH, "max_bytes": BATCH_BYTES}
        if len(self._subjects) == 1:
            ask["next_by_subj"] = self._subjects[0]
        return frames.publish(self._subject, json.dumps(ask).encode(), reply=f"{self._inbox}.get")

    def _answer(self) -> Iterator[Any]:
        """Yield the rows of one answer, in batches."""
        before = self._scanner.total_rows
        while True:
            found = self._scanner.next()
            self._position = max(self._position, self._scanner.last_sequence)
            if found is Stop.MORE:
                self._receive()
            elif found is Stop.FULL:
                yield from self._taken()
            elif found is Stop.DONE:
                self._position = self._last
                return
            elif isinstance(found, frames.Message):
                self._more = self._goes_on(found) and self._scanner.total_rows > before
                return
            elif isinstance(found, frames.Ping):
                self._connection.send(frames.PONG)

    def _goes_on(self, message: frames.Message) -> bool:
        """Whether the message at the end of an answer says that this replica has more."""
        code, text = message.status or (0, "")
        if code == 204:
            return message.header_values().get("Nats-Num-Pending", ["0"]) != ["0"]
        if code == 404:
            return False
        if code == 503:
            raise Unavailable(f"nobody answers direct get for stream {self._stream!r}; does it allow it?")
        raise ProtocolError(f"direct get from {self._stream!r} ends with {code} {text}")

    def _receive(self) -> None:
        try:
            self._scanner.received(self._connection.recv_into(self._scanner.space(), ANSWER_WITHIN))
        except DeadlineExceeded as exc:
            raise Unavailable(f"direct get from {self._stream!r} has been silent for {ANSWER_WITHIN:g} s") from exc

    def _taken(self) -> Iterator[Any]:
        """Yield the rows found so far. Direct get supports one filter: several are applied here."""
        if not self._scanner.rows:
            return
        if len(batch := self._scanner.take(self._subjects)):
            yield batch
