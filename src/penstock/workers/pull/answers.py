"""What a worker tells the server about each message: done, or kept as a dead letter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.consume.dead_letters import Reader, keep
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import DeadLetter
from penstock.errors import ConfigError
from penstock.wire import aio
from penstock.workers.pull.session import Session


class NoDeadLetters(ConfigError):
    """A message should be given up, and nobody said where to."""


class SessionAnswers:
    """Answers over the session of the moment; what is done without one is acknowledged by the next."""

    def __init__(
        self,
        connection: aio.Connection,
        stream: str,
        reader: str,
        dlq: str | None,
        on_trial: Callable[[str, int], Awaitable[None]],
        worker: str | None = None,
    ) -> None:
        """`reader` names the whole group on dead letters: their replay is for whichever worker has the partition.

        `worker` is one that belongs to no group: it gives up for itself alone, whoever else has that name.
        """
        self.session: Session | None = None
        self._on_trial = on_trial
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

    def again(self, message: Message, delay: float) -> float:
        return delay

    async def on_trial(self, partition_id: str, sequence: int) -> None:
        await self._on_trial(partition_id, sequence)

    async def bury(self, message: Message, context: MessageContext, letter: DeadLetter, error: BaseException) -> None:
        """Store the message with its reason below the subject for dead letters."""
        if self._dlq is None:
            raise NoDeadLetters(f"{letter.reason}; name a subject for dead letters (dlq) to get past such a message")
        reader = Reader(self._stream, self._reader, self._worker)
        await keep(self._connection, self._dlq, reader, message, context.delivery_count, letter, error)
