"""`penstock quickstart` as a person runs it: a subprocess in an empty directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import here
from tests.support.quickstarts import PENSTOCK, as_process, running_servers

from penstock.cli.home import Home
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually


def quickstart(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without Spark: that takes most of the time, and has tests of its own."""
    return as_process(where, "--no-spark", *arguments)


@dataclass(frozen=True)
class TwoRuns:
    """One quickstart and another one in the same directory, to look at and not to change."""

    where: Path
    said: tuple[str, str]
    left: list[str]
    """Servers that ran afterwards."""


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> TwoRuns:
    where, said, left = tmp_path_factory.mktemp("quickstart"), [], []
    for _ in range(2):
        done = quickstart(where, "--events", "1000")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        left += running_servers(where)
    return TwoRuns(where, (said[0], said[1]), left)


def test_quickstart_shows_the_whole_platform_and_stops_what_it_started(two_runs: TwoRuns) -> None:
    for said in two_runs.said:
        assert "6 streams and 23 durable consumers" in said
        assert "billing_worker_usage_metered" in said
    assert two_runs.left == []


def test_what_a_handler_failed_on_comes_back_and_the_totals_add_up(two_runs: TwoRuns) -> None:
    for number, said in enumerate(two_runs.said, 1):
        dead, total = map(int, re.search(r"failures +(\d+) of (\d+) top-ups failed", said).groups())  # type: ignore[union-attr]  # None fails too
        assert 0 < dead < total, f"run {number}"
        assert f"limit corrected, {dead} letters replayed and booked; {total} top-ups" in said
        assert "in the books, as much as was paid" in said
        assert "0 dead letters" in said


def test_the_services_handle_every_event_of_their_consumers_over_two_runs(two_runs: TwoRuns, tmp_path: Path) -> None:
    with EmbeddedServer(data=shutil.copytree(two_runs.where / ".penstock" / "nats", tmp_path / "nats")) as server:
        shown = {one["name"]: one for one in consumers_of(server.url)}
    behind = {name for name, one in shown.items() if one["lag_messages"]}
    assert behind == {name for name in shown if name.startswith("app_runtime_worker_")}, (
        "the service that was not started"
    )
    for said in two_runs.said:
        assert "5 services, 2 instances each, handled" in said
        assert "app_runtime_worker_instance_requested (nobody reads)" in said
        assert "app-runtime-worker was not started on purpose" in said


def test_a_group_shares_a_stream_and_hands_over(two_runs: TwoRuns) -> None:
    for said in two_runs.said:
        assert re.search(r"2 workers shared 12 nodes; one left, and its \d+ went over", said)
        assert "3,000 readings, each once and in order" in said


def test_a_second_run_goes_on_where_the_first_stopped_and_fresh_begins_anew(two_runs: TwoRuns, tmp_path: Path) -> None:
    first, second = two_runs.said
    assert "from 2026-01-01 00:00" in first
    assert "from 2026-01-01 06:00" in second
    assert "(0 changes)" in second
    fresh = quickstart(Path(shutil.copytree(two_runs.where, tmp_path / "copy")), "--events", "500", "--fresh")
    assert "from 2026-01-01 00:00" in fresh.stdout, fresh.stderr


def consumers_of(url: str) -> list[dict[str, Any]]:
    status = [*PENSTOCK, "--servers", url, "status", "--json"]
    shown = subprocess.run(status, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(shown.stdout)["consumers"]
    return found


def consumers(url: str) -> list[str]:
    return [one["name"] for one in consumers_of(url)]


def test_keep_leaves_the_broker_running_and_says_how_to_reach_and_stop_it(tmp_path: Path) -> None:
    kept = quickstart(tmp_path, "--events", "500", "--keep")
    assert kept.returncode == 0, kept.stderr
    pid = int(kept.stdout.rsplit("kill ", 1)[1].split()[0])
    url = kept.stdout.rsplit("PENSTOCK_SERVERS=", 1)[1].split()[0]
    assert "penstock ui " in kept.stdout
    try:
        # A listing that a worker broke off when it left is removed by the server, within seconds.
        declared = "the declared consumers, and none of workers that have left"
        eventually(lambda: len(consumers(url)) == 23, 60, declared, state=lambda: consumers(url))
        again = quickstart(tmp_path, "--events", "500")
        assert again.returncode == 0, again.stderr
        assert url in again.stdout, "the kept broker is used again"
        assert running_servers(tmp_path), "a run without --keep leaves the kept broker alone"
    finally:
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: not running_servers(tmp_path), what="the end of the kept broker")


def test_one_quickstart_at_a_time_and_ctrl_c_leaves_no_server_behind(tmp_path: Path) -> None:
    command = [*PENSTOCK, "quickstart", "--no-spark", "--events", "1000000"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert first.stdout
        assert "broker" in first.stdout.readline()
        for arguments in (["--events", "500"], ["--events", "500", "--fresh"]):
            second = quickstart(tmp_path, *arguments)
            assert second.returncode == 1
            assert second.stderr.startswith("error: another quickstart is running in")
        assert running_servers(tmp_path), "the first one's broker is left alone"
        first.send_signal(signal.SIGINT)
        _, complaints = first.communicate(timeout=60)
        assert (first.returncode, complaints.strip()) == (1, "error: interrupted")
    finally:
        first.kill()
        first.communicate()
    assert running_servers(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_line_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / ".penstock").write_text("a file")
    done = here("quickstart", "--no-spark", "--events", "500", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: .penstock: File exists\n")


def test_fresh_forgets_earlier_runs_and_nothing_else(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (home.data / "jetstream").mkdir(parents=True)
    (tmp_path / "broker.json").write_text("{}")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "messages").write_text("of `penstock server`")
    with home.claimed():
        home.clear()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lock", "messages", "server"]


def test_fresh_ends_no_process_but_the_broker_of_its_own_folder(tmp_path: Path) -> None:
    """A noted process id may be used again: by another nats-server, by a process that only mentions one."""
    home = Home(tmp_path / "home")
    home.data.mkdir(parents=True)
    mentions = f"import time; time.sleep(600)  # nats-server {home.data}/nats-server.conf"
    with EmbeddedServer(data=tmp_path / "other") as other, subprocess.Popen([sys.executable, "-c", mentions]) as second:
        try:
            for pid in (other.pid, second.pid, -1, 0, 1, True, "1", None):
                (home.path / "broker.json").write_text(json.dumps({"url": other.url, "pid": pid}))
                assert home.kept() is None, pid
            home.clear()
            assert other.is_ready()
            assert second.poll() is None
        finally:
            second.kill()


@pytest.mark.parametrize("count", ["0", "many"])
def test_a_wrong_number_of_events_is_wrong_usage(tmp_path: Path, count: str) -> None:
    done = here("quickstart", "--no-spark", "--events", count, cwd=tmp_path)
    assert done.returncode == 64
    assert "Traceback" not in done.stderr
