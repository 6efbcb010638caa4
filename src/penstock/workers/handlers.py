"""Handlers: what a user writes, found by name, and called in the event loop or in other processes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.workers.messages import Message, MessageContext

AsyncHandler = Callable[[Message, MessageContext], Awaitable[Any]]
Handler = AsyncHandler | Callable[[Message, MessageContext], Any]
"""Takes a message and its context. Returning acknowledges the message; raising tries it again later.

An `async def` runs in the worker's event loop: it may wait, and must not compute for long. A plain function is called
in place when `processes` is 0, and must be quick then; else it runs in a pool of processes, and must be a function of
a module, for it is sent there by its name.
"""


class Runner:
    """Calls a handler, wherever it is to run."""

    def __init__(self, handler: Handler, processes: int = 0) -> None:
        self._handler = handler
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self.call: AsyncHandler = self._chosen()
        """Awaited for every message."""

    def _chosen(self) -> AsyncHandler:
        if inspect.iscoroutinefunction(self._handler) or inspect.iscoroutinefunction(
            getattr(self._handler, "__call__", None)  # noqa: B004 -- an object with an async __call__ is a handler too
        ):
            if self._processes:
                raise ConfigError("processes are for plain functions; an async handler runs in the event loop")
            return cast(AsyncHandler, self._handler)
        return self._in_process if self._processes else self._in_place

    async def _in_place(self, message: Message, context: MessageContext) -> None:
        answer = self._handler(message, context)
        if inspect.isawaitable(answer):  # a wrapper around an async function
            await answer

    async def _in_process(self, message: Message, context: MessageContext) -> None:
        loop = asyncio.get_running_loop()
        pool = self._open_pool()
        try:
            await loop.run_in_executor(pool, partial(self._handler, message, context))
        except BrokenProcessPool:
            if pool is self._pool:  # a process of it died; the next message gets a new pool
                self._pool = None
                pool.shutdown(wait=False)
            raise

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not fork: the event loop and its sockets must not be copied into children.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, mp_context=context)
        return self._pool

    def close(self) -> None:
        """End the processes; what runs in them is finished first."""
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def load(name: str) -> Handler:
    """The handler called `MODULE:FUNCTION`; the module may lie in the current directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{name!r} is not MODULE:HANDLER, such as billing.handlers:on_usage")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name and module_name.startswith(exc.name):
            raise ConfigError(f"there is no module {module_name!r}, here or among what is installed") from exc
        raise ConfigError(f"module {module_name!r} needs {exc.name!r}, which is not installed") from exc
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"module {module_name!r} has no function {attribute!r}")
    return cast(Handler, found)
