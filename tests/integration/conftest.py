"""Servers with a configuration of the test's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker.embedded import find_binary
from penstock.testing import eventually

Serve = Callable[[str], int]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a nats-server with the given configuration, and says its port."""
    running: list[subprocess.Popen[bytes]] = []

    def start(config: str) -> int:
        home = tmp_path / f"server{len(running)}"
        home.mkdir()
        (home / "nats.conf").write_text(f'listen: "127.0.0.1:-1"\n{config}')
        command = [find_binary(), "-c", str(home / "nats.conf"), "--ports_file_dir", str(home)]
        with (home / "log").open("wb") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))

        def port() -> int:
            file = next(home.glob("*.ports"), None)
            return int(json.loads(file.read_text())["nats"][0].rsplit(":", 1)[1]) if file and file.read_text() else 0

        return eventually(port, what="the server's port")

    yield start
    for process in running:
        process.kill()
        process.wait()
