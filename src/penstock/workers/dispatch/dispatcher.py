"""Runs handlers: partitions side by side, each in order, without a task for every message.

A few runners take turns at the lanes that have work. While a handler does not wait, one runner goes through everything
that came; only when one waits do others start. How messages are answered is the caller's: see `MessageAnswers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.consume import verdicts
from penstock.consume.failures import FailureLog
from penstock.consume.handlers import FAILURES, AsyncHandler, failure_of, in_time
from penstock.consume.messages import Message, MessageContext
from penstock.consume.metrics import WorkerMetrics
from penstock.consume.verdicts import GiveUp, Retries
from penstock.workers.dispatch.lanes import NEGLIGIBLE_SECONDS, Arrival, Finished, Lane, relieve

log = logging.getLogger(__name__)


CONCURRENCY = 256
MAX_BUFFERED_ACKS = 256
"""Acknowledgements are written at once when so many are buffered."""


class MessageAnswers(Protocol):
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

    async def bury(self, message: Message, context: MessageContext, letter: GiveUp, error: BaseException) -> None:
        """Keep the message as a dead letter; durable when it returns. Raises when it cannot be kept."""
        ...


class Ownership(Protocol):
    """What a worker is allowed to handle."""

    def token(self, partition_id: str) -> int | None:
        """The fencing token of a partition that this worker owns now.

        None: not owned now. Its messages are then neither handled nor acknowledged; they wait. A token is larger than
        every token that was given out for the partition before. Called for every message: answer from memory.
        """
        ...


class OwnsAll:
    """For a worker that is alone: everything assigned to it is its own."""

    def __init__(self, token: int = 1) -> None:
        self._token = token

    def token(self, partition_id: str) -> int | None:
        return self._token


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


NEW = Arrival.NEW
LATENCIES_PER_REPORT = 1000
"""Handler calls whose times are kept before they are counted, at least."""
CANCEL_SECONDS = 1.0
"""Seconds that a handler has to end once it is cancelled."""
LONG_RUNNING_SECONDS = 30.0
"""Seconds after which a handler that runs is told of."""
MAX_SHOWN_PARTITIONS = 5
"""Partitions that are named; of the others, the number."""
READ_AHEAD = 64
"""Messages of a lane's backlog that wait to be handled, at most."""
READ_AHEAD_BYTES = 2**20
"""The same in bytes, about: a worker may read the backlogs of all its partitions at the same time."""
MESSAGES_PER_TURN = 64
"""Messages of one lane that a runner handles before it turns to the next lane."""


def running(lanes: Iterable[Lane]) -> list[tuple[str, float]]:
    """The partitions whose handlers run now, and for how many seconds."""
    now = time.perf_counter()
    return [(lane.id, now - started) for lane in list(lanes) if (started := lane.started) is not None]


class LongRunning:
    """Handlers that run for long. Each is logged once."""

    def __init__(self, long: float = LONG_RUNNING_SECONDS) -> None:
        self.now: dict[str, float] = {}
        """Seconds by partition."""
        self._long = long

    def look(self, lanes: Collection[Lane]) -> None:
        """See who runs for long now."""
        found = {id_: seconds for id_, seconds in running(lanes) if seconds >= self._long}
        for id_ in found.keys() - self.now.keys():
            log.warning("the handler of %s has been running for %.0f s; nothing else of it is handled", id_, found[id_])
        for id_ in self.now.keys() - found.keys():
            log.info("the handler of %s has ended", id_)
        self.now = found

    def told(self) -> list[str]:
        """A line about them, if there are any."""
        if not self.now:
            return []
        longest = sorted(self.now.items(), key=lambda item: -item[1])
        named = ", ".join(f"{id_} for {seconds:.0f} s" for id_, seconds in longest[:MAX_SHOWN_PARTITIONS])
        more = f" and {len(longest) - MAX_SHOWN_PARTITIONS} more" if len(longest) > MAX_SHOWN_PARTITIONS else ""
        return [f"handlers that have not ended: {named}{more}"]


class Dispatcher:
    """The lanes of a worker, and who works at them. For one event loop."""

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
        """Messages that are finished, well or as dead letters."""
        self.held = 0
        """Messages here with their data, in all lanes."""
        self.some_parked = False
        """Whether lanes may have messages put aside."""
        self.paused = False
        """Whether no message is begun."""
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
        """Whether a runner was called, and it is not known yet whether one is enough."""
        self._came_to_rest = asyncio.Event()
        """Set when somebody leaves a lane, while somebody else waits for that."""
        self._resting = 0
        """How many wait for lanes to come to rest."""
        self._worker_id = options.worker_id
        self._handling: dict[str, asyncio.Task[Any] | None] = {}
        """By lane: the task that called its handler last."""
        self._trial = asyncio.Lock()
        """Held by whoever handles a message that may kill this process."""
        self._retries: dict[str, asyncio.TimerHandle] = {}
        """By lane: when its lowest message is tried again."""

    # -- work comes ------------------------------------------------------------------------------------------------

    def deliver(self, lane: Lane, message: Message) -> None:
        """Take a message to its lane; somebody will handle it when its turn comes."""
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
        """Take the next message of a lane's backlog, read from the stream."""
        self.held += lane.read(message, self.finished)
        if not lane.busy:
            self.wake(lane)

    async def has_room(self, lane: Lane, size: int) -> None:
        """Return when more of a lane's backlog may be read, whose messages have about that many bytes."""
        ahead = max(1, min(READ_AHEAD, READ_AHEAD_BYTES // max(size, 1)))
        while len(lane.backlog) >= ahead and lane.rested:
            lane.rested.clear()
            await lane.rested.wait()

    def end_reading(self, lane: Lane) -> None:
        """All of a lane's backlog was read."""
        lane.end_reading()
        self.wake(lane)

    def bring_back(self, lane: Lane, wanted: Iterable[int], found: Iterable[Message]) -> int:
        """Messages that were put aside were read from the stream; says how many of those wanted are gone from it."""
        self.held += sum(lane.bring_back(message) for message in found)
        gone = [sequence for sequence in wanted if sequence in lane.parked]
        self._ack(self._let_go(lane, gone))
        self.wake(lane)
        return len(gone)

    def wake(self, lane: Lane) -> None:
        """Have somebody look at the lane: it may have work."""
        if self.paused or lane.busy or lane.next() is None:
            return
        lane.busy = True
        self._ready.append(lane)
        if not self._called:
            self._call_runner()

    def pause(self, paused: bool) -> None:
        """Begin nothing more, or go on."""
        self.paused = paused
        for lane in () if paused else self.lanes.values():
            self.wake(lane)

    def owners_changed(self) -> None:
        """Look again at the lanes that were not ours."""
        waiting, self._waiting_for_owner = self._waiting_for_owner, set()
        for lane in waiting:
            self.wake(lane)

    def _call_runner(self) -> None:
        """Have one more runner look for work, and another if a handler of that one has to wait."""
        while self._idle and self._idle[0].done():
            self._idle.popleft()
        if self._idle:
            self._idle.popleft().set_result(None)
        elif len(self._runners) < self.options.concurrency:
            runner = asyncio.create_task(self._run(), name="handlers")
            self._runners.add(runner)
            runner.add_done_callback(self._ended)
        else:
            return  # whoever is ready first goes on with what there is
        self._called = True
        asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        """Comes right behind the runner that was called: what is still there then waits for a handler that waits."""
        self._called = False
        if self._ready:
            self._call_runner()

    def _ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()):
            log.error("a runner of handlers ended by itself", exc_info=error)

    # -- work is done ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._work()
            self.finished.turn()
            if len(self._latencies) >= LATENCIES_PER_REPORT:
                self.report()
            self._answers.settled()
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    async def _work(self) -> None:
        """Handle what the lanes have, until none is ready.

        Each has its turn until it is empty or blocked, or its turn is over. Every message comes through here: what is
        usual is done in place, what is not elsewhere.
        """
        token_of, call, clock, made = self._ownership.token, self._call, time.perf_counter, tuple.__new__
        ready, worker_id, handling, runner = self._ready, self._worker_id, self._handling, asyncio.current_task()
        turn = MESSAGES_PER_TURN
        while ready:
            lane = ready.popleft()
            lane_id, items, order, limit = lane.id, lane.items, lane.order, lane.limit
            try:
                if self.options.batch:  # a batch, or one message by itself
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
                    context = made(MessageContext, about)  # what `MessageContext(…)` comes to, in a third of the time
                    if attempt > 1 and await self._given_up(lane, message, context):
                        continue
                    lane.started = started = clock()
                    handling[lane_id] = runner
                    error: BaseException | None = None
                    try:
                        await (self._on_trial if lane.suspect else call)(message, context)
                    except FAILURES as exc:  # counted, and answered to the server
                        error = failure_of(exc)
                    seconds = clock() - started
                    lane.started = None
                    if token_of(lane_id) != token:
                        # Somebody else may have it now, and will handle the message: our answer could remove it. Or
                        # only our lease is in doubt, and the message keeps its place until we know.
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
        """Handle the next messages of a lane in one call; whether that was all that could be done with them.

        False: the next message has to be handled by itself, as after a batch that failed, or cannot be handled now.
        What fails in a batch is no try of a message yet: each is then handled by itself.
        """
        messages = [] if self.paused else lane.batch(self.options.batch)
        token = self._ownership.token(lane.id)
        if len(messages) < 2 or token is None:
            return False
        first = messages[0]
        context = MessageContext(first.subject, lane.id, self._worker_id, first.received_at, 1, token)
        lane.started = started = time.perf_counter()
        self._handling[lane.id] = asyncio.current_task()
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
        lane.busy, lane.started = False, None
        if lane.rested:
            lane.rested.set()
        if self._resting:
            self._came_to_rest.set()

    def _was_done(self, lane: Lane, sequence: int, token: int) -> bool:
        """Whether we handled the message under this very token: then nobody else had the partition meanwhile."""
        unsure, lane.unsure = lane.unsure, None
        return unsure == (sequence, token)

    def report(self) -> None:
        """Tell how long handlers took since the last time."""
        latencies: list[float] = []
        with suppress(IndexError):  # until there are no more; the thread that serves metrics may take some, too
            while True:
                latencies.append(self._latencies.popleft())
        self._metrics.handled(latencies)

    async def _given_up(self, lane: Lane, message: Message, context: MessageContext) -> bool:
        """Whether the message was delivered too often to be tried once more."""
        letter = verdicts.before_try(context.delivery_count, self.options.retries)
        if letter is None:
            return False
        # What cannot be kept is tried once more: it may only have been unlucky, and must not hold up its lane for ever.
        if not await self._kept(lane, message, context, letter, RuntimeError(letter.reason)):
            return False
        self._finish(lane, message.sequence)
        return True

    async def _in_time(self, message: Any, context: MessageContext) -> Any:
        async with in_time(self.options.timeout):
            return await self._handler(message, context)

    async def _on_trial(self, message: Message, context: MessageContext) -> None:
        """Handle a message that may kill this process: no other such at the same time, and written down before."""
        async with self._trial:
            await self._answers.on_trial(context.partition_id, message.sequence)
            try:
                await self._call(message, context)
            finally:
                await self._answers.on_trial("", 0)
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
        after = await self._after_failure(lane, message, context, error)
        if after is None:
            self._finish(lane, message.sequence)
            return
        lane.waits = True
        timer = asyncio.get_running_loop().call_later(after, self._try_again, lane, message.sequence)
        self._retries[lane.id] = timer

    async def _after_failure(
        self, lane: Lane, message: Message, context: MessageContext, error: BaseException
    ) -> float | None:
        """Seconds until the next try; None when there is none, since the message is kept as a dead letter."""
        self._metrics.failed(error)
        verdict = verdicts.after_failure(error, context.delivery_count, self.options.retries)
        if not isinstance(verdict, GiveUp):
            lane.tries[message.sequence] = context.delivery_count
            after = verdict.after
        elif await self._kept(lane, message, context, verdict, error):
            return None
        else:  # it stays where it is, and its last try is made again
            after = self.options.retries.delay(context.delivery_count)
        self._failures.again(message, context, error, after)
        return self._answers.again(message, after)

    def _try_again(self, lane: Lane, sequence: int) -> None:
        self._retries.pop(lane.id, None)
        if lane.order and lane.order[0] <= sequence:  # else it is gone; a lower one that came meanwhile is next
            lane.waits = False
            self.wake(lane)

    async def _kept(
        self, lane: Lane, message: Message, context: MessageContext, letter: GiveUp, error: BaseException
    ) -> bool:
        try:
            await self._answers.bury(message, context, letter, error)
        except Exception as exc:  # noqa: BLE001 -- logged and counted, and the message is not lost: it is tried again
            log.error("%s #%d could not be kept as a dead letter: %s", lane.id, message.sequence, exc)
            self._metrics.failed(exc)
            return False
        self._metrics.dead()
        self._failures.buried(message, letter, error)
        return True

    # -- lanes come and go -----------------------------------------------------------------------------------------

    async def quiet(self, lanes: Iterable[Lane]) -> None:
        """Return when no handler of these lanes is running. They must be held, or this may take for ever."""
        chosen = list(lanes)
        self._resting += 1
        try:
            while any(lane.busy for lane in chosen):
                self._came_to_rest.clear()
                await self._came_to_rest.wait()
        finally:
            self._resting -= 1

    async def abandon(self, lanes: Iterable[Lane]) -> None:
        """Cancel the handlers of these lanes that run. Their messages are not done; one that does not end is left."""
        stuck = [lane for lane in lanes if lane.busy]
        for lane in stuck:
            log.warning("%s: its handler has not ended in time, and is cancelled", lane.id)
            if task := self._handling.get(lane.id):
                task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.quiet(stuck)

    def remove(self, lane: Lane) -> list[str]:
        """The lane is no longer ours; returns where the server waits for an answer about what it still had."""
        lane.held = True
        self._waiting_for_owner.discard(lane)
        self.lanes.pop(lane.id, None)
        if timer := self._retries.pop(lane.id, None):
            timer.cancel()
        return self._let_go(lane, list(lane.items))

    def forget(self, lane: Lane) -> None:
        """Everything that waits in the lane will be delivered again."""
        self._let_go(lane, list(lane.items))

    def relieve(self, limit: int) -> None:
        """Make room: slow lanes that hold more than `limit` put messages aside."""
        parked = relieve(self.lanes.values(), limit, time.perf_counter())
        self.held -= parked
        self.some_parked = self.some_parked or parked > 0

    @property
    def parked(self) -> int:
        """Messages that lanes have put aside."""
        count = sum(len(lane.parked) for lane in self.lanes.values()) if self.some_parked else 0
        self.some_parked = count > 0
        return count

    def advance(self, lane: Lane, floor: int) -> None:
        """Everything of the lane up to there is done elsewhere: acknowledge what came of it."""
        before = lane.holding
        self._ack(lane.advance(floor))
        self.held += lane.holding - before

    async def close(self) -> None:
        """Stop. What is being handled is cancelled, and delivered again some day."""
        for timer in self._retries.values():
            timer.cancel()
        runners = list(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        self._failures.close()


def _by_message(answer: Any, messages: list[Message]) -> list[BaseException | None]:
    """What a handler of batches says about each message: nothing at all means that all are done."""
    if answer is None:
        return [None] * len(messages)
    errors = list(answer)
    if len(errors) != len(messages) or not all(e is None or isinstance(e, BaseException) for e in errors):
        raise TypeError(
            f"a handler of batches returns None, or for each of its {len(messages)} messages None or an exception"
        )
    return errors
