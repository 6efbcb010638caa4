"""A group of workers on one stream: each handles its share of the partitions, and shares move without loss.

async with WorkerGroup(settings, GroupOptions(group="billing", stream="BILLING", source=...), handle) as group:
    await group.until_stopped()
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Any, Self

from penstock.consume.handlers import Handler, refuse_what_no_process_can_run
from penstock.consume.metrics import WorkerMetrics
from penstock.errors import ConfigError, OutcomeUnknown, PenstockError, Unavailable
from penstock.jetstream.kv import Bucket
from penstock.metrics.endpoint import Health
from penstock.publish.control import Control
from penstock.retry import is_retryable
from penstock.settings import Settings
from penstock.workers.group.assignment import Assignments
from penstock.workers.group.identity import ClaimLost, Identity, WorkerRecord
from penstock.workers.group.member import DEGRADED, Member, MemberStatistics
from penstock.workers.options import ConsumerOptions, GroupOptions, WorkerOptions
from penstock.workers.worker import Worker

log = logging.getLogger(__name__)

REJOIN_AFTER = 0.5
"""Maximum seconds before a worker that has lost its id claims another."""
JOIN_WITHIN = 60.0
"""Seconds that joining is retried while a reachable server has no leader, or is busy."""


def check_times(options: GroupOptions, consumer: Mapping[str, Any]) -> None:
    """Raise `ConfigError` when the group's consumers could not be created, or would be deleted too early."""
    made = ConsumerOptions(stream=options.stream, worker_id="x", prefix=options.group, **consumer)
    if made.inactive_threshold <= options.ttl:
        raise ConfigError(
            f"inactive_threshold ({made.inactive_threshold:g} s) must be longer than ttl ({options.ttl:g} s): "
            "the consumer of a dead worker says how far it came, and must outlive it"
        )


class WorkerGroup:
    """One worker of a group. For one event loop; `async with` joins and leaves.

    Handlers get a fencing token with every message: the store of their effects should refuse a token lower than the
    highest it has seen for the partition. Without that, an owner that was cut off may repeat an effect.
    """

    def __init__(
        self,
        settings: Settings,
        options: GroupOptions,
        handler: Handler,
        *,
        consumer: Mapping[str, Any] | None = None,
        worker: WorkerOptions | None = None,
    ) -> None:
        """`consumer`: fields of `ConsumerOptions` except its names; `worker`: how handlers are called."""
        self.options = options
        self.member: Member | None = None
        self.worker: Worker | None = None
        self._settings = settings
        self._handler = handler
        self._consumer = dict(consumer or {})
        self._worker_options = worker or WorkerOptions()
        check_times(options, self._consumer)
        if self._worker_options.processes:
            refuse_what_no_process_can_run(handler)
        self._running: asyncio.Task[None] | None = None
        self._reached = False
        self._joined = asyncio.Event()
        self._leaving = False

    async def _check_stream(self, control: Control, bucket: Bucket) -> None:
        """Raise when the stream does not exist, or is not the group's: its partitions would not be handled."""
        await control.jetstream.stream_info(self.options.stream)
        stream = await Assignments(bucket).stream()
        if stream and stream != self.options.stream:
            raise ConfigError(
                f"group {self.options.group!r} works on stream {stream!r}, not on {self.options.stream!r}; "
                f"give this one another name, or delete bucket {bucket.name!r} if that group is no more"
            )

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group: returns once an id is claimed. Partitions come with the next assignment."""
        self._running = asyncio.create_task(self._run(), name=f"group {self.options.group}")
        joined = asyncio.create_task(self._joined.wait())
        await asyncio.wait([self._running, joined], return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Hand over every partition, and leave the group."""
        self._leaving = True
        if self.member:
            await self.member.leave()
        if self._running:
            if not self.member:
                self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def until_stopped(self) -> None:
        """Return when the worker has left; raises what ended it otherwise."""
        if self._running:
            await asyncio.shield(self._running)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _run(self) -> None:
        join_by = time.monotonic() + JOIN_WITHIN
        while not (self._leaving and self._joined.is_set()):
            try:
                await self._take_part()
                return
            except PenstockError as exc:
                if self._leaving or not (self._may_rejoin(exc) or self._may_join(exc, join_by)):
                    raise
                log.warning("%s; trying again", exc)
            await asyncio.sleep(random.uniform(0, REJOIN_AFTER))

    def _may_rejoin(self, exc: PenstockError) -> bool:
        if isinstance(exc, ClaimLost) and exc.replaced:
            return False  # otherwise the two would take the id from each other forever
        passing = isinstance(exc, ClaimLost | Unavailable | OutcomeUnknown) or is_retryable(exc)
        return self._joined.is_set() and self.options.rejoin and passing

    def _may_join(self, exc: PenstockError, join_by: float) -> bool:
        """Whether to retry joining: a wrong address should fail, but a server that was reached may be without a leader
        for a while."""
        return not self._joined.is_set() and self._reached and is_retryable(exc) and time.monotonic() < join_by

    async def _take_part(self) -> None:
        """Run under one id, with separate connections."""
        control = await Control.connect(self._settings)
        self._reached = True
        try:
            bucket = Bucket(control, self.options.bucket, self.options.replicas, like=self.options.stream)
            await bucket.ensure()
            options = self.options
            if not self._joined.is_set():
                await self._check_stream(control, bucket)
            record = WorkerRecord(options.instance, labels=options.labels, capacity=options.capacity)
            identity = Identity(bucket, options.pool, record, options.ttl)
            await identity.claim()
            self.member = Member(control, options, identity, bucket)
            self.worker = self._make_worker(identity.id, self.member)
            await self.member.prepare()
            self._joined.set()
            if self._leaving:  # `stop` was called while it was rejoining
                await self.member.leave()
                return
            await self.member.run(self.worker)
        finally:
            await control.close()

    def _make_worker(self, worker_id: str, member: Member) -> Worker:
        claims = member.claims
        consumer = ConsumerOptions(
            stream=self.options.stream, worker_id=worker_id, prefix=self.options.group, **self._consumer
        )
        return Worker(
            self._settings,
            consumer,
            self._handler,
            options=self._worker_options,
            ownership=claims,
            before=claims.before,
            progress=member.progress,
            permitted=lambda: member.identity.lease.valid,
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str | None:
        """The current worker id."""
        return self.member.identity.id if self.member else None

    async def has_nothing_left(self) -> bool:
        """Whether every partition has an owner, and all of them are handled: others' too, since one of them may have
        died. False before the first assignment."""
        if self.worker is None or self.member is None or not await self.member.has_assigned_all():
            return False
        if self.worker.partitions and not await self.worker.has_nothing_left():
            return False
        return await self.member.others_have_nothing_left()

    def metrics(self) -> list[WorkerMetrics]:
        """Return its metrics for `consume.metrics.serve`; empty before it has joined."""
        if self.worker is None or self.member is None:
            return []
        self.member.count(self.worker.metrics)
        return [self.worker.metrics]

    def health(self) -> Health:
        """Return whether it should be restarted, and what it waits for before it can handle messages."""
        if self._running is None or self._running.done():
            return Health(broken=f"this worker of group {self.options.group!r} does not run")
        if self.worker is None or self.member is None:
            return Health(waiting="has not joined its group yet")
        if self.worker.failure:
            return Health(broken=f"cannot go on: {self.worker.failure}")
        if self.member.mode == DEGRADED:
            return Health(waiting="coordination is away; it goes on with the partitions that it has")
        return Health(waiting="" if self.member.assigned else "waits for its first assignment")

    def statistics(self) -> MemberStatistics:
        """Return the state of this worker. Raises before it has joined."""
        if self.member is None:
            raise PenstockError(f"this worker has not joined group {self.options.group!r} yet; call start first")
        return self.member.statistics()
