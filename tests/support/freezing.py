"""Processes that are there and do nothing."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from penstock.testing import eventually


def freeze(*pids: int) -> None:
    """SIGSTOP, and wait until every thread of them stands still, which takes a moment on a busy machine."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        return set[str]().union(*(_states(pid) for pid in pids))

    eventually(lambda: states() == {"T"}, what=f"processes {pids} to stand still", state=states)


def _states(pid: int) -> set[str]:
    """Of its threads, each a letter."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            found.add((task / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return found
