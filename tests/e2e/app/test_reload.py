"""`penstock run --reload`: a changed file starts the app again, and what runs is finished first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import here

from penstock.cli.reload import changed, seen
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually

PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams: {IN: {subjects: [in.>], max_age: 1d}}
consumers: {c: {stream: IN, filter: in.use, ack_wait: 30s}}
"""
SERVICE = """
import asyncio
from pathlib import Path
import penstock

app = penstock.App("penstock.yaml")

@app.consumer("c")
async def handle(text: str) -> None:
    with Path("began").open("a") as file:
        file.write(text)
    if text == "slow":
        await asyncio.sleep(0.7)
    with Path("handled").open("a") as file:
        file.write(f"VERSION {text}\\n")
"""


class Reloaded:
    """A project whose app runs with --reload."""

    def __init__(self, folder: Path, server: EmbeddedServer) -> None:
        self.folder = folder
        self.server = server
        (folder / "penstock.yaml").write_text(PLATFORM % server.url)
        assert here("apply", cwd=folder).returncode == 0
        self.write(1)
        command = [sys.executable, "-m", "penstock", "run", "service:app", "--reload"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def write(self, version: int | str) -> None:
        (self.folder / "service.py").write_text(SERVICE.replace("VERSION", str(version)))
        stamp = os.stat(self.folder / "service.py").st_mtime_ns + 10_000_000  # some file systems count in milliseconds
        os.utime(self.folder / "service.py", ns=(stamp, stamp))

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def send(self, text: str) -> None:
        with BlockingPublisher.connect(self.server.settings) as publisher:
            publisher.connection.request("in.use", text.encode())

    def until(self, what: str, name: str = "handled") -> None:
        eventually(lambda: what in self.text(name), 30, what, lambda: (self.text("log"), self.text("handled")))


@pytest.fixture
def reloaded(tmp_path: Path, nats_server: EmbeddedServer) -> Iterator[Reloaded]:
    made = Reloaded(tmp_path, nats_server)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_a_changed_file_starts_the_app_again_and_what_runs_is_finished(reloaded: Reloaded) -> None:
    reloaded.send("one")
    reloaded.until("1 one")
    reloaded.send("slow")
    reloaded.until("slow", "began")
    reloaded.write(2)
    reloaded.until("service.py changed", "log")
    assert "1 slow" in reloaded.text("handled")  # finished before the next one began
    reloaded.send("two")
    reloaded.until("2 two")
    (reloaded.folder / "service.py").write_text("1/0")
    reloaded.until("it starts again when a file changes", "log")
    reloaded.write(3)
    reloaded.send("three")
    reloaded.until("3 three")
    reloaded.process.send_signal(signal.SIGTERM)
    assert reloaded.process.wait(30) == 0
    assert reloaded.text("handled").splitlines() == ["1 one", "1 slow", "2 two", "3 three"]


def test_what_is_looked_at(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.yaml", "b/d.txt", ".git/e.py", "venv/pyvenv.cfg", "venv/f.py", "b/__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    before = seen(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in before} == {"a.py", "b/c.yaml"}
    (tmp_path / "a.py").unlink()
    (tmp_path / "b" / "new.py").touch()
    found = changed(before, seen(tmp_path))
    assert [path.name for path in found] == ["a.py", "new.py"]


def test_reload_does_not_go_with_an_end(tmp_path: Path) -> None:
    done = here("run", "service:app", "--reload", "--until-done", cwd=tmp_path)
    assert (done.returncode, "leave out --until-done" in done.stderr) == (64, True)
