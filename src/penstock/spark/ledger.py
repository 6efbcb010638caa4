"""The ledger: which chunks of which micro-batch are written, kept in the KV bucket `penstock_ledger`.

Every task that writes keeps a log under the key `<stream>.<created>.<series>.<batch>.<partition>`, where `created` is
the stream's creation time, and the series is the streaming query (its id) or one batch write. It says what the task is
about to write, before it writes it:

    open     an attempt begins; attempts before it can no longer append, so they stop
    chunk    a chunk of that digest is about to be written; all chunks before it are written
    done     a look into the stream found the last chunk there (after a crash)
    void     a look into the stream did not find the last chunk: it was never written
    refused  the server knows the message id of these rows already, and does not store them again
    end      everything is written
    sealed   the batch is closed: no attempt can append any more

An append states the log's last revision, and the server refuses it when another attempt has appended meanwhile. So of
two attempts of a task one always knows that it must stop, whatever Spark's attempt numbers say: a stage that runs again
counts its tasks from 0 again, and PySpark does not tell a task which run of a stage it is in.

The record `<stream>.<created>.<series>` holds the last batch that the driver has closed, and how many rows it had.
Batches close in order, so one number says it for all of them. The logs of the last closed batch are kept until the
next one is closed: when Spark runs it again, its rows are compared with them (`runs` in `earlier`).

Version 1 had neither creation time nor row digests; its keys and entries are still read.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self

from penstock.errors import ApiError, MessageNotFound, PenstockError
from penstock.jetstream.codes import WRITE_UNDER_WAY
from penstock.jetstream.connection import WrongRevision
from penstock.jetstream.kv import KeyValue, stream_of, write_prefix
from penstock.jetstream.model import Json, StoredMessage
from penstock.spark.history import History, Intent, LedgerPlace, Series, history_of, packed
from penstock.spark.link import Link
from penstock.spark.options import FAIL, SKIP

log = logging.getLogger(__name__)

BUCKET = "penstock_ledger"
STREAM = stream_of(BUCKET)
SUBJECTS = write_prefix(BUCKET)
VERSION = 2
RUNS = "runs"
"""The key whose revisions number the runs of all writes."""
WRITE_PAUSE = 0.1
"""Seconds between two attempts of an append while another write to the key is not replicated yet."""
KEEP_BATCH_WRITES = "720h"
"""How long the server keeps the log of a batch write that neither committed nor aborted: no run will continue it."""
REPLACE = {"Nats-Rollup": "sub"}

BUCKET_CONFIG: Json = {
    "name": STREAM,
    "description": "Penstock's Spark sink: chunks written and batches closed",
    "subjects": [f"{SUBJECTS}>"],
    "max_msgs_per_subject": -1,  # a log a key, not only its last value
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "deny_delete": True,
}


class Superseded(PenstockError):
    """Another attempt of the same task has begun; this one must not write any more."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"another attempt has taken over {self.key}; this one stops, and nothing is lost or repeated by that"


class Rewound(PenstockError):
    """The query runs a batch again that lies before the last one it has finished."""

    def __init__(self, series: str, batch: int, closed: int) -> None:
        super().__init__(series, batch, closed)
        self.series = series
        self.batch = batch
        self.closed = closed

    def __str__(self) -> str:
        return (
            f"batch {self.batch} of {self.series} is to be written, but batch {self.closed} is already finished: the "
            "checkpoint (or txnVersion) was taken back to an earlier state, or is used twice. To write those batches "
            "again on purpose, use a new checkpoint (or txnAppId)"
        )


class OtherRows(PenstockError):
    """The last finished batch runs again, and its rows are not those that were written."""

    def __init__(self, series: str, batch: int, difference: str) -> None:
        super().__init__(series, batch, difference)
        self.series = series
        self.batch = batch
        self.difference = difference

    def __str__(self) -> str:
        return (
            f"batch {self.batch} of {self.series} is already finished, and now comes with other rows ({self.difference}"
            "): the checkpoint was taken back by one batch, a copy of it is in use, txnVersion was used before, or the "
            "plan computes other rows each time. Set onFinishedBatch=write to write the rows that are not there yet, "
            "onFinishedBatch=skip to write nothing, or use a new checkpoint (or txnVersion)"
        )


@dataclass(frozen=True, slots=True)
class Closed:
    """The record of a series: the last batch that is closed."""

    batch: int = -1
    rows: int | None = None
    """How many rows it had; None: not known, and its logs are gone (version 1)."""
    previous: int = -1
    """The batch closed before it."""
    revision: int = 0
    """Of the record; 0 when there is none, or one of version 1."""
    first: bool = False
    """It is the first one under its key: logs of version 1 may be left."""

    def differs(self, rows: int | None) -> bool:
        """Whether the batch is known to have had another number of rows."""
        return None not in (self.rows, rows) and self.rows != rows


class Ledger:
    """The ledger's records over one link. Reads always go to the bucket's leader, never to a lagging replica."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._bucket = KeyValue(link, BUCKET)

    def create_bucket(self, replicas: int) -> None:
        """Create the bucket if it is missing. One with fewer replicas than the stream gets as many."""
        if not self.link.has_stream(STREAM):
            self.link.call(lambda api: api.create_stream({**BUCKET_CONFIG, "num_replicas": replicas}))
            return
        there = int(self.link.stream_info(STREAM).config.get("num_replicas", 1))
        if there < replicas:
            try:
                self.link.call(lambda api: api.update_stream(STREAM, {"num_replicas": replicas}))
            except ApiError as exc:
                log.warning("the ledger keeps %d replicas, and the stream has %d: %s", there, replicas, exc)

    def next_run(self) -> int:
        """A number for a run of a write, larger than those of all runs before."""
        return self.put(RUNS, {"version": VERSION}, headers=REPLACE)

    def open_log(self, place: LedgerPlace, ttl: str | None = None, run: int = 0) -> Log:
        """Begin an attempt: read what earlier ones wrote, and stop them."""
        return Log(self, place.key, ttl, run).open()

    # -- closed batches ------------------------------------------------------------------------------------------------

    def closed(self, series: Series) -> int:
        """The last batch closed; -1 when there is none."""
        return self.record(series).batch

    def record(self, series: Series) -> Closed:
        """What is known about the batches that are closed."""
        if found := self.last(series.key):
            value = json.loads(found.data)
            return Closed(
                batch=int(value["closed"]),
                rows=value.get("rows"),
                previous=int(value.get("previous", -1)),
                revision=found.sequence,
                first=bool(value.get("first")),
            )
        old = self.last(series.version_1().key) if series.created else None
        if old and is_of(old, series):
            return Closed(int(json.loads(old.data)["closed"]))
        return Closed()

    def finished(self, place: LedgerPlace) -> Closed | None:
        """The record, if the place's batch is the last one closed. Raises `Rewound` when a later one is closed."""
        record = self.record(place.of)
        if record.batch > place.batch:
            raise Rewound(place.series, place.batch, record.batch)
        return record if record.batch == place.batch else None

    def close(self, series: Series, batch: int, rows: int | None = None, finished: str = FAIL) -> None:
        """Close a batch of that many rows. May be repeated: a batch that is closed stays closed.

        1. write the record (crash after: attempts that begin now find the batch closed)
        2. seal the batch's logs (crash after: attempts that are under way can append no more)
        3. forget the logs of the batch before (crash after: nothing is left to do)

        After a crash in between Spark runs the batch again, and all of it is done again. When the batch is closed with
        another number of rows, `finished` says what to do; by default `OtherRows` is raised.
        """
        found = self.record(series)
        while found.batch < batch or (found.batch == batch and finished != SKIP and found.differs(rows)):
            if found.batch == batch and finished == FAIL:
                raise OtherRows(series.name, batch, f"{rows} rows, and {found.rows} were written")
            self._write_record(series, found, batch, rows)
            found = self.record(series)
        if found.batch > batch:
            return
        self._seal(series, batch)
        if found.previous >= 0:
            self._purge(f"{series.logs(found.previous)}.>")

    def _write_record(self, series: Series, found: Closed, batch: int, rows: int | None) -> None:
        previous = found.batch if found.batch < batch else found.previous
        value = {"version": VERSION, "closed": batch, "rows": rows, "previous": previous, "first": not found.revision}
        try:
            self.put(series.key, value, found.revision, REPLACE)
        except WrongRevision:  # another driver closed a batch of this series meanwhile: the caller reads again
            time.sleep(WRITE_PAUSE)
            return
        if found.first and series.created:
            self.forget(series.version_1())

    def _seal(self, series: Series, batch: int) -> None:
        for key in self.link.stubbornly(lambda: self._bucket.keys(f"{series.logs(batch)}.>")):
            if key.rsplit(".", 1)[1].isdecimal():
                self.put(key, {"version": VERSION, "kind": "sealed"})

    def forget(self, series: Series) -> None:
        """Remove the logs of a series. The record of closed batches has no further token, and stays."""
        self._purge(f"{series.key}.>")

    def _purge(self, keys: str) -> None:
        self.link.call(lambda api: api.purge_stream(STREAM, subject=SUBJECTS + keys))

    # -- one message ---------------------------------------------------------------------------------------------------

    def put(self, key: str, value: Json, expected: int | None = None, headers: Mapping[str, str] | None = None) -> int:
        """Store one value, and return its revision. Raises `WrongRevision` when the key has not the expected one."""
        data = encoded(value)
        if expected is None:
            return self.link.stubbornly(lambda: self._bucket.add(key, data, headers))
        return self.link.stubbornly(lambda: self._bucket.write(key, data, expected, headers))

    def last(self, key: str) -> StoredMessage | None:
        """The newest value of a key."""
        return self.link.stubbornly(lambda: self._bucket.newest(key))

    def values(self, key: str, after: int = 0) -> list[StoredMessage]:
        """All values of a key behind a revision, oldest first."""
        found: list[StoredMessage] = []
        while True:
            try:
                found.append(self.link.get_message(STREAM, seq=after + 1, next_of=SUBJECTS + key))
            except MessageNotFound:
                return found
            after = found[-1].sequence


class Log:
    """The log of one task, as seen by one attempt."""

    def __init__(self, ledger: Ledger, key: str, ttl: str | None, run: int = 0) -> None:
        self._ledger = ledger
        self._key = key
        self._ttl = ttl
        self._run = run
        self._owner = secrets.token_hex(8)
        self._appended = 0
        self._revision = 0
        self.history = History()

    def open(self) -> Self:
        """Become the only attempt that may append, and read what was written before."""
        while True:
            values = self._ledger.values(self._key) if self._ledger.last(self._key) else []
            self._revision = values[-1].sequence if values else 0
            entries = [json.loads(value.data) for value in values]
            if any(entry.get("run", 0) > self._run for entry in entries):
                raise Superseded(self._key)  # a later run of the batch has started
            self.history = history_of(entries)
            try:
                self._append("open")
            except Superseded:
                continue  # yet another attempt opened the log between our look and our append
            return self

    def chunk(self, intent: Intent, previous: int) -> None:
        """Announce this chunk; `previous` is the last sequence of the one before, 0 if unknown or none."""
        fields = asdict(intent)
        if not intent.messages:
            del fields["messages"]  # what earlier releases do not know
        self._append("chunk", previous=previous, chunk=fields)

    def done(self, last: int) -> None:
        """Record that the doubtful chunk is stored, and ends at this sequence."""
        self._append("done", previous=last)
        self.history = self.history.after({"kind": "done", "previous": last})

    def void(self) -> None:
        """Record that the doubtful chunk is not stored."""
        self._append("void")
        self.history = self.history.after({"kind": "void"})

    def refused(self, digests: list[bytes]) -> None:
        """Record rows that are already stored, by their message ids."""
        self._append("refused", rows=packed(digests))

    def end(self, last: int) -> None:
        """Record that everything is written, up to this sequence."""
        self._append("end", previous=last)

    def confirm(self) -> None:
        """Raise `Superseded` if another attempt has begun since the last append."""
        newest = self._ledger.last(self._key)
        if newest is None or newest.sequence != self._revision:
            raise Superseded(self._key)

    def _append(self, kind: str, **fields: Any) -> None:
        # Owner and count make the entry unique: after a lost answer it tells whether it was ours that arrived.
        own = {"owner": self._owner, "n": self._appended}
        entry = {"version": VERSION, "kind": kind, "run": self._run, **own, **fields}
        self._revision = self._put(entry, {"Nats-TTL": self._ttl} if self._ttl else {})
        self._appended += 1

    def _put(self, entry: Json, headers: dict[str, str]) -> int:
        """Append, and return the revision. Waits for another write that is not replicated yet."""
        until = time.monotonic() + self._ledger.link.patience
        while True:
            try:
                return self._ledger.put(self._key, entry, self._revision, headers)
            except WrongRevision as exc:
                newest = self._ledger.last(self._key)
                if newest and newest.data == encoded(entry):
                    return newest.sequence
                under_way = (newest.sequence if newest else 0) == self._revision and exc.err_code == WRITE_UNDER_WAY
                if not under_way or time.monotonic() > until:
                    raise Superseded(self._key) from exc
            time.sleep(WRITE_PAUSE)


def is_of(found: StoredMessage, series: Series) -> bool:
    """Whether a value of version 1, whose key has no creation time, is about this stream and not one before it."""
    return found.time is None or found.time >= datetime.fromisoformat(series.created)


def encoded(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
