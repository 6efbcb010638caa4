"""A JetStream KV bucket, and atomic changes of several keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from penstock.app import payloads
from penstock.errors import StreamNotFound
from penstock.jetstream import kv
from penstock.jetstream.connection import Broker, WrongRevision
from penstock.publish.atomic import AtomicBatch, Publisher
from penstock.publish.batch import literal_subject
from penstock.publish.errors import WrongSequence

DELETED = {"KV-Operation": "DEL"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value."""

    key: str
    value: bytes
    revision: int
    """Larger with every change of the bucket."""


class KeyChanged(WrongSequence):
    """A key does not have the expected revision: another client wrote it meanwhile."""

    def __str__(self) -> str:
        expected = " or ".join(map(str, self.expected))
        return f"key {self.batch_id!r} of stream {self.stream!r} no longer has revision {expected}; read it, then retry"


class Bucket:
    """A KV bucket that exists."""

    def __init__(self, publisher: Publisher, broker: Broker, name: str) -> None:
        self.name = name
        self.stream = kv.stream_of(name)
        self._publisher = publisher
        self._keys = kv.KeyValue(broker, name)

    async def get(self, key: str) -> Entry | None:
        """The value of a key; None when it has none, or was deleted."""
        try:
            found = await self._keys.newest(key)
        except StreamNotFound as exc:
            raise kv.NoBucket(f"there is no bucket {self.name!r}: no stream is called {self.stream!r}") from exc
        return None if found is None or kv.is_deleted(found) else Entry(key, found.data, found.sequence)

    async def put(self, key: str, value: Any, revision: int | None = None) -> int:
        """Write a value, and return its revision. With `revision`, only if the key has that one (0: none); raises
        `WrongSequence` when it has not."""
        return await self._write(key, payloads.encode(value), revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        await self._write(key, b"", revision, DELETED)

    async def _write(self, key: str, data: bytes, revision: int | None, headers: dict[str, str] | None = None) -> int:
        literal_subject(self.subject(key))
        try:
            return await self._keys.write(key, data, revision, headers)
        except WrongRevision as exc:
            expected = () if revision is None else (revision,)
            raise KeyChanged(self.stream, key, exc.code, exc.err_code, exc.description, expected) from exc

    def atomic(self) -> BucketBatch:
        """Several keys in one batch: all are changed or none. The bucket's stream needs `allow_atomic`."""
        return BucketBatch(self._publisher.atomic(self.stream), self)

    def subject(self, key: str) -> str:
        return self._keys.subject(key)


class BucketBatch:
    """Changes of several keys: stored when the `async with` block ends. Raises `WrongSequence` when a revision is not
    the expected one; then nothing is changed."""

    def __init__(self, batch: AtomicBatch, bucket: Bucket) -> None:
        self._batch = batch
        self._bucket = bucket
        self.revision = 0
        """Of the last key, once it is stored."""

    def put(self, key: str, value: Any, revision: int | None = None) -> None:
        """Write a value; with `revision`, only if the key has that one (0: none)."""
        self._add(key, payloads.encode(value), None, revision)

    def delete(self, key: str, revision: int | None = None) -> None:
        self._add(key, b"", DELETED, revision)

    def _add(self, key: str, data: bytes, headers: dict[str, str] | None, revision: int | None) -> None:
        self._batch.content.add(self._bucket.subject(key), data, headers, expected_last_subject_sequence=revision)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not len(self._batch.content):
            await self._batch.abandon()
            return
        self.revision = (await self._batch.commit()).sequence
