"""`penstock run --reload`: the same command as a child process, started anew when a source file changes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from penstock.app.app import stopped_by_signals
from penstock.cli.common import err

LOOK_EVERY = 0.3
"""Seconds between two looks at the files."""
SUFFIXES = (".py", ".yaml", ".yml")
PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages"})
FLAG, VARIABLE = "--reload", "PENSTOCK_RUN_RELOAD"

Seen = Mapping[Path, int]
"""Files, each with the time of its last change."""


def seen(folder: Path) -> Seen:
    """The source files below a folder, without virtual environments and folders whose name begins with a dot."""
    return dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone, or not ours to read
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(".") and entry.name not in PASSED_OVER:
                yield from _files(Path(entry.path))
        elif entry.name.endswith(SUFFIXES):
            try:
                yield Path(entry.path), entry.stat().st_mtime_ns
            except OSError:
                continue


def changed(before: Seen, now: Seen) -> list[Path]:
    """Files that were changed, are new, or are gone."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


async def run_reloading() -> int:
    """Run this very command without its flag until SIGINT or SIGTERM; returns the exit code of the last child."""
    command = [sys.executable, "-m", "penstock", *(one for one in sys.argv[1:] if one != FLAG)]
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with stopped_by_signals() as stop:
        while True:
            before = seen(Path.cwd())
            child = await asyncio.create_subprocess_exec(*command, env=variables, start_new_session=True)
            try:  # Ctrl-C is for us alone: a second signal would end the child at once
                files = await _until_changed(before, child, stop)
                code = await _ended(child)
            finally:
                if child.returncode is None:
                    child.kill()
            if stop.is_set():
                return code
            shown = ", ".join(str(path.relative_to(Path.cwd())) for path in files[:3])
            err.print(f"{shown}{' …' if len(files) > 3 else ''} changed: starting again", markup=False, soft_wrap=True)


async def _until_changed(before: Seen, child: asyncio.subprocess.Process, stop: asyncio.Event) -> list[Path]:
    """Wait until files have changed, and do so no more, or until we are told to stop."""
    told, latest = False, before
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_EVERY)
        if child.returncode is not None and not told:
            err.print(f"the app has ended with exit code {child.returncode}; it starts again when a file changes")
            told = True
        now = seen(Path.cwd())
        if now == latest and (files := changed(before, now)):
            return files
        latest = now
    return []


async def _ended(child: asyncio.subprocess.Process) -> int:
    """Have the child finish what it runs, and wait for it."""
    if child.returncode is None:
        child.terminate()
    return await child.wait()
