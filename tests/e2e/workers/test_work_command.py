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
from urllib.error import HTTPError

import pytest

from penstock.cli.main import run
from penstock.consume.metrics import METRICS
from penstock.publish import Publisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually

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

    def write_all(messages, context):
        for message in messages:
            write(message, context)
        return [None for _ in messages]
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
    stdout, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 0, stderr
    told = json.loads(stdout)[0]
    assert (told["consumer"], told["handled"], told["redelivered"]) == ("penstock-w1", 40, 0)
    assert shop.handled == shop.published


@pytest.mark.parametrize(
    "where", [[], ["--threads", "2"], ["--processes", "2"]], ids=["in place", "threads", "processes"]
)
def test_a_handler_gets_lists_of_messages(shop: Shop, where: list[str]) -> None:
    shop.create("limits")
    shop.publish(50, "a", "b")
    worker = shop.work("write_all", "--alone", "w1", "--pattern", "shop.{p}", "--until-done", "--batch", "7", *where)
    _, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 0, stderr
    assert shop.handled == shop.published


def test_a_worker_for_which_nothing_is_there_is_done(shop: Shop) -> None:
    shop.create("limits")
    worker = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done")
    stdout, stderr = worker.communicate(timeout=120)
    assert (worker.returncode, "0 messages handled" in stdout) == (0, True), stderr


def test_dead_letters_are_told_by_the_exit_code(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(1, "a")
    arguments = ["--alone", "w1", "--partition", "a=shop.a", "--until-done", "--dlq", "dlq.shop"]
    worker = shop.work("fail", *arguments, "--backoff", "50ms", "--max-deliver", "2")
    stdout, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 2, stderr
    assert "2 failed, 1 dead" in stdout


def test_a_worker_that_is_told_to_stop_finishes_and_loses_nothing(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(1000, "a", "b")  # so many that it is told long before it would be done
    worker = shop.work("slowly", "--alone", "w1", "--pattern", "shop.{p}")
    eventually(lambda: len(shop.handled["a"]) > 10, 60, state=shop.counts)
    worker.send_signal(signal.SIGTERM)
    _, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 0, stderr
    assert not shop.complete()
    again = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done")
    again.communicate(timeout=120)
    assert shop.handled == shop.published


def test_metrics_have_the_names_that_were_promised(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(5, "a")
    worker = shop.work("write", "--alone", "w1", "--pattern", "shop.{p}", "--metrics-port", "0")
    assert worker.stderr
    lines = [worker.stderr.readline() for _ in range(2)]
    url = next(line.split()[-1] for line in lines if line.startswith("metrics:"))

    def scraped() -> str:
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        return text if 'parti_handler_latency_seconds_count{consumer="penstock-w1",worker="w1"} 5.0' in text else ""

    text = eventually(scraped, 60, "five handled messages in the metrics")
    for name in METRICS:
        assert f"# HELP {name.removesuffix('_total')}" in text
    assert 'parti_consumer_messages_total{consumer="penstock-w1",worker="w1"} 5.0' in text
    assert 'parti_consumer_subject_count{consumer="penstock-w1",worker="w1"} 1.0' in text
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(url.replace("metrics", path), timeout=60) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(url.replace("metrics", "nothing"), timeout=60)
    with refused.value as answer:
        assert answer.code == 404


def test_the_first_lines_say_what_a_worker_waits_for_and_what_a_failure_does(shop: Shop) -> None:
    shop.create("limits")
    windows = ["--cold-start", "300ms", "--planned", "200ms"]
    worker = shop.work("write", "--group", "g", "--pattern", "shop.{p}", "--until-done", *windows, "--max-deliver", "5")
    _, stderr = worker.communicate(timeout=120)  # ends, although the stream is empty
    assert worker.returncode == 0, stderr
    assert "a group that begins assigns them 0.3 s after its last worker came" in stderr
    assert "a message that has failed 5 times is not given up" in stderr
    shop.publish(3, "a", "b")
    worker = shop.work("write", "--group", "g", "--pattern", "shop.{p}", "--until-done", *windows, "--dlq", "dlq.shop")
    _, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 0, stderr
    assert "it has 2 partitions" in stderr
    assert "no --dlq" not in stderr
    assert shop.handled == shop.published


def test_a_worker_that_is_alone_serves_what_fits_and_says_what_does_not(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(3, "a", "b", "c")
    worker = shop.work(
        "write", "--alone", "w1", "--pattern", "shop.{p}", "--until-done", "--max-subjects", "2", "--json"
    )
    stdout, stderr = worker.communicate(timeout=120)
    assert worker.returncode == 2, stderr
    assert json.loads(stdout)[0]["partitions_left_out"] == 1
    assert "1 partitions are not served" in stderr
    assert shop.handled == {p: shop.published[p] for p in "ab"}


@pytest.mark.kills
@pytest.mark.parametrize("kind", ["alone", "group"])
def test_a_worker_that_is_killed_while_it_catches_up_repeats_little_of_that(shop: Shop, kind: str) -> None:
    """A new subject appears, and its backlog lies behind the consumer's cursor."""
    shop.create("limits")
    shop.publish(1, "a")
    quick = ["--cold-start", "100ms", "--planned", "100ms", "--ttl", "2s", "--instance", "pod"]
    who = ["--alone", "w1"] if kind == "alone" else ["--group", "g", *quick]
    shop.work("slowly", *who, "--pattern", "shop.{p}")
    eventually(lambda: len(shop.handled["a"]) == 1, 60, state=shop.counts)
    shop.publish(750, "b", "b")
    shop.publish(1, "a")
    eventually(lambda: len(shop.handled["b"]) > 600, 60, state=shop.counts)
    shop.workers[-1].kill()
    shop.workers[-1].wait(60)
    before = len(shop.handled["b"])
    assert before < 1400, "it was killed in the middle"
    again = shop.work("slowly", *who, "--pattern", "shop.{p}", "--until-done")
    _, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr
    repeated = len(shop.handled["b"]) - 1500
    assert sorted(set(shop.handled["b"]), key=int) == shop.published["b"]
    assert repeated < 450, "what was done in half a second, and what was in flight"


KILLS = pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.short), 25])


@pytest.mark.kills
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
    eventually(lambda: _has_consumer(shop), 60, "the consumer")
    for round_ in range(kills + 1):
        shop.publish(25, *partitions)
        wanted = sum(map(len, shop.handled.values())) + rng.randint(5, 60)
        eventually(lambda: sum(map(len, shop.handled.values())) >= wanted, 60, f"seed {SEED}", shop.counts)  # noqa: B023
        if round_ < kills:
            worker.kill()
            worker.wait()
            worker = shop.work("slowly", *arguments)
    eventually(shop.complete, 60, f"every message, seed {SEED}", shop.counts)
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


FINE = "operator:eq"  # takes two arguments, and does nothing
BASE = ["--stream", "S"]
GROUP = [*BASE, "--group", "g"]
BY_PATTERN = [*GROUP, "--pattern", "a.{x}"]
ALONE = [*BASE, "--alone", "1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere:handler", *BY_PATTERN], "no module 'nowhere'"),
        (["json", *BY_PATTERN], "is not MODULE:HANDLER"),
        (["json:nothing", *BY_PATTERN], "has no function"),
        (["json:loads", *BY_PATTERN], "cannot be called with a message and a context"),
        ([FINE, *BASE, "--pattern", "a.{x}"], "--group, or give the worker an id of its own"),
        ([FINE, *GROUP, "--alone", "1", "--pattern", "a.{x}"], "--group, or give the worker an id of its own"),
        ([FINE, *GROUP], "say what the partitions are"),
        ([FINE, *BY_PATTERN, "--in-bucket"], "say what the partitions are"),
        ([FINE, *GROUP, "--pattern", "a.b"], "names no token"),
        ([FINE, *GROUP, "--pattern", "a..{x}"], "not a subject pattern"),
        ([FINE, *GROUP, "--partition", "a"], "'--partition': 'a': a partition is written as ID=SUBJECT"),
        ([FINE, *GROUP, "--partition", "a=b c"], "'--partition': partition 'a', subject 'b c'"),
        ([FINE, *GROUP, "--partition", "a=x", "--partition", "a=y"], "two partitions have the same id"),
        ([FINE, *GROUP, "--partition", "a=x", "--hashed", "3"], "--hashed goes with --pattern"),
        ([FINE, *GROUP, "--hashed", "3", "--pattern", "a.{x}"], "a subject with {partition} in it"),
        ([FINE, *GROUP, "--hashed", "3", "--pattern", "a.{x}.{partition}"], "a subject with {partition} in it"),
        ([FINE, *GROUP, "--hashed", "3", "--pattern", "a..{partition}"], "an empty token"),
        ([FINE, *GROUP, "--hashed", "1000000", "--pattern", "a.{partition}"], "not in the range"),
        ([FINE, *ALONE, "--hashed", "9", "--pattern", "a.{partition}", "--max-subjects", "4"], "9 filter subjects are"),
        ([FINE, "--stream", "a b", "--group", "g", "--pattern", "a.{x}"], "'--stream': 'a b' cannot be a name"),
        ([FINE, *BASE, "--group", "a.b", "--pattern", "a.{x}"], "'--group': 'a.b' cannot be a group's name"),
        ([FINE, *BASE, "--group", "facts", "--pattern", "a.{x}"], "'facts' cannot be a group's name: Penstock keeps"),
        ([FINE, *BASE, "--alone", "a.b", "--pattern", "a.{x}"], "'--alone': 'a.b' cannot be a name"),
        ([FINE, *BY_PATTERN, "--backoff", "soon"], "'--backoff': 'soon' is not a duration"),
        ([FINE, *BY_PATTERN, "--backoff", "1s,0s"], "'--backoff': backoff needs"),
        ([FINE, *BY_PATTERN, "--ack-wait", "soon"], "'--ack-wait': 'soon' is not a duration"),
        ([FINE, *BY_PATTERN, "--ack-wait", "1ms"], "ack_wait must be at least 0.1"),
        ([FINE, *ALONE, "--pattern", "a.{x}", "--ack-wait", "1ms"], "ack_wait must be at least 0.1"),
        ([FINE, *BY_PATTERN, "--ttl", "soon"], "'--ttl': 'soon' is not a duration"),
        ([FINE, *BY_PATTERN, "--ttl", "0"], "'--ttl': '0' is no time at all"),
        ([FINE, *BY_PATTERN, "--ttl", "500ms"], "<= ttl (0.5 s)"),
        ([FINE, *BY_PATTERN, "--ttl", "48h"], "must outlive it"),
        ([FINE, *BY_PATTERN, "--handler-timeout", "0"], "'--handler-timeout': '0' is no time at all"),
        ([FINE, *BY_PATTERN, "--report-every", "often"], "'--report-every': 'often' is not a duration"),
        ([FINE, *BY_PATTERN, "--dlq", "d l q"], "white space"),
        ([FINE, *BY_PATTERN, "--dlq", "dlq.>"], "has a wildcard"),
        ([FINE, *BY_PATTERN, "--max-deliver", "0"], "'--max-deliver'"),
        ([FINE, *BY_PATTERN, "--metrics-port", "65536"], "'--metrics-port'"),
        ([FINE, *BY_PATTERN, "--label", ""], "'--label': '' cannot be a label"),
        ([FINE, *BY_PATTERN, "--label", "gpu,cpu"], "'--label': 'gpu,cpu' cannot be a label"),
        ([FINE, *BY_PATTERN, "--partition-label", "gpu"], "written as ID=LABEL"),
        ([FINE, *BY_PATTERN, "--weight", "a=heavy", "--strategy", "weighted"], "a whole number from 1 on"),
        ([FINE, *BY_PATTERN, "--weight", "a=0", "--strategy", "weighted"], "a whole number from 1 on"),
        ([FINE, *BY_PATTERN, "--weight", "a=2"], "count with --strategy weighted only"),
        ([FINE, *BY_PATTERN, "--capacity", "2"], "count with --strategy weighted only"),
        ([FINE, *GROUP, "--partition", "a=x", "--partition-label", "b=gpu"], "there is no such partition"),
        ([FINE, *GROUP, "--in-bucket", "--partition-label", "b=gpu"], "its own weights and labels"),
        ([FINE, *BY_PATTERN, "--wildcards"], "it must know all subjects"),
        ([FINE, *BY_PATTERN, "--overlap", "--processes", "2"], "leave out --processes"),
        ([FINE, *BY_PATTERN, "--overlap", "--batch", "2"], "leave out --batch"),
        ([FINE, *BY_PATTERN, "--cold-start", "1s", "--planned", "2s"], "windows must be ordered"),
        ([FINE, *ALONE, "--pattern", "a.{x}", "--planned", "2s"], "--planned: only a group has that"),
        ([FINE, *ALONE, "--pattern", "a.{x}", "--overlap"], "--overlap: only a group has that"),
        ([FINE, *ALONE, "--pattern", "a.{x}", "--label", "x", "--ttl", "9s"], "--label and --ttl: only a group"),
        (["asyncio:sleep", *BY_PATTERN, "--processes", "2"], "an async handler runs in the event loop"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["work", *arguments])
    told = " ".join(capfd.readouterr().err.split())
    assert (ended.value.code, says in told, "Traceback" in told) == (64, True, False), told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "a.b"], "'NAME': 'a.b' cannot be a group's name"),
        (["migrate", "a b", "shadow", "--stream", "S", "--legacy", "old-"], "'NAME': 'a b' cannot be a group's name"),
        (["migrate", "g", "shadow", "--stream", "a.b", "--legacy", "old-"], "'--stream': 'a.b' cannot be a name"),
        (["migrate", "g", "shadow", "--stream", "S", "--legacy", ""], "'--legacy': '' cannot be a name"),
        (["migrate", "g", "drain", "--stream", "S", "--legacy", "old-", "--within", "-1"], "'--within'"),
        (["migrate", "g", "forward", "--stream", "S", "--legacy", "old-"], "'forward' is not one of"),
    ],
)
def test_groups_and_steps_that_cannot_be_are_wrong_usage(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["group", *arguments])
    told = " ".join(capfd.readouterr().err.split())
    assert (ended.value.code, says in told, "Traceback" in told) == (64, True, False), told


def test_a_lambda_in_other_processes_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short_handlers.py").write_text("quick = lambda message, context: None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(["work", "short_handlers:quick", *BY_PATTERN, "--processes", "2"])
    told = " ".join(capfd.readouterr().err.split())
    assert (ended.value.code, "define the handler as a function of a module" in told) == (64, True), told


def test_the_shell_sees_why_a_message_failed_and_when_it_comes_again(shop: Shop) -> None:
    shop.create("limits")
    shop.publish(3, "a")
    arguments = ["--alone", "w1", "--partition", "a=shop.a", "--until-done", "--dlq", "dlq.shop", "--max-deliver", "2"]
    worker = shop.work("fail", *arguments, "--backoff", "50ms")
    _, stderr = worker.communicate(timeout=30)
    assert worker.returncode == 2, stderr
    assert "shop.a #1: try 1 of 2 failed, again in 0.05 s: ValueError: no" in stderr
    assert "shop.a #1: kept as a dead letter: gave up after 2 tries: ValueError: no" in stderr
    assert stderr.count("again in 0.05 s") == 1, "those like it are counted"
    assert "further tries that failed: 2, with ValueError: no" in stderr


def test_a_group_whose_list_is_not_there_says_so_once(shop: Shop) -> None:
    shop.create("limits")
    worker = shop.work("write", "--group", "g", "--in-bucket", "--ttl", "2s")
    assert worker.stderr
    lines = [worker.stderr.readline() for _ in range(4)]  # what it works on, waits for, does with failures, and this
    assert any("bucket 'penstock_g' has no list of partitions" in line for line in lines), lines
    assert any("`penstock group migrate GROUP shadow`" in line for line in lines), lines
    shown = subprocess.run(
        [*PENSTOCK, "--servers", shop.server.url, "group", "show", "g"], capture_output=True, text=True, timeout=30
    )
    assert (shown.returncode, "waits for its first assignment" in " ".join(shown.stdout.split())) == (2, True), shown
    worker.send_signal(signal.SIGTERM)
    _, rest = worker.communicate(timeout=30)
    assert (worker.returncode, "no list of partitions" in rest) == (0, False)


def test_wildcards_from_the_shell_stand_for_subjects_that_are_too_many(shop: Shop) -> None:
    shop.create("limits")
    partitions = [f"p{n}" for n in range(6)]
    shop.publish(5, *partitions)
    arguments = [*(f"--partition={p}=shop.{p}" for p in partitions), "--max-subjects", "2", "--until-done"]
    worker = shop.work("write", "--alone", "w1", *arguments, "--wildcards")
    _, stderr = worker.communicate(timeout=30)
    assert worker.returncode == 0, stderr
    assert shop.handled == shop.published
    assert _filters(shop) == ("shop.*",)


def _filters(shop: Shop) -> tuple[str, ...]:
    async def of_consumer() -> tuple[str, ...]:
        async with await Publisher.connect(shop.server.settings) as publisher:
            return (await publisher.jetstream.consumer_info("SHOP", "penstock-w1")).filters

    return asyncio.run(of_consumer())
