"""The ledger: which chunks of which micro-batch are written, kept in the KV bucket `penstock_ledger`.

Every task that writes keeps a log under the key `<stream>.<series>.<batch>.<partition>`, where the series is the
streaming query (its id) or one batch write. It says what the task is about to write, before it writes it:

    open    an attempt begins; attempts before it can no longer append, so they stop
    chunk   a chunk of that digest is about to be written; all chunks before it are written
    done    a look into the stream found the last chunk there (after a crash)
    void    a look into the stream did not find the last chunk: it was never written
    end     everything is written

An append states the log's last revision, and the server refuses it when somebody else has appended meanwhile. So
between two attempts of a task there is always one that knows that it must stop, whatever Spark's attempt numbers say:
a stage that runs again counts its tasks from 0 again, and PySpark does not tell a task which run of a stage it is in.

The record `<stream>.<series>` holds the last batch that the driver has closed. Batches close in order, so one number
says it for all of them, and nothing has to be pruned but the logs of what is closed.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, Self

from penstock.broker.codes import WRITE_UNDER_WAY, WRONG_LAST_SEQUENCE, api_error
from penstock.broker.model import Json, StoredMessage
from penstock.errors import ApiError, MessageNotFound, PenstockError
from penstock.spark.link import Link

BUCKET = "penstock_ledger"
STREAM = f"KV_{BUCKET}"
VERSION = 1
WRITE_PAUSE = 0.1
"""Seconds between two tries of an append while another write to the key is on its way to the replicas."""
KEEP_BATCH_WRITES = "720h"
"""How long the server keeps the log of a batch write that neither committed nor aborted: nobody will continue it."""

BUCKET_CONFIG: Json = {
    "name": STREAM,
    "description": "Penstock's Spark sink: chunks written and batches closed",
    "subjects": [f"$KV.{BUCKET}.>"],
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


class WrongRevision(ApiError):
    """The key has another revision than the one that was to be replaced."""


# -- what the log says, without I/O --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intent:
    """A chunk that was about to be written."""

    number: int
    digest: str
    rows: int
    after: int
    """The output stream's last sequence known at that moment: the chunk can only lie beyond it."""
    batch_id: str
    """The id of the atomic batch that carries it."""
    subject: str
    """A subject of the batch."""


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk that lies in the output stream, or did once."""

    intent: Intent
    last: int
    """Sequence of its last message; 0 when that is not known."""


@dataclass(frozen=True, slots=True)
class History:
    """What earlier attempts of a task have written."""

    written: tuple[Written, ...] = ()
    """Chunk n is at position n."""
    doubtful: Intent | None = None
    """The chunk after them, if an attempt ended while writing it: it may lie in the stream or not."""

    def after(self, entry: Json) -> Self:
        """The history with one more entry of the log."""
        match entry["kind"]:
            case "chunk":
                return replace(self._settled(entry["previous"]), doubtful=Intent(**entry["chunk"]))
            case "done" | "end":
                return self._settled(entry["previous"])
            case "void":
                return replace(self, doubtful=None)
            case _:
                return self

    def _settled(self, last: int) -> Self:
        if self.doubtful is None:
            return self
        return replace(self, written=(*self.written, Written(self.doubtful, last)), doubtful=None)


def history_of(entries: Iterable[Json]) -> History:
    """All of a log."""
    history = History()
    for entry in entries:
        history = history.after(entry)
    return history


@dataclass(frozen=True, slots=True)
class Place:
    """Whose log it is: one partition of one batch of one series that goes into one stream."""

    stream: str
    series: str
    batch: int
    partition: int

    @property
    def key(self) -> str:
        return f"{series_key(self.stream, self.series)}.{self.batch}.{self.partition}"


def series_key(stream: str, series: str) -> str:
    """The key of the record that says which batches are closed, and the prefix of the logs."""
    return f"{stream}.{key_token(series)}"


def key_token(text: str) -> str:
    """Any text as one token of a KV key; the same text gives the same token, different texts different ones."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", text)
    return safe if safe == text else f"{safe[:80]}-{blake2b(text.encode(), digest_size=6).hexdigest()}"


# -- the log on the server -----------------------------------------------------------------------------------------


class Ledger:
    """The ledger's records over one link. Everything is asked of the bucket's leader, never of a lagging replica."""

    def __init__(self, link: Link) -> None:
        self._link = link
        domain = link.settings.domain
        self._prefix = f"$JS.{domain}.API.$KV.{BUCKET}." if domain else f"$KV.{BUCKET}."

    @property
    def patience(self) -> float:
        return self._link.patience

    def create_bucket(self, replicas: int) -> None:
        """Make the bucket if it is missing; one that is there stays as it is."""
        if not self._link.has_stream(STREAM):
            self._link.call(lambda api: api.create_stream({**BUCKET_CONFIG, "num_replicas": replicas}))

    def open_log(self, place: Place, ttl: str | None = None) -> Log:
        """Begin an attempt: read what earlier ones wrote, and stop them."""
        return Log(self, place.key, ttl).open()

    def is_closed(self, place: Place) -> bool:
        """Whether the place's batch is closed. Raises `Rewound` when a later one is closed too."""
        closed = self.closed(place.stream, place.series)
        if closed > place.batch:
            raise Rewound(place.series, place.batch, closed)
        return closed == place.batch

    def closed(self, stream: str, series: str) -> int:
        """The last batch closed; -1 when there is none."""
        return _closed(self.last(series_key(stream, series)))

    def close(self, stream: str, series: str, batch: int) -> None:
        """Close the batch and forget its logs. May be repeated: a batch that is closed stays closed."""
        key = series_key(stream, series)
        while _closed(found := self.last(key)) < batch:
            expected = str(found.sequence if found else 0)
            headers = {"Nats-Expected-Last-Subject-Sequence": expected, "Nats-Rollup": "sub"}
            try:
                self.put(key, {"version": VERSION, "closed": batch}, headers)
            except WrongRevision:  # another driver closed a batch of this query meanwhile: look again
                time.sleep(WRITE_PAUSE)
        self.forget(stream, series)

    def forget(self, stream: str, series: str) -> None:
        """Remove the logs of a series. The record of closed batches has no further token, and stays."""
        logs = f"$KV.{BUCKET}.{series_key(stream, series)}.>"
        self._link.call(lambda api: api.purge_stream(STREAM, subject=logs))

    # -- one message ---------------------------------------------------------------------------------------------------

    def put(self, key: str, value: Json, headers: dict[str, str] | None = None) -> int:
        """Store one value, and return its revision."""
        answer = self._link.ask(self._prefix + key, _encoded(value), headers)
        if error := answer.get("error"):
            refusal = api_error(f"write {key!r} to the ledger", error)
            raise WrongRevision(*refusal.args) if refusal.err_code in WRONG_LAST_SEQUENCE else refusal
        return int(answer["seq"])

    def last(self, key: str) -> StoredMessage | None:
        """The newest value of a key."""
        try:
            return self._link.get_message(STREAM, last_of=f"$KV.{BUCKET}.{key}")
        except MessageNotFound:
            return None

    def values(self, key: str) -> list[StoredMessage]:
        """All values of a key, oldest first."""
        found: list[StoredMessage] = []
        at = 1
        while True:
            try:
                found.append(self._link.get_message(STREAM, seq=at, next_of=f"$KV.{BUCKET}.{key}"))
            except MessageNotFound:
                return found
            at = found[-1].sequence + 1


class Log:
    """The log of one task, as seen by one attempt."""

    def __init__(self, ledger: Ledger, key: str, ttl: str | None) -> None:
        self._ledger = ledger
        self._key = key
        self._ttl = ttl
        self._owner = secrets.token_hex(8)
        self._appended = 0
        self._revision = 0
        self.history = History()

    def open(self) -> Self:
        """Become the only attempt that may append, and learn what was written before."""
        while True:
            values = self._ledger.values(self._key) if self._ledger.last(self._key) else []
            self._revision = values[-1].sequence if values else 0
            self.history = history_of(json.loads(value.data) for value in values)
            try:
                self._append("open")
            except Superseded:
                continue  # yet another attempt opened the log between our look and our append
            return self

    def chunk(self, intent: Intent, previous: int) -> None:
        """About to write this chunk; `previous` is the last sequence of the one before, 0 if unknown or none."""
        self._append("chunk", previous=previous, chunk=asdict(intent))

    def done(self, last: int) -> None:
        """The doubtful chunk is there, and ends at this sequence."""
        self._append("done", previous=last)
        self.history = self.history.after({"kind": "done", "previous": last})

    def void(self) -> None:
        """The doubtful chunk is not there."""
        self._append("void")
        self.history = self.history.after({"kind": "void"})

    def end(self, last: int) -> None:
        """Everything is written, and ends at this sequence."""
        self._append("end", previous=last)

    def confirm(self) -> None:
        """Raise `Superseded` if another attempt has begun since the last append."""
        newest = self._ledger.last(self._key)
        if newest is None or newest.sequence != self._revision:
            raise Superseded(self._key)

    def _append(self, kind: str, **fields: Any) -> None:
        # Owner and count make the entry unique: after a lost answer it tells whether it was ours that arrived.
        entry = {"version": VERSION, "kind": kind, "owner": self._owner, "n": self._appended, **fields}
        headers = {"Nats-Expected-Last-Subject-Sequence": str(self._revision)}
        if self._ttl:
            headers["Nats-TTL"] = self._ttl
        self._revision = self._put(entry, headers)
        self._appended += 1

    def _put(self, entry: Json, headers: dict[str, str]) -> int:
        """Append, and return the revision. Another write that the replicas do not have yet is waited for."""
        until = time.monotonic() + self._ledger.patience
        while True:
            try:
                return self._ledger.put(self._key, entry, headers)
            except WrongRevision as exc:
                newest = self._ledger.last(self._key)
                if newest and newest.data == _encoded(entry):
                    return newest.sequence
                under_way = (newest.sequence if newest else 0) == self._revision and exc.err_code == WRITE_UNDER_WAY
                if not under_way or time.monotonic() > until:
                    raise Superseded(self._key) from exc
            time.sleep(WRITE_PAUSE)


def _closed(record: StoredMessage | None) -> int:
    return int(json.loads(record.data)["closed"]) if record else -1


def _encoded(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
