"""Reads through an ephemeral consumer without acknowledgements, as fast as the server can send.

Several large pull requests are kept open, so that the server never waits for us. Their total is bounded in messages and
in bytes: a reader that pauses finds at most that much in its socket when it resumes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidConfiguration,
    PenstockError,
    ProtocolError,
    Unavailable,
)
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import PullEvent
from penstock.jetstream.model import NANOSECONDS, ConsumerInfo
from penstock.jetstream.requests import PullRequests
from penstock.jetstream.rows import Range, ScannerMaker
from penstock.wire import frames
from penstock.wire.blocking import BlockingConnection, run
from penstock.wire.scanning import Stop

PULL_MESSAGES = 20_000
PULL_BYTES = 8 * 1024 * 1024
PULLS = 3
"""Open requests. Together they stay below the 64 MiB that a server buffers before it disconnects a client."""
EXPIRES = 30.0  # seconds
HEARTBEAT = 2.0  # seconds
SILENCE = 3 * HEARTBEAT
"""Seconds without any frame after which the consumer or the connection counts as lost."""
INACTIVE = 60.0  # seconds
"""The server deletes a consumer without pull requests after that long, if we could not."""
FINISH_WITHIN = 2.0  # seconds
MAXIMUM_CONSUMERS, THRESHOLD_TOO_LONG = 10026, 10153
"""Server errors: no more consumers for stream or account, an inactive threshold beyond the stream's limit."""


class ReadInterrupted(Unavailable):
    """The consumer of a read is gone, or messages were lost; a new consumer resumes at the same position."""


class PullRead:
    """One attempt to read the messages of a range, through one consumer."""

    def __init__(self, connection: BlockingConnection, wanted: Range, scanner: ScannerMaker) -> None:
        settings = connection.settings
        self._connection = connection
        self._stream = wanted.stream
        self._last = wanted.last
        self._jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        # Short, since every message carries it; its metadata names the owner.
        self._name = f"pk-{secrets.token_hex(5)}"
        self._inbox = settings.new_inbox()
        self._position = wanted.first - 1
        self._requests = PullRequests(self._jetstream, wanted.stream, self._name, f"{self._inbox}.pull")
        self._oversized = False
        """The next message is larger than `max_bytes` of a pull request: request it alone."""
        config = consumer_config(self._name, wanted.first, wanted.subjects)
        if wanted.headers_only:
            config["headers_only"] = True
        created = run(create_reader(self._jetstream, wanted.stream, config))
        self._caught_up = created.pending == 0
        self._sid = connection.subscribe(f"{self._inbox}.*")
        self._scanner = wanted.scanned_by(scanner, self._sid)

    def batches(self) -> Iterator[Any]:
        """Yield rows in order, until the last one wanted, or until the consumer has no more."""
        try:
            yield from self._rows()
        except PenstockError:
            raise  # this connection is unusable; the server deletes the consumer by itself
        except GeneratorExit:
            self._finish()
            raise
        self._finish()

    def _rows(self) -> Iterator[Any]:
        self._scanner.feed(self._connection.take_buffered())
        while self._position < self._last and not self._caught_up:
            self._pull()
            self._receive()
            while self._look() is Stop.FULL:
                yield self._scanner.take()
        if self._scanner.rows:
            yield self._scanner.take()

    # -- asking ----------------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        """Keep pull requests open, without requesting more than the range can have."""
        requests = bytearray()
        while (count := self._next_pull()) > 0:
            most = None if self._oversized else PULL_BYTES
            requests += self._requests.request(count, max_bytes=most, expires=EXPIRES, heartbeat=HEARTBEAT)
        if requests:
            self._connection.send(requests)

    def _next_pull(self) -> int:
        asked = self._requests.asked
        if self._oversized:
            return 0 if asked else 1
        if asked > (PULLS - 1) * PULL_MESSAGES:
            return 0
        return min(PULL_MESSAGES, self._last - self._position - asked)

    # -- receiving -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            self._scanner.received(self._connection.recv_into(self._scanner.space(), SILENCE))
        except DeadlineExceeded as exc:
            raise ReadInterrupted(f"consumer {self._name!r} has been silent for {SILENCE:g} s") from exc

    def _look(self) -> Stop:
        """Parse received bytes until more are needed or the rows must be taken."""
        while True:
            before = self._scanner.total_rows
            found = self._scanner.next()
            self._count(self._scanner.total_rows - before)
            if found is Stop.GAP:
                raise ReadInterrupted(f"messages of {self._stream!r} behind {self._position} were lost on the way")
            if found is Stop.DONE:
                self._position = self._last
            if isinstance(found, Stop):
                return found
            self._handle(found)

    def _count(self, rows: int) -> None:
        if rows:
            self._requests.received(rows)
            self._oversized = False
            self._position = self._scanner.last_sequence
            self._caught_up = self._scanner.last_pending == 0

    def _handle(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.Ping):
            self._connection.send(frames.PONG)
        elif isinstance(frame, frames.Err):
            raise ReadInterrupted(f"the server says: {frame.text}")
        elif isinstance(frame, frames.Message):
            self._status(frame)

    def _status(self, frame: frames.Message) -> None:
        status = self._requests.status(frame)
        if status is None:
            return
        if status.event is PullEvent.HEARTBEAT:
            self._caught_up = True
        elif status.event in (PullEvent.ENDED, PullEvent.TOO_LARGE):
            untouched = status.left_bytes == PULL_BYTES
            self._oversized = self._oversized or (untouched and status.event is PullEvent.TOO_LARGE)
        elif status.event is PullEvent.UNKNOWN:
            raise ProtocolError(f"consumer {self._name!r} answers {status}")
        else:
            raise ReadInterrupted(f"consumer {self._name!r}: {status}")

    # -- ending ----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the connection to other readers. They ignore late messages of this read."""
        self._connection.give_back(self._scanner.rest())
        self._connection.unsubscribe(self._sid)

    def _finish(self) -> None:
        """Delete the consumer. Messages still arriving are read and dropped, so that the answer can be seen."""
        subject = self._jetstream.subject(f"CONSUMER.DELETE.{self._stream}.{self._name}")
        deadline = time.monotonic() + FINISH_WITHIN
        self._scanner.forget_order()
        with suppress(Unavailable):  # the server deletes it by itself later
            self._connection.send(frames.publish(subject, b"", reply=f"{self._inbox}.gone"))
            while (left := deadline - time.monotonic()) > 0:
                found = self._scanner.next()
                if isinstance(found, frames.Message) and found.subject.endswith(".gone"):
                    return
                self._scanner.drop()
                if found is Stop.MORE:
                    self._scanner.received(self._connection.recv_into(self._scanner.space(), left))


class ConsumersUsedUp(ConfigError):
    """The stream, or the account, has as many consumers as it may have."""

    def __init__(self, stream: str, allows_direct: bool) -> None:
        super().__init__(stream, allows_direct)
        self.stream = stream
        self.allows_direct = allows_direct
        """Whether the stream can be read without a consumer."""

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} takes no more consumers (max_consumers), and it cannot be read without one, since "
            "it does not answer direct get: raise max_consumers, or set `allow_direct: true`"
        )


async def create_reader(jetstream: JetStream, stream: str, config: dict[str, Any]) -> ConsumerInfo:
    """Create a consumer of `consumer_config`, within the limits that the stream sets for its consumers.

    Raises `ConsumersUsedUp` when the stream may have no more of them.
    """
    try:
        return await jetstream.create_consumer(stream, config)
    except InvalidConfiguration as exc:
        if exc.err_code not in (MAXIMUM_CONSUMERS, THRESHOLD_TOO_LONG):
            raise
        found = (await jetstream.stream_info(stream)).config
        if exc.err_code == MAXIMUM_CONSUMERS:
            raise ConsumersUsedUp(stream, bool(found.get("allow_direct"))) from exc
        limit = (found.get("consumer_limits") or {}).get("inactive_threshold")
        if not limit:
            raise
    return await jetstream.create_consumer(stream, {**config, "inactive_threshold": limit})


def consumer_config(name: str, first: int, subjects: tuple[str, ...]) -> dict[str, Any]:
    """Configuration of an ephemeral consumer: in memory, on one server, deleted soon after its reader ends."""
    config: dict[str, Any] = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(first, 1),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": int(INACTIVE * NANOSECONDS),
        "metadata": {"penstock.reader": "true"},
    }
    if len(subjects) == 1:
        config["filter_subject"] = subjects[0]
    elif subjects:
        config["filter_subjects"] = list(subjects)
    return config
