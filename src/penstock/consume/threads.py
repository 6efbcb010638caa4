"""Threads for plain functions. A thread cannot be stopped, so they are daemons: one that hangs does not keep the
process.

`ThreadPoolExecutor` is unsuitable: Python waits for its threads at exit, however long they take.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Work(NamedTuple):
    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]

    def done(self) -> None:
        try:
            result, error = self.call(), None
        except BaseException as exc:  # noqa: BLE001 -- it is raised where the call is awaited
            result, error = None, exc
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self.loop.call_soon_threadsafe(_settle, self.answer, result, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():  # the caller was cancelled
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)


class Threads:
    """Up to `count` threads, which are started when there is work for them."""

    def __init__(self, count: int, name: str = "handler") -> None:
        self._count = count
        self._name = name
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Call it in a thread. When cancelled, the call continues there, and its result is dropped."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.put(_Work(call, loop, answer))
        if not self._idle.acquire(blocking=False) and self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        return await answer

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work.done()

    def _next(self) -> _Work | None:
        """Return the next call; a thread counts as idle only while it waits for one."""
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._idle.release()
            return self._waiting.get()

    def close(self) -> None:
        """End idle threads."""
        for _ in range(self._started):
            self._waiting.put(None)
