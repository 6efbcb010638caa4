"""`penstock quickstart`, as a process of its own or inside this one, and the servers that it leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import here

PENSTOCK = [sys.executable, "-m", "penstock"]


def as_process(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    command = [*PENSTOCK, "quickstart", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=500, check=False)


def in_this_process(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with the Spark session of this process."""
    return here("quickstart", *arguments, cwd=where)


def running_servers(where: Path) -> list[str]:
    """nats-servers that use a configuration below `where`."""
    shown = subprocess.run(["ps", "-eww", "-o", "pid,command"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if "nats-server" in line and str(where) in line]
