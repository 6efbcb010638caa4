"""Loads users' handlers by name, and calls them in the event loop, in threads or in other processes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import pickle
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
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
"""Takes a message and its context. Returning acknowledges the message; raising causes a retry later.

With `WorkerOptions.batch` it takes a list of messages of one partition, and the context of the first. Returning None
acknowledges all of them. It may return a list instead, with None for each message that is done, and an exception for
each that is not. Raising means that none is done. Failed messages of a batch are then handled alone, in a list of one.

An `async def` runs in the worker's event loop: it may await, and must not block it with long computations. A plain
function that blocks, as on a database, runs in one of `threads`; one that computes in one of `processes`, and must then
be a module-level function, since it is pickled by name. With neither it is called in the event loop, and must be quick.
"""


log = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""Seconds that a cancelled handler has to end."""
OURS = str(Path(__file__).resolve().parents[1])
"""The directory of this package."""
FAILURES = (BaseException,)
"""What a handler may raise with an effect on its message only: a library that calls `sys.exit` ends no worker."""
NO_FAILURES = (KeyboardInterrupt, GeneratorExit)
"""Exceptions raised from outside the handler: they end more than a message."""


class HandlerTimeout(Exception):
    """A handler exceeded its timeout."""


class HandlerRunner:
    """Calls a handler in the event loop, a thread or a process."""

    def __init__(self, handler: Handler, processes: int = 0, timeout: float | None = None, threads: int = 0) -> None:
        """`timeout` is for handlers in processes; the caller can cancel any other one itself."""
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
        async with self._slots:  # the handler's timeout starts when a process is free for it
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
        """Stop the processes after their running calls finish. A thread cannot be stopped, and is not awaited."""
        if self._threads:
            self._threads.close()
        if self._pool:
            self._pool.close()
            self._pool = None


def refuse_what_no_process_can_run(handler: Handler) -> None:
    """Raise `ConfigError` for a handler that another process cannot run: every message would become a dead letter."""
    if is_async(handler):
        raise ConfigError("processes are for plain functions; an async handler runs in the event loop")
    try:
        pickle.loads(pickle.dumps(handler))  # as it is sent to a process: a function by name, an object by value
    except Exception as exc:  # whatever a user's object raises when it is pickled
        raise ConfigError(
            f"{getattr(handler, '__qualname__', handler)!r} cannot be sent to other processes ({exc}): define the "
            "handler as a function of a module, with `def` and outside of any other, or use no processes"
        ) from exc


def is_async(handler: Callable[..., Any]) -> bool:
    """Whether calling it returns an awaitable: an `async def`, or an object with such a `__call__`."""
    call = getattr(handler, "__call__", None)  # noqa: B004 -- an object with an async __call__ is a handler too
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


@asynccontextmanager
async def in_time(seconds: float | None) -> AsyncIterator[None]:
    """Cancel a handler that takes longer."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError as exc:
        if deadline.expired():
            raise HandlerTimeout(f"the handler took longer than {seconds:g} s") from exc
        raise


def failure_of(error: BaseException) -> BaseException:
    """Return what a handler raised. An exception from outside, such as a cancellation, is no failure of the message,
    and is raised."""
    if isinstance(error, NO_FAILURES):
        raise error
    if not isinstance(error, asyncio.CancelledError):
        return error
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    return RuntimeError("the handler cancelled itself")


def load(name: str, takes_context: bool = True) -> Handler:
    """Load the handler `MODULE:FUNCTION`; the module may be in the current directory.

    `takes_context`: the handler must accept a message and a context, or it is refused.
    """
    found = find(name, "HANDLER", "billing.handlers:on_usage")
    if not callable(found):
        raise ConfigError(f"{name!r}: the module has no function of that name, but a {type(found).__name__}")
    refuse_generators(found, name)
    if takes_context:
        _refuse_what_takes_no_context(found, name)
    return cast(Handler, found)


def find(name: str, what: str, example: str) -> Any:
    """Load the object `MODULE:NAME`; the module may be in the current directory."""
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
    except Exception as exc:  # whatever the user's module raises on import
        raise ConfigError(f"module {name!r} cannot be imported: {type(exc).__name__}: {exc}{place_of(exc)}") from exc


def place_of(exc: BaseException) -> str:
    """Return the place in the user's own code that an error comes from, in brackets."""
    if isinstance(exc, SyntaxError):  # contains its own place
        return ""
    frames = traceback.extract_tb(exc.__traceback__)
    last = next((one for one in reversed(frames) if not one.filename.startswith((OURS, "<"))), frames[-1])
    return f" ({last.filename}, line {last.lineno})"


def refuse_generators(found: Callable[..., Any], name: str) -> None:
    """Raise for a generator function: it would acknowledge every message and do nothing."""
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"{name!r} has a yield in it, so calling it does nothing; a handler is a plain or async def")


def _refuse_what_takes_no_context(found: Callable[..., Any], name: str) -> None:
    """Raise for a function that does not accept a context: it would fail on every message."""
    try:
        inspect.signature(found).bind("message", "context")
    except TypeError as exc:
        raise ConfigError(f"{name!r} cannot be called with a message and a context: {exc}") from exc
    except ValueError:  # some C functions have no signature
        return


async def cancel(handlers: Collection[asyncio.Task[Any]]) -> None:
    """Cancel running handlers, and wait for their end. One that goes on regardless is left behind."""
    for task in handlers:
        task.cancel()
    if handlers:
        ended, others = await asyncio.wait(handlers, timeout=CANCEL_SECONDS)
        await asyncio.gather(*ended, return_exceptions=True)
        for task in others:
            log.warning("a handler was cancelled and goes on: it is left behind")
            asyncio._unregister_task(task)  # `asyncio.run` would wait for its end,
            task._log_destroy_pending = False  # type: ignore[attr-defined] # and then complain of it
