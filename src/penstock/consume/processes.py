"""Processes that run a CPU-bound handler: started together, killed when one hangs, ended when their parent ends."""

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
    """Starts processes as `multiprocessing` does, and keeps track of them: executors do not expose them before Python
    3.14.

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
    """Processes that run one function. When one of them dies the pool is broken, and must be replaced."""

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        self.broken = False
        """Whether it can run nothing more."""
        self.killed = False
        """Whether it was killed because one call timed out: then other calls in it did not fail."""
        self._function = function
        self._processes = KnownProcesses()
        self._executor = ProcessPoolExecutor(processes, mp_context=self._processes, initializer=_follow_parent)
        self._starting = [self._executor.submit(_know, function) for _ in range(processes)]

    async def started(self) -> None:
        """Return once its processes have started and imported the function, or have failed to."""
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
            if not running.cancelled():  # it hangs, and would block the process for all other messages
                self._kill()
            raise

    def _kill(self) -> None:
        """Kill its processes: it is not known which runs what. Other calls that ran in them run again in new ones."""
        self.killed = True
        for process in self._processes.started:
            process.kill()
        self._break()

    def _break(self) -> None:
        self.broken = True
        self._executor.shutdown(wait=False)

    def close(self) -> None:
        """Stop the processes after their running calls finish."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _know(function: Callable[..., Any]) -> None:
    """Runs in a process of a pool: imports the function's module."""


def _follow_parent() -> None:
    """Runs in each process of a pool: ignores signals, which the parent handles, and ends the process when the parent
    dies.

    Ctrl-C, and the SIGTERM of many supervisors, go to the whole process group.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
