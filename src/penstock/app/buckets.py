"""Keys and values: a bucket as JetStream has it, and several keys changed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from penstock.app import payloads
from penstock.jetstream import kv
from penstock.publish.atomic import AtomicBatch, Publisher

DELETED = {"KV-Operation": "DEL"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value."""

    key: str
    value: bytes
    revision: int
    """Larger with every change of the bucket."""


class Bucket:
    """A KV bucket that exists."""

    def __init__(self, publisher: Publisher, name: str) -> None:
        self.name = name
        self.stream = kv.stream_of(name)
        self._publisher = publisher

    async def get(self, key: str) -> Entry | None:
        """The value of a key; None when it has none, or was deleted."""
        found = await kv.Keys(self._publisher.jetstream, self.name).newest(key)
        return None if found is None or kv.is_deleted(found) else Entry(key, found.data, found.sequence)

    async def put(self, key: str, value: Any, revision: int | None = None) -> int:
        """Write a value, and return its revision. With `revision`, only if the key has that one (0: none)."""
        async with self.atomic() as batch:
            batch.put(key, value, revision)
        return batch.revision

    async def delete(self, key: str, revision: int | None = None) -> None:
        async with self.atomic() as batch:
            batch.delete(key, revision)

    def atomic(self) -> BucketBatch:
        """Several keys in one batch: all are changed or none. The bucket's stream needs `allow_atomic`."""
        return BucketBatch(self._publisher.atomic(self.stream), self)

    def _subject(self, key: str) -> str:
        return kv.write_prefix(self.name) + key


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
        self._batch.content.add(self._bucket._subject(key), data, headers, expected_last_subject_sequence=revision)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not len(self._batch.content):
            await self._batch.abandon()
            return
        self.revision = (await self._batch.commit()).sequence
