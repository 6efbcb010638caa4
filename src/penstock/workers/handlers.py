"""Handlers: what a user writes, found by name, and called in the event loop or in other processes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, cast
from weakref import WeakSet

from penstock.errors import ConfigError
from penstock.workers.messages import Message, MessageContext

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
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[None]] = []
        self._killed: WeakSet[ProcessPoolExecutor] = WeakSet()
        self._slots = asyncio.Semaphore(processes)
        self._timeout = timeout
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
        async with self._slots:  # the handler's time begins when a process is free for it
            while True:
                pool = await self._open_pool()
                try:
                    async with in_time(self._timeout):
                        await self._run_in(pool, message, context)
                    return
                except BrokenProcessPool:
                    if pool is self._pool:  # a process of it died; the next message gets a new pool
                        self._pool = None
                        pool.shutdown(wait=False)
                    if pool not in self._killed:
                        raise

    async def _run_in(self, pool: ProcessPoolExecutor, message: Message, context: MessageContext) -> None:
        running = pool.submit(self._handler, message, context)
        try:
            await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.cancelled():  # it hangs in a process, and would keep that from all other messages
                self._kill(pool)
            raise

    async def _open_pool(self) -> ProcessPoolExecutor:
        """The pool, once its processes have started and know the handler."""
        if self._pool is None:
            # Not fork: the event loop and its sockets must not be copied into children.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, mp_context=context, initializer=_follow_parent)
            self._starting = [self._pool.submit(_know, self._handler) for _ in range(self._processes)]
        pool = self._pool
        if not all(start.done() for start in self._starting):
            await asyncio.wait([asyncio.wrap_future(start) for start in self._starting])
        return pool

    def _kill(self, pool: ProcessPoolExecutor) -> None:
        """End its processes: nobody tells which of them runs what. Whatever else ran in them runs again in new ones."""
        self._killed.add(pool)
        for process in list((pool._processes or {}).values()):  # its own way to do this is there from Python 3.14 on
            process.kill()
        pool.shutdown(wait=False)
        if pool is self._pool:
            self._pool = None

    def close(self) -> None:
        """End the processes; what runs in them is finished first."""
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


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


def _know(handler: Handler) -> None:
    """Runs in a process of a pool, which imports the handler's module for it."""


def _follow_parent() -> None:
    """Runs in each process of a pool: it leaves signals to its parent, which lets it finish, and ends when that dies.

    Ctrl-C, and many a supervisor's SIGTERM, go to the whole group of processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


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
