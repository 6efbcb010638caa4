"""Threads for plain functions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from penstock.consume.threads import Threads


async def test_calls_run_side_by_side_as_far_as_there_are_threads() -> None:
    threads, together = Threads(3), threading.Barrier(3, timeout=10)
    found = await asyncio.gather(*(threads.run(together.wait) for _ in range(6)))
    assert sorted(found) == [0, 0, 1, 1, 2, 2]
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(20)}
    assert names <= {"handler-1", "handler-2", "handler-3"}
    threads.close()


async def test_what_a_call_raises_is_raised_where_it_is_awaited() -> None:
    threads = Threads(1)

    def fails() -> None:
        raise KeyError("x")

    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(KeyError):
        await threads.run(fails)
    with pytest.raises(SystemExit):
        await threads.run(exits)
    assert await threads.run(lambda: 5) == 5  # the thread lives on


async def test_a_call_that_was_given_up_harms_no_other() -> None:
    threads, goes_on = Threads(1), threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await threads.run(lambda: goes_on.wait(10))
    goes_on.set()
    assert await threads.run(lambda: 5) == 5


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    code = """
import asyncio, threading
from penstock.consume.threads import Threads

async def main():
    try:
        async with asyncio.timeout(0.1):
            await Threads(1).run(threading.Event().wait)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
