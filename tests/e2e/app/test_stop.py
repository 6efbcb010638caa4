"""`penstock run` and signals: the first lets handlers finish, the second does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import here

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
    Path("began").touch()
    await asyncio.sleep(float(text))
    Path("handled").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_what_the_first_would_wait_for(
    tmp_path: Path, nats_server: EmbeddedServer, number: signal.Signals
) -> None:
    (tmp_path / "penstock.yaml").write_text(PLATFORM % nats_server.url)
    (tmp_path / "service.py").write_text(SERVICE)
    assert here("apply", cwd=tmp_path).returncode == 0
    with BlockingPublisher.connect(nats_server.settings) as publisher:
        publisher.connection.request("in.use", b"55")
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "penstock", "run", "service:app"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        eventually((tmp_path / "began").exists, 30, "the handler to begin")
        process.send_signal(number)
        eventually(lambda: "finishing what runs" in (tmp_path / "log").read_text(), 30, "the signal to be heard")
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(20) != 0
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "handled").exists()
    assert "Traceback" not in (tmp_path / "log").read_text()
