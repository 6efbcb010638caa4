"""`BlockingFacts`: the same calls for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from penstock.coroutines import blocked
from penstock.facts.service import Facts
from penstock.settings import Settings

T = TypeVar("T")


class BlockingFacts:
    """`Facts` on an event loop in a thread of its own; any number of threads may use it."""

    def __init__(self, settings: Settings, name: str = "penstock facts") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.inner = self.run(_made(settings, name))

    fetch_facts = blocked(Facts.fetch_facts)
    confirm_receipt = blocked(Facts.confirm_receipt)
    append_fact = blocked(Facts.append_fact)
    append_facts = blocked(Facts.append_facts)
    rotate_signing_key = blocked(Facts.rotate_signing_key)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self.inner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the thread's event loop, and wait for it."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the call, too
            raise


async def _made(settings: Settings, name: str) -> Facts:
    return Facts(settings, name)
