"""A blocking connection that survives a restart of the server, for idempotent requests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from penstock.errors import OutcomeUnknown, StreamNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import stored
from penstock.jetstream.model import Json, StoredMessage, StreamInfo
from penstock.retry import is_retryable, retrying_blocking
from penstock.settings import Settings
from penstock.wire.blocking import BlockingConnection, run
from penstock.wire.headers import Headers

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds to retry while the server is unavailable: a restart of the server should not fail a Spark job."""


class Link:
    """The connection of one task or one driver call, and the JetStream API on it.

    Every call is retried, on a new connection if needed, until it gets an answer: use it only for idempotent requests.
    """

    def __init__(self, settings: Settings, patience: float = PATIENCE) -> None:
        self.settings = settings
        self.patience = patience
        self.connection = BlockingConnection(settings, name="penstock-spark")
        self.jetstream = JetStream(self.connection.requester(), settings.domain, settings.timeout)

    def persistently(self, call: Callable[[], T], retry_on: Callable[[BaseException], bool] | None = None) -> T:
        """Call until it gets an answer, fails permanently, or `patience` ends; connects first if needed."""

        def connected_call() -> T:
            self.connection.ready()
            return call()

        return retrying_blocking(connected_call, self.patience, retry_on=retry_on or _may_ask_again)

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, what: str = "") -> Json:
        """Store one message, once: for KV buckets, whose calls `stubbornly` repeats. It blocks the loop."""
        return stored(what or f"publish to {subject!r}", self.connection.request(subject, data, headers).data)

    def stubbornly(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One call of a KV bucket over this link, until it gets an answer."""
        return self.persistently(lambda: run(make()))

    # -- the JetStream API ---------------------------------------------------------------------------------------------

    def call(self, make: Callable[[JetStream], Coroutine[Any, Any, T]]) -> T:
        """One call of the JetStream API."""
        return self.stubbornly(lambda: make(self.jetstream))

    def stream_info(self, name: str) -> StreamInfo:
        return self.call(lambda api: api.stream_info(name))

    def last_sequence(self, stream: str) -> int:
        """The stream's last sequence, as its leader knows it."""
        return self.stream_info(stream).state.last_seq

    def has_stream(self, name: str) -> bool:
        try:
            self.stream_info(name)
        except StreamNotFound:
            return False
        return True

    def get_message(self, stream: str, **which: Any) -> StoredMessage:
        return self.call(lambda api: api.get_message(stream, **which))

    def next_sequence(self, stream: str, first: int, subjects: tuple[str, ...] = ()) -> int:
        """The sequence of the first message of the subjects at or behind `first`; 0: there is none."""
        found = [self._next_sequence(stream, first, subject) for subject in subjects or (">",)]
        return min((sequence for sequence in found if sequence), default=0)

    def _next_sequence(self, stream: str, first: int, subject: str) -> int:
        return self.call(lambda api: api.next_sequence(stream, first, subject))

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _may_ask_again(error: BaseException) -> bool:
    return is_retryable(error) or isinstance(error, OutcomeUnknown)
