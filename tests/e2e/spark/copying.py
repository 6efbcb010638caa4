"""A streaming query from one stream to another in processes of its own, the ways to hurt it, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import processes

from penstock.publish import BlockingPublisher
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.spark import durable, steps
from penstock.spark.history import Series
from penstock.spark.ledger import Ledger
from penstock.spark.link import Link
from penstock.spark.origin import created
from penstock.testing import eventually
from penstock.testing.contents import stream_data

PROGRAM = Path(__file__).with_name("copy_stream.py")
DURABLE = "copier"
EXECUTOR = "CoarseGrainedExecutorBackend"
STARTED_WITHIN = 600.0
"""Seconds for Spark to start and come to the point that is waited for, on a busy machine."""


@dataclass
class Copy:
    """The query, its streams, and the ways to hurt it."""

    server: EmbeddedServer | EmbeddedCluster
    folder: Path
    count: int
    retention: str = "limits"
    rows_per_trigger: int = 4000
    master: str = "local[2,8]"
    """Two threads; a task may fail seven times."""
    masters: tuple[str, ...] = ()
    """Others, by turns from one start to the next: other numbers of cores."""
    shuffle: bool = False
    """Rows go through a shuffle, whose tasks follow the cores."""
    spark: dict[str, str] = field(default_factory=dict)
    """Further settings of Spark."""
    replicas: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    ahead: int | None = None
    """How many events are published before the output has them; None: all, before the query starts.

    A stream that gets nothing while very much is deleted loses its last message when the server is killed
    (`test_killed_at_rest`): a run that is to see our own mistakes must not leave it at rest for so long.
    """
    published: int = 0
    half_blind: int = 0
    """Starts of the query, up to this one, may end well without having seen all events: they look for the end once."""
    process: subprocess.Popen[bytes] | None = None
    sessions: list[int] = field(default_factory=list)
    """One for each start of the query; the processes in it are this start's, whoever their parent is after a kill."""
    _nodes_killed: int = 0

    def __post_init__(self) -> None:
        self.link = Link(self.server.settings)

    def prepare(self) -> None:
        """The streams, the durable consumer, and the first events."""
        self.holds.mkdir(parents=True)
        source: dict[str, Any] = {"name": "IN", "subjects": ["in.>"], "allow_atomic": True, "allow_direct": True}
        source |= {"retention": self.retention, "num_replicas": self.replicas}
        self.link.call(lambda api: api.create_stream(source))
        position = {"durable_name": DURABLE, "ack_policy": "explicit", "ack_wait": 30_000_000_000}
        self.link.call(lambda api: api.create_consumer("IN", position))
        output: dict[str, Any] = {
            "name": "OUT",
            "subjects": ["out.>"],
            "allow_atomic": True,
            "duplicate_window": 100_000_000,
        }
        output |= {"num_replicas": self.replicas}
        self.link.call(lambda api: api.create_stream(output))
        self.publish(self.ahead or self.count)

    def publish(self, until: int) -> None:
        """Publish on, up to that many events."""
        until = min(until, self.count)
        if until <= self.published:
            return
        with BlockingPublisher.connect(self.server.settings) as publisher:
            for start in range(self.published, until, 1000):
                ids = range(start, min(start + 1000, until))
                publisher.publish_batch("IN", "in.event", [b"%d" % n for n in ids])
        self.published = until
        self.half_blind = self.starts

    def stay_ahead(self) -> None:
        """Publish the next events when the output has half of those that were ahead of it."""
        if self.ahead and self.published < self.count and self.written() > self.published - self.ahead // 2:
            self.publish(self.published + self.ahead // 2)

    @property
    def holds(self) -> Path:
        return self.folder / "holds"

    # -- the driver ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        options = {"stream": "IN", "consumer": DURABLE, "maxRowsPerTrigger": self.rows_per_trigger, "partitions": 2}
        config = {
            "servers": ",".join(self.server.settings.servers),
            "master": self.masters[self.starts % len(self.masters)] if self.masters else self.master,
            "settings": self.spark,
            "shuffle": self.shuffle,
            "source": options,
            "sink": {"stream": "OUT"},
            "checkpoint": str(self.checkpoint),
        }
        environment = {**os.environ, steps.VARIABLE: str(self.holds), **self.environment}
        with (self.folder / f"driver-{self.starts + 1}.log").open("wb") as log:
            command = [sys.executable, str(PROGRAM), json.dumps(config)]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.sessions.append(self.process.pid)

    @property
    def starts(self) -> int:
        return len(self.sessions)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "start() first"
        return self.process

    def finish(self) -> None:
        """Start again until it ends well, having seen all events."""
        self.publish(self.count)
        for _ in range(6):
            if self.process is None or self.driver.poll() is not None:
                self.start()
            if self.driver.wait(STARTED_WITHIN) == 0 and self.starts > self.half_blind:
                return
        raise AssertionError(f"it does not end well: {self.last_words()}")

    def last_words(self) -> str:
        return (self.folder / f"driver-{self.starts}.log").read_text(errors="replace")[-3000:]

    def processes(self) -> dict[int, str]:
        """The query's processes of this start: pid and command."""
        return processes.in_session(self.driver.pid)

    # -- what happens to it ----------------------------------------------------------------------------------------

    def kill_driver(self) -> list[int]:
        """SIGKILL the driver's Python and its JVM. Executors and Python workers are left to themselves."""
        found = [pid for pid, command in self.processes().items() if _is_driver(pid, command, self.driver.pid)]
        killed = _killed(found)
        if self.driver.pid in killed:
            self.driver.wait(120)  # its main thread is gone first, the process only with the others
        return killed

    def kill_worker(self) -> list[int]:
        """SIGKILL the processes that run tasks: the executor's Python workers, not their daemon."""
        daemons = [pid for pid, command in self.processes().items() if "pyspark.daemon" in command]
        return _killed([pid for pid in daemons if processes.parent(pid) in daemons])

    def kill_executor(self) -> list[int]:
        """SIGKILL the JVM of one executor; only where they are processes of their own."""
        found = [pid for pid, command in self.processes().items() if _runs(command, EXECUTOR)]
        return _killed(found[:1])

    def kill_broker(self) -> bool:
        """Kill the server, or one node of the cluster in turn, and start it again."""
        if isinstance(self.server, EmbeddedCluster):
            node = self.server.nodes[self._nodes_killed % len(self.server.nodes)]
            self._nodes_killed += 1
        else:
            node = self.server
        node.kill()
        node.start()
        return True

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
        return pid

    def end(self) -> None:
        """Leave nothing behind."""
        self.link.close()
        _killed([pid for session in self.sessions for pid in processes.in_session(session)])
        if self.process:
            self.process.wait(120)

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

    # -- who has committed what ------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def closed_by_sink(self) -> int:
        """The last micro-batch that the sink has closed; -1: none."""
        query = json.loads((self.checkpoint / "metadata").read_text())["id"]
        return Ledger(self.link).closed(Series("OUT", query, created(self.link.stream_info("OUT"))))

    def committed_by_spark(self) -> int:
        """The last micro-batch in Spark's commit log; -1: none."""
        return max((int(file.name) for file in self.checkpoint.glob("commits/[0-9]*")), default=-1)

    def end_of(self, batch: int) -> int:
        """The last sequence of a micro-batch, by Spark's offset log."""
        version, _, offset = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()
        assert version == "v1"
        return int(json.loads(offset)["sequence"])

    def committed_by_source(self) -> int:
        """The last sequence that the durable has acknowledged."""
        return durable.floor(self.link.call(lambda api: api.consumer_info("IN", DURABLE)))


def _runs(command: str, main: str) -> bool:
    return "java" in command.split()[0] and main in command


def _is_driver(pid: int, command: str, driver: int) -> bool:
    return pid == driver or _runs(command, "org.apache.spark.deploy.SparkSubmit")


def _killed(pids: list[int]) -> list[int]:
    for pid in pids:
        processes.kill(pid)
    eventually(lambda: not any(processes.is_running(pid) for pid in pids), 120, f"the end of {pids}")
    return pids
