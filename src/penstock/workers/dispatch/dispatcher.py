"""Runs handlers: partitions concurrently, each in order, without a task for every message.

A few runners take turns at the lanes that have work. While handlers do not suspend, one runner handles everything that
arrived; another starts only when a handler suspends. The caller decides how messages are answered: see
`MessageAnswers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.consume import verdicts
from penstock.consume.failures import FailureLog
from penstock.consume.handlers import CANCEL_SECONDS, FAILURES, AsyncHandler, cancel, failure_of, in_time
from penstock.consume.messages import Message, MessageContext
from penstock.consume.metrics import WorkerMetrics
from penstock.consume.verdicts import GiveUp, Retries
from penstock.workers.dispatch.lanes import NEGLIGIBLE_SECONDS, Arrival, Finished, Lane, Unburied, relieve

log = logging.getLogger(__name__)


CONCURRENCY = 256
MAX_BUFFERED_ACKS = 256
"""Acknowledgements are written at once when this many are buffered."""


class MessageAnswers(Protocol):
    """Reports the outcome of a message; implemented by the worker, and by the test kit."""

    acks: list[str]
    """Reply subjects of finished messages; the caller that adds the first of several calls `acked`."""

    def acked(self) -> None:
        """Acknowledgements were buffered: send them soon."""
        ...

    def settled(self) -> None:
        """No message can be handled now: a good moment to send acknowledgements."""
        ...

    def again(self, message: Message, delay: float) -> float:
        """An attempt failed, and the next one is due after `delay` seconds. Returns the seconds to wait for it."""
        ...

    async def on_trial(self, partition_id: str, sequence: int) -> None:
        """Record that a message which may kill this process is about to be handled."""
        ...

    async def bury(self, message: Message, context: MessageContext, letter: GiveUp, error: BaseException) -> None:
        """Store the message as a dead letter; durable when it returns. Raises when it cannot be stored."""
        ...


class Ownership(Protocol):
    """Says which partitions a worker may handle."""

    def token(self, partition_id: str) -> int | None:
        """Return the fencing token of a partition that this worker owns now.

        None: not owned now. Its messages then wait, neither handled nor acknowledged. A token is larger than every
        token issued for the partition before. Called for every message: answer from memory.
        """
        ...


class OwnsAll:
    """The ownership of a worker without a group: it owns everything assigned to it."""

    def token(self, partition_id: str) -> int | None:
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlingOptions:
    """How handlers are called."""

    worker_id: str = "worker"
    retries: Retries = field(default_factory=Retries)
    concurrency: int = CONCURRENCY
    """Maximum number of partitions whose handlers run at the same time."""
    timeout: float | None = None
    """Seconds a handler may take; then it is cancelled, and that counts as a failure."""
    batch: int = 0
    """0: the handler takes one message. Otherwise it takes a list of at most this many messages."""
    keeps_letters: bool = True
    """Whether there is a dead-letter subject. Without one, a message that would be given up is retried."""


NEW = Arrival.NEW
LATENCIES_PER_REPORT = 1000
"""Minimum number of handler durations that are collected before they are reported."""
TRIAL_SECONDS = 5.0
"""Seconds after which a message that may kill this process no longer keeps others from being handled."""
LONG_RUNNING_SECONDS = 30.0
"""Seconds after which a running handler is reported."""
MAX_SHOWN_PARTITIONS = 5
"""Maximum number of partitions that are named; the others are counted."""
READ_AHEAD = 64
"""Maximum number of messages of a lane's backlog that wait to be handled."""
READ_AHEAD_BYTES = 2**20
"""The same in bytes, approximately: a worker may read the backlogs of all its partitions at the same time."""
MESSAGES_PER_TURN = 64
"""Messages of one lane that a runner handles before it turns to the next lane."""


def running(lanes: Iterable[Lane]) -> list[tuple[str, float]]:
    """Return the partitions whose handlers run now, and for how many seconds."""
    now = time.perf_counter()
    return [(lane.id, now - started) for lane in list(lanes) if (started := lane.started) is not None]


class LongRunning:
    """Finds handlers that run for long, and logs each once."""

    def __init__(self, long: float = LONG_RUNNING_SECONDS) -> None:
        self.now: dict[str, float] = {}
        """Seconds by partition."""
        self._long = long

    def look(self, lanes: Collection[Lane]) -> None:
        """Update the list of long-running handlers."""
        found = {id_: seconds for id_, seconds in running(lanes) if seconds >= self._long}
        for id_ in found.keys() - self.now.keys():
            log.warning("the handler of %s has been running for %.0f s; nothing else of it is handled", id_, found[id_])
        for id_ in self.now.keys() - found.keys():
            log.info("the handler of %s has ended", id_)
        self.now = found

    def told(self) -> list[str]:
        """Return a line about long-running handlers, if there are any."""
        if not self.now:
            return []
        longest = sorted(self.now.items(), key=lambda item: -item[1])
        named = ", ".join(f"{id_} for {seconds:.0f} s" for id_, seconds in longest[:MAX_SHOWN_PARTITIONS])
        more = f" and {len(longest) - MAX_SHOWN_PARTITIONS} more" if len(longest) > MAX_SHOWN_PARTITIONS else ""
        return [f"handlers that have not ended: {named}{more}"]


class Dispatcher:
    """Runs the handlers of a worker's lanes. For one event loop."""

    def __init__(
        self,
        handler: AsyncHandler,
        answers: MessageAnswers,
        ownership: Ownership,
        options: HandlingOptions,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.lanes: dict[str, Lane] = {}
        self.finished = Finished()
        self.handled = 0
        """Messages that are finished, successfully or as dead letters."""
        self.held = 0
        """Messages held in memory with their data, in all lanes."""
        self.some_parked = False
        """Whether lanes may have parked messages."""
        self.paused = False
        """Whether starting handlers is paused."""
        self.options = options
        self._handler = handler
        self._call_any: AsyncHandler = handler if options.timeout is None else self._in_time
        """Calls the handler, with a message or with a list of them."""
        self._call: AsyncHandler = self._alone_in_batch if options.batch else self._call_any
        """Calls the handler with one message."""
        self._answers = answers
        self._ownership = ownership
        self._metrics = metrics or WorkerMetrics(options.worker_id, "")
        self._failures = FailureLog(options.retries)
        self._ready: deque[Lane] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._runners: set[asyncio.Task[None]] = set()
        self._waiting_for_owner: set[Lane] = set()
        self._latencies: deque[float] = deque()
        self._called = False
        """Whether a runner was started, and it is not known yet whether one is enough."""
        self._came_to_rest = asyncio.Event()
        """Set when a runner leaves a lane while `quiet` waits for that."""
        self._resting = 0
        """Number of callers that wait for lanes to become idle."""
        self._worker_id = options.worker_id
        self._trial = asyncio.Lock()
        """Held while a message is handled that may kill this process."""
        self._trials: list[tuple[str, int]] = []
        """Partitions and sequences of the messages on trial; more than one when some take long."""
        self._retries: dict[str, asyncio.TimerHandle] = {}
        """By lane: the timer that retries its lowest message."""

    # -- incoming messages -----------------------------------------------------------------------------------------

    def deliver(self, lane: Lane, message: Message) -> None:
        """Add a message to its lane; a runner handles it when its turn comes."""
        arrival = lane.offer(message, self.finished)
        if arrival is NEW:
            self.held += 1
        elif arrival is Arrival.DONE:
            self._metrics.repeated()
            self._ack([message.reply])
            return
        elif arrival is Arrival.BACK:
            self.held += 1
        if not lane.busy:
            self.wake(lane)

    def read(self, lane: Lane, message: Message) -> None:
        """Add the next message of a lane's backlog, read from the stream."""
        self.held += lane.read(message, self.finished)
        if not lane.busy:
            self.wake(lane)

    async def has_room(self, lane: Lane, size: int) -> None:
        """Return when more of a lane's backlog may be read; `size`: approximate bytes of a message."""
        ahead = max(1, min(READ_AHEAD, READ_AHEAD_BYTES // max(size, 1)))
        while len(lane.backlog) >= ahead and lane.rested:
            lane.rested.clear()
            await lane.rested.wait()

    def end_reading(self, lane: Lane) -> None:
        """Note that all of a lane's backlog was read."""
        lane.end_reading()
        self.wake(lane)

    def bring_back(self, lane: Lane, wanted: Iterable[int], found: Iterable[Message]) -> int:
        """Restore parked messages that were read from the stream; returns how many of `wanted` are no longer stored."""
        self.held += sum(lane.bring_back(message) for message in found)
        gone = [sequence for sequence in wanted if sequence in lane.parked]
        self._ack(self._let_go(lane, gone))
        self.wake(lane)
        return len(gone)

    def wake(self, lane: Lane) -> None:
        """Schedule the lane: it may have work."""
        if self.paused or lane.busy or lane.next() is None:
            return
        lane.busy = True
        self._ready.append(lane)
        if not self._called:
            self._call_runner()

    def pause(self, paused: bool) -> None:
        """Stop starting handlers, or resume."""
        self.paused = paused
        for lane in () if paused else self.lanes.values():
            self.wake(lane)

    def owners_changed(self) -> None:
        """Check the lanes again that this worker did not own."""
        waiting, self._waiting_for_owner = self._waiting_for_owner, set()
        for lane in waiting:
            self.wake(lane)

    def _call_runner(self) -> None:
        """Start one more runner, and another if its handler suspends."""
        while self._idle and self._idle[0].done():
            self._idle.popleft()
        if self._idle:
            self._idle.popleft().set_result(None)
        elif len(self._runners) < self.options.concurrency:
            runner = asyncio.create_task(self._run(), name="handlers")
            self._runners.add(runner)
            runner.add_done_callback(self._ended)
        else:
            return  # the runner that is ready first continues with the remaining lanes
        self._called = True
        asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        """Runs right after the runner that was started: lanes still ready then wait behind a handler that suspended."""
        self._called = False
        if self._ready:
            self._call_runner()

    def _ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()):
            log.error("a runner of handlers ended by itself", exc_info=error)

    # -- handling --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        runner = asyncio.current_task()
        while True:
            await self._work(runner)
            self.finished.turn()
            if len(self._latencies) >= LATENCIES_PER_REPORT:
                self.report()
            self._answers.settled()
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    async def _work(self, runner: asyncio.Task[Any] | None) -> None:
        """Handle the messages of the lanes until none is ready.

        Each lane has its turn until it is empty or blocked, or its turn is over. Every message passes through here: the
        common case is inlined, the others are separate methods.
        """
        token_of, call, clock, made = self._ownership.token, self._call, time.perf_counter, tuple.__new__
        ready, worker_id = self._ready, self._worker_id
        turn = MESSAGES_PER_TURN
        while ready:
            lane = ready.popleft()
            lane.runner = runner
            lane_id, items, order, limit = lane.id, lane.items, lane.order, lane.limit
            try:
                if self.options.batch:  # a batch, or a single message
                    turn = 0 if await self._handle_batch(lane) else 1
                for _ in range(turn):
                    if lane.held or lane.waits or not order or (sequence := order[0]) > limit or self.paused:
                        break  # this and the next line are `lane.next()`, in place
                    if (message := items[sequence]) is None:
                        break
                    if (token := token_of(lane_id)) is None:
                        self._waiting_for_owner.add(lane)
                        break
                    if lane.unsure and self._was_done(lane, sequence, token):
                        self._finish(lane, sequence)
                        continue
                    attempt = lane.attempt(sequence) if lane.tries else 1
                    about = (message.subject, lane_id, worker_id, message.received_at, attempt, token)
                    context = made(MessageContext, about)  # the same as `MessageContext(…)`, in a third of the time
                    if attempt > 1 and await self._given_up(lane, message, context):
                        continue
                    lane.started = started = clock()
                    error: BaseException | None = None
                    try:
                        await (self._on_trial if lane.suspect else call)(message, context)
                    except FAILURES as exc:  # counted, and reported to the server
                        error = failure_of(exc)
                    seconds = clock() - started
                    lane.started = None
                    if token_of(lane_id) != token:
                        # Another worker may own the partition now, and will handle the message: our acknowledgement
                        # could remove it. Or only our lease is uncertain, and the message keeps its place until we
                        # know.
                        lane.unsure = (sequence, token) if error is None else None
                        self._waiting_for_owner.add(lane)
                        break
                    if error is None:
                        if seconds > NEGLIGIBLE_SECONDS or lane.latency:
                            lane.took(seconds)
                        self._finish(lane, sequence)
                        self._latencies.append(seconds)
                    else:
                        await self._failed(lane, message, context, error)
            finally:
                self._at_rest(lane)
            if items and lane not in self._waiting_for_owner:
                self.wake(lane)

    async def _handle_batch(self, lane: Lane) -> bool:
        """Handle the next messages of a lane in one call; returns whether nothing is left to do for them now.

        False: the next message must be handled alone, as after a batch that failed, or cannot be handled now. A failure
        of a batch is no attempt of a message: each is then handled alone.
        """
        messages = [] if self.paused else lane.batch(self.options.batch)
        token = self._ownership.token(lane.id)
        if len(messages) < 2 or token is None:
            return False
        first = messages[0]
        context = MessageContext(first.subject, lane.id, self._worker_id, first.received_at, 1, token)
        lane.started = started = time.perf_counter()
        try:
            errors = _by_message(await self._call_any(messages, context), messages)
        except FAILURES as exc:
            errors = [failure_of(exc)] * len(messages)
        lane.started = None
        if self._ownership.token(lane.id) != token:
            self._waiting_for_owner.add(lane)
            return False
        seconds = (time.perf_counter() - started) / len(messages)
        lane.took(seconds)
        for message, error in zip(messages, errors, strict=True):
            if error is None:
                self._finish(lane, message.sequence)
                self._latencies.append(seconds)
            else:
                lane.alone_through = message.sequence
        return True

    async def _alone_in_batch(self, message: Message, context: MessageContext) -> None:
        if error := _by_message(await self._call_any([message], context), [message])[0]:
            raise error

    def _at_rest(self, lane: Lane) -> None:
        lane.busy, lane.started, lane.runner = False, None, None
        if lane.rested:
            lane.rested.set()
        if self._resting:
            self._came_to_rest.set()

    def _was_done(self, lane: Lane, sequence: int, token: int) -> bool:
        """Whether we handled the message under this same token: then no other worker owned the partition meanwhile."""
        unsure, lane.unsure = lane.unsure, None
        return unsure == (sequence, token)

    def report(self) -> None:
        """Report the handler durations since the last call."""
        latencies: list[float] = []
        with suppress(IndexError):  # until it is empty; the thread that serves metrics may take some too
            while True:
                latencies.append(self._latencies.popleft())
        self._metrics.handled(latencies)

    async def _given_up(self, lane: Lane, message: Message, context: MessageContext) -> bool:
        """Give up a message that was delivered too often, or given up before; whether it must not be handled now."""
        unburied, lane.unburied = lane.unburied, None
        if unburied and (unburied.sequence, unburied.token) == (message.sequence, context.fencing_token):
            before = context._replace(delivery_count=unburied.attempt)
            await self._give_up(lane, message, before, unburied.letter, unburied.error)
            return True
        letter = verdicts.before_try(context.delivery_count, self.options.retries)
        if letter is None:
            return False
        # If the dead letter cannot be stored the message is handled again: it may only have been unlucky, and must not
        # block its lane forever.
        if not await self._kept(lane, message, context, letter, RuntimeError(letter.reason)):
            return False
        self._finish(lane, message.sequence)
        return True

    async def _in_time(self, message: Any, context: MessageContext) -> Any:
        async with in_time(self.options.timeout):
            return await self._handler(message, context)

    async def _on_trial(self, message: Message, context: MessageContext) -> None:
        """Handle a message that may kill this process, recorded before: alone, until it has taken long."""
        trial = context.partition_id, message.sequence
        await self._trial.acquire()
        with ExitStack() as alone:
            alone.callback(self._trial.release)
            alone.callback(asyncio.get_running_loop().call_later(TRIAL_SECONDS, alone.close).cancel)
            self._trials.append(trial)
            try:
                await self._answers.on_trial(*trial)
                await self._call(message, context)
            finally:
                self._trials.remove(trial)
                await self._answers.on_trial(*(self._trials[-1] if self._trials else ("", 0)))
                if lane := self.lanes.get(context.partition_id):
                    lane.suspect = False

    def _finish(self, lane: Lane, sequence: int) -> None:
        self.handled += 1
        lane.handled += 1
        self.finished.new.add(sequence)
        if reply := lane.finish(sequence):
            self.held -= 1
            acks = self._answers.acks
            acks.append(reply)
            if not 1 < len(acks) < MAX_BUFFERED_ACKS:
                self._answers.acked()

    def _ack(self, replies: list[str]) -> None:
        self._answers.acks.extend(replies)
        self._answers.acked()

    def _let_go(self, lane: Lane, sequences: Iterable[int]) -> list[str]:
        before = lane.holding
        replies = lane.forget(sequences)
        self.held += lane.holding - before
        return replies

    async def _failed(self, lane: Lane, message: Message, context: MessageContext, error: BaseException) -> None:
        self._metrics.failed(error)
        verdict = verdicts.after_failure(error, context.delivery_count, self.options.retries)
        if isinstance(verdict, GiveUp):
            await self._give_up(lane, message, context, verdict, error)
        else:
            lane.tries[message.sequence] = context.delivery_count
            self._failures.again(message, context, error, verdict.after)
            self._wait(lane, message, verdict.after)

    async def _give_up(
        self, lane: Lane, message: Message, context: MessageContext, letter: GiveUp, error: BaseException
    ) -> None:
        """Store a dead letter. When that fails the message keeps its place, and storing it is retried without calling
        the handler; without a dead-letter subject its last attempt is repeated."""
        if await self._kept(lane, message, context, letter, error):
            self._finish(lane, message.sequence)
            return
        attempt = context.delivery_count
        after = self.options.retries.delay(attempt)
        if self.options.keeps_letters:
            lane.tries[message.sequence] = attempt
            lane.unburied = Unburied(message.sequence, context.fencing_token, attempt, letter, error)
        else:
            self._failures.again(message, context, error, after)
        self._wait(lane, message, after)

    def _wait(self, lane: Lane, message: Message, seconds: float) -> None:
        lane.waits = True
        after = self._answers.again(message, seconds)
        self._retries[lane.id] = asyncio.get_running_loop().call_later(after, self._try_again, lane, message.sequence)

    def _try_again(self, lane: Lane, sequence: int) -> None:
        self._retries.pop(lane.id, None)
        if lane.order and lane.order[0] <= sequence:  # otherwise it is gone; a lower one that arrived meanwhile is next
            lane.waits = False
            self.wake(lane)

    async def _kept(
        self, lane: Lane, message: Message, context: MessageContext, letter: GiveUp, error: BaseException
    ) -> bool:
        try:
            await self._answers.bury(message, context, letter, error)
        except Exception as exc:  # noqa: BLE001 -- logged and counted; the message is not lost: it is retried
            log.error("%s #%d could not be kept as a dead letter: %s", lane.id, message.sequence, exc)
            self._metrics.failed(exc)
            return False
        self._metrics.dead()
        self._failures.buried(message, letter, error)
        return True

    # -- adding and removing lanes ---------------------------------------------------------------------------------

    async def quiet(self, lanes: Iterable[Lane]) -> None:
        """Return when no handler of these lanes is running. The lanes must be held, or this may never return."""
        chosen = list(lanes)
        self._resting += 1
        try:
            while any(lane.busy for lane in chosen):
                self._came_to_rest.clear()
                await self._came_to_rest.wait()
        finally:
            self._resting -= 1

    async def abandon(self, lanes: Iterable[Lane]) -> None:
        """Cancel the running handlers of these lanes. Their messages are not done; one that does not end is left."""
        stuck = [lane for lane in lanes if lane.busy]
        for lane in stuck:
            if lane.runner:  # otherwise it waits behind the handlers of others
                log.warning("%s: its handler has not ended in time, and is cancelled", lane.id)
                lane.runner.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.quiet(stuck)

    def remove(self, lane: Lane) -> list[str]:
        """Remove a lane that we no longer own; returns the reply subjects of its unanswered messages."""
        lane.held = True
        self._waiting_for_owner.discard(lane)
        self.lanes.pop(lane.id, None)
        if timer := self._retries.pop(lane.id, None):
            timer.cancel()
        return self._let_go(lane, list(lane.items))

    def forget(self, lane: Lane) -> None:
        """Drop everything that waits in the lane: it will be delivered again."""
        self._let_go(lane, list(lane.items))

    def relieve(self, limit: int) -> None:
        """Free memory: slow lanes that hold more than `limit` messages park some."""
        parked = relieve(self.lanes.values(), limit, time.perf_counter())
        self.held -= parked
        self.some_parked = self.some_parked or parked > 0

    @property
    def parked(self) -> int:
        """Number of parked messages in all lanes."""
        count = sum(len(lane.parked) for lane in self.lanes.values()) if self.some_parked else 0
        self.some_parked = count > 0
        return count

    def advance(self, lane: Lane, floor: int) -> None:
        """Acknowledge the lane's messages up to `floor`: they were done by another worker."""
        before = lane.holding
        self._ack(lane.advance(floor))
        self.held += lane.holding - before

    async def close(self) -> None:
        """Stop. Running handlers are cancelled; their messages are delivered again later."""
        for timer in self._retries.values():
            timer.cancel()
        await cancel(list(self._runners))
        self._failures.close()


def _by_message(answer: Any, messages: list[Message]) -> list[BaseException | None]:
    """Return a batch handler's result for each message: no answer at all means that all are done."""
    if answer is None:
        return [None] * len(messages)
    errors = list(answer)
    if len(errors) != len(messages) or not all(e is None or isinstance(e, BaseException) for e in errors):
        raise TypeError(
            f"a batch handler must return None, or a list of {len(messages)} items, each None or an exception; "
            f"this one returned {answer!r:.100}"
        )
    return errors
