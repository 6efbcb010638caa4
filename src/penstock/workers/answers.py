"""What a worker tells the server about each message: done, again later, or kept as a dead letter."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.deadletter import letters
from penstock.deadletter.capture import capture
from penstock.errors import ConfigError
from penstock.wire import aio
from penstock.workers import messages
from penstock.workers.messages import Message, MessageContext
from penstock.workers.session import Session
from penstock.workers.verdicts import DeadLetter


class NoDeadLetters(ConfigError):
    """A message should be given up, and nobody said where to."""


class SessionAnswers:
    """Answers over the session of the moment. Without one a nak is dropped: the message comes again by itself."""

    def __init__(
        self, connection: aio.Connection, stream: str, reader: str, dlq: str | None, worker: str | None = None
    ) -> None:
        """`reader` names the whole group on dead letters: their replay is for whichever worker has the partition.

        `worker` is one that belongs to no group: it gives up for itself alone, whoever else has that name.
        """
        self.session: Session | None = None
        self.acks: list[str] = []
        """What is done and not yet acknowledged; every session takes from here, so none of them is lost with one."""
        self._connection = connection
        self._stream = stream
        self._reader = reader
        self._dlq = dlq
        self._worker = worker

    def acked(self) -> None:
        if self.session:
            self.session.acked()

    def settled(self) -> None:
        if self.session:
            self.session.settled()

    def nak(self, reply: str, delay: float) -> None:
        if self.session and reply:
            self.session.write(messages.nak(reply, delay))

    async def bury(self, message: Message, context: MessageContext, letter: DeadLetter, error: BaseException) -> None:
        """Store the message with its reason below the subject for dead letters."""
        if self._dlq is None:
            raise NoDeadLetters(f"{letter.reason}; name a subject for dead letters (dlq) to get past such a message")
        failure = letters.Failure.of(error)
        made = letters.of_message(
            subject=message.subject,
            stream=self._stream,
            sequence=message.sequence,
            stored=message.timestamp,
            consumer=self._reader,
            body=message.data,
            headers=message.headers,
            deliveries=context.delivery_count,
            failure=letters.Failure(failure.type, letter.reason, failure.stack),
            failed_at=datetime.now(UTC),
            worker=self._worker,
        )
        settings = self._connection.settings
        await capture(self._connection, made, self._dlq, attempted=message.received_at, domain=settings.domain)
