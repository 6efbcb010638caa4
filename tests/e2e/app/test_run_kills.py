"""`penstock run` under SIGKILL: instances and the broker die, results are stored once, and nothing is missing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from tests.support.commands import here

from penstock.errors import PenstockError
from penstock.jetstream.api import JetStream
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, stream_messages
from penstock.wire import blocking

SEED = 20261116
PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], retention: %s, allow_atomic: true, max_age: 1d}
  OUT: {subjects: [out.>, penstock.done.OUT.>], allow_atomic: true, duplicate_window: 2s, max_age: 1d}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  copy: {stream: IN, filter: in.use, service: copier, ack_wait: 2s, max_deliver: 1000, deliver: all, dlq: dlq.in.use,
         purpose: copies}
"""
SERVICE = """
import asyncio, os, random
import penstock

app = penstock.App("penstock.yaml")



@app.consumer("copy", concurrency=32)
async def copy(number: int, message: penstock.Message) -> None:
    if os.environ["CARELESS"] == "yes":
        await publish(message)
        return
    async with message.atomic("OUT") as batch:
        batch.add("out.copy", number)


async def publish(message: penstock.Message) -> None:
    from penstock.publish import Publisher
    if not hasattr(app.state, "publisher"):
        app.state.publisher = await Publisher.connect(penstock.app.app.Settings.load(servers=[os.environ["SERVER"]]))
    async with app.state.publisher.atomic("OUT") as batch:
        await batch.add("out.copy", message.data)
    await asyncio.sleep(random.random() / 100)
"""


class Instances:
    """Processes of one app; whichever is killed is started again."""

    def __init__(self, folder: Path, server: EmbeddedServer, count: int, careless: bool = False) -> None:
        self._folder = folder
        self._environment = {**os.environ, "CARELESS": "yes" if careless else "no", "SERVER": server.url}
        self.running = [self._start(which) for which in range(count)]
        self.kills = 0

    def _log(self, which: int) -> Path:
        return self._folder / f"log-{which}"

    def _start(self, which: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "run", "service:app"]
        with self._log(which).open("wb") as log:
            return subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)

    def kill(self, which: int) -> None:
        self.running[which].kill()
        self.running[which].wait()
        self.kills += 1
        self.running[which] = self._start(which)

    def until_all_begin(self) -> None:
        for which in range(len(self.running)):
            log = self._log(which)
            eventually(partial(_holds, log, "handling copy"), 60, f"instance {which} to begin", log.read_text)

    def stop(self) -> list[int]:
        for process in self.running:
            process.terminate()
        return [process.wait(60) for process in self.running]


def _holds(path: Path, text: str) -> bool:
    return text in path.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "service.py").write_text(textwrap.dedent(SERVICE))
    return tmp_path


def unprocessed(server: EmbeddedServer) -> int:
    try:
        with blocking.connect(server.settings) as connection:
            return blocking.run(JetStream(connection.requester()).consumer_info("IN", "copy")).unprocessed
    except PenstockError:
        return -1


def has_handled(server: EmbeddedServer, count: int, goal: int) -> bool:
    left = unprocessed(server)
    return left >= 0 and count - left >= goal


def killed(folder: Path, server: EmbeddedServer, count: int, kills: int, careless: bool = False) -> None:
    """Two instances handle that many messages, while they and the broker are killed in between."""
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    instances = Instances(folder, server, 2, careless)
    try:
        for number in range(kills):
            goal = (number + 1) * count // (kills + 1)
            eventually(partial(has_handled, server, count, goal), 300, f"{goal} to be handled")
            if number % 4 == 3:
                instances.until_all_begin()  # one that starts without a server says so, and ends
                server.kill()
                threading.Event().wait(chance.uniform(0.1, 0.5))
                server.start()
            else:
                instances.kill(chance.randrange(2))
        eventually(lambda: unprocessed(server) == 0, 300, "everything to be handled", lambda: unprocessed(server))
    finally:
        codes = instances.stop()
    assert codes == [0, 0], [path.read_text()[-3000:] for path in folder.glob("log-*")]


def through_kills(
    folder: Path, server: EmbeddedServer, retention: str, count: int, kills: int, careless: bool = False
) -> Counter[bytes]:
    """What is stored in the end, while instances and the broker are killed in between."""
    (folder / "penstock.yaml").write_text(PLATFORM % (server.url, retention))
    assert here("apply", folder / "penstock.yaml").returncode == 0
    with BlockingPublisher.connect(server.settings) as publisher:
        for start in range(0, count, 1000):
            publisher.publish_batch("IN", "in.use", [b"%d" % n for n in range(start, min(start + 1000, count))])
    killed(folder, server, count, kills, careless)
    return Counter(one.data for one in stream_messages(server.settings, "OUT") if one.subject == "out.copy")


@pytest.mark.kills
@pytest.mark.short
def test_results_are_stored_once_through_kills_of_instances_and_broker(
    nats_server: EmbeddedServer, folder: Path
) -> None:
    found = through_kills(folder, nats_server, "workqueue", 800, 4)
    assert found == Counter(b"%d" % n for n in range(800))


@pytest.mark.kills
def test_without_the_marker_kills_repeat_results(nats_server: EmbeddedServer, folder: Path) -> None:
    """Shows that the check can fail."""
    found = through_kills(folder, nats_server, "limits", 2_000, 4, careless=True)
    assert set(found) == {b"%d" % n for n in range(2_000)}
    assert max(found.values()) > 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_a_hundred_thousand_results_through_twenty_kills(
    nats_server: EmbeddedServer, folder: Path, retention: str
) -> None:
    found = through_kills(folder, nats_server, retention, 100_000, 20)
    assert found == Counter(b"%d" % n for n in range(100_000))
