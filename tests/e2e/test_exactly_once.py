"""Exactly once, by killing it: a streaming query from one stream to another, while its processes and the broker die.

The output's duplicate window is the shortest that the server takes: what is seen here is the ledger's work.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
import pytest

from penstock.broker.embedded import EmbeddedServer
from penstock.publish import BlockingPublisher
from penstock.spark import steps
from penstock.spark.ledger import STREAM as LEDGER
from penstock.spark.link import Link
from penstock.testing import eventually
from penstock.testing.contents import stream_data

PROGRAM = Path(__file__).with_name("copy_stream.py")
SEED = 20_240_615
DURABLE = "copier"
pytestmark = pytest.mark.timeout(1200)
STARTED_WITHIN = 300.0
"""Seconds for Spark to start and come to the point that is waited for, on a busy machine."""


@dataclass
class Copy:
    """The query, its streams, and the ways to hurt it."""

    server: EmbeddedServer
    folder: Path
    count: int
    retention: str = "limits"
    rows_per_trigger: int = 4000
    master: str = "local[2,8]"
    """Two threads; a task may fail seven times."""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    held: list[int] = field(default_factory=list)
    """Processes that tests have left standing."""

    def __post_init__(self) -> None:
        self.link = Link(self.server.settings)

    def prepare(self) -> None:
        """The streams, the durable consumer, and all events."""
        self.holds.mkdir(parents=True)
        source = {"name": "IN", "subjects": ["in.>"], "allow_atomic": True, "allow_direct": True}
        self.link.call(lambda api: api.create_stream({**source, "retention": self.retention}))
        durable = {"durable_name": DURABLE, "ack_policy": "explicit", "ack_wait": 30_000_000_000}
        self.link.call(lambda api: api.create_consumer("IN", durable))
        output = {"name": "OUT", "subjects": ["out.>"], "allow_atomic": True, "duplicate_window": 100_000_000}
        self.link.call(lambda api: api.create_stream(output))
        with BlockingPublisher.connect(self.server.settings) as publisher:
            for start in range(0, self.count, 1000):
                ids = range(start, min(start + 1000, self.count))
                publisher.publish_batch("IN", "in.event", [b"%d" % n for n in ids])

    @property
    def holds(self) -> Path:
        return self.folder / "holds"

    # -- the driver ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        options = {"stream": "IN", "consumer": DURABLE, "maxRowsPerTrigger": self.rows_per_trigger, "partitions": 2}
        config = {
            "servers": self.server.url,
            "master": self.master,
            "source": options,
            "sink": {"stream": "OUT"},
            "checkpoint": str(self.folder / "checkpoint"),
        }
        environment = {**os.environ, steps.VARIABLE: str(self.holds), **self.environment}
        self.starts += 1
        with (self.folder / f"driver-{self.starts}.log").open("wb") as log:
            command = [sys.executable, str(PROGRAM), json.dumps(config)]
            # A session of its own: its processes are found by it, whoever their parent is after a kill.
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "start() first"
        return self.process

    def finish(self) -> None:
        """Start again until it ends well."""
        for _ in range(5):
            if self.process is None or self.driver.poll() is not None:
                self.start()
            if self.driver.wait(STARTED_WITHIN) == 0:
                return
        raise AssertionError(f"it does not end well: {self.last_words()}")

    def last_words(self) -> str:
        return (self.folder / f"driver-{self.starts}.log").read_text(errors="replace")[-3000:]

    def processes(self) -> dict[int, str]:
        """The query's processes of this start: pid and command."""
        return {pid: command for pid, (session, command) in _all_processes().items() if session == self.driver.pid}

    # -- what happens to it ----------------------------------------------------------------------------------------

    def kill_driver(self) -> None:
        """SIGKILL the driver's Python and its JVM. Python workers are left to themselves."""
        for pid, command in self.processes().items():
            if pid == self.driver.pid or "java" in command.split()[0]:
                _kill(pid)
        self.driver.wait(30)

    def kill_worker(self) -> None:
        """SIGKILL the processes that run tasks: the executor's Python workers, not their daemon."""
        daemons = [pid for pid, command in self.processes().items() if "pyspark.daemon" in command]
        for pid in daemons:
            if _parent(pid) in daemons:
                _kill(pid)

    def kill_executor(self) -> None:
        """SIGKILL the JVM of one executor; only where they are processes of their own."""
        found = [pid for pid, command in self.processes().items() if "CoarseGrainedExecutorBackend" in command]
        _kill(found[0])

    def kill_broker(self) -> None:
        self.server.kill()
        self.server.start()

    def hold(self, step: str) -> int:
        """Let the next process that reaches the step stop there, and return its pid."""
        (self.holds / step).touch()
        if self.driver.poll() is not None:
            self.start()

        def stopped() -> int:
            if self.driver.poll() is not None:
                raise RuntimeError(f"the query ended before step {step!r}: {self.last_words()}")
            found = next(self.holds.glob(f"{step}.*"), None)
            return int(found.suffix[1:]) if found else 0

        pid = eventually(stopped, within=STARTED_WITHIN, what=f"a process at step {step!r}", state=self.last_words)
        (self.holds / f"{step}.{pid}").unlink()
        self.held.append(pid)
        return pid

    def end(self) -> None:
        """Leave nothing behind."""
        self.link.close()
        if self.process:
            for pid in (*self.held, *self.processes()):
                _kill(pid)
            self.process.wait(30)

    # -- what came of it -------------------------------------------------------------------------------------------

    def written(self) -> int:
        return self.link.last_sequence("OUT")

    def wrong(self) -> list[str]:
        """What is wrong with the output; nothing, when every event is there once."""
        found = Counter(int(data) for data in stream_data(self.server.settings, "OUT"))
        twice = sorted(n for n, times in found.items() if times > 1)
        missing = sorted(set(range(self.count)) - set(found))
        strange = sorted(set(found) - set(range(self.count)))
        named = (("twice", twice), ("missing", missing), ("never published", strange))
        return [f"{len(ids)} {what}: {ids[:10]}" for what, ids in named if ids]

    def left_in_input(self) -> int:
        return self.link.stream_info("IN").state.messages


def _all_processes() -> dict[int, tuple[int, str]]:
    """Session and command of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it ended while we looked
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if stat[0] != "Z" and command:
                    found[int(entry.name)] = (int(stat[3]), command)
    return found


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _is_running(pid: int) -> bool:
    return pid in _all_processes()


def _kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)


@pytest.fixture
def copies(tmp_path: Path, nats_server: EmbeddedServer) -> Iterator[list[Copy]]:
    made: list[Copy] = []
    yield made
    for copy in made:
        copy.end()


def begin(copies: list[Copy], server: EmbeddedServer, folder: Path, **settings) -> Copy:
    copy = Copy(server, folder / "copy", **settings)
    copies.append(copy)
    copy.prepare()
    return copy


def test_a_crash_after_each_step_of_a_write_neither_loses_nor_repeats(
    copies: list[Copy], nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    copy = begin(copies, nats_server, tmp_path, count=24_000, retention="workqueue", rows_per_trigger=2000)
    copy.start()
    for step in (steps.OPENED, steps.STORED, steps.ENDED):  # a worker dies: Spark runs the task again
        _kill(copy.hold(step))
    late = copy.hold(steps.INTENDED)
    copy.kill_driver()  # its worker stands still, and will go on when everything is over
    _kill(copy.hold(steps.CLOSED))  # between the sink's commit and Spark's commit log
    copy.kill_driver()
    copy.hold(steps.COMMITTING)  # between Spark's commit log and the source's commit
    copy.kill_driver()
    copy.finish()
    assert copy.wrong() == []
    assert copy.left_in_input() == 0
    _kill(late, signal.SIGCONT)
    eventually(lambda: not _is_running(late), within=60, what="the worker that woke up late has stopped")
    assert copy.wrong() == []


def test_executors_need_only_the_dependencies_and_one_may_die(
    copies: list[Copy], nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Two executors in processes of their own, on a Python that has everything but this package: it is sent to them."""
    environment = {
        "PYSPARK_PYTHON": str(python_without_package(tmp_path / "python")),
        "SPARK_HOME": str(spark_home(tmp_path / "spark")),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    master = "local-cluster[2,1,1024]"
    copy = begin(copies, nats_server, tmp_path, count=20_000, master=master, environment=environment)
    copy.start()
    _until_written(copy, copy.count // 4)
    copy.kill_executor()
    copy.finish()
    assert copy.starts == 1
    assert copy.wrong() == []


def python_without_package(folder: Path) -> Path:
    """An interpreter with the packages of this one, except those that are installed as a link to their sources."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    seen = subprocess.run([python, "-c", "import pyarrow, penstock.spark"], capture_output=True, text=True)
    assert "No module named 'penstock" in seen.stderr, f"this Python must not have the package: {seen}"
    return python


def spark_home(folder: Path) -> Path:
    """Spark under another folder, since the executors of a local cluster leave their files in it."""
    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (folder / entry.name).symlink_to(entry)
    return folder


def killed_at_random(copy: Copy, kills: int, seed: int) -> None:
    """Kill something, again and again, each time a random part of the events later."""
    rng = random.Random(seed)
    print(f"seed {seed}, {copy.count} events, {kills} kills")
    points = sorted(rng.randrange(copy.count * 9 // 10) for _ in range(kills))
    kinds = [("driver", copy.kill_driver), ("worker", copy.kill_worker), ("broker", copy.kill_broker)] * kills
    order = kinds[:kills]
    rng.shuffle(order)
    for point, (name, kill) in zip(points, order, strict=True):
        _until_written(copy, point)
        print(f"{time.strftime('%X')} kill {name} at {copy.written()} (planned {point}), start {copy.starts}")
        kill()
    copy.finish()


def _until_written(copy: Copy, count: int) -> None:
    def reached() -> bool:
        if copy.process is None or copy.driver.poll() not in (None, 0):
            copy.start()
        return copy.written() >= count or copy.driver.poll() == 0

    eventually(reached, within=STARTED_WITHIN, what=f"{count} events in the output", state=copy.last_words)


def test_random_kills_neither_lose_nor_repeat(copies: list[Copy], nats_server: EmbeddedServer, tmp_path: Path) -> None:
    copy = begin(copies, nats_server, tmp_path, count=20_000)
    killed_at_random(copy, kills=4, seed=SEED)
    assert copy.wrong() == [], f"seed {SEED}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_many_random_kills_neither_lose_nor_repeat(
    copies: list[Copy], nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    copy = begin(copies, nats_server, tmp_path, count=500_000, retention=retention, rows_per_trigger=20_000)
    killed_at_random(copy, kills=21, seed=SEED + 1)
    assert copy.wrong() == [], f"seed {SEED + 1}"
    if retention != "limits":
        assert copy.left_in_input() == 0


@pytest.mark.soak
def test_without_the_ledger_a_crash_repeats_events(
    copies: list[Copy], nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Shows that the checks above can fail: the logs are gone when the query comes back."""
    copy = begin(copies, nats_server, tmp_path, count=8000)
    copy.start()
    copy.hold(steps.STORED)
    copy.kill_driver()
    copy.link.call(lambda api: api.purge_stream(LEDGER))
    copy.finish()
    assert any("twice" in complaint for complaint in copy.wrong())
