"""Processes that run a handler which computes: started together, killed when one hangs, gone when their parent is."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread
from typing import Any


class KnownProcesses(SpawnContext):
    """Starts processes as `multiprocessing` does, and knows which: an executor does not tell before Python 3.14.

    Not by fork: the event loop and its sockets must not be copied into children.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802 -- its name there
        made = SpawnProcess(*args, **options)
        self.started.append(made)
        return made


class ProcessPool:
    """So many processes that know a function. When one of them dies the pool is broken, and another must be made."""

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        self.broken = False
        """Whether it can run nothing more."""
        self.killed = False
        """Whether that is because one call was cut off: then whatever else ran in it did not fail."""
        self._function = function
        self._processes = KnownProcesses()
        self._executor = ProcessPoolExecutor(processes, mp_context=self._processes, initializer=_follow_parent)
        self._starting = [self._executor.submit(_know, function) for _ in range(processes)]

    async def started(self) -> None:
        """Return once its processes have started and know the function, or have failed to."""
        if not all(start.done() for start in self._starting):
            await asyncio.wait([asyncio.wrap_future(start) for start in self._starting])

    async def run(self, *arguments: Any) -> Any:
        """Call the function in a process. When this is cancelled while it runs, the whole pool is killed.

        Raises `BrokenProcessPool` when a process has died.
        """
        if self.broken:
            raise BrokenProcessPool("a process of the pool has died")
        try:
            running = self._executor.submit(self._function, *arguments)
            return await asyncio.wrap_future(running)
        except BrokenProcessPool:
            self._break()
            raise
        except asyncio.CancelledError:
            if not running.cancelled():  # it hangs in a process, and would keep that from all other messages
                self._kill()
            raise

    def _kill(self) -> None:
        """End its processes: nobody tells which of them runs what. Whatever else ran in them runs again in new ones."""
        self.killed = True
        for process in self._processes.started:
            process.kill()
        self._break()

    def _break(self) -> None:
        self.broken = True
        self._executor.shutdown(wait=False)

    def close(self) -> None:
        """End the processes; what runs in them is finished first."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _know(function: Callable[..., Any]) -> None:
    """Runs in a process of a pool, which imports the function's module for it."""


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
