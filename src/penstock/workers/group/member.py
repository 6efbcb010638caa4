"""One worker under one id in its group: from claiming the id until it leaves or loses the id.

Three loops run concurrently, so that none waits for another: the heartbeat, the check of the worker's own partitions,
and the leader's check of the whole group, while this worker leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from penstock.consume.hooks import HookFailed
from penstock.consume.metrics import WorkerMetrics
from penstock.errors import (
    ApiError,
    BrokerUnreachable,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
)
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import Retention
from penstock.publish.control import Control
from penstock.workers.group import handoff
from penstock.workers.group.assignment import Assignments, Share
from penstock.workers.group.claims import (
    CLAIMS,
    Claim,
    KVClaims,
    ProgressRecorder,
    Reached,
    claim_key,
    claims_in,
    progress_key,
    records_in,
    store,
)
from penstock.workers.group.handoff import Steps, View
from penstock.workers.group.identity import ACTIVE, LEAVING, WORKERS, ClaimLost, Election, Identity, clock, workers_in
from penstock.workers.group.leader import Leader
from penstock.workers.group.overview import look
from penstock.workers.options import GroupOptions
from penstock.workers.partitions import NoPartitionList, Partition
from penstock.workers.pull import filters
from penstock.workers.pull.consumer import StreamRemade, group_consumers, stream_identity
from penstock.workers.worker import Worker

log = logging.getLogger(__name__)

WORKING, MOVING, DEGRADED = "working", "moving", "degraded"


class WorkerFailed(PenstockError):
    """One of the worker's own loops has ended: this process should end too, and be restarted."""


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    """The state of a member."""

    worker_id: str
    mode: str
    leads: bool
    version: int
    """Version of the assignment it works by."""
    partitions: tuple[str, ...]
    held: tuple[str, ...]
    catching_up: tuple[str, ...]
    handed_over: int


class Member:
    """A worker with an id. `run` returns when it has left, and raises `ClaimLost` when it has lost its id."""

    def __init__(self, control: Control, options: GroupOptions, identity: Identity, bucket: Bucket) -> None:
        self._control = control
        self._options = options
        self._bucket = bucket
        self.identity = identity
        self.claims = KVClaims(bucket, identity.id, identity.incarnation, identity.lease)
        self.progress = ProgressRecorder(bucket, progress_key(identity.id, identity.incarnation))
        self._assignments = Assignments(bucket)
        self._election = Election(bucket, identity.id, identity.incarnation, options.ttl)
        self._leader = Leader(control, bucket, options, options.source(control, bucket), identity.id)
        self._known: dict[str, Partition] = {}
        """Every partition that we have owned, covered or been assigned."""
        self._wanted: frozenset[str] | None = None
        self._version = 0
        self._covered: set[str] = set()
        """Partitions whose subjects our consumer filters by."""
        self._held: set[str] = set()
        self._draining: dict[str, asyncio.Task[dict[str, Reached]]] = {}
        """Partitions to be released: each is drained separately, so that a slow handler holds up no other partition."""
        self._again: set[str] = set()
        """Partitions whose backlog is always read: another worker owned them while our consumer still covered them."""
        self._catching_up: set[str] = set()
        """Partitions of our worker that may have a backlog."""
        self._has_inherited = False
        """Whether all claims of the process that had our id before are freed."""
        self._inherited_cover: set[str] = set()
        """Partitions that the consumer of that process must keep covering."""
        self._alone = False
        """We leave, and no other worker is there to take over: then everything is freed for the next one."""
        self._recheck = True
        self._steps = Steps()
        self._look = asyncio.Event()
        self._left = asyncio.Event()
        self._epoch_seen = self._epoch
        self._checked_at = clock()
        self._retention: Retention | None = None
        self._stream = ""
        """The creation time of the stream."""
        self.mode = WORKING
        self.handed_over = 0
        self._warned: set[str] = set()

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Create what must exist before this worker announces that it joined."""
        await self._leader.begin()

    async def run(self, worker: Worker) -> None:
        """Run until `leave` is done, or until the id is lost."""
        self._worker = worker
        worker.told = self._reached
        await worker.start()
        own = (self._renew(), self._follow(), self._lead())
        loops = [asyncio.create_task(loop) for loop in own]
        left = asyncio.create_task(self._left.wait())
        try:
            done, _ = await asyncio.wait([*loops, left], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {left}:
                task.result()
        finally:
            all_: list[asyncio.Task[Any]] = [*loops, left, *self._draining.values()]
            for task in all_:
                task.cancel()
            await asyncio.gather(*all_, return_exceptions=True)
            await worker.stop()

    async def leave(self) -> None:
        """Hand over all partitions, and stop. Those that no worker takes in time are left free for the next owner."""
        if self.identity.lost or self._left.is_set():
            return
        try:
            async with asyncio.timeout(self._options.leave_within):
                await self._farewell()
        except (TimeoutError, PenstockError) as exc:
            log.warning("%s leaves without having handed over everything: %s", self.identity.id, exc)
        self._left.set()

    async def _farewell(self) -> None:
        await self.identity.renew(state=LEAVING)
        while self.claims.mine or await self._to_be_covered():
            self._alone = not await self._others()
            self._look.set()
            await asyncio.sleep(self._options.look_soon)
        await self._election.resign()
        await self.identity.retire()

    async def _to_be_covered(self) -> bool:
        """Whether other workers have yet to cover what we cover. On an Interest stream our consumer stays when we stop,
        for partitions that no worker can take: without it their messages would not be kept for the next owner."""
        if self._retention is Retention.INTEREST and self._covered:
            return not self._alone and not self._covered.issubset((await self._assignments.current()).parked)
        return bool(self._covered)

    async def _others(self) -> bool:
        """Whether another worker is left to hand over to."""
        workers = workers_in(await self._bucket.entries(WORKERS))
        return any(record.state == ACTIVE for record in workers.values())

    # -- heartbeat -----------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            asked = clock()
            try:
                await self.identity.renew(
                    applied=self._version,
                    mode=self.mode,
                    failures=self._worker.metrics.updates_failing,
                    troubles=tuple(self._worker.troubles()),
                )
                self._healthy()
            except (Unavailable, OutcomeUnknown, ApiError) as exc:
                answered = await self._degraded(exc)
                if _is_away_for_all(exc, answered):
                    self.identity.lease.unanswered(asked)
            await asyncio.sleep(self._options.renew_every)

    @property
    def _epoch(self) -> tuple[int, int]:
        """Changes when the connection was re-established or the bucket was re-created."""
        return self._control.connection.opened, self.identity.made_again

    def _healthy(self) -> None:
        """Re-check our claims after a lost connection or in a new bucket, when nothing we remember is certain. They are
        also re-checked once per lease."""
        self._recheck = self._recheck or clock() - self._checked_at > self._options.ttl
        if self.mode == DEGRADED or self._epoch != self._epoch_seen:
            log.info("%s: coordination is back", self.identity.id)
            self._epoch_seen, self._recheck = self._epoch, True
            self._leader.forget_heartbeats()
            self._election.forget_heartbeats()
            self._look.set()
        self.mode = MOVING if self._moving else WORKING

    async def _degraded(self, why: PenstockError) -> bool:
        """Enter degraded mode when coordination is unavailable: we keep our partitions, and nothing else changes until
        it is back. Returns whether a server reported the state of the bucket."""
        if self.mode != DEGRADED:
            log.warning(
                "%s: degraded, goes on with its %d partitions: %s", self.identity.id, len(self.claims.mine), why
            )
        self.mode = DEGRADED
        try:
            await self._bucket.ensure()
        except PenstockError as exc:
            log.debug("the bucket cannot be looked at: %s", exc)
            return False
        return True

    @property
    def _moving(self) -> bool:
        busy = self._catching_up or self._held or self._draining
        return bool(busy or self._steps.wait or not self._steps.nothing)

    # -- progress record -----------------------------------------------------------------------------------------------

    def _reached(self) -> dict[str, Reached]:
        mine = self.claims.mine
        return {p: replace(r, token=mine[p].token) for p, r in self._worker.reached().items() if p in mine}

    # -- this worker's partitions --------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                await self._step()
            except (ClaimLost, WorkerFailed, StreamRemade):
                raise
            except PenstockError as exc:
                self._say("the next look may see more", exc)
            self.count(self._worker.metrics)
            await self._pause(self._options.look_soon if self._moving else self._options.look_every)

    async def _pause(self, seconds: float) -> None:
        self._look.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            return

    async def _step(self) -> None:
        """Read the assignment and its claims, and take the steps that are due."""
        if failure := self._worker.failure:
            raise WorkerFailed(f"{self.identity.id} cannot go on: {failure}") from failure
        consumer = self._worker.consumer
        if consumer.remade or (self._stream and consumer.created not in ("", self._stream)):
            raise StreamRemade(f"stream {self._options.stream!r} was recreated; {self.identity.id} begins with it")
        retention = await self._learn()
        if not self.identity.lease.valid:
            return
        self._held |= self._covered - self.claims.mine.keys()  # also partitions that turned out to be another worker's
        if self.assigned and not self._has_inherited:
            await self._inherit(retention)
        found = await self._relevant_claims()
        await self._check(found)
        again = self.claims.found_again(found)
        self._again |= again
        self._held -= again
        mine = frozenset(self.claims.mine)
        view = View(self.identity.id, self._wanted, found, mine, frozenset(self._held))
        steps = self._steps = handoff.next_steps(view, retention)
        await self._stay(mine.difference(steps.give))
        freed = await self._give(steps.give)
        at_once = frozenset[str]() if retention is Retention.INTEREST else freed
        await self._let_go((*steps.let_go, *at_once))
        await self._take(steps.take)
        self._hold_inherited()
        await self._settle()

    async def _learn(self) -> Retention:
        """Read our share of the assignment, and the retention of its stream."""
        if self._retention is None:
            stream = await self._control.jetstream.stream_info(self._options.stream)
            self._retention = Retention(stream.config.get("retention", "limits"))
            self._stream = stream_identity(stream)
        share = Share(self._version) if self._alone else await self._assignments.share(self.identity.id)
        if share is None:
            self._wanted = None
        else:
            self._version, listed = share.version, share.partitions
            if not self._alone:
                self._worker.pause(share.paused)
            partitions = self._worker.fitting(listed, self._covered)
            for trouble in filters.left_out(len(listed) - len(partitions)):
                self._say("the assignment", ConfigError(trouble))
            # One that comes back with other subjects is given away first.
            found = {p.id: p for p in partitions if p.id not in self._covered or self._known[p.id].mark == p.mark}
            self._known |= found
            self._wanted = frozenset(found)
        return self._retention

    async def _relevant_claims(self) -> dict[str, Claim]:
        """Return the claims of what we own, should own, or still cover; none when there is nothing to compare."""
        concerned = (self._wanted or frozenset()) | self.claims.mine.keys() | self._held
        quiet = not self._held and (self._wanted is None or self._wanted == self.claims.mine.keys())
        if quiet and not self._recheck and all(claim.settled for claim in self.claims.mine.values()):
            return {}
        return claims_in(await self._bucket.values([claim_key(p) for p in sorted(concerned)]))

    async def _check(self, found: Mapping[str, Claim]) -> None:
        """After a lost connection: drop what another worker owns by now, and claim again what has no claim."""
        if not self._recheck:
            return
        changed = self.claims.compare(found)
        missing = {p for p in changed if p not in found}
        await self.claims.assert_again(self._worker.done_through, sorted(missing))
        stolen = (changed - missing) | (missing - self.claims.mine.keys())
        self.claims.drop(stolen)
        for partition in stolen & self._draining.keys():
            self._draining.pop(partition).cancel()
        self._held |= stolen
        self._recheck, self._checked_at = False, clock()

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def _stay(self, partitions: Collection[str]) -> None:
        """Resume partitions that were to be released, could not be, and need not be any more."""
        staying = self._draining.keys() & set(partitions)
        for partition in staying:
            self._draining.pop(partition).cancel()
        try:
            await self._worker.resume(staying)
        except HookFailed:  # they stay held until the next check
            self._drain_all(staying)
            raise

    async def _give(self, partitions: Collection[str]) -> frozenset[str]:
        """1. drain each partition separately, 2. free the drained ones. Returns what is no longer ours."""
        if not partitions:
            return frozenset()
        self._drain_all(partitions)
        await asyncio.wait([self._draining[p] for p in partitions], timeout=self._options.look_soon)
        ended = {p: self._draining[p] for p in partitions if self._draining[p].done()}
        for partition in [p for p, task in ended.items() if task.exception()]:  # it is drained again
            log.info("%s: %s is given away later: %s", self.identity.id, partition, ended.pop(partition).exception())
            self._draining.pop(partition)
        known = {p: reached for p, task in ended.items() if (reached := task.result().get(p))}
        log.debug("%s gives away, and has done: %s", self.identity.id, known)
        mine = [p for p in ended if p in self.claims.mine]
        freed = await self.claims.give({p: known.get(p) or Reached(self.claims.mine[p].handoff) for p in mine})
        gone = frozenset(claim.partition for claim in freed)
        for partition in gone:
            self._draining.pop(partition)
        self._held |= self._covered & gone
        self.handed_over += len(gone)
        return gone

    def _drain_all(self, partitions: Iterable[str]) -> None:
        for partition in partitions:
            if partition not in self._draining:
                drain = self._worker.drain([partition])
                self._draining[partition] = asyncio.create_task(drain, name=f"drain {partition}")

    async def _let_go(self, partitions: Collection[str]) -> None:
        """7. remove the subjects from our consumer. Nothing is added with it: on a work queue that may have to wait for
        another worker, which may wait for us."""
        if partitions:
            log.debug("%s lets go of %s", self.identity.id, sorted(partitions))
            await self._cover(self._covered - set(partitions))
            self._held -= set(partitions)

    async def _take(self, free: Collection[Claim]) -> None:
        """3. take the claims."""
        if not free:
            return
        # The stream may have been recreated, unnoticed by a worker that owned nothing of it.
        self._stream = stream_identity(await self._control.jetstream.stream_info(self._options.stream))
        about = [claim.about(self._stream, self._known[claim.partition].mark) for claim in free]
        taken = {claim.partition for claim in await self.claims.take(about)}
        self._again |= self._held & taken
        self._held -= taken

    async def _inherit(self, retention: Retention) -> None:
        """Free the claims of the process that had our id before us, with their progress, before the filters of its
        consumer, now ours, change: its ack floor counts for the claims. On an Interest stream its filters may be all
        that keeps unhandled messages: then they stay."""
        jetstream, options, id_ = self._control.jetstream, self._options, self.identity.id
        self._known |= (await self._assignments.current()).by_id
        consumers = await group_consumers(jetstream, options.stream, options.group)
        claims = claims_in(await self._bucket.entries(CLAIMS))
        left = handoff.left_behind(claims, id_, self.identity.incarnation)
        keys = {progress_key(id_, claim.incarnation or "") for claim in left}
        records = records_in(await self._bucket.values(sorted(keys))) if keys else {}
        freed = await store(self._bucket, handoff.freed(left, self._known, consumers, records))
        self._has_inherited = len(freed) == len(left)  # otherwise the leader freed some first: check again
        claims |= {claim.partition: claim for claim in freed}
        if id_ in consumers and retention is Retention.INTEREST:
            self._inherited_cover |= {p for p, c in claims.items() if id_ in c.holders and p in self._known}

    def _hold_inherited(self) -> None:
        left, self._inherited_cover = self._inherited_cover - self.claims.mine.keys(), set()
        self._covered |= left
        self._held |= left

    async def _settle(self) -> None:
        """4. add the subjects, 5. read and handle the backlog, 6. settle the claims of those that are done."""
        open_ = {p: c for p, c in self.claims.mine.items() if not c.settled and p not in self._draining}
        self._catching_up &= open_.keys()
        if new := open_.keys() - self._catching_up:
            await self._cover(self._covered | new, self._again & new)
            self._again -= new
            self._catching_up |= new
        if done := open_.keys() - self._worker.behind:
            is_queue = self._retention is Retention.WORKQUEUE  # there what is not done may not be delivered yet
            through = {p: open_[p].handoff if is_queue else self._worker.done_through(p) for p in done}
            await self.claims.settle(through)

    async def _cover(self, partitions: Set[str], again: Collection[str] = ()) -> None:
        anothers = partitions - self.claims.mine.keys()
        await self._worker.update([self._known[p] for p in sorted(partitions)], again, anothers)
        self._covered = set(partitions)

    # -- leading the group ---------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        while True:
            try:
                leads = await self._election.step()
                if leads and self._retention:
                    if await self._leader.step(self._retention, self._election.sightings):
                        self._look.set()
                    for problem in self._leader.problems:
                        self._say("the partitions", ConfigError(problem))
            except PenstockError as exc:
                self._leader.forget_heartbeats()
                self._election.forget_heartbeats()  # do not declare a leader dead that could not write either
                self._say("nobody is given up and nothing assigned for now", exc)
            await asyncio.sleep(min(self._options.look_every, self._options.renew_every))

    def _say(self, what: str, error: PenstockError) -> None:
        """Log an error; one that does not resolve by itself, such as too many subjects, is a warning, once."""
        level = logging.DEBUG if str(error) in self._warned else logging.INFO
        if level == logging.INFO and isinstance(error, ConfigError | NoPartitionList):
            self._warned.add(str(error))
            level = logging.WARNING
        log.log(level, "%s: %s: %s", self.identity.id, what, error)

    def count(self, metrics: WorkerMetrics) -> None:
        """Add the group's numbers to those of its worker.

        `in`: claims that it took, `out`: claims that it released; it owns the difference, less what it lost.
        """
        metrics.claims, metrics.leader_changes = len(self.claims.mine), self._election.changes
        metrics.handoffs.update({"in": self.claims.made - metrics.handoffs["in"]})
        metrics.handoffs.update({"out": self.handed_over - metrics.handoffs["out"]})

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def assigned(self) -> bool:
        """Whether we have read an assignment."""
        return self._wanted is not None

    async def has_assigned_all(self) -> bool:
        """Whether there is an assignment that has every partition."""
        return self.assigned and await self._leader.has_assigned_all()

    async def others_have_nothing_left(self) -> bool:
        """Whether no partition moves, and no worker of the group has messages left."""
        found = await look(self._control, self._options.group)
        return found.waits_for is None and not found.moves and not any(worker.lag for worker in found.workers)

    def statistics(self) -> MemberStatistics:
        return MemberStatistics(
            worker_id=self.identity.id,
            mode=self.mode,
            leads=self._election.leading,
            version=self._version,
            partitions=tuple(sorted(self.claims.mine)),
            held=tuple(sorted(self._held)),
            catching_up=tuple(sorted(self._catching_up)),
            handed_over=self.handed_over,
        )


def _is_away_for_all(error: PenstockError, answered: bool) -> bool:
    """Whether no other worker could renew or take over either: no server runs, or one says that the bucket accepts no
    writes.

    A timeout does not prove that: only our connection may be cut.
    """
    if isinstance(error, BrokerUnreachable):
        return error.refused
    return answered and not isinstance(error, DeadlineExceeded | ConnectionLost | OutcomeUnknown)
