"""The same read and write in a classic session, over Spark Connect and in a declarative pipeline, each in a JVM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.spark.clusters import LOOPBACK, QUICK, STARTED_WITHIN, python_without_package
from tests.support import doors
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.server.ports import free_ports
from penstock.testing import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.kills]
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
SCRIPTS = Path(sysconfig.get_path("scripts"))


@pytest.fixture(autouse=True)
def filled(streams: Streams) -> None:
    doors.fill(streams)


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server in a process of its own; gives its address."""
    (port,) = free_ports(1, LOOPBACK)
    settings = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.ui.enabled": "false",
    }
    options = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    command = [str(SCRIPTS / "spark-submit"), "--class", SERVER, "--master", "local[1]", *options, "spark-internal"]
    environment = {**os.environ, **QUICK, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(doors.SPARK_HOME)}
    log = folder / "connect.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)
    try:
        eventually(lambda: _listens(port), STARTED_WITHIN, "a Spark Connect server", lambda: log.read_text()[-2000:])
        yield f"sc://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def test_a_session_that_starts_after_the_import_runs_this_python(
    streams: Streams, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Where `python3` is another one, which does not have the package."""
    other = python_without_package(tmp_path / "python")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "python3").symlink_to(other)
    path = f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}"
    code = doors.program(doors.CLASSIC, nats_server, tmp_path)
    doors.python(code, tmp_path, PATH=path, PYSPARK_PYTHON=None, PYSPARK_DRIVER_PYTHON=None, **QUICK)
    assert streams.info("COPY").state.messages == doors.COUNT


def test_a_client_without_the_package_reads_and_writes_over_spark_connect_and_one_with_it_may_register(
    streams: Streams, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    client = python_without_package(tmp_path / "python")
    with connect_server(tmp_path) as url:
        code = doors.program(doors.CONNECT, nats_server, tmp_path)
        doors.run([client, "-c", code], tmp_path, SPARK_REMOTE=url, PYSPARK_PYTHON=None, PYSPARK_DRIVER_PYTHON=None)
        registered = (doors.CONNECT + doors.REGISTERED).format(url=nats_server.url)
        assert doors.python(registered, tmp_path, SPARK_REMOTE=url).split() == [str(doors.COUNT)]
    assert streams.info("COPY").state.messages == doors.COUNT


def test_spark_pipelines_reads_and_writes_and_the_next_run_goes_on(
    streams: Streams, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    folder = doors.project(tmp_path / "project", nats_server)
    for run in (1, 2):
        doors.run([SCRIPTS / "spark-pipelines", "run"], folder, PYSPARK_PYTHON=sys.executable, **QUICK)
        assert streams.info("COPY").state.messages == run * doors.COUNT
        streams.number("orders.new", 1, doors.COUNT)
