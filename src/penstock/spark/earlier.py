"""What earlier runs of a batch have written, and which task of this run may count it as its own.

When Spark runs a batch again, rows need not come to the partition that had them before: with adaptive execution the
number of partitions, and where one ends and the next begins, follow the cores that there are. So the rows of a new run
are compared with those of all logs that earlier runs of the batch have left:

1. The first task makes the new run the batch's current one, in the record `<batch>.run` (crash after: the next task
   goes on). A task of an earlier run that opens a log after this finds that it is no longer the current run, and stops.
2. Every log that an earlier run has left gets an entry of this run, so that its task can append no more (crash after:
   the next task does the rest).
3. Each task takes what it has and what is written together (`take`). Equal rows may come to several tasks, so a task
   says in the record `<batch>.claims` which of the rows written it counts as its own, before it leaves them out (crash
   after: the next attempt of the task finds its claims).

The first run of a batch finds no logs of earlier runs, and does none of this. Runs are numbered by the driver. All
attempts of a job, those of a repeated stage included, have the same run and the same partitions.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.model import Json
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.spark.delivery import ChunkDelivery
from penstock.spark.history import History, Intent, LedgerPlace, Series, Written, history_of, packed, unpacked
from penstock.spark.ledger import REPLACE, STREAM, SUBJECTS, VERSION, Ledger, Superseded, is_of

CLAIMED_AT_ONCE = 20_000
"""Rows of one claim. Their digests must fit into a message."""


def begin_run(ledger: Ledger, place: LedgerPlace, run: int) -> bool:
    """Step 1: make this run the current one of its batch. Returns whether earlier runs have left logs.

    Raises `Superseded` when a later run has begun.
    """
    key = f"{place.of.logs(place.batch)}.run"
    while True:
        found = ledger.last(key)
        state = json.loads(found.data) if found else {"run": 0}
        if state["run"] > run:
            raise Superseded(place.key)
        if state["run"] == run and "again" in state:
            return bool(state["again"])
        revision = found.sequence if found else 0
        try:
            if state["run"] < run:
                revision = ledger.put(key, _record(run), revision, REPLACE)
            again = any(log.run_before(run) for log in batch_logs(ledger, place.of, place.batch).values())
            ledger.put(key, _record(run, again=again), revision, REPLACE)
        except WrongRevision:
            continue  # another task is doing it: read again
        return again


def _record(run: int, **more: bool) -> Json:
    return {"version": VERSION, "run": run, **more}


@dataclass(slots=True)
class BatchLog:
    """One log of a batch, or its claims: the entries, and the revision of the last."""

    entries: list[Json] = field(default_factory=list)
    revision: int = 0

    def run_before(self, run: int) -> bool:
        """Whether an earlier run has written here."""
        return any(entry.get("run", 0) < run for entry in self.entries if entry["kind"] != "sealed")

    @property
    def newest_run(self) -> int:
        return max((int(entry.get("run", 0)) for entry in self.entries), default=0)


def batch_logs(ledger: Ledger, series: Series, batch: int) -> dict[str, BatchLog]:
    """All logs of a batch and its claims by their keys, those of version 1 too."""
    last = ledger.link.last_sequence(STREAM)
    found: defaultdict[str, BatchLog] = defaultdict(BatchLog)
    if not last:
        return found
    old = series.version_1()
    names = [f"{SUBJECTS}{series.logs(batch)}.*"]
    if series.created:
        names.append(f"{SUBJECTS}{old.logs(batch)}.*")
    wanted = Range(stream=STREAM, first=1, last=last, subjects=tuple(names))
    for rows in read_range(ledger.link.settings, wanted, ledger.link.patience):
        for subject, sequence, data in zip(
            *(rows.column(name).to_pylist() for name in ("subject", "sequence", "data")), strict=True
        ):
            key = subject.removeprefix(SUBJECTS)
            if not key.endswith(".run"):
                found[key].entries.append(json.loads(data))
                found[key].revision = sequence
    prefix = f"{series.key}."
    for key in [key for key in found if not key.startswith(prefix)]:
        newest = ledger.last(key)
        if newest is None or not is_of(newest, series):
            del found[key]
    return found


class EarlierRuns:
    """The rows that are written, as one task of a new run sees them."""

    def __init__(self, ledger: Ledger, place: LedgerPlace, run: int, delivery: ChunkDelivery) -> None:
        self._ledger = ledger
        self._place = place
        self._run = run
        self._delivery = delivery
        self._key = f"{place.of.logs(place.batch)}.claims"
        self._revision = 0
        self._pool: Counter[bytes] = Counter()
        """Rows that earlier runs have written, and no task has claimed."""
        self._own: Counter[bytes] = Counter()
        """Rows that attempts of this task have claimed or written in this run."""
        self._load()

    @property
    def unused(self) -> int:
        """Rows that earlier attempts of this task had, and this one did not get."""
        return self._own.total()

    def take(self, digests: Sequence[bytes]) -> Counter[bytes]:
        """Those of the rows that are written and that this task may leave out."""
        taken = Counter(digests) & self._own
        self._own -= taken
        left = Counter(digests) - taken
        while wanted := left & self._pool:
            part = Counter(dict(list(wanted.items())[:CLAIMED_AT_ONCE])) if len(wanted) > CLAIMED_AT_ONCE else wanted
            if self._claim(part):
                self._pool -= part
                left -= part
                taken += part
        return taken

    def _claim(self, rows: Counter[bytes]) -> bool:
        """Step 3. False when another task has claimed something meanwhile: then there may be less to take."""
        value: Json = {"version": VERSION, "kind": "claim", "run": self._run, "by": self._place.partition}
        value["rows"] = packed(list(rows.elements()))
        try:
            self._revision = self._ledger.put(self._key, value, self._revision)
        except WrongRevision:
            for found in self._ledger.values(self._key, self._revision):
                self._note(json.loads(found.data))
                self._revision = found.sequence
            return False
        return True

    def _note(self, claim: Json) -> None:
        if claim["run"] > self._run:
            raise Superseded(self._place.key)
        if claim["run"] == self._run:
            rows = Counter(unpacked(claim["rows"]))
            self._pool -= rows
            if claim["by"] == self._place.partition:
                self._own += rows

    # -- reading -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        logs = batch_logs(self._ledger, self._place.of, self._place.batch)
        claims = logs.pop(self._key, BatchLog())
        for key, log in logs.items():
            self._add(self._fenced(key, log), own=key == self._place.key)
        for claim in claims.entries:
            self._note(claim)
        self._revision = claims.revision

    def _fenced(self, key: str, log: BatchLog) -> BatchLog:
        """Step 2. The log after its task of an earlier run can append no more."""
        while log.newest_run < self._run:
            entry = {"version": VERSION, "kind": "open", "run": self._run}
            try:
                log.revision = self._ledger.put(key, entry, log.revision)
                log.entries.append(entry)
            except WrongRevision:
                values = self._ledger.values(key)
                log = BatchLog([json.loads(value.data) for value in values], values[-1].sequence if values else 0)
        if log.newest_run > self._run:
            raise Superseded(key)
        return log

    def _add(self, log: BatchLog, own: bool) -> None:
        history = history_of(log.entries)
        if history.doubtful and history.doubtful_run < self._run:
            history = self._settled(history, history.doubtful)
        for written in history.written:
            self._count(row_digests(written, self._delivery.rows_of), written.run, own)
        for refused in history.refused:
            self._count(refused.row_digests, refused.run, own)

    def _count(self, digests: Iterable[bytes], run: int, own: bool) -> None:
        if run < self._run:
            self._pool.update(digests)
        elif own:
            self._own.update(digests)

    def _settled(self, history: History, doubtful: Intent) -> History:
        found = self._delivery.find(doubtful)
        return history.after({"kind": "void"} if found is None else {"kind": "done", "previous": found})


def row_digests(written: Written, read_back: Callable[[Written], list[bytes]]) -> list[bytes]:
    """The digests of a chunk's rows: as they were sent, or, for version 1, as they lie in the stream."""
    return unpacked(written.intent.row_digests) or read_back(written)
