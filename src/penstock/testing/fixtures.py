"""Pytest fixtures; pytest loads them by the package's entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A nats-server with JetStream of the test's own, stopped and removed with the test."""
    with EmbeddedServer(data=tmp_path / "nats") as server:
        yield server
