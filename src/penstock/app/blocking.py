"""The client for blocking code: every call runs in an event loop in a separate thread, and waits for its result."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.app.client import connect
from penstock.settings import Settings


@contextmanager
def connect_blocking(servers: str | Collection[str] | Settings | None = None, **settings: Any) -> Iterator[Any]:
    """As `connect`, without asyncio: `with penstock.connect_blocking() as client: client.publish(...)`.

    Coroutines become plain calls, `async with` becomes `with`, and `async for` becomes `for`.
    """
    with own_loop() as loop, Blocking(connect(servers, **settings), loop) as client:
        yield client


@contextmanager
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="penstock client", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Blocking:
    """Wraps an asyncio object; its calls block."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return self._given(found)

        def call(*arguments: Any, **options: Any) -> Any:
            async def called() -> Any:  # in the loop, since objects of asyncio belong to one
                answer = found(*arguments, **options)
                return await answer if inspect.isawaitable(answer) else answer

            return self._given(self._wait(called()))

        return call

    def __enter__(self) -> Any:
        return self._given(self._wait(self._inner.__aenter__()))

    def __exit__(self, *error: Any) -> Any:
        return self._wait(self._inner.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        steps: AsyncIterator[Any] = aiter(self._inner)
        while True:
            try:
                yield self._given(self._wait(anext(steps)))
            except StopAsyncIteration:
                return

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(_awaited(coroutine), self._loop).result()

    def _given(self, value: Any) -> Any:
        """Wrap a value with async methods; return any other unchanged."""
        return Blocking(value, self._loop) if _has_waits(value) else value


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _has_waits(value: Any) -> bool:
    kind = type(value)
    if any(hasattr(kind, name) for name in ("__aenter__", "__anext__", "__aiter__")):
        return True
    members = (getattr(kind, name, None) for name in dir(kind) if not name.startswith("__"))
    return any(inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) for member in members)
