"""The state of named readers on the server: the book of each consumer, and the key that signs receipts.

Both are stored in the KV bucket `penstock_facts`, so that any instance, also after a restart of everything, finds them.
Reads always go to the bucket's leader, never to a replica that lags.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import NamedTuple

from penstock.errors import OutcomeUnknown, StreamNotFound, Unavailable
from penstock.facts.pages import Book
from penstock.jetstream.connection import Broker, WrongRevision
from penstock.jetstream.kv import KeyValue, NoBucket, bucket_layout

BUCKET = "penstock_facts"
KEY_BYTES = 32
SIGNING_KEY = "signing-key"
PREVIOUS_KEY = "signing-key-previous"
"""The key before the last rotation: its receipts are still accepted."""
KEY_LOOK_EVERY = 10.0
"""Seconds after which the keys are read again: another process may have rotated or deleted them."""

CONFIG = bucket_layout(BUCKET, "Penstock's named readers: their pages, and the key that signs receipts")


class Kept(NamedTuple):
    """A book with its revision; 0 when there is none yet."""

    book: Book
    revision: int


class SigningKeys(NamedTuple):
    """The key that signs receipts, and the one before it."""

    current: bytes
    previous: bytes | None = None

    @property
    def accepted(self) -> tuple[bytes, ...]:
        return (self.current, self.previous) if self.previous else (self.current,)


def book_key(stream: str, consumer: str) -> str:
    return f"book.{stream}.{consumer}"


class FactStore:
    """The bucket over one link."""

    def __init__(self, link: Broker) -> None:
        self._link = link
        self._bucket = KeyValue(link, BUCKET)
        self._keys: SigningKeys | None = None
        self._looked_at = 0.0

    async def book(self, stream: str, consumer: str) -> Kept:
        """A consumer's book as it is now."""
        found = await self.get(book_key(stream, consumer))
        return Kept(Book.parse(found[0]), found[1]) if found and found[0] else Kept(Book(), found[1] if found else 0)

    async def write(self, stream: str, consumer: str, book: Book, revision: int) -> Kept:
        """Replace the book of that revision. Raises `WrongRevision` when it has another one by now."""
        return Kept(book, await self.put(book_key(stream, consumer), book.encoded(), revision))

    async def forget(self, stream: str, consumer: str) -> None:
        """Delete the book: the consumer's open pages are stale, and nothing counts as confirmed."""
        while (found := await self.get(book_key(stream, consumer))) is not None and found[0]:
            try:
                await self.put(book_key(stream, consumer), b"", found[1])
            except WrongRevision:
                continue
            return

    # -- the keys that sign receipts -------------------------------------------------------------------------------

    async def signing_keys(self, fresh: bool = False) -> SigningKeys:
        """Return the keys of this installation; the first process that needs them creates them. `fresh`: as they are on
        the server now.

        A key that was deleted on the server is restored by a process that knows it. If another process created a new
        one first, the old key becomes the previous one, so that issued receipts stay valid.
        """
        known = self._keys
        if known and not fresh and time.monotonic() - self._looked_at < KEY_LOOK_EVERY:
            return known
        current = await self._current_key(known.current if known else secrets.token_bytes(KEY_BYTES))
        previous, revision = await self._value(PREVIOUS_KEY)
        if known and known.current != current and not previous:
            with suppress(WrongRevision):  # another process did the same
                await self.put(PREVIOUS_KEY, known.current, revision)
                previous = known.current
        self._keys, self._looked_at = SigningKeys(current, previous or None), time.monotonic()
        return self._keys

    async def rotate_signing_key(self) -> SigningKeys:
        """Replace the signing key; receipts of the key before are accepted until the next rotation.

        1. the current key is stored as the previous one (crash after: nothing has changed, but receipts of the key
        before that are refused); 2. a new key replaces the current one.
        """
        while True:
            current = (await self.signing_keys(fresh=True)).current
            try:
                await self.put(PREVIOUS_KEY, current, (await self._value(PREVIOUS_KEY))[1])
                stored, revision = await self._value(SIGNING_KEY)
                if stored == current:
                    await self.put(SIGNING_KEY, secrets.token_bytes(KEY_BYTES), revision)
                    return await self.signing_keys(fresh=True)
            except WrongRevision:
                continue  # another process rotates too: both happen, one after the other

    async def _current_key(self, wanted: bytes) -> bytes:
        """The key on the server; `wanted` is stored where there is none. A deleted one has an empty value."""
        while True:
            stored, revision = await self._value(SIGNING_KEY)
            if stored:
                return stored
            with suppress(WrongRevision):  # another instance created one at the same moment: that one counts
                await self.put(SIGNING_KEY, wanted, revision)
                return wanted

    async def _value(self, key: str) -> tuple[bytes, int]:
        return await self.get(key) or (b"", 0)

    # -- keys and values -------------------------------------------------------------------------------------------

    async def keys(self, filter_: str) -> list[str]:
        """The keys that a filter matches."""
        return await self._bucket.keys(filter_)

    async def _create_bucket(self) -> None:
        """Create the bucket if it is missing, with as many replicas as the best stream; leaves an existing one."""
        if not await self._bucket.exists():
            replicas = max([1, *(one.config.get("num_replicas", 1) for one in await self._link.jetstream.streams())])
            await self._link.jetstream.create_stream({**CONFIG, "num_replicas": replicas})

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """The value of a key with its revision; None when it has none."""
        try:
            found = await self._bucket.newest(key)
        except StreamNotFound:
            return None
        return (found.data, found.sequence) if found else None

    async def put(self, key: str, value: bytes, revision: int, *, repeated: bool = False) -> int:
        """Replace the value of that revision, 0 for none. Raises `WrongRevision` when it has another one by now."""
        try:
            return await self._bucket.write(key, value, revision)
        except OutcomeUnknown as exc:
            raise Unavailable(str(exc)) from exc  # a retry finds another revision, and reads the key
        except NoBucket as exc:
            if revision == 0 and not repeated:  # there is no bucket yet, or no longer
                await self._create_bucket()
                return await self.put(key, value, 0, repeated=True)
            raise Unavailable(f"the KV bucket {BUCKET!r} does not answer") from exc
