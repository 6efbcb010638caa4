"""Pytest fixtures; pytest loads them by the package's entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.testing.servers import Certificates, LeafPair, issue_certificates, leaf_pair


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A nats-server with JetStream of the test's own, stopped with the test."""
    with EmbeddedServer(data=tmp_path / "nats") as server:
        yield server


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A cluster of three nodes of the test's own."""
    with EmbeddedCluster(data=tmp_path / "nats-cluster") as cluster:
        yield cluster


@pytest.fixture
def nats_leaf(tmp_path: Path) -> Iterator[LeafPair]:
    """A hub (JetStream domain `hub`) and a leaf of it (domain `leaf`), linked."""
    with leaf_pair(tmp_path / "nats-leaf") as pair:
        yield pair


@pytest.fixture(scope="session")
def tls_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA with a server and a client certificate, made once a session. Needs `penstock-nats[testing]`."""
    return issue_certificates(tmp_path_factory.mktemp("certificates"))
