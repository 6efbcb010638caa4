"""`penstock pipeline` as people run it: killed, stopped, looked at from elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.support.commands import here

from penstock.jetstream import JetStream
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.spark import steps
from penstock.spark.link import Link
from penstock.spark.session import SHORT_LIVED
from penstock.testing import eventually
from penstock.testing.contents import stream_data
from penstock.topology.load import load

PENSTOCK = [sys.executable, "-m", "penstock"]
WITHIN = 400.0
"""Seconds for Spark to start and come to the point that is waited for, on a busy machine."""
PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], allow_atomic: true, allow_direct: true}
  OUT: {subjects: [out.>], allow_atomic: true, duplicate_window: 100ms}
  DLQ: {subjects: [dlq.>], allow_atomic: true, duplicate_window: 100ms}
pipelines:
  copy:
    from: {stream: IN, max_rows: 500}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    dedupe: {key: id, within: 1h}
    to: [{format: parquet, path: lake/copy}, {stream: OUT, subject: out.copy}]
    bad_records: dlq.copy
    trigger: {%s}
  totals:
    from: {stream: IN, subjects: [in.good], max_rows: 500}
    event: {format: json, schema: "id bigint NOT NULL, part bigint NOT NULL"}
    sql: "SELECT part, count(*) AS events, sum(id) AS total FROM events GROUP BY ALL"
    to: [{format: parquet, path: lake/totals}]
    trigger: {%s}
"""
COUNT, PARTS, BAD = 1200, 7, 5


@dataclass
class Pipelines:
    """A platform with two pipelines, and `penstock pipeline` on it."""

    server: EmbeddedServer
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    named: tuple[str, ...] = ("--all",)
    """The pipelines that `start` runs."""

    def prepare(self, trigger: str) -> None:
        (self.folder / "holds").mkdir()
        self.file.write_text(PLATFORM % (self.server.url, trigger, trigger))
        with Link(self.server.settings) as link:
            for stream in load(self.file).streams.values():
                link.call(partial(JetStream.create_stream, config=stream.config))

    def publish(self, first: int, last: int, bad: int = 0) -> None:
        """Numbered events, and bad ones among them."""
        bodies = [json.dumps({"id": n, "part": n % PARTS}).encode() for n in range(first, last + 1)]
        with BlockingPublisher.connect(self.server.settings) as publisher:
            for start in range(0, len(bodies), 1000):
                publisher.publish_batch("IN", "in.good", bodies[start : start + 1000])
            if bad:
                publisher.publish_batch("IN", "in.bad", [b"bad %d" % n for n in range(bad)])

    @property
    def file(self) -> Path:
        return self.folder / "penstock.yaml"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*PENSTOCK, "pipeline", "run", *self.named, "--file", str(self.file)]
        environment = {**os.environ, steps.VARIABLE: str(self.folder / "holds"), "JDK_JAVA_OPTIONS": SHORT_LIVED}
        with (self.folder / "run.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    def ask(self, *arguments: str) -> tuple[int, Any]:
        """A command that answers in JSON: its exit code and its answer."""
        done = here("pipeline", *arguments, "--json", cwd=self.folder)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def log(self) -> str:
        return (self.folder / "run.log").read_text(errors="replace")[-3000:]

    def kill_at(self, step: str) -> None:
        """Run until the driver comes to the step, and kill everything there at once, as a power cut would."""
        armed = self.folder / "holds" / step
        armed.touch()
        process = self.start("--once")

        def stopped() -> bool:
            self.check_running(process, f"before {step}")
            return not armed.exists()

        eventually(stopped, WITHIN, f"the driver at {step}", self.log)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)

    def check_running(self, process: subprocess.Popen[bytes], when: str) -> None:
        if process.poll() is not None:
            raise RuntimeError(f"it ended {when} with code {process.returncode}: {self.log()}")

    def finish(self, *arguments: str) -> None:
        """Run to the end, with the Spark session of this process."""
        done = here("pipeline", "run", "--all", "--file", self.file, *arguments)
        assert done.returncode == 0, done.stderr

    def problems(self, count: int, bad: int) -> list[str]:
        """What is not as it should be after events 1 to `count`; empty when all is well."""
        wanted = Counter(range(1, count + 1))
        copied = Counter(row["id"] for row in self.table("copy"))
        sent = Counter(json.loads(body)["id"] for body in stream_data(self.server.settings, "OUT"))
        letters = Counter(stream_data(self.server.settings, "DLQ"))
        totals = {row["part"]: (row["events"], row["total"]) for row in self.table("totals")}
        parts = {part: [n for n in wanted if n % PARTS == part] for part in range(PARTS)}
        checks = {
            "files": copied == wanted,
            "stream": sent == wanted,
            "bad records": letters == Counter(b"bad %d" % n for n in range(bad)),
            "totals": totals == {part: (len(ids), sum(ids)) for part, ids in parts.items()},
            "one row a group": len(self.table("totals")) == PARTS,
        }
        return [name for name, well in checks.items() if not well]

    def table(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pyarrow.dataset.dataset(self.folder / "lake" / name).to_table().to_pylist()
        return rows


@pytest.fixture
def pipelines(nats_server: EmbeddedServer, tmp_path: Path, spark: SparkSession) -> Any:
    made = Pipelines(nats_server, tmp_path)
    yield made
    if made.process and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait(120)


@pytest.mark.parametrize(
    ("count", "named", "kills"),
    [
        pytest.param(300, "copy", [steps.FILES_WRITTEN], marks=pytest.mark.short),
        (COUNT, "--all", [steps.LETTERS_WRITTEN, steps.FILES_WRITTEN, steps.STORED, steps.CLOSED, steps.BATCH_WRITTEN]),
        pytest.param(
            COUNT,
            "--all",
            [steps.LETTERS_WRITTEN, steps.FILES_WRITTEN, steps.STORED, steps.CLOSED, steps.BATCH_WRITTEN] * 2,
            marks=[pytest.mark.soak, pytest.mark.timeout(3000)],
        ),
    ],
    ids=["in short", "at each step", "at each step twice"],
)
@pytest.mark.kills
@pytest.mark.timeout(1500)
def test_a_run_after_a_crash_gives_the_same_result(
    pipelines: Pipelines, count: int, named: str, kills: list[str]
) -> None:
    pipelines.named = (named,)
    pipelines.prepare("available_now: true")
    pipelines.publish(1, count, BAD)
    for step in kills:
        pipelines.kill_at(step)
    pipelines.finish()
    assert pipelines.problems(count, BAD) == []

    with Link(pipelines.server.settings) as link:  # and the check can fail
        link.stubbornly(lambda: link.publish("out.copy", b'{"id": 7, "part": 0}'))
    assert pipelines.problems(count, BAD) == ["stream"]


@pytest.mark.kills
@pytest.mark.timeout(1500)
def test_a_signal_lets_the_micro_batch_finish_and_the_next_run_continues(pipelines: Pipelines) -> None:
    pipelines.prepare("every: 1s")
    pipelines.publish(1, COUNT, BAD)
    process = pipelines.start()

    def both_have_begun() -> bool:
        pipelines.check_running(process, "before its first micro-batches")
        _, answer = pipelines.ask("status", "--file", str(pipelines.file))
        return all((one["progress"] or {}).get("batches") for one in answer["pipelines"])

    eventually(both_have_begun, WITHIN, "micro-batches", pipelines.log)
    _, answer = pipelines.ask("ls", "--file", str(pipelines.file))
    assert {one["name"]: one["state"] for one in answer["pipelines"]} == {"copy": "running", "totals": "running"}
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
    assert process.wait(WITHIN) == 0, pipelines.log()
    code, answer = pipelines.ask("status", "--file", str(pipelines.file))
    assert code == 0
    assert {one["state"] for one in answer["pipelines"]} == {"stopped"}

    pipelines.publish(COUNT + 1, COUNT + 500)
    pipelines.finish("--once")
    assert pipelines.problems(COUNT + 500, BAD) == []
    code, answer = pipelines.ask("status", "--file", str(pipelines.file))
    assert code == 0
    assert {(one["state"], one["rows_behind"], one["seconds_behind"]) for one in answer["pipelines"]} == {
        ("finished", 0, 0.0)
    }
