"""A worker: one connection, one durable consumer, a lane a partition, and a handler.

What it promises: a message is acknowledged only after its handler has returned, or after it was kept as a dead letter.
Messages of one partition are handled in the order of the stream, one at a time. A handler that raises, a consumer that
vanishes, a server that restarts: none of them ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Self

from penstock import subjects
from penstock.broker.jetstream import JetStream
from penstock.deadletter import headers as deadletter_headers
from penstock.errors import ConfigError, PenstockError
from penstock.settings import Settings
from penstock.wire import aio
from penstock.workers import lag
from penstock.workers.answers import SessionAnswers
from penstock.workers.catchup import CatchUp
from penstock.workers.consumer import WORK_QUEUE, WorkerConsumer
from penstock.workers.dispatch import Dispatcher
from penstock.workers.handlers import Handler, Runner
from penstock.workers.handling import HandlingOptions
from penstock.workers.lag import Lag
from penstock.workers.lanes import Lane
from penstock.workers.metrics import Look, WorkerMetrics
from penstock.workers.nodes import NodeWatch
from penstock.workers.options import ConsumerOptions, Positions, WorkerOptions, no_positions
from penstock.workers.ownership import Ownership, OwnsAll
from penstock.workers.partitions import Partition
from penstock.workers.puller import Puller
from penstock.workers.stored import Place
from penstock.workers.updates import Permission, Trouble, UpdateOutcome, always
from penstock.workers.upkeep import Upkeep

log = logging.getLogger(__name__)

ONLY = deadletter_headers.ONLY.encode()
FOR_EVER = 10 * 365 * 86400.0  # seconds
SETTLE_WITHIN = 1.0
"""Seconds that the server may take to count acknowledgements that it has received."""


class Worker:
    """Handles the messages of its partitions. For one event loop; `async with` starts and stops it."""

    def __init__(
        self,
        settings: Settings,
        consumer: ConsumerOptions,
        handler: Handler,
        *,
        options: WorkerOptions | None = None,
        ownership: Ownership | None = None,
        positions: Positions | None = None,
        metrics: WorkerMetrics | None = None,
        on_trouble: Trouble | None = None,
        permitted: Permission = always,
    ) -> None:
        self.options = options or WorkerOptions()
        limit = consumer.max_subjects * consumer.max_consumers
        self.metrics = metrics or WorkerMetrics(consumer.worker_id, consumer.consumer, limit)
        self.partitions: dict[str, Partition] = {}
        """What it was last told to handle."""
        self._positions = positions or no_positions()
        self._runner = Runner(handler, self.options.processes, self.options.handler_timeout)
        self._connection = aio.Connection(settings, name=f"penstock {consumer.consumer}")
        self._jetstream = JetStream(self._connection.requester(), settings.domain, settings.timeout)
        # Workers of a group give a message up once between them; one that is alone gives it up for itself.
        alone = None if ownership else consumer.consumer
        self._answers = SessionAnswers(self._connection, consumer.stream, consumer.prefix, self.options.dlq, alone)
        handling = HandlingOptions(
            worker_id=consumer.worker_id,
            retries=self.options.retries,
            concurrency=self.options.concurrency,
            timeout=None if self.options.processes else self.options.handler_timeout,
        )
        owner = ownership or OwnsAll()
        self._dispatcher = Dispatcher(self._runner.call, self._answers, owner, handling, self.metrics)
        self.consumer = WorkerConsumer(
            self._jetstream,
            consumer,
            positions=self._done,
            events=self.metrics,
            on_trouble=on_trouble,
            permitted=permitted,
            before_removal=lambda name: self._puller.leave(name),
        )
        self.metrics.look = self._look
        self._upkeep = Upkeep(self._dispatcher, self.consumer, self.options)
        self._puller = Puller(
            self._connection,
            self._jetstream,
            self.consumer,
            self._dispatcher,
            self._answers,
            self._upkeep,
            self.metrics,
        )
        self._catching_up = CatchUp(self._place, self.consumer, self._dispatcher, self._puller)
        self._known: dict[str, Partition] = {}
        """The partitions that have a lane."""
        self._fresh: set[str] = set()
        """Partitions that were added, and of which nothing is handled yet."""
        self._behind: set[str] = set()
        """Partitions whose backlog was passed over and has not been read yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    # -- its life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and begin to serve. Raises when no server answers now; later it connects again by itself."""
        await self._connection.reconnect()
        self._spawn(self._puller.serve(), "serve")
        self._spawn(self._look_for_ever(), "upkeep")
        self._spawn(NodeWatch(self.consumer).run(), "nodes")
        if self.options.measure_every:
            self._spawn(self._measure_for_ever(), "measure")

    async def stop(self) -> None:
        """Finish what is being handled, acknowledge it, and leave. The consumer stays for the next run."""
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(self.options.stop_within):
                await self._hold(self._dispatcher.lanes.values())
                await self._puller.all_sent()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.consumer.close()
        await self._dispatcher.close()
        await asyncio.to_thread(self._runner.close)
        with suppress(PenstockError):  # once the server has heard that we pull no more, nothing is sent here in vain
            await self._connection.flush()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name} {self.consumer.options.consumer}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._failure = self._failure or error
            log.error("%s ended", task.get_name(), exc_info=error)

    @property
    def failure(self) -> BaseException | None:
        """What ended one of its loops, if anything did: it should be stopped, and started anew."""
        return self._failure

    # -- partitions ------------------------------------------------------------------------------------------------

    async def update(self, partitions: Iterable[Partition]) -> UpdateOutcome:
        """Handle these partitions, and no others. Returns when the server filters by them.

        Partitions that are new begin behind their position, and are caught up with in the background; or they wait
        for `catch_up`, if the options say so and their backlog was passed over. Of those that are left out, what is
        being handled is finished, and the rest is let go: acknowledged, except on a work queue, where that would
        remove it. So a partition that goes to somebody else must be theirs, with their catching up done, before.
        Raises as `WorkerConsumer.update` does.
        """
        chosen = {partition.id: partition for partition in partitions}
        for partition in chosen.values():
            if partition.id not in self._dispatcher.lanes:
                self._add_lane(partition)
        self.partitions = chosen
        outcome = await self.consumer.update(chosen.values())
        async with self._puller.settling:
            await self._let_go([id_ for id_ in self._dispatcher.lanes if id_ not in self.partitions])
            await self._puller.attach()
            await self._begin(outcome)
        return outcome

    def _add_lane(self, partition: Partition) -> None:
        lane = self._dispatcher.lanes[partition.id] = Lane(partition.id)
        lane.held = True
        self._fresh.add(partition.id)
        self._puller.routes.add(partition, lane)
        self._known[partition.id] = partition

    async def _let_go(self, ids: Collection[str]) -> None:
        gone = [self._dispatcher.lanes[id_] for id_ in ids]
        await self._hold(gone)
        for lane in gone:
            self._puller.routes.remove(self._known.pop(lane.id))
            self._fresh.discard(lane.id)
            self._behind.discard(lane.id)
            replies = self._dispatcher.remove(lane)
            if self.consumer.retention != WORK_QUEUE:
                self._answers.acks += replies
        self._answers.acked()

    async def _begin(self, outcome: UpdateOutcome) -> None:
        """Let the partitions that were added be handled from where they should."""
        fresh = [self.partitions[id_] for id_ in sorted(self._fresh) if id_ in self.partitions]
        if not fresh:
            return
        done = await self._positions(fresh) if self.consumer.retention != WORK_QUEUE else {}
        floor = await self._common_floor()
        wild = [subject for subject in outcome.passed_over if not subjects.is_literal(subject)]
        for partition in fresh:
            position = done.get(partition.id, 0)
            if not any(s in outcome.passed_over or subjects.covered(s, wild) for s in partition.subjects):
                self._go_live(partition.id, max(position, floor))
                continue
            self._behind.add(partition.id)
            if self.options.catches_up:
                self._fresh.discard(partition.id)
                self._spawn(self._keep_catching_up(partition, position + 1, outcome.cursor), "catch up")

    async def _common_floor(self) -> int:
        """How far every partition is done that our consumers have had all along. Whoever coordinates a group has that
        in the positions already, where it counts; on a work queue whatever is there is not done."""
        if self.consumer.retention == WORK_QUEUE or not self.options.catches_up:
            return 0
        infos = (await self.consumer.present()).values()
        return min((info.ack_floor_stream_seq for info in infos), default=0)

    def _go_live(self, id_: str, floor: int) -> None:
        lane = self._dispatcher.lanes[id_]
        self._fresh.discard(id_)
        self._dispatcher.advance(lane, floor)
        lane.held = False
        self._dispatcher.wake(lane)

    @property
    def connects(self) -> int:
        """How often it began to pull anew."""
        return self._puller.connects

    @property
    def behind(self) -> frozenset[str]:
        """Partitions whose backlog was passed over: they wait for `catch_up`."""
        return frozenset(self._behind)

    def done_through(self, partition_id: str) -> int:
        """Of all that came of a partition, everything up to this stream sequence is done."""
        return self._lane(partition_id).done_through

    def floor(self, partition_id: str) -> int:
        """Everything of a partition up to this stream sequence is done for certain, whether it came here or not.

        0 for one that is not handled here.
        """
        lane = self._dispatcher.lanes.get(partition_id)
        return lane.floor if lane else 0

    async def drain(self, partition_ids: Collection[str]) -> dict[str, int]:
        """Finish what is being handled of these partitions, and handle no more of them until they are live again.

        Returns of each that is handled here the last sequence that is done, with everything before it. Its
        acknowledgement has reached the server by then.
        """
        chosen = [lane for id_ in partition_ids if (lane := self._dispatcher.lanes.get(id_))]
        await self._hold(chosen)
        await self._puller.all_sent()
        known = await self._puller.nothing_unknown()
        # Messages may be out that never came here: then only what the server knows to be acknowledged is certain.
        return {lane.id: lane.done_through if known is None else min(lane.done_through, known) for lane in chosen}

    def resume(self, partition_ids: Collection[str]) -> None:
        """Handle partitions again that were drained and not given away after all."""
        for lane in [self._dispatcher.lanes[id_] for id_ in partition_ids if id_ in self._dispatcher.lanes]:
            lane.held = False
            self._dispatcher.wake(lane)

    async def catch_up(self, partition: Partition, first_sequence: int, last_sequence: int) -> None:
        """Handle what the partition has in this range, in order, before any live message of it; then let those come.

        The partition must have been given to `update` before, so that whatever lies above the range is delivered.
        Raises `NotOwned` when the partition is or becomes somebody else's; what was handled until then is done.
        """
        lane = self._lane(partition.id)
        self._fresh.discard(partition.id)
        self._behind.add(partition.id)
        await self._hold([lane])
        await self._catching_up.run(partition, lane, first_sequence, last_sequence)
        lane.held = False
        self._dispatcher.wake(lane)
        self._behind.discard(partition.id)
        if not self._behind and not self._fresh:
            await self.consumer.all_caught_up()

    async def _keep_catching_up(self, partition: Partition, first: int, last: int) -> None:
        """Catch up, however long the partition or the server is away."""
        while self.partitions.get(partition.id) == partition:
            try:
                done = max(first - 1, self._lane(partition.id).floor)
                await self.catch_up(partition, done + 1, last)
                return
            except PenstockError as exc:
                log.warning("catching up with %s: %s", partition.id, exc)
                await asyncio.sleep(1.0)

    def _lane(self, id_: str) -> Lane:
        if lane := self._dispatcher.lanes.get(id_):
            return lane
        raise ConfigError(f"partition {id_!r} is not one of this worker's; give it to `update` first")

    async def _hold(self, lanes: Iterable[Lane]) -> None:
        """Return when nothing of these lanes is being handled; nothing more is begun."""
        held = list(lanes)
        for lane in held:
            lane.held = True
        await self._dispatcher.quiet(held)

    def _place(self) -> Place:
        return Place(self._connection, self._jetstream, self.consumer.options.stream, self.consumer.direct)

    async def _done(self, partitions: Collection[Partition]) -> Mapping[str, int]:
        """Positions for a consumer that must be made: what was done here, or else what the coordinator knows."""
        elsewhere = await self._positions(partitions)
        lanes = self._dispatcher.lanes
        known = [p.id for p in partitions if p.id in lanes and p.id not in self._fresh]
        # What came of a partition that is being caught up with lies above what is not done.
        here = {id_: lanes[id_].floor if id_ in self._behind else lanes[id_].done_through for id_ in known}
        return {p.id: max(here.get(p.id, 0), elsewhere.get(p.id, 0)) for p in partitions}

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._upkeep.pause(self._answers.session))
            if session := self._answers.session:
                try:
                    await self._upkeep.look(session)
                except PenstockError as exc:
                    log.warning("%s: %s", self.consumer.options.consumer, exc)

    def _look(self) -> Look:
        """How things stand; asked for when somebody wants to see the metrics."""
        self._dispatcher.report()
        lanes = self._dispatcher.lanes.values()
        outstanding = sum(len(lane.items) for lane in lanes)
        return Look(len(lanes), outstanding, self._dispatcher.held, self._dispatcher.parked)

    async def _measure_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.options.measure_every)
            with suppress(PenstockError):  # without an answer the last measure stands
                await self.measure()

    async def measure(self) -> dict[str, Lag]:
        """How far each partition is behind, asked of the server now."""
        lanes = self._dispatcher.lanes
        live = [self._known[id_] for id_ in lanes if id_ not in self._fresh]
        done = {id_: lane.done_through for id_, lane in lanes.items()}
        self.metrics.lag = await lag.measure(
            self._connection, self._jetstream, self.consumer.options.stream, live, done
        )
        return self.metrics.lag
