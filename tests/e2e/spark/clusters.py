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

import penstock
from penstock.broker.ports import free_ports
from penstock.spark.session import SHORT_LIVED
from penstock.testing import eventually

LOOPBACK = "127.0.0.1"
QUICK = {"JDK_JAVA_OPTIONS": SHORT_LIVED}
"""For every JVM there is: master, worker, driver and executors live a minute each."""
STARTED_WITHIN = 300.0  # seconds


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
    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (folder / entry.name).symlink_to(entry)
    return folder


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and a worker with two cores, as processes of their own; gives the master's URL."""
    port, page, worker_page = free_ports(3, LOOPBACK)
    url = f"spark://{LOOPBACK}:{port}"
    place = ["--host", LOOPBACK]
    offer = ["--cores", "2", "--memory", "1g", "--work-dir", str(folder / "work")]
    with (
        _spark_class(folder, "master.Master", *place, "--port", str(port), "--webui-port", str(page)) as master,
        _spark_class(folder, "worker.Worker", *place, "--webui-port", str(worker_page), *offer, url) as worker,
    ):

        def has_worker() -> bool:
            assert (master.poll(), worker.poll()) == (None, None), "master or worker has ended"
            return bool(_state(page).get("aliveworkers"))

        logs = [folder / "master.Master.log", folder / "worker.Worker.log"]
        eventually(has_worker, STARTED_WITHIN, "a worker", lambda: [log.read_text()[-1500:] for log in logs])
        yield url


def _state(page: int) -> dict[str, int]:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
            state: dict[str, int] = json.load(answer)
            return state
    except OSError:
        return {}


@contextmanager
def _spark_class(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        **QUICK,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
