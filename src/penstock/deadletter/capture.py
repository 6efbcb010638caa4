"""Stores a dead letter once, whether its worker or the server's advisory reports the dead message first.

A letter has its own subject, the consumer's `dlq:` followed by the letter's id, and is published there only if that
subject is empty. So it is stored once however late, often or concurrently it is captured, independent of the stream's
duplicate window. A letter that was replayed or discarded leaves its subject empty, but not the audit: a late capture of
that same attempt finds it there.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Protocol

from penstock import retry
from penstock.deadletter import streams
from penstock.deadletter.letters import DeadLetter
from penstock.errors import ApiError, ConfigError, NotFound, ProtocolError, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.codes import WRITE_UNDER_WAY, WRONG_LAST_SEQUENCE, api_error
from penstock.jetstream.consumer import ACK, ack_subject, consumer_prefix
from penstock.wire import headers as header_block
from penstock.wire.frames import Message
from penstock.wire.headers import Headers

EXPECT_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
RESERVE: Final = 256
"""Bytes for the headers that are added last."""


class CaptureConnection(Protocol):
    """The connection that capturing needs; `penstock.wire.aio.Connection` is one."""

    async def request(
        self, subject: str, data: bytes, headers: Headers | None = None, timeout: float | None = None
    ) -> Message: ...


class NobodyKeepsLetters(ConfigError):
    """No stream stores dead letters of this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def __str__(self) -> str:
        return (
            f"no stream takes dead letters on {self.subject!r}: declare one with `subjects: [dlq.>]` and run "
            "`penstock apply`; the message is not lost, it stays where it is"
        )


@dataclass(frozen=True, slots=True)
class Captured:
    """Where a letter is stored."""

    id: str
    subject: str
    new: bool
    """Whether this call stored it; otherwise it existed, or had been replayed or discarded."""


async def capture(
    connection: CaptureConnection,
    letter: DeadLetter,
    dlq: str,
    *,
    attempted: datetime | None = None,
    domain: str | None = None,
    patience: float = 5.0,
) -> Captured:
    """Store a letter below the subject `dlq`, unless it is or was there. Durable when it returns.

    `attempted` is when the attempt that failed began; it tells a late capture of an attempt whose letter was replayed
    meanwhile from a new failure after the consumer was set back. Left out, the time of the failure counts.

        1. look into the audit           settled after the attempt began: nothing to do
        2. publish, if the subject is empty   crash before: the message is delivered, or its advisory read, again
                                              crash after: the next capture finds the subject taken
        3. look into the audit again     settled between 1 and 2: take back what 2 has stored

    The caller must ack or term the original only after this returns. Retries what got no answer for `patience` seconds,
    which is harmless. Raises `NobodyKeepsLetters` when no stream stores the subject.
    """
    jetstream = JetStream(_Requester(connection), domain, patience)
    began = attempted or letter.last_failure
    subject = f"{dlq}.{letter.id}"
    if await _settled(jetstream, letter.id, began):
        return Captured(letter.id, subject, new=False)
    try:
        stored = await retry.retrying(lambda: _store(connection, subject, letter), patience, retry_on=_may_repeat)
    except Unavailable as exc:
        if type(exc) is Unavailable:  # no responders, and not because a leader is being elected
            raise NobodyKeepsLetters(subject) from exc
        raise
    if stored and await _settled(jetstream, letter.id, began):
        with suppress(NotFound):
            await jetstream.delete_message(*stored)
        stored = None
    return Captured(letter.id, subject, new=stored is not None)


async def _settled(jetstream: JetStream, letter_id: str, began: datetime | None) -> bool:
    """Whether the letter of an attempt that began then was replayed or discarded."""
    try:
        record = await jetstream.get_message(streams.AUDIT, last_of=streams.settled_subject(letter_id))
    except NotFound:
        return False
    return began is None or record.time is None or record.time >= began


async def _store(connection: CaptureConnection, subject: str, letter: DeadLetter) -> tuple[str, int] | None:
    """Publish, and return stream and sequence; None when a letter is there."""
    # No message id: inside the duplicate window it would swallow a new letter of a message that failed again after its
    # first letter was removed.
    headers = {**_fitting(letter, connection), EXPECT_LAST: "0"}
    answer = await connection.request(subject, letter.body, headers)
    try:
        told = json.loads(answer.data)
        if error := told.get("error"):
            if error["err_code"] in WRONG_LAST_SEQUENCE - {WRITE_UNDER_WAY}:
                return None
            raise api_error(f"dead letter {subject!r}", error)
        return told["stream"], told["seq"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ProtocolError(f"the server sent an invalid answer to a publish: {answer.data[:200]!r}") from exc


def _fitting(letter: DeadLetter, connection: CaptureConnection) -> dict[str, list[str] | str]:
    """The letter's headers, without the stack when it would make the message larger than the server takes."""
    headers = letter.message_headers()
    limit = getattr(getattr(connection, "info", None), "max_payload", None)
    size = len(header_block.encode(headers)) + len(letter.body) + RESERVE
    if limit and size > limit:
        headers = replace(letter, failure=replace(letter.failure, stack="")).message_headers()
    return dict(headers)


def _may_repeat(error: BaseException) -> bool:
    busy = isinstance(error, ApiError) and error.err_code == WRITE_UNDER_WAY
    return busy or retry.is_retryable(error)


class _Requester:
    """A connection in the shape that the JetStream API asks for."""

    def __init__(self, connection: CaptureConnection) -> None:
        self._connection = connection

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        return (await self._connection.request(subject, payload, timeout=timeout)).data


async def let_go(
    connection: CaptureConnection, stream: str, consumer: str, sequence: int, timeout: float = 5.0
) -> None:
    """Acknowledge a message for a consumer that has given up on it: only then may WorkQueue and Interest remove it.

    After its last delivery a message is no longer pending, and the server keeps it all the same, as something this
    consumer never acknowledged. An acknowledgement that names the sequence ends that, for this consumer alone: other
    consumers of an Interest stream still get the message. Doing it twice is harmless.
    """
    await connection.request(ack_subject(consumer_prefix(stream, consumer), 1, sequence, 0), ACK, timeout=timeout)
