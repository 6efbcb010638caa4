"""What named readers keep on the server: the book of each consumer, and the key that signs receipts.

Both lie in the KV bucket `penstock_facts`, so that any instance, and any after a restart of everything, finds them.
Everything is asked of the bucket's leader, never of a replica that lags.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from penstock.broker.model import Json
from penstock.errors import MessageNotFound, StreamNotFound, Unavailable
from penstock.facts.link import Link, NoStream, WrongRevision
from penstock.facts.pages import Book

BUCKET = "penstock_facts"
STREAM = f"KV_{BUCKET}"
KEY_BYTES = 32
SIGNING_KEY = "signing-key"

CONFIG: Json = {
    "name": STREAM,
    "description": "Penstock's named readers: their pages, and the key that signs receipts",
    "subjects": [f"$KV.{BUCKET}.>"],
    "max_msgs_per_subject": 1,
    "allow_rollup_hdrs": True,
    "allow_direct": True,
    "deny_delete": True,
    "discard": "new",
}


class Kept(NamedTuple):
    """A book with its revision; 0 when there is none yet."""

    book: Book
    revision: int


def book_key(stream: str, consumer: str) -> str:
    return f"book.{stream}.{consumer}"


class Store:
    """The bucket over one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        domain = link.settings.domain
        self._prefix = f"$JS.{domain}.API.$KV.{BUCKET}." if domain else f"$KV.{BUCKET}."
        self._key: bytes | None = None
        self._made = False
        """Whether the bucket is known to be there."""

    async def book(self, stream: str, consumer: str) -> Kept:
        """A consumer's book as it is now."""
        found = await self.get(book_key(stream, consumer))
        return Kept(Book.parse(found[0]), found[1]) if found and found[0] else Kept(Book(), found[1] if found else 0)

    async def write(self, stream: str, consumer: str, book: Book, revision: int) -> Kept:
        """Replace the book of that revision. Raises `WrongRevision` when it has another one by now."""
        return Kept(book, await self.put(book_key(stream, consumer), book.encoded(), revision))

    async def forget(self, stream: str, consumer: str) -> None:
        """Let a consumer start over: its open pages are stale, and nothing counts as confirmed."""
        while (found := await self.get(book_key(stream, consumer))) is not None and found[0]:
            try:
                await self.put(book_key(stream, consumer), b"", found[1])
            except WrongRevision:
                continue
            return

    async def signing_key(self) -> bytes:
        """The key of this installation; made by whoever needs it first."""
        while self._key is None:
            found = await self.get(SIGNING_KEY)
            if found:
                self._key = found[0]
                break
            made = secrets.token_bytes(KEY_BYTES)
            try:
                await self.put(SIGNING_KEY, made, 0)
            except WrongRevision:
                continue  # another instance made one in the same moment: that one counts
            self._key = made
        return self._key

    # -- keys and values -------------------------------------------------------------------------------------------

    async def keys(self, filter_: str) -> list[str]:
        """The keys that a filter matches."""
        prefix = f"$KV.{BUCKET}."
        try:
            info = await self._link.jetstream.stream_info(STREAM, subjects_filter=prefix + filter_)
        except StreamNotFound:
            return []
        return sorted(subject.removeprefix(prefix) for subject in info.state.subjects)

    async def _create_bucket(self) -> None:
        """Make the bucket if it is missing, with as many replicas as the best stream; one that is there stays."""
        try:
            await self._link.jetstream.stream_info(STREAM)
        except StreamNotFound:
            replicas = max([1, *(one.config.get("num_replicas", 1) for one in await self._link.jetstream.streams())])
            await self._link.jetstream.create_stream({**CONFIG, "num_replicas": replicas})

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """The value of a key with its revision; None when it has none."""
        try:
            found = await self._link.jetstream.get_message(STREAM, last_of=f"$KV.{BUCKET}.{key}")
        except (MessageNotFound, StreamNotFound):
            return None
        return found.data, found.sequence

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Replace the value of that revision, 0 for none. Raises `WrongRevision` when it has another one by now."""
        if revision == 0 and not self._made:
            await self._create_bucket()
            self._made = True
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            return int((await self._link.publish(self._prefix + key, value, headers))["seq"])
        except NoStream as exc:
            self._made = False
            raise Unavailable(f"the KV bucket {BUCKET!r} does not answer") from exc
