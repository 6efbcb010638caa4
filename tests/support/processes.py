"""Processes of a test and what they run: found by session, killed by pid."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def in_session(session: int) -> dict[int, str]:
    """The living processes of a session: pid and command."""
    return {pid: command for pid, (own, command) in _all().items() if own == session}


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended before or while it was read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def below(pid: int) -> dict[int, str]:
    """The living processes that a process has started, and those that they have: pid and command."""
    everybody = _all()
    found: dict[int, str] = {}
    new = {pid}
    while new:
        new = {one for one in everybody if parent(one) in new and one not in found}
        found |= {one: everybody[one][1] for one in new}
    return found


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def _all() -> dict[int, tuple[int, str]]:
    """Session and command of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it ended while we looked
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if stat[0] != "Z" and command:
                    found[int(entry.name)] = (int(stat[3]), command)
    return found
