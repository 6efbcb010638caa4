"""Handlers with `once=True` under SIGKILL: no event that was finished is started again."""

from __future__ import annotations

import hashlib
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
from tests.e2e.app.test_run_kills import PLATFORM, killed, unprocessed
from tests.support.commands import here

import penstock
from penstock.app.handled import STREAM
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually

SERVICE = """
import os, time
import penstock

app = penstock.App("penstock.yaml")


@app.consumer("copy", concurrency=32, once=ONCE)
async def copy(event: dict) -> None:
    with open("started", "a") as log:
        log.write(f"{event['event_id']} {time.time()}\\n")
"""
Times = dict[str, list[float]]


def started(folder: Path) -> Times:
    """When the handler was started, by event. A line that a kill cut short is left out: it was not begun for long."""
    found: Times = defaultdict(list)
    for line in (folder / "started").read_text().splitlines():
        name, _, moment = line.partition(" ")
        if name and moment.count(".") == 1:
            found[name].append(float(moment))
    return found


def finished(server: EmbeddedServer) -> dict[str, float]:
    """When it was written that an event is handled, by the key of the event."""
    with penstock.connect_blocking(server.url) as client:
        kept = list(client.stream(STREAM).messages())
    return {one.subject.rpartition(".")[2]: one.time.timestamp() for one in kept if one.time}


def started_again(begun: Times, done: dict[str, float]) -> list[str]:
    """Events whose handler was started after it was written that they are handled."""
    return [
        name
        for name, moments in begun.items()
        if (end := done.get(hashlib.blake2b(name.encode(), digest_size=16).hexdigest())) and max(moments) > end
    ]


def through(folder: Path, server: EmbeddedServer, retention: str, count: int, kills: int) -> None:
    (folder / "service.py").write_text(textwrap.dedent(SERVICE).replace("ONCE", "True"))
    (folder / "penstock.yaml").write_text(PLATFORM % (server.url, retention))
    assert here("apply", folder / "penstock.yaml").returncode == 0
    with BlockingPublisher.connect(server.settings) as publisher:
        for start in range(0, count, 1000):
            bodies = [b'{"event_id": "e%d"}' % n for n in range(start, min(start + 1000, count))]
            publisher.publish_batch("IN", "in.use", bodies)
    killed(folder, server, count, kills)
    eventually(lambda: unprocessed(server) == 0, 30, "everything to be acknowledged")
    begun, done = started(folder), finished(server)
    assert len(begun) == len(done) == count, "each event was started, and each was finished"
    assert started_again(begun, done) == []


@pytest.mark.kills
@pytest.mark.short
def test_no_finished_event_is_started_again_through_kills(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    through(tmp_path, nats_server, "limits", 600, 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_a_hundred_thousand_events_through_twenty_kills(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    through(tmp_path, nats_server, retention, 100_000, 20)


def test_the_check_notices_an_event_that_is_started_again() -> None:
    key = hashlib.blake2b(b"e1", digest_size=16).hexdigest()
    assert started_again({"e1": [1.0, 3.0]}, {key: 2.0}) == ["e1"]
    assert started_again({"e1": [1.0, 1.5], "e2": [9.0]}, {key: 2.0}) == []
