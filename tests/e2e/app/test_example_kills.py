"""The example's services, two instances of all, through kills of an instance and of the broker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.commands import here

from penstock.errors import PenstockError
from penstock.examples import example_dir, load_module
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.topology.load import load
from penstock.wire import blocking

EVENTS = 4_000


class Services:
    """The example's platform on a server, with instances of its services."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.platform = load(example_dir() / "penstock.yaml", "dev")
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """An instance; servers are taken from the variable, not from the example's file."""
        command = [sys.executable, "-m", "penstock", "run", "services:app"]
        environment = {**os.environ, "PENSTOCK_SERVERS": self.server.url, "PYTHONPATH": str(example_dir())}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self.running.append(process)
        return process

    def publish(self) -> None:
        simulator = load_module(example_dir() / "simulator.py", "gpuaas_simulator")
        start = datetime(2026, 1, 1, tzinfo=UTC)
        with BlockingPublisher.connect(self.server.settings) as publisher:
            for step in simulator.simulate(seed=1, start=start, span=timedelta(hours=6), events=EVENTS):
                subjects, bodies = [one.subject for one in step.events], [one.encode() for one in step.events]
                publisher.publish_batch(step.stream, subjects, bodies)

    def consumers(self) -> dict[str, ConsumerInfo]:
        try:
            with blocking.connect(self.server.settings) as connection:
                api = JetStream(connection.requester())
                found = [one for name in self.platform.streams for one in blocking.run(api.consumers(name))]
                return {one.name: one for one in found}
        except PenstockError:
            return {}

    def left(self) -> int:
        """Messages that are not handled; as if there were many while the broker is away."""
        found = self.consumers()
        return sum(one.unprocessed for one in found.values()) if found else EVENTS

    def handled(self, part: float) -> bool:
        found = self.consumers().get("billing_worker_usage_metered")
        return bool(found and found.ack_floor_stream_seq > part * EVENTS / 2)


@pytest.mark.kills
def test_every_event_of_every_consumer_is_handled(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    services = Services(nats_server, tmp_path)
    applied = here(
        "--servers", nats_server.url, "apply", example_dir() / "penstock.yaml", "--env", "dev", "--allow-override"
    )
    assert applied.returncode == 0, applied.stderr
    services.publish()
    first, _ = services.start(), services.start()
    try:
        eventually(lambda: services.handled(0.1), 120, "a tenth to be handled")
        first.kill()
        first.wait()
        services.start()
        eventually(lambda: services.handled(0.3), 120, "more to be handled")
        nats_server.kill()
        threading.Event().wait(0.3)
        nats_server.start()
        eventually(lambda: services.left() == 0, 240, "everything to be handled", services.left)
        found = services.consumers()
        assert set(found) == set(services.platform.consumers)
        letters = {name for name, one in found.items() if one.stream == "DLQ" and one.ack_floor_stream_seq}
        assert letters == {"dlq_inspector"}, "top-ups above the limit became dead letters, and were looked at"
        assert all(one.ack_pending == 0 for one in found.values())
    finally:
        for process in services.running:
            process.terminate()
        codes = [process.wait(60) for process in services.running[1:]]
    # 2 says that an instance gave up on messages: which of them got these is chance, and the first one was killed
    assert set(codes) <= {0, 2}, (tmp_path / "log").read_text()[-2000:]
