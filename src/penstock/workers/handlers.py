"""Handlers: what a user writes, found by name, and called in the event loop or in other processes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.workers.messages import Message, MessageContext
from penstock.workers.processes import Pool

AsyncHandler = Callable[[Message, MessageContext], Awaitable[Any]]
Handler = AsyncHandler | Callable[[Message, MessageContext], Any]
"""Takes a message and its context. Returning acknowledges the message; raising tries it again later.

An `async def` runs in the worker's event loop: it may wait, and must not compute for long. A plain function is called
in place when `processes` is 0, and must be quick then; else it runs in a pool of processes, and must be a function of
a module, for it is sent there by its name.
"""


class HandlerTimeout(Exception):
    """A handler took longer than it may."""


class Runner:
    """Calls a handler, wherever it is to run."""

    def __init__(self, handler: Handler, processes: int = 0, timeout: float | None = None) -> None:
        """`timeout` is for handlers in processes; whoever calls any other one can cut it off himself."""
        self._handler = handler
        self._processes = processes
        self._pool: Pool | None = None
        self._slots = asyncio.Semaphore(processes)
        self._timeout = timeout
        self.call: AsyncHandler = self._chosen()
        """Awaited for every message."""

    def _chosen(self) -> AsyncHandler:
        if self._processes:
            refuse_what_no_process_can_run(self._handler)
            return self._in_process
        return cast(AsyncHandler, self._handler) if _is_async(self._handler) else self._in_place

    async def _in_place(self, message: Message, context: MessageContext) -> None:
        answer = self._handler(message, context)
        if inspect.isawaitable(answer):  # a wrapper around an async function
            await answer

    async def _in_process(self, message: Message, context: MessageContext) -> None:
        async with self._slots:  # the handler's time begins when a process is free for it
            while True:
                pool = self._pool = self._pool or Pool(self._handler, self._processes)
                await pool.started()
                try:
                    async with in_time(self._timeout):
                        await pool.run(message, context)
                    return
                except BrokenProcessPool:
                    if not pool.killed:
                        raise
                finally:
                    if pool.broken and pool is self._pool:  # the next message gets a new one
                        self._pool = None

    def close(self) -> None:
        """End the processes; what runs in them is finished first."""
        if self._pool:
            self._pool.close()
            self._pool = None


def refuse_what_no_process_can_run(handler: Handler) -> None:
    """Raise `ConfigError` for a handler that no other process can run: every message would become a dead letter."""
    if _is_async(handler):
        raise ConfigError("processes are for plain functions; an async handler runs in the event loop")
    try:
        pickle.loads(pickle.dumps(handler))  # as it goes to a process: a function by its name, an object whole
    except Exception as exc:  # whatever an object of the user's does when it is taken apart
        raise ConfigError(
            f"{getattr(handler, '__qualname__', handler)!r} cannot be sent to other processes ({exc}): define the "
            "handler as a function of a module, with `def` and outside of any other, or use no processes"
        ) from exc


def _is_async(handler: Handler) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 -- an object with an async __call__ is a handler too
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


@asynccontextmanager
async def in_time(seconds: float | None) -> AsyncIterator[None]:
    """Cut off a handler that takes longer."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError as exc:
        if deadline.expired():
            raise HandlerTimeout(f"the handler took longer than {seconds:g} s") from exc
        raise


def load(name: str) -> Handler:
    """The handler called `MODULE:FUNCTION`; the module may lie in the current directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{name!r} is not MODULE:HANDLER, such as billing.handlers:on_usage")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _imported(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"module {module_name!r} has no function {attribute!r}")
    _refuse_what_cannot_handle(found, name)
    return cast(Handler, found)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name and f"{name}.".startswith(f"{exc.name}."):
            raise ConfigError(f"there is no module {name!r}, here or among what is installed") from exc
        raise ConfigError(f"module {name!r} needs {exc.name!r}, which is not installed") from exc
    except Exception as exc:  # whatever the user's module does while it is imported
        raise ConfigError(f"module {name!r} cannot be imported: {type(exc).__name__}: {exc}{_place(exc)}") from exc


def _place(exc: Exception) -> str:
    if isinstance(exc, SyntaxError):  # says so itself
        return ""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return f" ({last.filename}, line {last.lineno})"


def _refuse_what_cannot_handle(found: Callable[..., Any], name: str) -> None:
    """Raise for what would fail on every message, or would acknowledge every message and do nothing."""
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"{name!r} has a yield in it, so calling it does nothing; a handler is a plain or async def")
    try:
        inspect.signature(found).bind("message", "context")
    except TypeError as exc:
        raise ConfigError(f"{name!r} cannot be called with a message and a context: {exc}") from exc
    except ValueError:  # some functions written in C do not tell
        return
