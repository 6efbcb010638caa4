"""Spark clusters on this machine whose executors do not have this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
from tests.support import processes
from tests.support.spark_homes import linked_home

import penstock
from penstock.server.ports import free_ports
from penstock.spark.session import SHORT_LIVED
from penstock.testing import eventually

LOOPBACK = "127.0.0.1"
QUICK = {"JDK_JAVA_OPTIONS": SHORT_LIVED}
"""For every JVM there is: master, worker, driver and executors live a minute each."""
STARTED_WITHIN = 300.0  # seconds
EXECUTOR = "CoarseGrainedExecutorBackend"


def python_without_package(folder: Path) -> Path:
    """An interpreter with the packages of this one, except those that are installed as a link to their sources."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    seen = subprocess.run([python, "-c", "import pyarrow, penstock.spark"], capture_output=True, text=True, check=False)
    assert "No module named 'penstock" in seen.stderr, f"this Python must not have the package: {seen}"
    return python


def python_with_package_on_the_driver(folder: Path) -> Path:
    """An interpreter with everything that is installed here; this package only on the driver's side, not in executors.

    Executors are told by their working directory: Spark makes one called `app-…` for every application.
    """
    installed = folder / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "penstock" not in entry.name:
            (installed / entry.name).symlink_to(entry)
    own = Path(penstock.__file__).parents[1]
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
case "$PWD" in */app-[0-9]*) extra="{installed}" ;; *) extra="{installed}:{own}" ;; esac
PYTHONPATH="$PYTHONPATH:$extra" exec {sys.executable} -S "$@"
"""
    )
    program.chmod(0o755)
    executor = folder / "work" / "app-1"
    executor.mkdir(parents=True)
    seen = subprocess.run([program, "-c", "import penstock"], capture_output=True, text=True, check=False, cwd=executor)
    assert "No module named 'penstock'" in seen.stderr, f"executors must not have the package: {seen}"
    return program


def spark_home(folder: Path) -> Path:
    """Spark under another folder, since the executors of a local cluster leave their files in it."""
    return linked_home(folder, "work")


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and a worker with two cores, as processes of their own; gives the master's URL."""
    with standalone_cluster(folder, workers=1) as made:
        yield made.url


@contextmanager
def standalone_cluster(folder: Path, workers: int) -> Iterator[Standalone]:
    """A master and workers with two cores each, as processes of their own."""
    made = Standalone(folder)
    try:
        made.start(workers)
        yield made
    finally:
        made.end()


class Standalone:
    """A Spark master and its workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._page = free_ports(2, LOOPBACK)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed = 0
        self.url = f"spark://{LOOPBACK}:{self._port}"

    def start(self, workers: int) -> None:
        place = ["--host", LOOPBACK, "--port", str(self._port), "--webui-port", str(self._page)]
        self._processes["master"] = _spark_class(self._folder, "master", "master.Master", *place)
        for number in range(workers):
            self._start_worker(f"worker{number}")
        eventually(lambda: self._alive() >= workers, STARTED_WITHIN, f"{workers} workers", self._logs)

    def _start_worker(self, name: str) -> None:
        (page,) = free_ports(1, LOOPBACK)
        offer = ["--cores", "2", "--memory", "1g", "--work-dir", str(self._folder / "work")]
        place = ["--host", LOOPBACK, "--webui-port", str(page), *offer, self.url]
        self._processes[name] = _spark_class(self._folder, name, "worker.Worker", *place)

    def _alive(self) -> int:
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        assert not ended, f"{ended} ended: {self._logs()}"
        return _state(self._page).get("aliveworkers", 0)

    def _logs(self) -> list[str]:
        return [(self._folder / f"{name}.log").read_text()[-1500:] for name in self._processes]

    def kill_worker(self) -> bool:
        """SIGKILL one worker in turn, with its executors, as when a machine goes away; another one comes."""
        names = [name for name in self._processes if name != "master"]
        name = names[self._killed % len(names)]
        self._killed += 1
        old = self._processes[name]
        for pid in [old.pid, *processes.below(old.pid)]:
            processes.kill(pid)
        old.wait(60)
        self._start_worker(name)
        return True

    def kill_executor(self) -> list[int]:
        """SIGKILL the JVM of one executor."""
        workers = [process.pid for name, process in self._processes.items() if name != "master"]
        started = {pid: command for worker in workers for pid, command in processes.below(worker).items()}
        found = [pid for pid, command in started.items() if EXECUTOR in command]
        for pid in found[:1]:
            processes.kill(pid)
        return found[:1]

    def end(self) -> None:
        for process in self._processes.values():
            for pid in [process.pid, *processes.below(process.pid)]:
                processes.kill(pid)
            process.wait(30)


def _state(page: int) -> dict[str, int]:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
            state: dict[str, int] = json.load(answer)
            return state
    except OSError:
        return {}


def _spark_class(folder: Path, log_name: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        **QUICK,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with (folder / f"{log_name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
