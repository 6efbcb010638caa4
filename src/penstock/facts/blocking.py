"""`BlockingFacts`: the same calls without an event loop of the caller's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from penstock.facts.fact import Appended
from penstock.facts.reader import PAGE_BYTES, Confirmation, Page
from penstock.facts.service import Facts
from penstock.settings import Settings
from penstock.wire.headers import Headers

T = TypeVar("T")


class BlockingFacts:
    """`Facts` on an event loop in a thread of its own; any number of threads may use it."""

    def __init__(self, settings: Settings, name: str = "penstock facts") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._facts = self._run(_made(settings, name))

    def fetch_facts(
        self,
        consumer_name: str,
        limit: int = 100,
        *,
        stream: str | None = None,
        wait: float = 0.0,
        max_bytes: int = PAGE_BYTES,
    ) -> Page:
        """See `Facts.fetch_facts`."""
        return self._run(self._facts.fetch_facts(consumer_name, limit, stream=stream, wait=wait, max_bytes=max_bytes))

    def confirm_receipt(self, consumer_name: str, receipt: str | None, *, stream: str | None = None) -> Confirmation:
        """See `Facts.confirm_receipt`."""
        return self._run(self._facts.confirm_receipt(consumer_name, receipt, stream=stream))

    def append_fact(
        self, subject: str, fact_id: str, data: bytes, *, headers: Headers | None = None, stream: str | None = None
    ) -> Appended:
        """See `Facts.append_fact`."""
        return self._run(self._facts.append_fact(subject, fact_id, data, headers=headers, stream=stream))

    def rotate_signing_key(self) -> tuple[str, str | None]:
        """See `Facts.rotate_signing_key`."""
        return self._run(self._facts.rotate_signing_key())

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._run(self._facts.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the call, too
            raise


async def _made(settings: Settings, name: str) -> Facts:
    return Facts(settings, name)
