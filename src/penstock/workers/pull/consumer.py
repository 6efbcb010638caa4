"""The durable consumer of a worker: its filters follow the partitions, and nothing else of it changes.

Changes are collected for a short window, applied at most once per interval, and skipped when they change nothing. When
an update fails the consumer keeps its last good filters, and the worker keeps pulling.

A subject that is added to an existing consumer has its backlog skipped: the consumer's one cursor is beyond it. The
update that adds it also records it in the consumer's metadata, in one request, and `all_caught_up` clears that. So a
worker that dies in between finds the backlog when it restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from penstock.consume.metrics import WorkerMetrics
from penstock.errors import ConsumerNotFound, FeatureMissing, PenstockError, Unavailable
from penstock.jetstream import features
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, Json, ReplicaInfo, Retention, StreamInfo
from penstock.workers.options import ConsumerOptions
from penstock.workers.partitions import Partition
from penstock.workers.pull import filters
from penstock.workers.pull.filters import Shards

log = logging.getLogger(__name__)


class UpdateFailed(Unavailable):
    """A consumer could not be updated; it keeps its last good filters, and the change is retried."""


class UpdateStatus(Enum):
    """The result of an update."""

    CREATED = "created"
    """At least one consumer was created."""
    UPDATED = "updated"
    SKIPPED = "skipped"
    """The filters were already correct."""


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The result of `update`: the filters are now those of its partitions, or of a later call's."""

    status: UpdateStatus
    subjects: int
    """Number of filter subjects now."""
    passed_over: frozenset[str] = frozenset()
    """Subjects whose backlog will not be delivered: they were added to an existing consumer, now or by an earlier
    update, and `all_caught_up` was not called since."""


SHOWN = 5
"""Maximum number of changed subjects shown in one line."""


def difference(before: Set[str], after: Set[str]) -> str:
    """Describe what an update changes, in one line. Pure."""
    signed = (
        [f"+{subject}" for subject in sorted(after - before)],
        [f"-{subject}" for subject in sorted(before - after)],
    )
    more = sum(max(len(some) - SHOWN, 0) for some in signed)
    shown = [one for some in signed for one in some[:SHOWN]]
    return " ".join([*shown, f"and {more} more"] if more else shown) or "no other subjects"


Permission = Callable[[], bool]


def always() -> bool:
    """Permit every change: for a worker whose names no other process can have."""
    return True


Trouble = Callable[[PenstockError, int], None]
"""Called after several updates have failed in a row, with the last error and their number."""


BEHIND = "penstock.behind"
"""Consumer metadata: the subjects whose backlog was skipped and is not caught up with."""
WRITTEN_AGAIN = "penstock.written-again"
"""Consumer metadata: when the consumer was last written without a change."""


class StreamRemade(Unavailable):
    """The stream was recreated: progress on the old one does not apply to it."""


def stream_identity(stream: StreamInfo) -> str:
    """Return what distinguishes a stream from an earlier one of the same name: its creation time."""
    return stream.created.isoformat() if stream.created else ""


class WorkerConsumer:
    """One durable pull consumer (and its shards, where that is allowed) of one worker. For one event loop."""

    def __init__(
        self,
        jetstream: JetStream,
        options: ConsumerOptions,
        *,
        done: Callable[[str], int] = lambda partition_id: 0,
        metrics: WorkerMetrics | None = None,
        on_trouble: Trouble | None = None,
        permitted: Permission = always,
        before_removal: Callable[[str], None] = lambda name: None,
        before_creation: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`done` returns the last sequence done of a partition, when a consumer must be created.

        `permitted` is called before every change: another process may have our names by now.

        `before_removal` is called with a consumer that will be deleted, so that pulling from it stops, and
        `before_creation` with one that will be created: deliveries of an earlier one of its name do not apply to it.
        """
        self.options = options
        self.failures = 0
        """Updates that failed since the last good one."""
        self.trouble = ""
        """What the last failed update was to change, and why it failed."""
        self.applied: Shards = ()
        """The filters that the server has, as far as we know."""
        self.created = ""
        """Creation time of the stream, to recognise a recreated one; known after the first contact."""
        self.remade = False
        """Whether the stream was deleted and created again: nothing known of the old one applies."""
        self.retention = ""
        """The stream's retention; known after the first contact."""
        self.start = 0
        """The highest start sequence of its consumers: the server moves none of them before its own."""
        self.direct = False
        """Whether the stream allows batched direct get; known after the first contact."""
        self._jetstream = jetstream
        self._done = done
        self._metrics = metrics or WorkerMetrics(options.worker_id, options.consumer)
        self._on_trouble = on_trouble
        self._permitted = permitted
        self._before_removal = before_removal
        self._before_creation = before_creation
        self._partitions: tuple[Partition, ...] = ()
        self._desired: Shards | None = None
        self._waiting: list[asyncio.Future[UpdateOutcome]] = []
        self._applier: asyncio.Task[None] | None = None
        self._last_applied = float("-inf")
        self._max_ack_pending = options.max_ack_pending
        self._writing = asyncio.Lock()
        self._adopted = False
        self._doubtful = False
        """Whether a write failed: the server may have other filters than `applied`."""
        self._behind: frozenset[str] = frozenset()
        """Subjects whose backlog was skipped."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the current consumers."""
        return tuple(self.options.name(i) for i, shard in enumerate(self.applied) if shard)

    # -- updates ---------------------------------------------------------------------------------------------------

    async def update(self, partitions: Iterable[Partition]) -> UpdateOutcome:
        """Set the filters to those of these partitions; concurrent calls share one update.

        Returns when the server has them. Raises `SubjectCapExceeded` at once, with nothing changed; `UpdateFailed`
        after several attempts, with the last good filters in place and the change still pending.
        """
        chosen = tuple(partitions)
        found = filters.subject_set(chosen)
        if found.duplicates:
            self._metrics.duplicate_subjects(found.duplicates)
            log.warning("%d subjects of %s overlap others", found.duplicates, self.options.consumer)
        await self._adopt()
        options = self.options
        target = filters.plan(chosen, self.applied, options.max_subjects, options.max_consumers, options.universe)
        self._partitions = chosen
        if self._desired is not None:
            self._metrics.update_skipped()  # this one replaces an update that was not sent yet
        elif target == self.applied and not self._doubtful:
            self._metrics.update_skipped()
            return self._outcome(UpdateStatus.SKIPPED)
        self._desired = target
        waiting: asyncio.Future[UpdateOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self._applier is None or self._applier.done():
            self._applier = asyncio.create_task(self._apply_until_done(), name=f"update {options.consumer}")
        return await waiting

    def fits(self, partitions: Collection[Partition]) -> bool:
        """Whether consumers with exactly these partitions stay below the cap."""
        options = self.options
        try:
            filters.plan(partitions, (), options.max_subjects, options.max_consumers, options.universe)
        except filters.SubjectCapExceeded:
            return False
        return True

    def forget(self) -> None:
        """Drop all cached state of the stream and the consumers."""
        self.applied, self._adopted, self._partitions = (), False, ()
        self.start, self._behind = 0, frozenset()

    async def close(self) -> None:
        """Stop updating. The consumer stays, so that the worker finds it again."""
        if self._applier:
            self._applier.cancel()
            await asyncio.gather(self._applier, return_exceptions=True)
        self._answer(UpdateFailed("the worker has stopped"))

    async def _apply_until_done(self) -> None:
        delays, tries = self.options.retry.delays(), 0
        await asyncio.sleep(self._time_to_wait())
        while (target := self._desired) is not None:
            started = _now()
            try:
                outcome = await self._write(target)
            except PenstockError as exc:
                tries += 1
                self._failed(exc, tries)
                await asyncio.sleep(max(next(delays), self._time_to_wait()))
                continue
            self._last_applied = _now()
            self.failures, self.trouble, tries = 0, "", 0
            self._metrics.update_applied(self._last_applied - started, outcome.subjects)
            if self._desired == target:
                self._desired = None
                self._answer(outcome)
            else:  # `update` was called again meanwhile: all callers get the last result
                await asyncio.sleep(self._time_to_wait())

    def _time_to_wait(self) -> float:
        """Return the seconds until the next update: the window, or longer right after the last one."""
        return max(self.options.window, self._last_applied + self.options.min_interval - _now())

    def _failed(self, error: PenstockError, tries: int) -> None:
        self.failures += 1
        self._metrics.update_failed()
        change = difference(_union(self.applied), _union(self._desired or ()))
        self.trouble = (
            f"update of consumer {self.options.consumer} failed ({self.failures} in a row; {change}): {error}"
        )
        log.warning("%s", self.trouble)
        if self._on_trouble and self.failures % self.options.escalate_after == 0:
            self._on_trouble(error, self.failures)
        if tries >= self.options.attempts:
            failed = UpdateFailed(f"consumer {self.options.consumer!r} goes on with its last good filters: {error}")
            failed.__cause__ = error
            self._answer(failed)

    def _answer(self, answer: UpdateOutcome | UpdateFailed) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.done():
                continue
            if isinstance(answer, UpdateOutcome):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    # -- the server ------------------------------------------------------------------------------------------------

    async def _write(self, target: Shards) -> UpdateOutcome:
        """Update the filters of every consumer; removals first, so that a work queue never sees an overlap."""
        before, created = self.applied, False
        async with self._writing:
            doubtful, self._doubtful = self._doubtful, True
            for shard in range(max(len(before), len(target))):
                wanted = target[shard] if shard < len(target) else frozenset()
                had = before[shard] if shard < len(before) else frozenset()
                if not wanted:
                    await self._remove(shard)
                elif wanted != had or doubtful:
                    created = await self._put(shard, wanted) or created
                self.applied = _replaced(self.applied, shard, wanted)
            self._doubtful = False
        return self._outcome(UpdateStatus.CREATED if created else UpdateStatus.UPDATED)

    def _outcome(self, status: UpdateStatus) -> UpdateOutcome:
        covered = _union(self.applied)
        self._behind &= covered
        return UpdateOutcome(status, len(covered), self._behind)

    async def _adopt(self) -> None:
        """Read the consumers of an earlier run of this worker: subjects that they filter by are not skipped."""
        async with self._writing:
            if self._adopted:
                return
            stream = await self._jetstream.stream_info(self.options.stream)
            self.created = stream_identity(stream)
            self.retention = str(stream.config.get("retention", "limits"))
            self.direct = bool(stream.config.get("allow_direct")) and await self._can_read_batches()
            for shard in range(self.options.max_consumers):
                with suppress(ConsumerNotFound):
                    info = await self._jetstream.consumer_info(self.options.stream, self.options.name(shard))
                    self.applied = _replaced(self.applied, shard, frozenset(info.filters))
                    self._behind |= set(passed_over(info))
                    self._note_start(info)
            self._adopted = True

    async def _can_read_batches(self) -> bool:
        try:
            await self._jetstream.require(features.BATCH_DIRECT_GET)
        except FeatureMissing:
            return False
        return True

    async def _put(self, shard: int, subjects: frozenset[str]) -> bool:
        """Update the consumer, or create it when it does not exist; returns whether it was created.

        Its filters and metadata are read from the server: an update whose answer was lost counts too.
        """
        behind = frozenset[str]()

        def change(config: Json) -> Json:
            """Change only what may change: a field that the server refuses to change is written back as it was read."""
            nonlocal behind
            self._ask_permission()
            single = config.pop("filter_subject", None)
            added = subjects.difference([single] if single else config.get("filter_subjects") or ())
            behind = (subjects & {*self._behind, *_noted(config)}) | added
            changed = {"filter_subjects": sorted(subjects), "max_ack_pending": self._max_ack_pending}
            return {**config, **changed, **self.options.mutable(), "metadata": _with_note(config, behind)}

        try:
            info = await self._jetstream.update_consumer(self.options.stream, self.options.name(shard), change)
        except ConsumerNotFound:
            await self._create(shard, subjects)
            return True
        log.debug("%s passes over %s up to %d", info.name, sorted(behind), info.delivered_stream_seq)
        self._behind |= behind
        return False

    async def all_caught_up(self) -> None:
        """Clear the metadata about skipped backlogs: they have been read."""
        if not self._behind or self._desired is not None:
            return
        await self._change_all(lambda config: {**config, "metadata": _with_note(config, frozenset())})
        self._behind = frozenset()

    async def _create(self, shard: int, subjects: Collection[str]) -> ConsumerInfo:
        """Create the consumer so that it starts after what is done of every partition."""
        if stream_identity(await self._jetstream.stream_info(self.options.stream)) != self.created:
            self.remade = True
            raise StreamRemade(f"stream {self.options.stream!r} was deleted and made again")
        start = None
        if self.retention != Retention.WORKQUEUE:  # there only what is not done is left
            start = min((self._done(p.id) for p in self._partitions), default=0) + 1
        config = self.options.created(shard, subjects, start)
        self._ask_permission()
        self._before_creation(self.options.name(shard))
        info = await self._jetstream.create_consumer(self.options.stream, config)
        self._note_start(info)
        return info

    def _note_start(self, info: ConsumerInfo) -> None:
        self.start = max(self.start, info.config.get("opt_start_seq", 0))

    async def _remove(self, shard: int) -> None:
        """Delete a consumer that has no subjects left: without filters it would read the whole stream."""
        self._ask_permission()
        self._before_removal(self.options.name(shard))
        with suppress(ConsumerNotFound):
            await self._jetstream.delete_consumer(self.options.stream, self.options.name(shard))

    async def present(self) -> dict[str, ConsumerInfo]:
        """Return the consumers as the server has them; one that has vanished is created again, after what is done."""
        found = {}
        async with self._writing:
            for shard, subjects in enumerate(self.applied):
                if not subjects:
                    continue
                try:
                    info = await self._jetstream.consumer_info(self.options.stream, self.options.name(shard))
                except ConsumerNotFound:
                    log.warning("consumer %s has vanished; making it again", self.options.name(shard))
                    info = await self._create(shard, subjects)
                found[info.name] = info
        return found

    async def allow_pending(self, count: int) -> None:
        """Set `max_ack_pending` on the server, for messages that wait without being held in memory."""
        self._max_ack_pending = max(count, self.options.max_ack_pending)
        await self._change_all({"max_ack_pending": self._max_ack_pending})

    async def replicas(self) -> list[ReplicaInfo]:
        """Return the replicas of the consumers, as their leaders see them."""
        infos = [await self._jetstream.consumer_info(self.options.stream, name) for name in self.names]
        return [replica for info in infos for replica in info.replicas]

    async def write_again(self) -> None:
        """Make every server read the configuration again: only a metadata value changes."""
        now = datetime.now(UTC).isoformat()
        await self._change_all(lambda c: {**c, "metadata": {**(c.get("metadata") or {}), WRITTEN_AGAIN: now}})

    async def _change_all(self, change: Json | Callable[[Json], Json]) -> None:
        async with self._writing:
            self._ask_permission()
            for name in self.names:
                await self._jetstream.update_consumer(self.options.stream, name, change)

    async def reset(self, name: str, first: int | None) -> None:
        """Reset a consumer to a sequence, or to after its ack floor; its delivery count restarts at 1."""
        async with self._writing:
            self._ask_permission()
            await self._jetstream.reset_consumer(self.options.stream, name, first)

    def _ask_permission(self) -> None:
        if not self._permitted():
            raise Unavailable(
                f"{self.options.worker_id} lost its lease and cannot change its consumer until its id is confirmed "
                "again; it will retry"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()


async def group_consumers(jetstream: JetStream, stream: str, group: str) -> dict[str, list[ConsumerInfo]]:
    """Return the consumers of a group's workers, by worker id."""
    return by_worker(await jetstream.consumers(stream), group)


def by_worker(consumers: Iterable[ConsumerInfo], group: str) -> dict[str, list[ConsumerInfo]]:
    """Return those consumers that belong to a group's workers, by worker id."""
    found: dict[str, list[ConsumerInfo]] = {}
    for consumer in consumers:
        metadata = consumer.config.get("metadata") or {}
        if metadata.get("penstock.group") == group:
            found.setdefault(str(metadata.get("penstock.worker")), []).append(consumer)
    return found


def passed_over(info: ConsumerInfo) -> list[str]:
    """Return the subjects whose backlog a worker has not caught up with, from its consumer's metadata."""
    return _noted(info.config)


def _noted(config: Json) -> list[str]:
    return str((config.get("metadata") or {}).get(BEHIND, "")).split()


def _with_note(config: Json, behind: frozenset[str]) -> Json:
    kept = {key: value for key, value in (config.get("metadata") or {}).items() if key != BEHIND}
    return {**kept, BEHIND: " ".join(sorted(behind))} if behind else kept


def _union(shards: Shards) -> frozenset[str]:
    return frozenset().union(*shards)


def _replaced(shards: Shards, index: int, subjects: frozenset[str]) -> Shards:
    changed = [*shards, *[frozenset[str]()] * (index + 1 - len(shards))]
    changed[index] = subjects
    while changed and not changed[-1]:
        changed.pop()
    return tuple(changed)


LOOK_EVERY = 10.0  # seconds
TIMES = 3
"""Number of times a consumer is written again, once per check: what blocks one write may itself be written later."""


class Absence:
    """Tracks whether a node was away, and how often consumers were written since. Pure."""

    def __init__(self) -> None:
        self._due = TIMES  # at the start it is unknown whether a node was away before

    def over(self, away: bool) -> bool:
        """Record one check; returns whether to write the consumers now."""
        if away:
            self._due = TIMES
            return False
        due, self._due = self._due, max(self._due - 1, 0)
        return due > 0


class NodeWatch:
    """Checks the replicas of a worker's consumers periodically."""

    def __init__(self, consumer: WorkerConsumer) -> None:
        self._consumer = consumer
        self._absence = Absence()

    async def run(self) -> None:
        """Check for as long as the worker runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await self._look()
            except PenstockError as exc:
                self._absence.over(away=True)  # a server does not answer
                log.info("%s: its replicas cannot be looked at now: %s", self._consumer.options.consumer, exc)

    async def _look(self) -> None:
        if self._consumer.retention != Retention.WORKQUEUE:
            return
        replicas = await self._consumer.replicas()
        away = any(replica.offline or replica.silent for replica in replicas)
        if replicas and self._absence.over(away):
            await self._consumer.write_again()
            log.info("%s is written again, for a node that may have been away", self._consumer.options.consumer)
