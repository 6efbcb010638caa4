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
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.consume.messages import Message, MessageContext
from penstock.consume.processes import ProcessPool
from penstock.consume.threads import Threads
from penstock.errors import ConfigError

AsyncHandler = Callable[[Any, MessageContext], Awaitable[Any]]
Handler = AsyncHandler | Callable[[Any, MessageContext], Any]
"""Takes a message and its context. Returning acknowledges the message; raising tries it again later.

With `WorkerOptions.batch` it takes a list of messages of one partition, and the context of the first. Returning None
acknowledges all of them. It may return a list instead, with None for each message that is done, and an exception for
each that is not. Raising means that none is done. What failed in a batch is then handled by itself, in a list of one.

An `async def` runs in the worker's event loop: it may wait, and must not compute for long. A plain function that waits,
as for a database, runs in one of `threads`; one that computes in one of `processes`, and must be a function of a module
then, for it is sent there by its name. With neither it is called in place, and must be quick.
"""


OURS = str(Path(__file__).resolve().parents[1])
"""Where this package is."""
FAILURES = (Exception, asyncio.CancelledError, SystemExit)
"""What a handler may raise without harm to anything but its message: a library that calls `sys.exit` ends no worker."""


class HandlerTimeout(Exception):
    """A handler took longer than it may."""


class HandlerRunner:
    """Calls a handler, wherever it is to run."""

    def __init__(self, handler: Handler, processes: int = 0, timeout: float | None = None, threads: int = 0) -> None:
        """`timeout` is for handlers in processes; whoever calls any other one can cut it off himself."""
        self._handler = handler
        self._threads = Threads(threads) if threads else None
        self._processes = processes
        self._pool: ProcessPool | None = None
        self._slots = asyncio.Semaphore(processes)
        self._timeout = timeout
        self.call: AsyncHandler = self._chosen()
        """Awaited for every message."""

    def _chosen(self) -> AsyncHandler:
        if self._processes:
            refuse_what_no_process_can_run(self._handler)
            return self._in_process
        if self._threads:
            if is_async(self._handler):
                raise ConfigError("threads are for plain functions; an async handler runs in the event loop")
            return self._in_thread
        return cast(AsyncHandler, self._handler) if is_async(self._handler) else self._in_place

    async def _in_place(self, message: Message, context: MessageContext) -> Any:
        answer = self._handler(message, context)
        if inspect.isawaitable(answer):  # a wrapper around an async function
            return await answer
        return answer

    async def _in_thread(self, message: Message, context: MessageContext) -> Any:
        assert self._threads
        return await self._threads.run(partial(self._handler, message, context))

    async def _in_process(self, message: Message, context: MessageContext) -> Any:
        async with self._slots:  # the handler's time begins when a process is free for it
            while True:
                pool = self._pool = self._pool or ProcessPool(self._handler, self._processes)
                await pool.started()
                try:
                    async with in_time(self._timeout):
                        return await pool.run(message, context)
                except BrokenProcessPool:
                    if not pool.killed:
                        raise
                finally:
                    if pool.broken and pool is self._pool:  # the next message gets a new one
                        self._pool = None

    def close(self) -> None:
        """End the processes; what runs in them is finished first. A thread cannot be ended: it is not waited for."""
        if self._threads:
            self._threads.close()
        if self._pool:
            self._pool.close()
            self._pool = None


def refuse_what_no_process_can_run(handler: Handler) -> None:
    """Raise `ConfigError` for a handler that no other process can run: every message would become a dead letter."""
    if is_async(handler):
        raise ConfigError("processes are for plain functions; an async handler runs in the event loop")
    try:
        pickle.loads(pickle.dumps(handler))  # as it goes to a process: a function by its name, an object whole
    except Exception as exc:  # whatever an object of the user's does when it is taken apart
        raise ConfigError(
            f"{getattr(handler, '__qualname__', handler)!r} cannot be sent to other processes ({exc}): define the "
            "handler as a function of a module, with `def` and outside of any other, or use no processes"
        ) from exc


def is_async(handler: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: an `async def`, or an object with such a `__call__`."""
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


def failure_of(error: BaseException) -> BaseException:
    """What a handler raised. When it was cancelled from outside, that is no failure of the message: it is raised."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    return RuntimeError("the handler cancelled itself")


def load(name: str, takes_context: bool = True) -> Handler:
    """The handler called `MODULE:FUNCTION`; the module may lie in the current directory.

    `takes_context`: it is called with a message and a context, and refused if it cannot be.
    """
    found = find(name, "HANDLER", "billing.handlers:on_usage")
    if not callable(found):
        raise ConfigError(f"{name!r}: the module has no function of that name, but a {type(found).__name__}")
    refuse_generators(found, name)
    if takes_context:
        _refuse_what_takes_no_context(found, name)
    return cast(Handler, found)


def find(name: str, what: str, example: str) -> Any:
    """What is called `MODULE:NAME`; the module may lie in the current directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{name!r} is not MODULE:{what}, such as {example}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _imported(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"module {module_name!r} has no {'function' if what == 'HANDLER' else what} {attribute!r}")
    return found


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name and f"{name}.".startswith(f"{exc.name}."):
            raise ConfigError(f"there is no module {name!r}, here or among what is installed") from exc
        raise ConfigError(f"module {name!r} needs {exc.name!r}, which is not installed") from exc
    except Exception as exc:  # whatever the user's module does while it is imported
        raise ConfigError(f"module {name!r} cannot be imported: {type(exc).__name__}: {exc}{place_of(exc)}") from exc


def place_of(exc: BaseException) -> str:
    """Where in the user's own code an error comes from, in brackets."""
    if isinstance(exc, SyntaxError):  # says so itself
        return ""
    frames = traceback.extract_tb(exc.__traceback__)
    last = next((one for one in reversed(frames) if not one.filename.startswith(OURS)), frames[-1])
    return f" ({last.filename}, line {last.lineno})"


def refuse_generators(found: Callable[..., Any], name: str) -> None:
    """Raise for what would acknowledge every message and do nothing."""
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"{name!r} has a yield in it, so calling it does nothing; a handler is a plain or async def")


def _refuse_what_takes_no_context(found: Callable[..., Any], name: str) -> None:
    """Raise for what would fail on every message."""
    try:
        inspect.signature(found).bind("message", "context")
    except TypeError as exc:
        raise ConfigError(f"{name!r} cannot be called with a message and a context: {exc}") from exc
    except ValueError:  # some functions written in C do not tell
        return
