"""The pipelines of `penstock quickstart`: run, interrupted, and run again in the same directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset
import pytest
from tests.support import processes
from tests.support.quickstarts import PENSTOCK, as_process, in_this_process, running_servers

from penstock.testing import eventually

Quickstart = Callable[..., subprocess.CompletedProcess[str]]


def rows_read(output: str) -> dict[str, int]:
    """What the table of pipelines says each of them has read."""
    lines = output.split("Pipelines (4)", 1)[1].splitlines()[2:6]
    return {name: int(read.replace(",", "")) for name, read, *_ in map(str.split, lines)}


def usage_lake(where: Path) -> int:
    """GPU seconds in the table that `usage_hourly` keeps."""
    table = pyarrow.dataset.dataset(where / ".penstock/lake/usage_hourly", format="parquet").to_table()
    return sum(table["gpu_seconds"].to_pylist())


def dead_letters(where: Path) -> dict[str, int]:
    """Letters in the table that `dlq_report` keeps, by who gave up."""
    table = pyarrow.dataset.dataset(where / ".penstock/lake/dlq_report", format="parquet").to_table()
    return {row["gave_up"]: row["letters"] for row in table.to_pylist()}


@pytest.mark.kills
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("run", [in_this_process, as_process])
def test_the_pipelines_read_every_event_once_over_two_runs(tmp_path: Path, run: Quickstart) -> None:
    first = run(tmp_path, "--events", "1000")
    assert first.returncode == 0, first.stderr
    assert f"failures  {dead_letters(tmp_path)['billing_worker_balance_credited']} of" in first.stdout
    once, seconds = rows_read(first.stdout), usage_lake(tmp_path)
    assert once["event_lake"] >= 1000
    assert once["usage_hourly"] > 0
    second = run(tmp_path, "--events", "1000")
    assert second.returncode == 0, second.stderr
    assert usage_lake(tmp_path) > seconds
    assert "incubator" not in first.stderr + second.stderr, "a line of the JVM that nobody can act on"
    check_lake(tmp_path, at_least=2000)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark")
def test_the_pipelines_read_every_event(tmp_path: Path) -> None:
    done = in_this_process(tmp_path, "--events", "500")
    assert done.returncode == 0, done.stderr
    assert rows_read(done.stdout)["event_lake"] >= 500
    assert dead_letters(tmp_path)
    check_lake(tmp_path, at_least=500)


@pytest.mark.kills
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("spark")
def test_ctrl_c_while_spark_works_ends_everything_and_the_next_run_takes_it_up(tmp_path: Path) -> None:
    command = [*PENSTOCK, "quickstart", "--events", "1000"]
    first = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        started = ".penstock/.penstock/checkpoints/*/offsets/0"
        eventually(lambda: list(tmp_path.glob(started)), within=500, what="a micro-batch", state=first.poll)
        os.killpg(first.pid, signal.SIGINT)  # to the whole group, as a terminal does
        _, complaints = first.communicate(timeout=120)
        assert (first.returncode, complaints.splitlines()[-1]) == (1, "error: interrupted")
        assert "Traceback" not in complaints
        eventually(lambda: not processes.in_session(first.pid), 120, what="the end of Spark's JVM and its workers")
    finally:
        first.kill()
        first.communicate()
    assert running_servers(tmp_path) == []
    second = in_this_process(tmp_path, "--events", "1000")
    assert second.returncode == 0, second.stderr
    assert rows_read(second.stdout)["event_lake"] >= 1000
    assert usage_lake(tmp_path) > 0
    check_lake(tmp_path, at_least=2000)


def check_lake(where: Path, at_least: int) -> None:
    """Every event is in the lake, and none twice."""
    events = pyarrow.dataset.dataset(where / ".penstock/lake/events", format="parquet", partitioning="hive")
    keys = [(key["stream"], key["sequence"]) for key in events.to_table(columns=["stream", "sequence"]).to_pylist()]
    assert len(set(keys)) == len(keys), "no event twice in the lake"
    assert len(keys) >= at_least
