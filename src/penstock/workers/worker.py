"""A worker: one connection, one durable consumer, one lane per partition, and a handler.

Guarantees: a message is acknowledged only after its handler has returned, or after it was stored as a dead letter.
Messages of one partition are handled in stream order, one at a time. A handler that raises, a consumer that vanishes, a
server that restarts: none of them ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Self

from penstock import retry, subjects
from penstock.consume.handlers import Handler, HandlerRunner
from penstock.consume.hooks import Announced
from penstock.consume.messages import Message
from penstock.consume.metrics import Lag, WorkerMetrics, WorkerSnapshot
from penstock.errors import ConfigError, PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import Retention
from penstock.metrics.endpoint import Health
from penstock.publish.control import Control
from penstock.settings import Settings
from penstock.wire import aio
from penstock.workers.dispatch.dispatcher import Dispatcher, HandlingOptions, Ownership, OwnsAll, running
from penstock.workers.dispatch.lanes import NO_LIMIT, Finished, Lane
from penstock.workers.group.claims import (
    ALONE,
    CALM_RECORD_EVERY,
    NO_TRIES,
    RECORD_EVERY,
    ProgressRecord,
    ProgressRecorder,
    Reached,
    progress_key,
)
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.partitions import Partition
from penstock.workers.pull import filters
from penstock.workers.pull.consumer import NodeWatch, Permission, Trouble, UpdateOutcome, WorkerConsumer, always
from penstock.workers.pull.puller import Puller, SessionAnswers, Upkeep
from penstock.workers.pull.stored import StoredStream, measure, stored

log = logging.getLogger(__name__)


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
        begins: tuple[str, int] = ("", 0),
        before: Callable[[str], Reached] | None = None,
        progress: ProgressRecorder | None = None,
        metrics: WorkerMetrics | None = None,
        on_trouble: Trouble | None = None,
        permitted: Permission = always,
    ) -> None:
        """`before` returns the progress of a partition before it was handled here, and what else is known of it.
        `progress`: where to record messages on trial. A worker without `ownership` belongs to no group, and records its
        own progress; partitions without a record begin after the sequence of `begins`, if the stream's creation time is
        still the one named there."""
        self.options = options or WorkerOptions()
        limit = consumer.max_subjects * consumer.max_consumers
        self.metrics = metrics or WorkerMetrics(consumer.worker_id, consumer.consumer, limit)
        self.partitions: dict[str, Partition] = {}
        """The partitions of the last `update`."""
        self._begins = begins
        self._before = before or self._recorded
        self._alone = ownership is None
        self._permitted = permitted
        self._settings = settings
        self._control: Control | None = None
        self._progress = progress
        self.told: Callable[[], Mapping[str, Reached]] = self.reached
        """Returns the progress to record."""
        self._record = ProgressRecord()
        """The progress record that a worker without a group found at its start."""
        self._announced = Announced(self.options.hooks)
        self._runner = HandlerRunner(
            handler, self.options.processes, self.options.handler_timeout, self.options.threads
        )
        self._connection = aio.Connection(settings, name=f"penstock {consumer.consumer}")
        self._jetstream = JetStream(self._connection.requester(), settings.domain, settings.timeout)
        # The workers of a group give up a message once for all of them; a worker without a group gives up for itself.
        alone = None if ownership else consumer.consumer
        self._answers = SessionAnswers(
            self._connection, consumer.stream, consumer.prefix, self.options.dlq, self._on_trial, alone
        )
        handling = HandlingOptions(
            worker_id=consumer.worker_id,
            retries=self.options.retries,
            concurrency=self.options.concurrency,
            timeout=None if self.options.processes else self.options.handler_timeout,
            batch=self.options.batch,
            keeps_letters=self.options.dlq is not None,
        )
        owner = ownership or OwnsAll()
        self._dispatcher = Dispatcher(self._runner.call, self._answers, owner, handling, self.metrics)
        self.consumer = WorkerConsumer(
            self._jetstream,
            consumer,
            done=self._position,
            metrics=self.metrics,
            on_trouble=on_trouble,
            permitted=permitted,
            before_removal=lambda name: self._puller.leave(name),
            before_creation=lambda name: self._puller.forget(name),
        )
        self.metrics.look = self._look
        self._upkeep = Upkeep(self._dispatcher, self.consumer, self.options, self._bring_back)
        self._puller = Puller(
            self._connection,
            self._jetstream,
            self.consumer,
            self._dispatcher,
            self._answers,
            self._upkeep,
            self.metrics,
        )
        self._known: dict[str, Partition] = {}
        """The partitions that have a lane."""
        self._fresh: set[str] = set()
        """Added partitions of which nothing is handled yet."""
        self._behind: dict[str, int] = {}
        """Partitions whose skipped backlog is not done yet, with its last sequence."""
        self._again: set[str] = set()
        """Those of `_fresh` whose backlog is read even if the consumer has not skipped it."""
        self._readers: dict[str, asyncio.Task[None]] = {}
        """By partition: the task that reads its backlog."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and start to pull. Raises when no server answers now; later it reconnects by itself."""
        await self._connection.ready()
        if self._alone:
            await self._remember()
        await self._announced.started()
        self._spawn(self._puller.serve(), "serve")
        self._spawn(self._look_for_ever(), "upkeep")
        self._spawn(NodeWatch(self.consumer).run(), "nodes")
        self._spawn(self._write_down_for_ever(), "write down")
        if self.options.measure_every:
            self._spawn(self._measure_for_ever(), "measure")

    async def stop(self) -> None:
        """Finish running handlers, acknowledge their messages, and disconnect. The consumer stays for the next run."""
        with suppress(PenstockError):
            await self.drain(self._dispatcher.lanes)
        if self._alone:
            await self._write_down(ended=True)
        await self._announced.stopped()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.consumer.close()
        await self._dispatcher.close()
        await asyncio.to_thread(self._runner.close)
        with suppress(PenstockError):  # once the server has dropped our pull requests, no message is sent here in vain
            await self._connection.flush()
        await self._connection.close()
        if self._control:
            await self._control.close()

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
        """The error that ended one of its loops, if any: it should be stopped, and restarted."""
        return self._failure

    def health(self) -> Health:
        """Return whether it should be restarted, and what it waits for before it can handle messages."""
        if self._failure:
            return Health(broken=f"cannot go on: {self._failure}")
        return Health(waiting="" if self._answers.session else "has no connection to a server, or nothing to pull from")

    # -- progress record -------------------------------------------------------------------------------------------

    @property
    def strained(self) -> bool:
        """Whether its consumer's ack floor says too little: a message waits or takes long, or a backlog is read."""
        now = time.perf_counter()
        return any(
            lane.waits or lane.tries or lane.parked or not lane.live or (lane.started or now) < now - RECORD_EVERY
            for lane in self._dispatcher.lanes.values()
        )

    def reached(self) -> dict[str, Reached]:
        """Return the progress of each partition that is handled here."""
        cursor = self._puller.cursor
        lanes = [lane for id_, lane in self._dispatcher.lanes.items() if id_ not in self._fresh]
        return {
            lane.id: Reached(lane.done(cursor), min(lane.tries.items(), default=NO_TRIES), self._known[lane.id].mark)
            for lane in lanes
        }

    async def _remember(self) -> None:
        """Load the progress record of this worker's last run."""
        options, settings = self.consumer.options, self._settings
        self._control = await Control.connect(settings)
        bucket = Bucket(self._control, ALONE, like=options.stream)
        self._progress = ProgressRecorder(bucket, progress_key(options.stream, options.consumer))
        self._record = await self._progress.load()

    async def _write_down_for_ever(self) -> None:
        written = 0.0
        while True:
            await asyncio.sleep(RECORD_EVERY)
            now = time.perf_counter()
            due = self.strained or (self._progress and self._progress.is_due) or now - written >= CALM_RECORD_EVERY
            if due and self._permitted():
                written = now
                await self._write_down()

    async def _write_down(self, ended: bool = False) -> None:
        if self._progress:
            try:
                await self._progress.save(self.consumer.created, self.told(), ended)
            except PenstockError as exc:
                log.info("%s could not write down how far it is: %s", self.consumer.options.consumer, exc)

    async def _on_trial(self, partition_id: str, sequence: int) -> None:
        """Record a message on trial. Its end is written with the next record: only a crash makes a difference."""
        if self._progress:
            self._progress.trial = (partition_id, sequence) if sequence else None
            if sequence:
                await self._write_down()

    def _recorded(self, partition_id: str) -> Reached:
        """Return the recorded progress of a partition, for a worker without a group."""
        stream, first = self._begins
        # Of a queue, only what is not done is left.
        is_new = stream != self.consumer.created or self.consumer.retention == Retention.WORKQUEUE
        if not self._alone or self._record.stream not in ("", self.consumer.created):
            return Reached(0)
        marks = {0, self._known[partition_id].mark} if partition_id in self._known else {0}  # 0: not recorded
        recorded = (self._record.of(partition_id, mark, self.consumer.created) for mark in marks)
        found = next(filter(None, recorded), Reached(0 if is_new else first))
        crashed = bool(self._record.stream) and not self._record.ended
        return replace(found, tries=self._record.tries(partition_id, found.tries), suspect=crashed)

    async def _start_over(self) -> None:
        """Discard all progress after the stream was recreated. The mark stays until that is done: it is retried."""
        log.warning(
            "stream %s was recreated; %s begins with it", self.consumer.options.stream, self.consumer.options.consumer
        )
        wanted = list(self.partitions.values())
        async with self._puller.settling:
            await self._let_go(list(self._dispatcher.lanes))
            self._answers.acks.clear()
            self._dispatcher.finished = Finished()
            self._puller.cursors.clear()
            self.consumer.forget()
        await self.update(wanted)
        self.consumer.remade = False

    # -- partitions ------------------------------------------------------------------------------------------------

    async def has_nothing_left(self) -> bool:
        """Whether all messages of its consumers are handled and acknowledged."""
        if not self.partitions or self.behind:
            return False
        infos = (await self.consumer.present()).values()
        return bool(infos) and not any(info.unprocessed for info in infos)

    async def update(
        self, partitions: Iterable[Partition], again: Collection[str] = (), only_covered: Collection[str] = ()
    ) -> UpdateOutcome:
        """Handle these partitions, and no others. Returns when the server filters by them.

        New partitions start after their position: a backlog that the consumer has skipped is read from the stream first
        (`behind`). So are those of `again`, which another worker may have owned since they were handled here. Of
        removed partitions, running handlers are finished, and waiting messages are dropped: acknowledged, except on a
        work queue, where that would remove them. So a partition that moves to another worker must be owned by that
        worker, with its backlog done, before. New partitions of `only_covered` are another worker's, and how far they
        are done is not known here: their messages are kept, and handled once an update names them `again`.

        Raises as `WorkerConsumer.update` does, and when the server is unavailable; it may be repeated.
        """
        chosen = {partition.id: partition for partition in partitions}
        if changed := [id_ for id_, p in chosen.items() if set(self._known.get(id_, p).subjects) != set(p.subjects)]:
            async with self._puller.settling:
                await self._let_go(changed)
        await self._hold([self._dispatcher.lanes[id_] for id_ in again if id_ in self._dispatcher.lanes])
        for id_ in self._dispatcher.lanes.keys() & set(again):
            self._stop_reading(id_)
            self._fresh.add(id_)
        self._again.update(again)
        for partition in chosen.values():
            if partition.id not in self._dispatcher.lanes:
                self._add_lane(partition)
        self.partitions = chosen
        outcome = await self.consumer.update(chosen.values())
        async with self._puller.settling:
            await self._let_go([id_ for id_ in self._dispatcher.lanes if id_ not in self.partitions])
            await self._begin(outcome, frozenset(only_covered))
            if self._alone:  # before anything is handled: a record without an end means a crash
                await self._write_down()
            await self._puller.attach()
        return outcome

    def fitting(self, partitions: Collection[Partition], kept: Collection[str]) -> list[Partition]:
        """Return as many of these as its consumers have room for, kept ones first. The rest is counted."""
        found = filters.fitting(partitions, kept, self.consumer.fits)
        self.metrics.left_out = len(partitions) - len(found)
        return found

    def troubles(self) -> list[str]:
        """Return problems for an operator."""
        failing = [self.consumer.trouble] if self.consumer.trouble else []
        return failing + filters.left_out(self.metrics.left_out) + self._upkeep.long_running.told()

    def _add_lane(self, partition: Partition) -> None:
        lane = self._dispatcher.lanes[partition.id] = Lane(partition.id)
        lane.held, lane.limit = True, 0
        self._fresh.add(partition.id)
        self._puller.routes.add(partition, lane)
        self._known[partition.id] = partition

    async def _let_go(self, ids: Collection[str]) -> None:
        gone = [self._dispatcher.lanes[id_] for id_ in ids]
        await self._hold(gone)
        await self._announced.revoked([lane.id for lane in gone])
        overlap = filters.subject_set(self._known.values()).duplicates > 0
        for lane in gone:
            self._puller.routes.remove(known := self._known.pop(lane.id), lane)
            self._stop_reading(lane.id)
            undone, unread = list(lane.items.values()), lane.parked or lane.backlog or lane.limit not in (0, NO_LIMIT)
            replies = self._dispatcher.remove(lane)
            self._fresh.discard(lane.id)
            self._again.discard(lane.id)
            if overlap and (heirs := [one for one in self._known.values() if one.overlaps(known)]):
                await self._bequeath(heirs, [message for message in undone if message and message.reply], bool(unread))
            elif self.consumer.retention != Retention.WORKQUEUE:
                self._answers.acks += replies
        self._answers.acked()

    async def _bequeath(self, heirs: Collection[Partition], undone: list[Message], unread: bool) -> None:
        """Give the undone messages of a removed partition to those that have its subjects now, as after a new id.

        `unread`: not all of them are here."""
        lanes = [self._dispatcher.lanes[partition.id] for partition in heirs]
        for partition, lane in zip(heirs, lanes, strict=True):
            self._puller.routes.add(partition, lane)
        if unread:
            await self._hold(lanes)
            self._fresh.update(lane.id for lane in lanes)
            self._again.update(lane.id for lane in lanes)
        for message in undone:
            if heir := self._puller.routes.lane(message.subject):
                self._dispatcher.deliver(heir, message)

    async def _begin(self, outcome: UpdateOutcome, only_covered: frozenset[str]) -> None:
        """Start handling the added partitions, each from its position."""
        new = [self.partitions[id_] for id_ in sorted(self._fresh - only_covered) if id_ in self.partitions]
        lanes = self._dispatcher.lanes
        leaving = [p for p in self._known.values() if lanes[p.id].held and p.id not in self._fresh - only_covered]
        fresh = [partition for partition in new if not any(partition.overlaps(other) for other in leaving)]
        if not fresh:
            return
        await self._announced.assigned([partition.id for partition in fresh])
        is_queue = self.consumer.retention == Retention.WORKQUEUE
        floor = await self._common_floor()
        # What the cursor has skipped lies below the stream's current end.
        end = (await self._jetstream.stream_info(self.consumer.options.stream)).state.last_seq
        wild = [subject for subject in outcome.passed_over if not subjects.is_literal(subject)]
        from_start: list[Lane] = []
        for partition in fresh:
            before, lane = self._before(partition.id), self._dispatcher.lanes[partition.id]
            position = 0 if is_queue and not self._alone else before.done
            lane.suspect = before.suspect
            if before.tries[1]:
                lane.tries[before.tries[0]] = before.tries[1]
            passed_over = any(s in outcome.passed_over or subjects.covered(s, wild) for s in partition.subjects)
            unread = passed_over or partition.id in self._again
            if not passed_over:
                position = max(position, floor)
            if position >= end or not (unread or position + 1 < self.consumer.start):
                self._go_live(lane, position)
            elif is_queue:
                from_start.append(lane)
            else:
                self._start_reading(partition, lane, position, end)
        if from_start:
            await self._rewind(from_start)

    async def _common_floor(self) -> int:
        """Return how far every partition is done that our consumers have always covered. The coordinator of a group has
        that in the positions already, where it counts; on a work queue every stored message is not done."""
        if self.consumer.retention == Retention.WORKQUEUE or not self._alone:
            return 0
        infos = (await self.consumer.present()).values()
        return min((info.ack_floor_stream_seq for info in infos), default=0)

    def _go_live(self, lane: Lane, floor: int) -> None:
        """Make a lane live: everything above `floor` comes from the consumer."""
        self._dispatcher.advance(lane, floor)
        lane.limit = NO_LIMIT
        self._begun(lane)

    def _begun(self, lane: Lane) -> None:
        self._fresh.discard(lane.id)
        self._again.discard(lane.id)
        lane.held = False
        self._dispatcher.wake(lane)

    @property
    def connects(self) -> int:
        """Number of pull sessions started."""
        return self._puller.connects

    @property
    def behind(self) -> frozenset[str]:
        """Partitions whose backlog is not done."""
        lanes = self._dispatcher.lanes
        self._behind = {
            id_: until for id_, until in self._behind.items() if (lane := lanes.get(id_)) and not lane.has_done(until)
        }
        return frozenset(self._behind.keys() | self._fresh)

    def done_through(self, partition_id: str) -> int:
        """Return the stream sequence up to which everything of a partition is done."""
        return self._lane(partition_id).done(self._puller.cursor)

    async def drain(self, partition_ids: Collection[str]) -> dict[str, Reached]:
        """Finish the running handlers of these partitions, and start no more until the partitions are live again.

        Returns the progress of each that is handled here. Its acknowledgements have reached the server by then.
        """
        chosen = [lane for id_ in partition_ids if (lane := self._dispatcher.lanes.get(id_))]
        for lane in chosen:
            lane.held = True
        try:
            async with asyncio.timeout(self.options.stop_within):
                await self._dispatcher.quiet(chosen)
        except TimeoutError:
            await self._dispatcher.abandon(chosen)
        await self._puller.all_sent()
        await self._announced.revoked([lane.id for lane in chosen])
        reached = self.reached()
        return {lane.id: reached[lane.id] for lane in chosen if lane.id in reached}

    def pause(self, paused: bool) -> None:
        """Stop or resume starting handlers; running ones finish, and their messages are acknowledged."""
        self._dispatcher.pause(paused)

    async def resume(self, partition_ids: Collection[str]) -> None:
        """Resume partitions that were drained and not released after all."""
        await self._announced.assigned([id_ for id_ in partition_ids if id_ in self._dispatcher.lanes])
        for lane in [self._dispatcher.lanes[id_] for id_ in partition_ids if id_ in self._dispatcher.lanes]:
            lane.held = False
            self._dispatcher.wake(lane)

    def _start_reading(self, partition: Partition, lane: Lane, done: int, until: int) -> None:
        """Start reading the backlog between the two sequences; it is handled before what is delivered."""
        self._dispatcher.advance(lane, done)
        lane.begin_reading(done, until)
        self._begun(lane)
        self._behind[lane.id] = until
        self._readers[lane.id] = self._spawn(self._read_backlog(partition, lane, until), "read the backlog")

    def _stop_reading(self, id_: str) -> None:
        if reader := self._readers.pop(id_, None):
            reader.cancel()

    async def _read_backlog(self, partition: Partition, lane: Lane, until: int) -> None:
        """Read what the consumer has skipped into the lane, in order, however long the server is unavailable."""
        tries = retry.Tries(
            retry_on=retry.always, tell=lambda exc: log.warning("the backlog of %s waits: %s", lane.id, exc)
        )
        while lane.limit < until:
            try:
                reading = stored(self._place(), partition.subjects, lane.limit + 1, until)
                async with aclosing(reading) as messages:
                    async for message in messages:
                        self._dispatcher.read(lane, message)
                        await self._dispatcher.has_room(lane, len(message.data))
                break
            except PenstockError as exc:
                await tries.failed(exc)
        self._dispatcher.end_reading(lane)

    async def _rewind(self, lanes: Collection[Lane]) -> None:
        """Make the consumers of a work queue deliver everything: finished messages are deleted, so nothing comes twice.

        Earlier deliveries of these lanes are dropped, since they come again, in order.
        """
        for name in self.consumer.names:
            await self.consumer.reset(name, 1)
        self._puller.begin_anew(f"the backlogs of {len(lanes)} partitions are to come")
        for lane in lanes:
            self._dispatcher.forget(lane)
            self._go_live(lane, 0)

    def _lane(self, id_: str) -> Lane:
        if lane := self._dispatcher.lanes.get(id_):
            return lane
        raise ConfigError(f"partition {id_!r} is not one of this worker's; give it to `update` first")

    async def _hold(self, lanes: Iterable[Lane]) -> None:
        """Hold these lanes, and return when none of their handlers runs."""
        held = list(lanes)
        for lane in held:
            lane.held = True
        await self._dispatcher.quiet(held)

    def _place(self) -> StoredStream:
        return StoredStream(self._connection, self._jetstream, self.consumer.options.stream, self.consumer.direct)

    def _position(self, partition_id: str) -> int:
        """Return the last sequence done of a partition: here, or before."""
        lane = None if partition_id in self._fresh else self._dispatcher.lanes.get(partition_id)
        return max(lane.done(self._puller.cursor) if lane else 0, self._before(partition_id).done)

    def _bring_back(self, lane: Lane, sequences: list[int]) -> None:
        self._spawn(self._read_back(lane, sequences), "read what was put aside")

    async def _read_back(self, lane: Lane, sequences: list[int]) -> None:
        """Read parked messages of a lane; those no longer in the stream are dropped."""
        partition = self._known.get(lane.id)
        try:
            if partition is None:
                return
            reading = stored(self._place(), partition.subjects, sequences[0], sequences[-1])
            async with aclosing(reading) as messages:
                found = [message async for message in messages]
            if gone := self._dispatcher.bring_back(lane, sequences, found):
                log.warning("%d messages of %s left the stream before they were handled", gone, lane.id)
        except PenstockError as exc:
            log.info("what was put aside of %s is read later: %s", lane.id, exc)
        finally:
            lane.reading = False

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._upkeep.pause(self._answers.session))
            if session := self._answers.session:
                try:
                    await self._upkeep.look(session)
                    if not self.behind:
                        await self.consumer.all_caught_up()
                except PenstockError as exc:
                    log.warning("%s: %s", self.consumer.options.consumer, exc)
            if self._alone and self.consumer.remade:
                try:
                    await self._start_over()
                except PenstockError as exc:
                    log.warning("%s: %s", self.consumer.options.consumer, exc)

    def _look(self) -> WorkerSnapshot:
        """Return a snapshot for metrics; called when metrics are requested."""
        self._dispatcher.report()
        lanes = self._dispatcher.lanes.values()
        outstanding = sum(len(lane.items) for lane in lanes)
        behind = sum(
            max(self.metrics.lag[lane.id].messages, 0)
            for lane in lanes
            if not lane.live and lane.id in self.metrics.lag
        )
        oldest = max((seconds for _, seconds in running(lanes)), default=0.0)
        handled = {lane.id: (lane.handled, lane.latency) for lane in lanes}
        return WorkerSnapshot(
            len(lanes), outstanding, self._dispatcher.held, self._dispatcher.parked, behind, oldest,
            len(self._upkeep.long_running.now), handled,
        )  # fmt: skip

    async def _measure_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.options.measure_every)
            with suppress(PenstockError):  # without an answer the last measurement stays
                await self.measure()

    async def measure(self) -> dict[str, Lag]:
        """Query the server for the lag of each partition."""
        lanes = self._dispatcher.lanes
        live = [self._known[id_] for id_ in lanes if id_ not in self._fresh]
        done = {id_: lane.done(self._puller.cursor) for id_, lane in lanes.items()}
        self.metrics.lag = await measure(self._connection, self._jetstream, self.consumer.options.stream, live, done)
        self.metrics.pending = sum(info.pending for info in (await self.consumer.present()).values())
        return self.metrics.lag
