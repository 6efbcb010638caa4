"""`Facts`: fetch, confirm and append, over one connection.

async with Facts(settings) as facts:
    page = await facts.fetch_facts("edge_reader", 100, wait=5)
    ...
    await facts.confirm_receipt("edge_reader", page.receipt)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from penstock.facts.append import Writer
from penstock.facts.fact import Appended, NewFact
from penstock.facts.reader import PAGE_BYTES, Confirmation, Page, PageReader
from penstock.jetstream.connection import Broker
from penstock.settings import Settings
from penstock.wire.headers import Headers


class Facts:
    """Named readers and idempotent writers; any number of tasks of one event loop may use it.

    It holds no state that another instance could not have: receipts of one are confirmed by any other, and both may be
    restarted in between. A connection that is found lost is opened again by the next call.
    """

    def __init__(self, settings: Settings, name: str = "penstock facts") -> None:
        self.link = Broker(settings, name)
        self._reader = PageReader(self.link)
        self._writer = Writer(self.link)

    async def fetch_facts(
        self,
        consumer_name: str,
        limit: int = 100,
        *,
        stream: str | None = None,
        wait: float = 0.0,
        max_bytes: int = PAGE_BYTES,
    ) -> Page:
        """The next page of at most `limit` facts of a durable consumer, in the order of the stream.

        Returns as soon as there is something, and an empty page after `wait` seconds. What is not confirmed within the
        consumer's ack wait comes again, in order, with the next fetch after it. `stream` may be left out where only one
        stream has a consumer of that name. A fact larger than `max_bytes` comes alone.

        A consumer whose reader is declared `dedicated` has one open page at a time: until that is confirmed, or its
        ack wait is over, further fetches give an empty page whose `retry_after` says how long.
        """
        return await self._reader.fetch(consumer_name, limit, stream, wait, max_bytes)

    async def confirm_receipt(
        self, consumer_name: str, receipt: str | None, *, stream: str | None = None
    ) -> Confirmation:
        """Confirm exactly the page that came with the receipt.

        When it returns, the page is confirmed for good: written down on the server, and every message of it
        acknowledged. May be repeated. Raises `ForgedReceipt`, `ForeignReceipt` or `StaleReceipt`, all `ReceiptRefused`;
        then nothing was confirmed. After `Unavailable` it may have been: confirm it again.
        """
        return await self._reader.confirm(consumer_name, receipt, stream)

    async def append_fact(
        self, subject: str, fact_id: str, data: bytes, *, headers: Headers | None = None, stream: str | None = None
    ) -> Appended:
        """Store a fact once: the same id and content give back where it is stored, however often and however late.

        Raises `FactConflict` when the subject has a fact of that id with other content. That holds for as long as the
        stream keeps the fact, beyond its duplicate window. With `stream`, only that stream may take it. After
        `Unavailable` it may be stored or not: append it again.
        """
        return await self._writer.append(NewFact(subject, fact_id, data, headers), stream)

    async def append_facts(self, facts: Sequence[NewFact], *, stream: str | None = None) -> tuple[Appended, ...]:
        """Store many facts, each once and as `append_fact` does, and return the outcome of each in the same order.

        A fact of an id that is stored with other content is told as a `conflict` and raises nothing. `ConfigError`
        before anything is stored when one of them cannot be a fact. After any other error some may be stored and others
        not: append all of them again. They are stored in their order; with others between them, and not atomically.
        """
        return await self._writer.append_all(facts, stream)

    async def forget_pages(self, consumer_name: str, *, stream: str | None = None) -> None:
        """Make all open pages of a consumer stale, and let it start over: what goes with a reset of the consumer."""
        await self._reader.forget(await self._reader.stream_of(consumer_name, stream), consumer_name)

    async def rotate_signing_key(self) -> tuple[str, str | None]:
        """Sign receipts with a new key from now on; returns the ids of the new key and of the one before.

        Receipts of the key before stay valid until the next rotation. Other processes notice within ten seconds.
        """
        return await self._reader.rotate_signing_key()

    async def close(self) -> None:
        await self._reader.close()
        await self.link.close()

    async def __aenter__(self) -> Self:
        await self.link.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
