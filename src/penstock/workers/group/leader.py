"""The leader's duties besides its own messages: retire dead workers, and assign partitions.

One `step` reads the group, and does what is due in this order. If a leader dies in between, the next one continues from
the same place.

    1. retire        the id of a silent worker: from here on the worker cannot renew it, and stops
    2. free          its claims, with the handoff sequence that its consumer's ack floor is
    3. delete        its consumer, once it is not needed any more; then its id is free for another worker
    4. claim         create free claims for new partitions, with their first sequence
    5. assign        once changes have settled, publish the next assignment as one atomic batch
    6. release       what the holder of an Interest stream keeps, once an owner's consumer keeps it
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock import subjects
from penstock.errors import ConfigError, ConsumerNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import Bucket, Entry
from penstock.jetstream.model import ConsumerInfo, Json, Retention
from penstock.publish.control import Control
from penstock.workers.group import assignment, handoff, identity, migration
from penstock.workers.group import claims as claim_store
from penstock.workers.group.assignment import Assignment, Candidate, Published, Situation, Stabilizer, assign
from penstock.workers.group.claims import Claim, ProgressRecord, Reached, claim_key, claims_in, progress_key, records_in
from penstock.workers.group.identity import ACTIVE, RETIRED, Sightings, WorkerRecord, worker_key, workers_in
from penstock.workers.options import GroupOptions
from penstock.workers.partitions import NoPartitionList, Partition, PartitionSource, usable, wildcard_of
from penstock.workers.pull.consumer import group_consumers, passed_over, stream_identity

log = logging.getLogger(__name__)


HOLDS = "penstock.holds"
"""Consumer metadata: the group or the worker that a holder belongs to."""


def holder_name(prefix: str) -> str:
    """Return the name of the consumer that holds messages for a group, or for a worker without a group."""
    return f"{prefix}-holder"


class Holder:
    """The holding consumer of a group, or of a worker without a group; does nothing where none is needed."""

    def __init__(self, jetstream: JetStream, stream: str, prefix: str, source: PartitionSource) -> None:
        self.stream = ""
        """Creation time of the stream at the last `end`: a recreated stream of the same name has other messages."""
        self._jetstream = jetstream
        self._stream = stream
        self._prefix = prefix
        self._filter = wildcard_of(source)
        self._needed = self._filter is not None

    async def begin(self) -> None:
        """Create the consumer if it is needed; an existing one keeps its position, with the pattern's filter."""
        if self._filter is None:
            return
        info = await self._jetstream.stream_info(self._stream)
        self._needed = info.config.get("retention") == Retention.INTEREST
        if not self._needed:
            return
        try:
            await self._jetstream.update_consumer(self._stream, holder_name(self._prefix), self._changed)
        except ConsumerNotFound:
            await self._jetstream.create_consumer(self._stream, self._config())

    async def end(self) -> int:
        """Return the stream's last sequence; call it before partitions are discovered."""
        if not self._needed:
            return 0
        info = await self._jetstream.stream_info(self._stream)
        self.stream = stream_identity(info)
        return info.state.last_seq

    async def release(self, through: int) -> None:
        """Stop holding messages up to `through`. Never moves back."""
        if not self._needed or not through:
            return
        name = holder_name(self._prefix)
        try:
            info = await self._jetstream.consumer_info(self._stream, name)
        except ConsumerNotFound:  # gone with its stream, or deleted
            await self.begin()
            return
        if info.ack_floor_stream_seq < through:
            await self._jetstream.reset_consumer(self._stream, name, through + 1)

    def _config(self) -> Json:
        name = holder_name(self._prefix)
        kept = {"ack_policy": "explicit", "deliver_policy": "all", "metadata": {HOLDS: self._prefix}}
        return {"name": name, "durable_name": name, "filter_subjects": [self._filter], **kept}

    def _changed(self, config: Json) -> Json:
        config.pop("filter_subject", None)
        return {**config, "filter_subjects": [self._filter]}


def covered_through(end: int, handoffs: Collection[int | None]) -> int:
    """Return the sequence up to which nothing needs to be held. `handoffs`: for partitions without an owner that has
    caught up, how far each is done; None where that is not known. Pure."""
    return 0 if None in handoffs else min([end, *(handoff or 0 for handoff in handoffs)])


BEGUN = "group.begun"
"""The key that says where in the stream the group began."""
PROBLEMS = "assignment.problems"
"""The key with the problems that the leader finds in the partitions."""
NOTHING = Reached(0)
AUDIT_EVERY = 20
"""Number of steps after which all claims are checked, even if nothing seems to have changed."""


def situation(
    published: Published, workers: Mapping[str, WorkerRecord], partitions: Collection[Partition]
) -> Situation:
    """Return why a new assignment is needed. Pure."""
    if not published.version:
        return Situation.COLD_START
    if any(member not in workers or workers[member].state == RETIRED for member in published.members):
        return Situation.EMERGENCY
    assigned = {p for some in published.partitions.values() for p in some}
    parked = set(published.parked)
    expected = {p for p in partitions if p.id not in parked}
    active = {worker for worker, record in workers.items() if record.state == ACTIVE}
    # A worker may now be allowed to own a parked partition: then the members have changed too.
    changed = active != set(published.members) or assigned != expected or not parked <= {p.id for p in partitions}
    by_id, owners = {p.id: p for p in partitions}, published.owners
    wished = [
        (p, w) for p, w in published.pins.items() if p in owners and owners[p] != w and w in active and p in by_id
    ]
    changed = changed or any(workers[w].member(w).may_have(by_id[p]) for p, w in wished)
    return Situation.PLANNED if changed else Situation.NONE


@dataclass(frozen=True, slots=True)
class _Scene:
    """The state a leader cleans up by; the workers and their entries change with its actions."""

    workers: dict[str, WorkerRecord]
    entries: dict[str, Entry]
    consumers: Mapping[str, Collection[ConsumerInfo]]
    partitions: Collection[Partition]
    records: Mapping[str, ProgressRecord]

    def after_crash(self, dead: Iterable[Claim]) -> list[Claim]:
        """Return the claims of dead workers, freed with the progress in their consumers and records."""
        return handoff.freed(dead, {one.id: one for one in self.partitions}, self.consumers, self.records)

    def needed(self, claims: Mapping[str, Claim], retention: Retention) -> list[str]:
        """Return the subjects for which consumers of dead workers stay: of partitions whose claims are gone, since
        their ack floors still tell; and on an Interest stream of those that no owner is known to cover."""
        settled = {p for p, claim in claims.items() if claim.settled or retention is not Retention.INTEREST}
        return [
            subject for partition in self.partitions if partition.id not in settled for subject in partition.subjects
        ]


def problems_in(entry: Entry | None) -> tuple[str, ...]:
    """Return the stored problems."""
    found = entry.value.get("problems") if entry else None
    return tuple(map(str, found)) if isinstance(found, list) else ()


class Leader:
    """The leader's part of one member. All its state can be read again by the next leader."""

    def __init__(
        self, control: Control, bucket: Bucket, options: GroupOptions, source: PartitionSource, worker_id: str
    ) -> None:
        self._control = control
        self._bucket = bucket
        self._options = options
        self._source = source
        self._worker_id = worker_id
        self._assignments = assignment.Assignments(bucket)
        self._sightings = Sightings(options.ttl)
        self._orphans = Sightings(2 * options.ttl)
        self._unclaimed = Sightings(2 * options.ttl)
        self._stabilizer = Stabilizer(options.windows)
        self.holder = Holder(control.jetstream, options.stream, options.group, source)
        """Keeps messages whose partition is not known yet."""
        self._steps = 0
        self._failing: dict[str, int] = {}
        """Workers whose consumer updates failed at the last check, and how often in a row."""
        self.problems: list[str] = []
        """Problems with partitions of the source."""
        self._problems_written: list[str] | None = None

    async def begin(self) -> None:
        """Create what must exist before this worker announces itself: the group's start sequence, and the holder."""
        await self._first_sequence()
        await self.holder.begin()

    def forget_heartbeats(self) -> None:
        """Discard heartbeat history after a pause of our own, so that no worker is declared dead because of it."""
        self._sightings.forget_heartbeats()
        self._orphans.forget_heartbeats()
        self._unclaimed.forget_heartbeats()

    async def has_assigned_all(self) -> bool:
        """Whether the assignment has every current partition; an older one may have fewer."""
        known = (await self._assignments.current()).by_id
        partitions, _ = usable(await self._source.partitions(), known)
        return all(partition.id in known for partition in partitions)

    async def step(self, retention: Retention, seen: Sightings) -> bool:
        """Do what is due; returns whether it published an assignment. `seen`: worker keys watched before we led."""
        entries = await self._bucket.entries(identity.WORKERS)
        self._sightings.learn(seen)
        await self._retire(entries)
        published, end = await self._assignments.current(), await self.holder.end()
        try:
            partitions, self.problems = usable(await self._source.partitions(), published.by_id)
        except (ConfigError, NoPartitionList) as exc:  # until that is put right the partitions are those of before
            if not published.version:
                raise
            partitions, self.problems = list(published.by_id.values()), [str(exc)]
        await self._write_problems()
        workers = workers_in(entries)
        self._hear_of(workers)
        self._steps += 1
        if self._steps % AUDIT_EVERY == 1 or any(record.state == RETIRED for record in workers.values()):
            consumers = await self._consumers()
            records = records_in(await self._bucket.entries(claim_store.PROGRESS))
            await self._clear_away(_Scene(workers, entries, consumers, partitions, records), retention)
        assigned = await self._assign(workers, partitions)
        if end:
            await self._release(partitions, end)
        return assigned

    async def _release(self, partitions: Collection[Partition], end: int) -> None:
        """Release what the holder need not keep: the consumer of an owner that has caught up keeps it."""
        claims, stream = claims_in(await self._bucket.entries(claim_store.CLAIMS)), self.holder.stream
        found = [claims.get(partition.id) for partition in partitions]
        known = [claim if claim and claim.stream == stream else None for claim in found]
        open_ = [claim.handoff if claim else None for claim in known if not (claim and claim.settled)]
        await self.holder.release(covered_through(end, open_))

    async def _write_problems(self) -> None:
        """Store the problems of the partitions where `group show` reads them."""
        if self.problems == self._problems_written:
            return
        if self.problems or await self._bucket.get(PROBLEMS):
            await self._bucket.put(PROBLEMS, {"v": 1, "problems": self.problems})
        self._problems_written = list(self.problems)

    def _hear_of(self, workers: Mapping[str, WorkerRecord]) -> None:
        failing = {worker: record.failures for worker, record in workers.items() if record.failures}
        for worker in failing.keys() - self._failing.keys():
            log.warning("%s: %s", worker, "; ".join(workers[worker].troubles) or "its consumer cannot be updated")
        self._failing = failing

    async def _consumers(self) -> dict[str, list[ConsumerInfo]]:
        return await group_consumers(self._control.jetstream, self._options.stream, self._options.group)

    # -- dead workers --------------------------------------------------------------------------------------------------

    async def _retire(self, entries: dict[str, Entry]) -> None:
        self._sightings.look({key: entry.revision for key, entry in entries.items()})
        records = workers_in(entries)
        for key, entry in list(entries.items()):
            record = records.get(key.removeprefix(f"{identity.WORKERS}."))
            if record is None or record.state == RETIRED or not self._sightings.silent(key):
                continue
            given_up = replace(record, state=RETIRED).to_json()
            try:
                entries[key] = Entry(given_up, await self._bucket.put(key, given_up, entry.revision))
                log.warning("%s has been silent for %g s and is given up", key, self._options.ttl)
            except WrongRevision:
                log.info("%s was heard of at the last moment", key)

    async def _clear_away(self, scene: _Scene, retention: Retention) -> None:
        await self._adopt_orphans(scene)
        claims = claims_in(await self._bucket.entries(claim_store.CLAIMS))
        # In this order: a worker is known before it takes a claim, so no live worker's claim counts as a dead one's.
        alive = workers_in(await self._bucket.entries(identity.WORKERS))
        dead = scene.after_crash(handoff.dead_claims(claims, alive))
        claims |= {claim.partition: claim for claim in await claim_store.store(self._bucket, dead)}
        await self._forget(claims, alive, scene)
        claims |= await self._disown(claims, scene)
        await self._claim_again(claims, scene)
        open_ = scene.needed(claims, retention)
        for worker_id in [w for w, record in scene.workers.items() if record.state == RETIRED]:
            consumers = scene.consumers.get(worker_id, ())
            covers = any(subjects.covered(subject, one.filters) for one in consumers for subject in open_)
            if not covers and not handoff.is_needed(worker_id, claims.values(), retention):
                await self._remove(worker_id, consumers, scene.entries[worker_key(worker_id)])
                del scene.workers[worker_id]

    async def _remove(self, worker_id: str, consumers: Iterable[ConsumerInfo], entry: Entry) -> None:
        """Delete first the consumer, then the id: no worker can claim the id while its consumer is being deleted."""
        current = await self._bucket.get(worker_key(worker_id))
        if current is None or current.revision != entry.revision:
            return  # another leader was first, and a worker may have the id by now
        for consumer in consumers:
            with suppress(ConsumerNotFound):
                await self._control.jetstream.delete_consumer(self._options.stream, consumer.name)
        with suppress(WrongRevision):  # another leader was first
            await self._bucket.delete(worker_key(worker_id), entry.revision)

    async def _disown(self, claims: Mapping[str, Claim], scene: _Scene) -> dict[str, Claim]:
        """Clear the holders of partitions that no longer exist: no worker will take them."""
        listed = {partition.id for partition in scene.partitions}
        ended = [c for p, c in claims.items() if p not in listed and c.owner is None and c.holders]
        done = await claim_store.store(self._bucket, (replace(claim, holders=()) for claim in ended))
        return {claim.partition: claim for claim in done}

    async def _forget(self, claims: Mapping[str, Claim], workers: Mapping[str, WorkerRecord], scene: _Scene) -> None:
        """Delete the records of processes that are gone and own nothing any more, unless claims are gone too."""
        if any(partition.id not in claims for partition in scene.partitions):
            return
        alive = {progress_key(worker, record.incarnation) for worker, record in workers.items()}
        needed = {progress_key(claim.owner, claim.incarnation or "") for claim in claims.values() if claim.owner}
        with suppress(WrongRevision):  # another leader was first
            await claim_store.clear(self._bucket, scene.records.keys() - alive - needed)

    async def _claim_again(self, claims: Mapping[str, Claim], scene: _Scene) -> None:
        """Create the claims of assigned partitions again after they were deleted.

        Not at once: a live owner writes its claim again by itself. An owner that died before that waits for a claim
        when it restarts, as does the worker that the partition is assigned to.
        """
        assigned = (await self._assignments.current()).owners
        missing = {p.id: p for p in scene.partitions if p.id in assigned and p.id not in claims}
        self._unclaimed.look(dict.fromkeys(missing, 0))
        due = [p for name, p in missing.items() if self._unclaimed.silent(name)]
        if due:
            log.warning("the claims of %s are gone; they are created again", ", ".join(p.id for p in due[:5]))
            await self._create_claims(due)

    async def _create_claims(self, partitions: Iterable[Partition]) -> None:
        start = await self._first_sequence()
        # Before the consumers: were the stream recreated in between, claims about the old one would begin anew.
        stream = stream_identity(await self._control.jetstream.stream_info(self._options.stream))
        consumers = [one for some in (await self._consumers()).values() for one in some]
        records = records_in(await self._bucket.entries(claim_store.PROGRESS)).values()
        wanted = [
            replace(first_claim(p, consumers, start, last_record(records, p.id, stream)), stream=stream)
            for p in partitions
        ]
        written = {claim.partition for claim in await claim_store.store(self._bucket, wanted)}
        for claim in wanted:
            if claim.partition not in written:  # a deleted key leaves a marker, which `create` replaces
                with suppress(WrongRevision):  # another process has written it meanwhile
                    await self._bucket.create(claim_key(claim.partition), claim.to_json())

    async def _adopt_orphans(self, scene: _Scene) -> None:
        """Delete consumers of unknown workers, as after the loss of the bucket, like those of dead workers.

        Not at once: after that loss live workers come back first, each under its id.
        """
        orphans = scene.consumers.keys() - scene.workers.keys()
        self._orphans.look(dict.fromkeys(orphans, 0))
        for worker_id in [w for w in orphans if self._orphans.silent(w)]:
            record = WorkerRecord(instance="unknown", state=RETIRED)
            with suppress(WrongRevision):  # a worker has claimed the id meanwhile, and the consumer with it
                revision = await self._bucket.create(worker_key(worker_id), record.to_json())
                scene.workers[worker_id] = record
                scene.entries[worker_key(worker_id)] = Entry(record.to_json(), revision)

    # -- live workers --------------------------------------------------------------------------------------------------

    async def _assign(self, workers: Mapping[str, WorkerRecord], partitions: Collection[Partition]) -> bool:
        published = await self._assignments.current()
        members = [record.member(w) for w, record in sorted(workers.items()) if record.state == ACTIVE]
        now = situation(published, workers, partitions)
        phase = await migration.phase(self._bucket)
        if phase == migration.LEGACY and published.owners:  # the old consumers have the partitions again
            await self._publish(published, Assignment(), (), members)
            return True
        if phase not in migration.AT_WORK:
            return False  # the old consumers still have the partitions
        if not self._stabilizer.due(now, (tuple(members), tuple(partitions))) or not members:
            return False
        owners = await self._claimed(partitions)
        previous = owners if now is Situation.COLD_START else published.owners
        following = assign(partitions, members, previous, self._options.strategy, published.pins)
        await self._publish(published, following, partitions, members)
        log.info(
            "assignment %d: %d partitions, %d workers (%s)", published.version + 1, len(partitions), len(members), now
        )
        return True

    async def _publish(
        self, published: Published, following: Assignment, partitions: Collection[Partition], members: list[Candidate]
    ) -> None:
        by_id, names = {p.id: p for p in partitions}, tuple(member.id for member in members)
        draft = assignment.Draft(following, by_id, names, self._options.stream, self._worker_id)
        try:
            await self._bucket.commit(assignment.writes(published, draft))
        except WrongRevision:  # by another leader, or a share was written by hand
            self._assignments = assignment.Assignments(self._bucket)
            raise
        self._stabilizer.acted()

    async def _claimed(self, partitions: Collection[Partition]) -> dict[str, str]:
        """Create missing claims; returns the current owners by partition."""
        claims = claims_in(await self._bucket.entries(claim_store.CLAIMS))
        missing = [p for p in partitions if p.id not in claims]
        if missing:
            await self._create_claims(missing)
        return {p: claim.owner for p, claim in claims.items() if claim.owner}

    async def _first_sequence(self) -> int:
        """Return where "new" starts: when the group began, also for a partition that is first seen later."""
        if self._options.start == "all":
            return 0
        info = await self._control.jetstream.stream_info(self._options.stream)
        identity_, entry = stream_identity(info), await self._bucket.get(BEGUN)
        if entry and entry.value.get("stream") == identity_:
            return int(entry.value["sequence"])
        first = 0 if entry else info.state.last_seq  # all of a stream that was recreated is new
        try:
            value = {"stream": identity_, "sequence": first}
            await (self._bucket.put(BEGUN, value, entry.revision) if entry else self._bucket.create(BEGUN, value))
        except WrongRevision:  # another worker was first
            return await self._first_sequence()
        return first


def last_record(records: Iterable[ProgressRecord], partition: str, stream: str) -> Reached:
    """Return the progress of a partition that its last owner recorded; `Reached(0)` when none did. Pure."""
    found = [
        record.partitions[partition] for record in records if record.stream == stream and partition in record.partitions
    ]
    return max(found, key=lambda reached: (reached.token, reached.done), default=Reached(0))


def first_claim(
    partition: Partition, consumers: Collection[ConsumerInfo], start: int, recorded: Reached = NOTHING
) -> Claim:
    """Return the claim of a partition without one: it is new, or its claim was lost, and a consumer covers it or a
    process has recorded how far it is done.

    A consumer whose worker has not caught up with the partition has skipped messages of it: its ack floor says nothing.
    When no other consumer covers it, and nothing is recorded, the partition starts from the beginning.
    """
    found = _by_consumers(partition, consumers, start)
    return replace(found, handoff=recorded.done, tries=recorded.tries) if recorded.done > found.handoff else found


def _by_consumers(partition: Partition, consumers: Collection[ConsumerInfo], start: int) -> Claim:
    covering = [c for c in consumers if any(subjects.covered(s, c.filters) for s in partition.subjects)]
    if not covering:
        return Claim(partition.id, start)
    knowing = [c for c in covering if not any(subjects.covered(s, passed_over(c)) for s in partition.subjects)]
    floor = min((consumer.ack_floor_stream_seq for consumer in knowing), default=0)
    holders = tuple(sorted({consumer.config["metadata"]["penstock.worker"] for consumer in covering}))
    return Claim(partition.id, floor, holders=holders)
