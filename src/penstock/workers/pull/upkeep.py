"""What no event tells a worker: messages that wait for long, lanes that are ours again, room that is gone or back."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from penstock.consume import messages
from penstock.consume.messages import Message
from penstock.workers.dispatch.dispatcher import Dispatcher
from penstock.workers.dispatch.lanes import Lane
from penstock.workers.dispatch.troubles import LongRunning
from penstock.workers.options import WorkerOptions
from penstock.workers.pull import pacing
from penstock.workers.pull.consumer import WorkerConsumer
from penstock.workers.pull.session import Session

TICK = 0.1
"""Seconds between two looks while something waits here."""
REST = 0.5
"""The same while nothing does: to be woken costs a worker that has little to do more than its messages."""
MANY = 500
"""Messages since the last look after which the next one is soon: batch sizes are to follow the handlers quickly."""
PATIENT_FOR = 3
"""The server is asked for patience so many times within its `ack_wait`."""


class Upkeep:
    """Looks at the lanes from time to time."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        consumer: WorkerConsumer,
        options: WorkerOptions,
        read: Callable[[Lane, list[int]], object],
    ) -> None:
        """`read` begins to read messages from the stream that a lane has put aside."""
        self.batch = pacing.BatchSize(pacing.capacity(consumer.options.max_ack_pending))
        self._dispatcher = dispatcher
        self._consumer = consumer
        self._options = options
        self._read = read
        self._allowed = consumer.options.max_ack_pending
        self._touch_every = consumer.options.ack_wait / PATIENT_FOR
        self._touched = self._observed = time.monotonic()
        self._handled = self._seen = 0
        self.long_running = LongRunning()
        self._message_size = 0.0
        """Bytes of a message, about; at once as large as those that come, and only slowly less."""

    def room(self) -> int:
        """Messages that may still come, besides those that were asked for."""
        return self._most - self._dispatcher.held

    @property
    def _most(self) -> int:
        most = pacing.capacity(self._consumer.options.max_ack_pending)
        return pacing.bounded(most, self._options.max_bytes, self._message_size)

    @property
    def _kept(self) -> int:
        """Messages that a slow partition may hold: of large ones fewer, so that it leaves room for others."""
        large = self._most < pacing.capacity(self._consumer.options.max_ack_pending)
        return min(self._options.max_in_flight, max(1, self._most // 4)) if large else self._options.max_in_flight

    def request_bytes(self, max_payload: int) -> int:
        """Bytes that one request may bring."""
        return pacing.request_bytes(self._options.max_bytes, max_payload)

    def came(self, batch: list[Message]) -> None:
        """Learn how large messages are."""
        size = sum([len(message.data) for message in batch]) / len(batch)
        self._message_size = max(size, pacing.MEMORY * self._message_size)

    def pause(self, session: Session | None) -> float:
        """Seconds until the next look."""
        since, self._seen = self._dispatcher.handled - self._seen, self._dispatcher.handled
        waits = self._dispatcher.held or self._dispatcher.some_parked
        return TICK if waits or since > MANY or session is None else REST

    async def look(self, session: Session) -> None:
        """One look. Raises what the server refuses."""
        self._dispatcher.owners_changed()
        self._observe()
        self.long_running.look(self._dispatcher.lanes.values())
        session.check()
        if session.stalled:
            self._dispatcher.relieve(self._kept)
        parked = self._dispatcher.parked
        if parked:
            self._bring_back()
        self._ask_for_patience(session)
        session.top_up()
        await self._widen(parked)

    def _bring_back(self) -> None:
        for lane in self._dispatcher.lanes.values():
            if back := lane.wanted_back(self._kept):
                lane.reading = True
                self._read(lane, back)

    def _observe(self) -> None:
        """Let the batches follow the handlers."""
        now, handled = time.monotonic(), self._dispatcher.handled
        if now - self._observed >= pacing.HORIZON / 2:
            self.batch.observe(handled - self._handled, now - self._observed, idle=self._dispatcher.held == 0)
            self._observed, self._handled = now, handled

    def _ask_for_patience(self, session: Session) -> None:
        now = time.monotonic()
        if now - self._touched < self._touch_every:
            return
        self._touched = now
        old = datetime.now(UTC) - timedelta(seconds=self._touch_every / 2)
        waiting = [
            reply
            for lane in self._dispatcher.lanes.values()
            for reply, message in lane.replies()
            if message is None or message.received_at < old
        ]
        session.write(messages.in_progress(waiting))

    async def _widen(self, parked: int) -> None:
        """Let the server have more out while messages of slow partitions wait there."""
        needed = pacing.pending_needed(parked, self._consumer.options.max_ack_pending, self._options.max_parked)
        if needed > self._allowed or (needed < self._allowed and not parked):
            self._allowed = needed
            await self._consumer.allow_pending(needed)
