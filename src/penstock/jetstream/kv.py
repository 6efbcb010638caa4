"""KV buckets: one client for all of them, and the bucket of a group with atomic batches and listings.

The bucket of a group starts at a sequence taken from the clock. So a bucket that was deleted and created again
continues above all its earlier revisions, and a fencing token stays comparable with older ones.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from penstock.errors import (
    AlreadyExists,
    ConnectionLost,
    DeadlineExceeded,
    MessageNotFound,
    OutcomeUnknown,
    StreamNotFound,
    Unavailable,
)
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import NoStream, WrongRevision
from penstock.jetstream.consumer import AckSubject
from penstock.jetstream.model import NANOSECONDS, Json, StoredMessage, StreamInfo
from penstock.settings import Settings
from penstock.subjects import api_prefix
from penstock.wire import aio, frames
from penstock.wire.headers import Headers

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
MARKER_LIVES = "1h"
"""How long the marker of a deleted key is kept."""
DELETED = frozenset({"DEL", "PURGE"})
LISTING_LIVES = 5_000_000_000  # nanoseconds until the server itself removes the consumer of a listing
ONE_BY_ONE = 100
"""Changes that are asked for one by one."""
ASKED_AT_ONCE = 100
"""Keys of one request; a server answers up to 1,024, and is slow with many."""
READ_AT_ONCE = 1_000
"""Messages of one direct get; a server does not answer larger requests."""
END_OF_ANSWER = frozenset({204, 404})
BATCH = 500
"""Writes of one atomic batch; a server takes 1,000."""


class NoBucket(Unavailable):
    """No stream stores the keys of a bucket: it does not exist, or not yet, or has no leader. Nothing was written."""


class Store(Protocol):
    """The connection that a bucket needs; `jetstream.connection.Broker` is one."""

    jetstream: JetStream

    @property
    def settings(self) -> Settings: ...

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, what: str = "") -> Json:
        """Store a message, and return the stream's answer. Raises `WrongRevision` and `NoStream`."""
        ...


class Keys:
    """Reads the keys of one bucket, in the layout of NATS KV. Every request goes to the bucket's leader."""

    def __init__(self, jetstream: JetStream, name: str) -> None:
        self.name = name
        self.stream = stream_of(name)
        self._jetstream = jetstream
        self._prefix = write_prefix(name)

    async def exists(self) -> bool:
        try:
            await self._jetstream.stream_info(self.stream)
        except StreamNotFound:
            return False
        return True

    async def keys(self, filter_: str = ">") -> list[str]:
        """Return the keys that a filter matches, also deleted ones with a marker; empty when there is no bucket."""
        try:
            info = await self._jetstream.stream_info(self.stream, subjects_filter=self._prefix + filter_)
        except StreamNotFound:
            return []
        return sorted(subject.removeprefix(self._prefix) for subject in info.state.subjects)

    async def newest(self, key: str) -> StoredMessage | None:
        """Return the newest value of a key, or the marker of its deletion; None when it never had a value.

        Raises `StreamNotFound` when there is no bucket.
        """
        try:
            return await self._jetstream.get_message(self.stream, last_of=self._prefix + key)
        except MessageNotFound:
            return None


class KeyValue(Keys):
    """Reads and writes the keys of one bucket.

    When the answer to a write is lost, the key is read: a later value with the same bytes is ours.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store.jetstream, name)
        self.writes = 0
        """Values written so far, for the figures on KV traffic."""
        self._store = store
        self._into = write_prefix(name, store.settings.domain)

    def subject(self, key: str) -> str:
        """The subject to which a value of the key is published."""
        return self._into + key

    async def write(
        self, key: str, data: bytes, expected: int | None = None, headers: Mapping[str, str] | None = None
    ) -> int:
        """Store a value and return its revision; with `expected`, only if the key still has that revision (0: none).

        Raises `WrongRevision` when it has not, `NoBucket` when no stream stores it, and `OutcomeUnknown` when the
        answer is lost and the key cannot be read.
        """
        condition = {} if expected is None else {EXPECTED: str(expected)}
        try:
            return await self.add(key, data, {**condition, **(headers or {})})
        except (ConnectionLost, DeadlineExceeded) as exc:
            try:
                found = await self.newest(key)
            except Unavailable as second:
                raise OutcomeUnknown(f"whether key {key!r} was written is not known: {second}") from exc
            if found and found.data == data and found.sequence != expected:
                return found.sequence
            raise Unavailable(f"key {key!r} was not written: {exc}") from exc

    async def add(self, key: str, data: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Store a value to get its revision: a lost answer is raised."""
        what = f"write key {key!r} of bucket {self.name!r}"
        try:
            answer = await self._store.publish(self.subject(key), data, dict(headers or {}), what)
        except NoStream as exc:
            raise NoBucket(f"{what}: nobody takes it; does the bucket exist, and has it a leader?") from exc
        self.writes += 1
        return int(answer["seq"])


def stream_of(bucket: str) -> str:
    """Return the stream of a bucket."""
    return f"KV_{bucket}"


def bucket_layout(name: str, description: str, **more: object) -> Json:
    """The stream of a bucket that keeps the newest value of each key; `more` are further fields of the stream."""
    return {
        "name": stream_of(name),
        "description": description,
        "subjects": [f"{write_prefix(name)}>"],
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "deny_delete": True,
        "discard": "new",
        **more,
    }


def write_prefix(bucket: str, domain: str | None = None) -> str:
    """Return the subject prefix for writing keys; those of another domain go through its API."""
    return f"{api_prefix(domain)}.$KV.{bucket}." if domain else f"$KV.{bucket}."


def is_deleted(message: StoredMessage) -> bool:
    """Whether it is the marker of a deleted key."""
    return message.headers.get("KV-Operation", [""])[0] in DELETED


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest value of a key, and its revision."""

    value: Json
    revision: int


@dataclass(frozen=True, slots=True)
class Write:
    """A value for a key, if its revision is still the expected one (0: the key has no value)."""

    key: str
    value: Json
    expected: int


class AtomicStore(Store, Protocol):
    """The connection that the bucket of a group needs; `publish.control.Control` is one."""

    @property
    def connection(self) -> aio.Connection: ...

    async def ready(self) -> aio.Connection:
        """Return an open connection; raises `Unavailable` when there is none."""
        ...

    async def store_all(self, stream: str, prefix: str, writes: Sequence[Write]) -> list[int]:
        """Store several values or none, and return their revisions. Raises `WrongRevision` when one key has changed."""
        ...


class Bucket(KeyValue):
    """The keys of one group. Values are JSON objects."""

    def __init__(self, control: AtomicStore, name: str, replicas: int = 0, like: str | None = None) -> None:
        """`replicas`: of the bucket, if it must be created; 0: as many as stream `like` has, or one."""
        super().__init__(control, name)
        self._control = control
        self._replicas = replicas
        self._like = like

    async def ensure(self, max_age: float = 0.0) -> None:
        """Create the bucket if it is missing; an existing one is not changed. `max_age`: seconds that a key is kept."""
        if not await self.exists():
            config = bucket_config(self.stream, self._prefix, await self._wanted_replicas())
            config["max_age"] = int(max_age * NANOSECONDS)
            try:
                await self._control.jetstream.create_stream(config)
            except AlreadyExists:
                return  # another member created it meanwhile, with another first sequence

    async def _wanted_replicas(self) -> int:
        if self._replicas or not self._like:
            return self._replicas or 1
        return int((await self._control.jetstream.stream_info(self._like)).config.get("num_replicas", 1))

    # -- reading -----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """Return the newest value of a key, from the bucket's leader; None when it has none."""
        found = await self.newest(key)
        return None if found is None or is_deleted(found) else Entry(_object(found.data), found.sequence)

    async def entries(self, *families: str) -> dict[str, Entry]:
        """Return all keys `<family>.…`, however many, through one ephemeral consumer. The values may be outdated when
        they are read: a write that is based on them states the revision, and is refused."""
        found: dict[str, Entry] = {}
        async with self._listing([f"{self._prefix}{family}.>" for family in families]) as messages:
            async for message in messages:
                key = message.subject.removeprefix(self._prefix)
                _note(found, key, AckSubject.parse(message.reply).sequence, message.header_values(), message.data)
        return found

    async def values(self, keys: Collection[str]) -> dict[str, Entry]:
        """Return those of these keys that have a value. As with `entries`, values may be outdated. Any replica may
        answer, also one that lags; so for a missing value the bucket's leader is asked.

        A consumer with a filter for each of thousands of keys would keep the server busy for seconds.
        """
        found: dict[str, Entry] = {}
        waiting = iter(keys)
        while some := list(islice(waiting, ASKED_AT_ONCE)):
            for message in await self._newest_of(some):
                headers = message.header_values()
                key = headers["Nats-Subject"][-1].removeprefix(self._prefix)
                _note(found, key, int(headers["Nats-Sequence"][-1]), headers, message.data)
        for key in [key for key in keys if key not in found]:
            if entry := await self.get(key):
                found[key] = entry
        return found

    async def since(self, revision: int, bucket: StreamInfo | None = None) -> tuple[dict[str, Entry | None], int]:
        """Return the changes after a revision, and the newest revision seen; None stands for a deleted key.

        Read by direct get, so that no consumer is needed. Any replica may answer, also one that lags: what it does not
        have yet comes with the next call. Values that are not JSON are skipped.

        `bucket`: its stream as it is now, if already known. A few changes of a bucket without replicas are then asked
        for one by one: for every request of several the server counts what else there is, over thousands of keys.
        """
        found: dict[str, Entry | None] = {}
        if bucket and bucket.config.get("num_replicas", 1) == 1 and bucket.state.last_seq - revision <= ONE_BY_ONE:
            _note_changes(found, self._prefix, await self._each(range(revision + 1, bucket.state.last_seq + 1)))
            return found, max(revision, bucket.state.last_seq)
        while True:
            page = await self._page_behind(revision)
            revision = _note_changes(found, self._prefix, page) or revision
            if len(page) < READ_AT_ONCE:
                return found, revision

    async def _each(self, sequences: Sequence[int]) -> list[frames.Message]:
        """The messages of these sequences that are still there, in their order."""
        await self._control.ready()
        connection, subject = self._control.connection, self._control.jetstream.subject(f"DIRECT.GET.{self.stream}")
        async with self._inbox() as (inbox, arrived):
            for sequence in sequences:
                await connection.publish(subject, b'{"seq":%d}' % sequence, reply=inbox)
            read = [message async for message in self._received(arrived, len(sequences))]
        there = [message for message in read if not self._is_end(message)]
        return sorted(there, key=lambda message: int(message.header_values()["Nats-Sequence"][-1]))

    async def _page_behind(self, revision: int) -> list[frames.Message]:
        await self._control.ready()
        connection, jetstream = self._control.connection, self._control.jetstream
        ask = json.dumps({"seq": revision + 1, "next_by_subj": f"{self._prefix}>", "batch": READ_AT_ONCE}).encode()
        async with self._inbox() as (inbox, arrived):
            await connection.publish(jetstream.subject(f"DIRECT.GET.{self.stream}"), ask, reply=inbox)
            return await self._until_status(arrived, READ_AT_ONCE)

    async def _until_status(self, arrived: asyncio.Queue[frames.Message], most: int) -> list[frames.Message]:
        """The messages of an answer to a direct get."""
        found: list[frames.Message] = []
        async for message in self._received(arrived, most + 1):
            if self._is_end(message):
                break
            found.append(message)
        return found

    def _is_end(self, message: frames.Message) -> bool:
        """Whether it says that there is no message, or no further one. Raises when it says something else."""
        status = message.status
        if status and status[0] not in END_OF_ANSWER:
            raise Unavailable(f"bucket {self.name!r} cannot be read: {status[0]} {status[1]}")
        return status is not None

    async def _newest_of(self, keys: Collection[str]) -> list[frames.Message]:
        await self._control.ready()
        connection, jetstream = self._control.connection, self._control.jetstream
        ask = json.dumps({"multi_last": [self._prefix + key for key in keys]}).encode()
        async with self._inbox() as (inbox, arrived):
            await connection.publish(jetstream.subject(f"DIRECT.GET.{self.stream}"), ask, reply=inbox)
            return await self._until_status(arrived, len(keys))

    @asynccontextmanager
    async def _inbox(self) -> AsyncIterator[tuple[str, asyncio.Queue[frames.Message]]]:
        connection = self._control.connection
        inbox, arrived = connection.settings.new_inbox(), asyncio.Queue[frames.Message]()
        sid = await connection.subscribe(inbox, handler=arrived.put_nowait)
        try:
            yield inbox, arrived
        finally:
            if connection.connected:
                await connection.unsubscribe(sid)

    @asynccontextmanager
    async def _listing(self, filters: list[str]) -> AsyncIterator[AsyncIterator[frames.Message]]:
        await self._control.ready()
        jetstream = self._control.jetstream
        async with self._inbox() as (inbox, arrived):
            listed = await jetstream.create_consumer(self.stream, listing_config(inbox, filters))
            count = listed.pending + listed.delivered_consumer_seq
            yield self._received(arrived, count)
            await jetstream.delete_consumer(self.stream, listed.name)

    async def _received(self, arrived: asyncio.Queue[frames.Message], count: int) -> AsyncIterator[frames.Message]:
        timeout = self._control.connection.settings.timeout
        for _ in range(count):
            try:
                async with asyncio.timeout(timeout):
                    message = await arrived.get()
            except TimeoutError as exc:
                raise DeadlineExceeded(f"a listing of bucket {self.name!r}", timeout) from exc
            yield message

    # -- writing -----------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: Json, expected: int | None = None) -> int:
        """Store a value and return its revision; with `expected`, only if the key still has that revision (0: none).

        Raises `WrongRevision` when it has not. When the answer is lost, the key is read to decide.
        """
        return await self.write(key, encoded(value), expected)

    async def create(self, key: str, value: Json) -> int:
        """Store the first value of a key, or the first after it was deleted."""
        try:
            return await self.put(key, value, 0)
        except WrongRevision:
            marker = await self._marker(key)
            if marker is None:
                raise
            return await self.put(key, value, marker)

    async def delete(self, key: str, expected: int) -> None:
        """Delete a key if it still has that revision; a marker remains for a while."""
        await self.write(key, b"", expected, {"KV-Operation": "DEL", "Nats-TTL": MARKER_LIVES})

    async def commit(self, writes: Sequence[Write]) -> list[int]:
        """Store all values or none, and return their revisions. Raises `WrongRevision` when one key has changed.

        A deleted key has no value, and may be written as if it never had one.
        """
        try:
            return await self._commit(writes)
        except WrongRevision:
            markers = {one.key: await self._marker(one.key) for one in writes if one.expected == 0}
            if not any(markers.values()):
                raise
            return await self._commit([replace(one, expected=markers.get(one.key) or one.expected) for one in writes])

    async def _commit(self, writes: Sequence[Write]) -> list[int]:
        if len(writes) == 1:
            return [await self.put(writes[0].key, writes[0].value, writes[0].expected)]
        revisions = await self._control.store_all(self.stream, self._into, writes)
        self.writes += len(writes)
        return revisions

    async def _marker(self, key: str) -> int | None:
        """Return the revision of a deleted key's marker; None when it has a value, 0 when it never had one."""
        found = await self.newest(key)
        if found is None:
            return 0
        return found.sequence if is_deleted(found) else None


def bucket_config(stream: str, prefix: str, replicas: int, clock: Callable[[], float] = time.time) -> Json:
    """Return the configuration of a bucket's stream, in the layout of NATS KV, with atomic batches allowed."""
    return {
        "name": stream,
        "description": "Penstock: coordination of a group of workers",
        "subjects": [f"{prefix}>"],
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_msg_ttl": True,
        "discard": "new",
        "num_replicas": replicas,
        "first_seq": int(clock() * 1000),
    }


def listing_config(inbox: str, filters: list[str]) -> Json:
    """Return the configuration of an ephemeral consumer that delivers the newest value of every key once."""
    return {
        "name": f"list-{secrets.token_hex(5)}",
        "deliver_subject": inbox,
        "deliver_policy": "last_per_subject",
        "ack_policy": "none",
        "filter_subjects": filters,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": LISTING_LIVES,
    }


def _note_changes(found: dict[str, Entry | None], prefix: str, messages: Sequence[frames.Message]) -> int:
    """Note what messages of direct gets say, skipping values that are not JSON. Returns the last revision; 0: none."""
    revision = 0
    for message in messages:
        headers = message.header_values()
        revision = int(headers["Nats-Sequence"][-1])
        try:
            gone = headers.get("KV-Operation", [""])[0] in DELETED or not message.data
            value = None if gone else Entry(json.loads(message.data), revision)
        except ValueError:
            continue
        found[headers["Nats-Subject"][-1].removeprefix(prefix)] = value
    return revision


def _note(found: dict[str, Entry], key: str, revision: int, headers: Mapping[str, list[str]], data: bytes) -> None:
    if headers.get("KV-Operation", [""])[0] not in DELETED:
        found[key] = Entry(_object(data), revision)


def _object(data: bytes) -> Json:
    """Decode a value; empty when it is no JSON object, as after a mistake of somebody who wrote it by hand."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def encoded(value: Json) -> bytes:
    """Encode a value: the same bytes for the same value."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
