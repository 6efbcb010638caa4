"""Testing a handler without a broker: the same lanes, retries and dead letters as in a worker, and no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.consume.handlers import Handler, HandlerRunner
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import GiveUp, Retries
from penstock.wire import headers as header_block
from penstock.wire.headers import Headers
from penstock.workers.dispatch.dispatcher import Dispatcher, HandlingOptions, Ownership, OwnsAll
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.partitions import SubjectPattern


@dataclass(frozen=True, slots=True)
class Given:
    """A message to be handled."""

    subject: str
    data: bytes
    headers: Headers | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A message that was given up."""

    message: Message
    reason: str
    error: BaseException


@dataclass(slots=True)
class HandlerRun:
    """What became of the messages, in the order it happened."""

    tries: list[tuple[Message, MessageContext]] = field(default_factory=list)
    """Every call of the handler."""
    done: list[Message] = field(default_factory=list)
    """Messages that a worker would have acknowledged."""
    retried: list[tuple[Message, float]] = field(default_factory=list)
    """Failed tries, and the seconds that a worker would have waited before the next."""
    dead: list[Dead] = field(default_factory=list)


async def run_handler(
    handler: Handler,
    messages: Iterable[Given | tuple[str, bytes]],
    *,
    pattern: str | None = None,
    retries: Retries | None = None,
    handler_timeout: float | None = None,
    ownership: Ownership | None = None,
    worker_id: str = "test",
) -> HandlerRun:
    """Handle the messages as a worker would, and return when each is done or given up.

    `pattern` finds the partition in a subject, such as `dc.{tool}.completion`; without one each subject is a partition.
    Messages get sequences from 1 on. What fails is delivered again at once: delays are told, not waited for.
    """
    run = HandlerRun()
    answers = _Answers(run)
    runner = HandlerRunner(handler)

    async def call(message: Message, context: MessageContext) -> None:
        run.tries.append((message, context))
        await runner.call(message, context)

    options = HandlingOptions(worker_id=worker_id, retries=retries or Retries(), timeout=handler_timeout)
    dispatcher = answers.dispatcher = Dispatcher(call, answers, ownership or OwnsAll(), options)
    finder = SubjectPattern(pattern) if pattern else None
    for sequence, given in enumerate(messages, 1):
        answers.deliver(_message(given if isinstance(given, Given) else Given(*given), sequence), finder)
    try:
        if answers.open:
            await answers.finished.wait()
    finally:
        await dispatcher.close()
    return run


class _Answers:
    """A server in memory: redelivers what is not acknowledged, and keeps dead letters."""

    def __init__(self, run: HandlerRun) -> None:
        self.acks: list[str] = []
        self.dispatcher: Dispatcher | None = None
        self._run = run
        self.open: dict[str, tuple[Lane, Message]] = {}
        """Messages that are not done, by their reply."""
        self.finished = asyncio.Event()

    def deliver(self, message: Message, finder: SubjectPattern | None) -> None:
        assert self.dispatcher
        id_ = finder.partition_id(message.subject) if finder else message.subject
        if id_ is None:
            raise ValueError(f"subject {message.subject!r} has no partition: it is not of the pattern {finder}")
        lane = self.dispatcher.lanes.setdefault(id_, Lane(id_))
        self._take(lane, message)

    def _take(self, lane: Lane, message: Message) -> None:
        assert self.dispatcher
        self.open[message.reply] = (lane, message)
        self.dispatcher.deliver(lane, message)

    def acked(self) -> None:
        for reply in self.acks:
            _, message = self.open.pop(reply)
            if not any(dead.message.sequence == message.sequence for dead in self._run.dead):
                self._run.done.append(message)
        self.acks.clear()
        if not self.open:
            self.finished.set()

    def settled(self) -> None:
        self.acked()

    def again(self, message: Message, delay: float) -> float:
        self._run.retried.append((message, delay))
        return 0.0

    async def on_trial(self, partition_id: str, sequence: int) -> None: ...

    async def bury(self, message: Message, context: MessageContext, letter: GiveUp, error: BaseException) -> None:
        self._run.dead.append(Dead(message, letter.reason, error))


def _message(given: Given, sequence: int) -> Message:
    now = datetime.now(UTC)
    return Message(
        given.subject,
        given.data,
        sequence,
        1,
        f"{sequence}.1",
        now,
        header_block.encode(given.headers),
        sequence,
        int(now.timestamp() * 1_000_000) * 1000,
    )
