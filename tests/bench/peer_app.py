"""The same service with `penstock.App` and with FastStream: lines of code, and messages a second with acknowledgement.

Both parse each message into the same pydantic model, call an async handler, and acknowledge. A stream is filled, the
service starts as a process of its own, and the time counts from its first acknowledgement to its last. FastStream is
given both of its ways: pulled in batches of 100, and pushed, its default.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import faststream_peer
from harness import Bench, Figure, Timed

from penstock.errors import DeadlineExceeded, NotFound
from penstock.jetstream.api import JetStream
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.wire import blocking

SERVICES = Path(__file__).resolve().parent / "services"
STREAM, CONSUMER, SUBJECT = "USAGE", "charge", "usage.metered"
OURS, PULLED, PUSHED = "penstock.App", "FastStream, pull", "FastStream, push"
FILES = {OURS: "with_penstock.py", PULLED: "with_faststream.py", PUSHED: "with_faststream_push.py"}
TIMES = 8
"""How much faster ours should be."""
WITHIN = 300.0
LOOK_EVERY = 0.005


def run(bench: Bench) -> None:
    bench.unit = "messages/s"
    bench.about = (
        "One process, one durable consumer, a pydantic model, explicit acknowledgement; everything is there before it "
        "begins."
    )
    server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
    ours, theirs = bench.size(200_000, quick=20_000), bench.size(30_000, quick=5_000)
    service = Service(server, bench.scratch, max(ours, theirs))
    for name in FILES:
        count = ours if name == OURS else theirs  # rates are compared, and FastStream takes longer for each
        bench.add(name, partial(service.drained, name, count), limit=None if name == OURS else OURS)
    for other in (PULLED, PUSHED):
        bench.goal(OURS, of=other, at_least=TIMES)
    bench.probe(figures)


def figures() -> list[Figure]:
    """Lines of the service with each; ours should have no more than the shorter of theirs."""
    theirs = min(lines(PULLED), lines(PUSHED))
    return [
        Figure(name=f"lines of code, {name}", value=lines(name), unit="", at_most=theirs if name == OURS else None)
        for name in FILES
    ]


def lines(name: str) -> int:
    """Lines with code on them."""
    text = (SERVICES / FILES[name]).read_text()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


class Service:
    """A filled stream, and services that handle its messages."""

    def __init__(self, server: EmbeddedServer, folder: Path, count: int) -> None:
        self._server = server
        self._folder = folder
        body = json.dumps({"project": "proj-0001", "seconds": 3600, "note": "x" * 120}).encode()
        with BlockingPublisher.connect(server.settings) as publisher:
            config = {"name": STREAM, "subjects": ["usage.>"], "allow_atomic": True}
            blocking.run(publisher.jetstream.create_stream(config))
            for start in range(0, count, 1000):
                publisher.publish_batch(STREAM, SUBJECT, [body] * min(1000, count - start))
        self._last = count

    def drained(self, name: str, count: int) -> Timed:
        """Handle the last `count` messages; the time from the first acknowledgement to the last."""
        with blocking.connect(self._server.settings) as connection:
            jetstream = JetStream(connection.requester())
            self._consumer(jetstream, name, self._last - count + 1)
            process = self._start(name)
            try:
                return self._timed(jetstream, process)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _consumer(self, jetstream: JetStream, name: str, first: int) -> None:
        with suppress(NotFound):
            blocking.run(jetstream.delete_consumer(STREAM, CONSUMER))
        config = {
            "durable_name": CONSUMER,
            "name": CONSUMER,
            "filter_subject": SUBJECT,
            "ack_policy": "explicit",
            "max_ack_pending": 10_000,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            **({"deliver_subject": "to.charge"} if name == PUSHED else {}),
        }
        blocking.run(jetstream.create_consumer(STREAM, config))

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        paths = [str(faststream_peer.path())] if name != OURS else []
        variables = {**os.environ, "NATS_URL": self._server.url, "PYTHONPATH": os.pathsep.join(paths)}
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, SERVICES / FILES[name]], cwd=self._folder, env=variables, stdout=log, stderr=log
            )

    def _timed(self, jetstream: JetStream, process: subprocess.Popen[bytes]) -> Timed:
        began, first, give_up = 0.0, 0, time.monotonic() + WITHIN
        while time.monotonic() < give_up:
            if process.poll() is not None:
                raise AssertionError(f"the service has ended: {(self._folder / 'log').read_text()[-2000:]}")
            info = blocking.run(jetstream.consumer_info(STREAM, CONSUMER))
            floor, now = info.ack_floor_stream_seq, time.perf_counter()
            if info.ack_floor_consumer_seq and not began:
                began, first = now, floor
            if floor >= self._last:
                return Timed(self._last - first, now - began)
            time.sleep(LOOK_EVERY)
        raise DeadlineExceeded(f"{STREAM} to be handled", WITHIN)
