"""Replicates facts: from a named reader on one side to appends on the other.

Each page, in order:
    1. fetched from the reader (crash after: its facts come again after the ack wait);
    2. each fact is appended with its own id, one after the other (crash after: the same, and those that are there are
       found there by their id);
    3. the page's receipt is confirmed (crash after: nothing comes again).
So every fact arrives, once, and in the order of the reader; nothing is kept between the two sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigError, PenstockError
from penstock.facts.errors import StaleReceipt
from penstock.facts.fact import Appended, Fact
from penstock.facts.reader import Confirmation, Page
from penstock.retry import Tries
from penstock.wire.headers import Headers

WAIT = 1.0
"""Seconds for which a fetch waits for facts; a request to stop is noticed in between."""
STEERING = ("nats-", "penstock-")
"""Headers with a meaning for a server or a worker on the side where they were written: they are not copied."""


class Source(Protocol):
    """Where facts come from: `Facts`, or a client of a gateway."""

    async def fetch_facts(
        self, consumer_name: str, limit: int = 100, *, stream: str | None = None, wait: float = 0.0
    ) -> Page: ...

    async def confirm_receipt(
        self, consumer_name: str, receipt: str | None, *, stream: str | None = None
    ) -> Confirmation: ...


class Destination(Protocol):
    """Where facts go: `Facts`, or a client of a gateway."""

    async def append_fact(
        self, subject: str, fact_id: str, data: bytes, *, headers: Headers | None = None, stream: str | None = None
    ) -> Appended: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Source and destination of a replication."""

    consumer: str
    """The named reader."""
    stream: str | None = None
    """Its stream; None where only one has such a consumer."""
    to_stream: str | None = None
    """The only stream that may take the facts; None: whichever takes their subjects."""
    rename: Callable[[str], str] = str
    """The subject on the other side."""
    limit: int = 100
    """Facts a page."""


@dataclass(frozen=True, slots=True)
class ReplicationStatistics:
    """Counters of a replication."""

    appended: int = 0
    existed: int = 0
    """Facts that were there before: an earlier run was cut off behind them."""
    position: int = 0
    """Sequence of the last fact confirmed."""
    caught_up: bool = False
    last_error: str | None = None
    """Why it is retrying now."""


class Replication:
    """One loop from a source to a destination; several of one consumer share the work, and lose the order."""

    def __init__(self, source: Source, destination: Destination, config: ReplicationConfig) -> None:
        self.config = config
        self._source = source
        self._destination = destination
        self._limit = config.limit
        self._appended = self._existed = self._position = 0
        self._caught_up = False
        self._last_error: str | None = None

    def statistics(self) -> ReplicationStatistics:
        return ReplicationStatistics(self._appended, self._existed, self._position, self._caught_up, self._last_error)

    async def run(self, stop: asyncio.Event, *, until_caught_up: bool = False) -> ReplicationStatistics:
        """Carry facts until `stop`, or until the reader has none left, delivered or not.

        Raises permanent errors, such as `FactConflict`, and any error of the very first fetch.
        """
        has_worked, tries = False, Tries()
        while not stop.is_set():
            try:
                page = await self._source.fetch_facts(
                    self.config.consumer, self._limit, stream=self.config.stream, wait=WAIT
                )
                has_worked = True
                if page:
                    await self._carry(page)
                elif page.pending == 0 and page.retry_after is None and until_caught_up:
                    self._caught_up = True
                    break
                self._last_error = None
                tries.succeeded()
            except PenstockError as exc:
                if not has_worked:
                    raise
                self._last_error = str(exc)
                await tries.failed(exc, stop)
        return self.statistics()

    async def _carry(self, page: Page) -> None:
        for fact in page.facts:
            found = await self._append(fact)
            self._existed += found.existed
            self._appended += not found.existed
        try:
            done = await self._source.confirm_receipt(self.config.consumer, page.receipt, stream=self.config.stream)
        except StaleReceipt:
            self._limit = max(1, self._limit // 2)  # it took longer than the ack wait: the facts come again
            return
        self._position = max(self._position, done.last)

    async def _append(self, fact: Fact) -> Appended:
        subject = self.config.rename(fact.subject)
        headers = {name: values for name, values in fact.headers.items() if not name.lower().startswith(STEERING)}
        try:
            return await self._destination.append_fact(
                subject, id_of(fact), fact.data, headers=headers, stream=self.config.to_stream
            )
        except ConfigError as exc:
            raise ConfigError(f"fact {fact.sequence} of {fact.stream}: {exc}") from exc


def id_of(fact: Fact) -> str:
    """The fact's id; of a message that was not appended as a fact, its place in its stream."""
    return fact.id or f"{fact.stream}.{fact.sequence}"
