"""Servers with a configuration of the test's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.server.embedded import find_binary
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
            try:
                text = next(home.glob("*.ports")).read_text()
                return int(json.loads(text)["nats"][0].rsplit(":", 1)[1])
            except (StopIteration, json.JSONDecodeError):
                return 0  # not there, or not written to its end

        return eventually(port, what="the server's port")

    yield start
    for process in running:
        process.kill()
        process.wait()
