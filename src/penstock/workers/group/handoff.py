"""The steps that move a partition to another worker without losing a message, and their order. Pure.

One consumer has one cursor for all its filters: a subject that is added later never gets what lies below the cursor. So
the new owner reads that part from the stream itself, and the order of the steps keeps it stored until then.

    old owner                                        new owner
    1. drain: finish what is under way, hold the rest
    2. free the claim with the handoff sequence  →   3. take the claim (new token: the old owner is fenced)
                                                     4. add the subjects to its consumer
                                                     5. read from the handoff sequence to the stream's end, in order,
                                                        before anything that its consumer delivers
                                                     6. settle the claim
    7. remove the subjects from its consumer

A crash of the old owner before 2 leaves its claim: the leader frees it with the known progress. That is the record in
which the owner wrote its progress (`claims.py`), and the consumer's ack floor, which is a true handoff sequence as
long as the claim is settled and the subjects are among the filters. A crash of the new owner between 3 and 6 leaves the
handoff sequence in the claim, and what was caught up in the record. The next owner starts there.

A process that restarts with the id of a dead worker also has its consumer. Before it changes the filters it frees its
predecessor's claims, as the leader would, and on an Interest stream it keeps covering what its predecessor held.

Step 7 depends on the retention:

    limits      any time after 2: the stream keeps everything
    workqueue   right after 2, since filters must not overlap: step 4 is refused, and retried, until then
    interest    only after 6: the stream deletes what no consumer has a filter for, and so what was not handled yet
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock import subjects
from penstock.jetstream.model import ConsumerInfo, Retention
from penstock.workers.group.claims import Claim, ProgressRecord, Reached, progress_key
from penstock.workers.group.identity import RETIRED, WorkerRecord
from penstock.workers.partitions import Partition


@dataclass(frozen=True, slots=True)
class View:
    """What one worker knows about its partitions."""

    worker: str
    wanted: frozenset[str] | None
    """The partitions assigned to it; None while there is no assignment: then everything stays."""
    claims: Mapping[str, Claim]
    running: frozenset[str]
    """The partitions that it owns and works on."""
    held: frozenset[str]
    """Partitions that it has freed and that its consumer still covers."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that the worker can take now."""

    give: tuple[str, ...] = ()
    """Partitions for steps 1 and 2."""
    take: tuple[Claim, ...] = ()
    """Claims for steps 3 to 6."""
    let_go: tuple[str, ...] = ()
    """Partitions for step 7."""
    wait: tuple[str, ...] = ()
    """Partitions assigned to us that another worker still owns."""

    @property
    def nothing(self) -> bool:
        return not (self.give or self.take or self.let_go)


def next_steps(view: View, retention: Retention) -> Steps:
    """Return the steps that are due. Called again whenever something has changed."""
    wanted = view.running if view.wanted is None else view.wanted
    missing = sorted(wanted - view.running)
    take = [view.claims[p] for p in missing if p in view.claims and view.claims[p].owner is None]
    taken = {claim.partition for claim in take}
    return Steps(
        give=tuple(sorted(view.running - wanted)),
        take=tuple(take),
        let_go=tuple(sorted(p for p in view.held - taken if may_let_go(view.claims.get(p), view.worker, retention))),
        wait=tuple(p for p in missing if p not in taken),
    )


def may_let_go(claim: Claim | None, worker: str, retention: Retention) -> bool:
    """Whether a worker that does not work on a partition may remove its subjects from its consumer.

    Never while the claim names this worker as owner: if it died then, its ack floor would count for the partition.
    Without a claim, as after the loss of the bucket, an Interest stream keeps only what a consumer covers.
    """
    if claim is None:
        return retention is not Retention.INTEREST
    return claim.owner != worker and (retention is not Retention.INTEREST or worker not in claim.holders)


def ack_floor(partition: Partition | None, consumers: Collection[ConsumerInfo]) -> int | None:
    """Return how far a partition is done according to a worker's consumers; None when they do not cover it.

    A consumer without the subjects in its filters has moved past them, and says nothing about them.
    """
    if partition is None or not all(
        any(subjects.covered(subject, one.filters) for one in consumers) for subject in partition.subjects
    ):
        return None
    return min(one.ack_floor_stream_seq for one in consumers)


def after_crash(claim: Claim, floor: int | None, record: ProgressRecord | None) -> Claim:
    """Return the claim of a dead worker, freed. `floor`: the result of `ack_floor`; None when the consumer is gone too.
    `record`: the last progress record of its process.

    While the owner was catching up, its ack floor says nothing about this partition: only the record and the claim do.
    """
    acknowledged = floor or 0 if claim.settled else 0
    written = record.of(claim.partition, claim.token, claim.stream) if record else None
    done = max(acknowledged, written.done if written else 0)
    tries = written.tries if written and written.tries[0] else claim.tries
    if record and record.stream == claim.stream:
        tries = record.tries(claim.partition, tries)
    return claim.freed(Reached(done, tries, suspect=done <= claim.handoff))


def freed(
    dead: Iterable[Claim],
    partitions: Mapping[str, Partition],
    consumers: Mapping[str, Collection[ConsumerInfo]],
    records: Mapping[str, ProgressRecord],
) -> list[Claim]:
    """Return the claims of dead workers, freed with the progress in their consumers (by worker id) and records."""
    return [
        after_crash(
            claim,
            ack_floor(partitions.get(claim.partition), consumers.get(claim.owner or "", ())),
            records.get(progress_key(claim.owner or "", claim.incarnation or "")),
        )
        for claim in dead
    ]


def left_behind(claims: Mapping[str, Claim], worker: str, incarnation: str) -> list[Claim]:
    """Return the claims of the process that had this worker id before."""
    return [claim for claim in claims.values() if claim.owner == worker and claim.incarnation != incarnation]


def dead_claims(claims: Mapping[str, Claim], workers: Mapping[str, WorkerRecord]) -> list[Claim]:
    """Return the claims whose owners are gone, retired, or replaced by another process with the same id."""

    def gone(claim: Claim) -> bool:
        record = workers.get(claim.owner or "")
        return record is None or record.state == RETIRED or record.incarnation != claim.incarnation

    return [claim for claim in claims.values() if claim.owner is not None and gone(claim)]


def is_needed(worker: str, claims: Collection[Claim], retention: Retention) -> bool:
    """Whether the consumer of a dead worker must stay: its ack floor is still to be read, or, on an Interest stream, it
    alone keeps messages from being deleted."""
    owned = any(claim.owner == worker for claim in claims)
    keeps = retention is Retention.INTEREST and any(worker in claim.holders for claim in claims)
    return owned or keeps
