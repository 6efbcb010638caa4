"""What handlers are called with, and what becomes known of them: options, answers to the server, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import DeadLetter, Retries

CONCURRENCY = 256
ACKS = 256
"""So many acknowledgements do not wait for company."""


class Answers(Protocol):
    """How the outcome of a message is made known; implemented by the worker, and by the test kit."""

    acks: list[str]
    """Where to acknowledge messages that are done; whoever adds the first of several calls `acked`."""

    def acked(self) -> None:
        """There are acknowledgements: send them, soon."""
        ...

    def settled(self) -> None:
        """Everything that can be handled now has been: a good moment to send acknowledgements."""
        ...

    def again(self, message: Message, delay: float) -> float:
        """A try has ended badly, and the next one is due after `delay` seconds. Returns the seconds to wait for it."""
        ...

    async def on_trial(self, partition_id: str, sequence: int) -> None:
        """Write down that a message is about to be handled that may kill this process."""
        ...

    async def bury(self, message: Message, context: MessageContext, letter: DeadLetter, error: BaseException) -> None:
        """Keep the message as a dead letter; durable when it returns. Raises when it cannot be kept."""
        ...


class Watch(Protocol):
    """What is counted; implemented by `consume.metrics`."""

    def handled(self, latencies: list[float]) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def dead(self) -> None: ...
    def repeated(self) -> None: ...


class NoWatch:
    """Nobody counts."""

    def handled(self, latencies: list[float]) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def dead(self) -> None: ...
    def repeated(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlingOptions:
    """How handlers are called."""

    worker_id: str = "worker"
    retries: Retries = field(default_factory=Retries)
    concurrency: int = CONCURRENCY
    """Partitions whose handlers run at the same time, at most."""
    timeout: float | None = None
    """Seconds a handler may take; then it is cancelled, and that counts as a failure."""
    batch: int = 0
    """0: the handler takes a message. Else it takes a list of messages, so many at most."""
