"""The configuration file of an embedded server, generated without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.server.server_config import ClusterMember, ServerConfig, config_file, quoted


def text(**options: object) -> str:
    return config_file(ServerConfig(**options), Path("/data"), Path("/data/ports"))  # type: ignore[arg-type] # by name


def test_loopback_is_the_default_everywhere() -> None:
    assert text().count('"127.0.0.1') == 3
    assert "0.0.0.0" not in text()


def test_another_host_opens_clients_and_leaf_nodes_but_not_monitoring_and_routes() -> None:
    member = ClusterMember(name="c", port=6222, route_ports=(6222, 6223, 6224))
    made = text(host="0.0.0.0", cluster=member)
    assert made.count('host: "0.0.0.0"') == 2
    assert 'http: "127.0.0.1:-1"' in made
    assert 'host: "127.0.0.1"\n  port: 6222' in made


def test_a_leaf_gets_a_domain_of_its_own() -> None:
    assert 'domain: "leaf"' in text(leaf_of="nats://hub:7422")
    assert 'domain: "edge"' in text(leaf_of="nats://hub:7422", domain="edge")
    assert "domain" not in text()


def test_every_node_of_a_cluster_is_told_of_all() -> None:
    made = text(cluster=ClusterMember(name="c", port=2, route_ports=(1, 2, 3)))
    assert made.count("nats-route://127.0.0.1:") == 3


def test_without_jetstream_there_is_no_such_block() -> None:
    assert "jetstream" not in text(jetstream=False)


def test_raw_lines_come_last() -> None:
    assert text(extra="debug: true\ntrace: true").endswith("debug: true\ntrace: true\n")


def test_users_are_written_as_the_server_reads_them() -> None:
    """It knows few of JSON's escapes: a letter beyond ASCII, written as one, is an error to it."""
    user = {"user": "sérvice", "password": 'p"ä\\', "permissions": {"publish": ["a.>"], "allow_responses": True}}
    assert '"sérvice", "password": "p\\"ä\\\\", "permissions": {"publish": ["a.>"], ' in text(users=(user,))
    with pytest.raises(ConfigError):
        text(users=({"user": "a", "password": "b\x01"},))


def test_strings_cannot_break_out_of_their_quotes() -> None:
    assert quoted('a"b\\c') == '"a\\"b\\\\c"'
    with pytest.raises(ConfigError):
        quoted("a\nb")
