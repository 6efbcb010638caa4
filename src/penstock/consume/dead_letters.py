"""Stores a message that is given up as a dead letter."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from penstock.consume.messages import Message
from penstock.consume.verdicts import GiveUp
from penstock.deadletter import letters
from penstock.deadletter.capture import capture
from penstock.wire import aio


class GivenUpBy(NamedTuple):
    """The consumer or group that gives up a message."""

    stream: str
    name: str
    """Name of the consumer or the group."""
    worker: str | None = None


async def keep(
    connection: aio.Connection,
    dlq: str,
    reader: GivenUpBy,
    message: Message,
    attempts: int,
    letter: GiveUp,
    error: BaseException,
) -> None:
    """Store a message that is given up as a dead letter; durable when it returns."""
    made = letter_of(reader, message, attempts, letter, error)
    await capture(connection, made, dlq, attempted=message.received_at, domain=connection.settings.domain)


def letter_of(
    reader: GivenUpBy, message: Message, attempts: int, letter: GiveUp, error: BaseException
) -> letters.DeadLetter:
    """Build the dead letter of a message that is given up."""
    failure = letters.Failure.of(error)
    return letters.of_message(
        subject=message.subject,
        stream=reader.stream,
        sequence=message.sequence,
        stored=message.timestamp,
        consumer=reader.name,
        body=message.data,
        headers=message.headers,
        deliveries=attempts,
        failure=letters.Failure(failure.type, letter.reason, failure.stack),
        failed_at=datetime.now(UTC),
        worker=reader.worker,
    )
