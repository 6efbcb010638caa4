"""`penstock work`: workers as processes, told to stop, and killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedServer
from penstock.cli.main import run
from penstock.publish import Publisher
from penstock.testing import eventually
from penstock.workers.metrics import METRICS

PENSTOCK = [sys.executable, "-c", "from penstock.cli.main import run; run()"]
SEED = 20_261_116
IN_FLIGHT = 50

HANDLERS = '''
    import asyncio, os

    def write(message, context):
        """One line a message: an append of this size is whole or not at all."""
        line = f"{context.partition_id} {message.data.decode()} {os.getpid()}\\n"
        file = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    async def slowly(message, context):
        await asyncio.sleep(0.003)
        write(message, context)

    async def fail(message, context):
        raise ValueError("no")
'''


class Shop:
    """A stream of numbered messages by partition, and the file that handlers write to."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.file = folder / "handled"
        self.published: dict[str, list[str]] = defaultdict(list)
        self.workers: list[subprocess.Popen[str]] = []
        (folder / "shop.py").write_text(textwrap.dedent(HANDLERS))

    def create(self, retention: str) -> None:
        async def streams() -> None:
            async with await Publisher.connect(self.server.settings) as publisher:
                flags = {"allow_atomic": True, "retention": retention}
                await publisher.jetstream.create_stream({"name": "SHOP", "subjects": ["shop.>"], **flags})
                await publisher.jetstream.create_stream({"name": "DLQ", "subjects": ["dlq.>"]})

        asyncio.run(streams())

    def publish(self, count: int, *partitions: str) -> None:
        async def send() -> None:
            async with await Publisher.connect(self.server.settings) as publisher:
                for partition in partitions:
                    first = len(self.published[partition])
                    data = [str(n) for n in range(first, first + count)]
                    await publisher.publish_batch("SHOP", f"shop.{partition}", [d.encode() for d in data])
                    self.published[partition] += data

        asyncio.run(send())

    def arguments(self, handler: str, *more: str) -> list[str]:
        return ["--servers", self.server.url, "work", f"shop:{handler}", "--stream", "SHOP", *more]

    def work(self, handler: str, *more: str) -> subprocess.Popen[str]:
        """Start a worker as a process of its own."""
        started = subprocess.Popen(
            [*PENSTOCK, *self.arguments(handler, *more)],
            cwd=self.folder,
            env={**os.environ, "HANDLED": str(self.file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers.append(started)
        return started

    @property
    def handled(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            partition, number, _ = line.split()
            found[partition].append(number)
        return found

    def complete(self) -> bool:
        handled = self.handled
        return all(set(numbers) <= set(handled[partition]) for partition, numbers in self.published.items())

    def counts(self) -> dict[str, str]:
        handled = self.handled
        return {p: f"{len(set(handled[p]))} of {len(numbers)}" for p, numbers in self.published.items()}


@pytest.fixture
def shop(nats_server: EmbeddedServer, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(nats_server, tmp_path)
    yield made
    for worker in made.workers:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()


def test_a_worker_handles_what_is_there_and_says_so(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(20, "a", "b")
    worker = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done", "--json")
    stdout, stderr = worker.communicate(timeout=30)
    assert worker.returncode == 0, stderr
    told = json.loads(stdout)[0]
    assert (told["consumer"], told["handled"], told["redelivered"]) == ("penstock-w1", 40, 0)
    assert shop.handled == shop.published


def test_a_worker_for_which_nothing_is_there_is_done(shop: Shop) -> None:
    shop.create("limits")
    worker = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done")
    stdout, stderr = worker.communicate(timeout=30)
    assert (worker.returncode, "0 messages handled" in stdout) == (0, True), stderr


def test_dead_letters_are_told_by_the_exit_code(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(1, "a")
    arguments = ["--alone", "w1", "--partition", "a=shop.a", "--until-done", "--dlq", "dlq.shop"]
    worker = shop.work("fail", *arguments, "--backoff", "50ms", "--max-deliver", "2")
    stdout, stderr = worker.communicate(timeout=30)
    assert worker.returncode == 2, stderr
    assert "2 failed, 1 dead" in stdout


def test_a_worker_that_is_told_to_stop_finishes_and_loses_nothing(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(200, "a", "b")
    worker = shop.work("slowly", "--alone", "w1", "--pattern", "shop.{p}")
    eventually(lambda: len(shop.handled["a"]) > 10, 20, state=shop.counts)
    worker.send_signal(signal.SIGTERM)
    _, stderr = worker.communicate(timeout=20)
    assert worker.returncode == 0, stderr
    assert not shop.complete()
    again = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done")
    again.communicate(timeout=30)
    assert shop.handled == shop.published


def test_metrics_have_the_names_that_were_promised(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(5, "a")
    worker = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--metrics-port", "0")
    assert worker.stderr
    lines = [worker.stderr.readline() for _ in range(2)]
    url = next(line.split()[-1] for line in lines if line.startswith("metrics:"))

    def scraped() -> str:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        return text if 'parti_handler_latency_seconds_count{consumer="penstock-w1",worker="w1"} 5.0' in text else ""

    text = eventually(scraped, 10, "five handled messages in the metrics")
    for name in METRICS:
        assert f"# HELP {name.removesuffix('_total')}" in text
    assert 'parti_consumer_messages_total{consumer="penstock-w1",worker="w1"} 5.0' in text
    assert 'parti_consumer_subject_count{consumer="penstock-w1",worker="w1"} 1.0' in text


KILLS = pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.soak)])


@KILLS
@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
def test_a_worker_that_is_killed_again_and_again_loses_nothing_and_keeps_the_order(
    shop: Shop, retention: str, kills: int
) -> None:
    rng = random.Random(SEED)
    shop.create(retention)
    partitions = [f"p{n}" for n in range(6)]
    arguments = [
        "--alone",
        "w1",
        "--max-ack-pending",
        str(IN_FLIGHT),
        *(f"--partition={p}=shop.{p}" for p in partitions),
    ]
    worker = shop.work("slowly", *arguments)
    eventually(lambda: _has_consumer(shop), 20, "the consumer")
    for round_ in range(kills + 1):
        shop.publish(25, *partitions)
        wanted = sum(map(len, shop.handled.values())) + rng.randint(5, 60)
        eventually(lambda: sum(map(len, shop.handled.values())) >= wanted, 20, f"seed {SEED}", shop.counts)  # noqa: B023
        if round_ < kills:
            worker.kill()
            worker.wait()
            worker = shop.work("slowly", *arguments)
    eventually(shop.complete, 30, f"every message, seed {SEED}", shop.counts)
    repeated = 0
    for partition, numbers in shop.handled.items():
        repeated += len(numbers) - len(set(numbers))
        first_seen = [int(n) for n in dict.fromkeys(numbers)]
        assert first_seen == sorted(first_seen), f"{partition} is out of order, seed {SEED}"
    assert repeated <= kills * IN_FLIGHT, f"more was repeated than was in flight, seed {SEED}"


def _has_consumer(shop: Shop) -> bool:
    async def names() -> list[str]:
        async with await Publisher.connect(shop.server.settings) as publisher:
            return await publisher.jetstream.consumer_names("SHOP")

    return "penstock-w1" in asyncio.run(names())


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere:handler", "--stream", "S", "--group", "g", "--pattern", "a.{x}"],
        ["json", "--stream", "S", "--group", "g", "--pattern", "a.{x}"],
        ["json:nothing", "--stream", "S", "--group", "g", "--pattern", "a.{x}"],
        ["json:loads", "--stream", "S", "--pattern", "a.{x}"],
        ["json:loads", "--stream", "S", "--group", "g"],
        ["json:loads", "--stream", "S", "--alone", "1", "--pattern", "a.{x}", "--overlap"],
        ["json:loads", "--stream", "S", "--group", "g", "--pattern", "a.b"],
        ["json:loads", "--stream", "S", "--group", "g", "--partition", "a"],
        ["json:loads", "--stream", "S", "--group", "g", "--pattern", "a.{x}", "--backoff", "soon"],
    ],
)
def test_what_makes_no_sense_is_wrong_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["work", *arguments])
    assert ended.value.code == 64
    assert "Traceback" not in capfd.readouterr().err
