"""`penstock server` as a subprocess: it says where it is, ends as it should, and leaves nothing running."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import ended
from tests.support.processes import is_running

from penstock.jetstream import connect
from penstock.server.embedded import PortTaken
from penstock.server.hub import LEAF_OFFSET
from penstock.server.ports import free_ports
from penstock.settings import Settings
from penstock.testing import Certificates, EmbeddedServer, eventually

PENSTOCK = str(Path(sysconfig.get_path("scripts")) / "penstock")


@contextmanager
def penstock_server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running `penstock server --json`, and what it said."""
    command = [PENSTOCK, "server", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: dict[str, Any] = {"pids": []}
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"{command} said nothing: {process.communicate()[1]}")
        said = json.loads(line)
        yield process, said
    finally:
        process.kill()
        process.communicate()
        eventually(lambda: not any(map(is_running, said["pids"])), what="all servers to be gone", state=lambda: said)


def fails(code: int, *arguments: str) -> str:
    """`penstock server` in this process, which is quicker; returns its stderr."""
    return ended("server", *arguments, code=code).stderr


async def level(settings: Settings) -> int:
    async with connect(settings) as broker:
        return (await broker.jetstream.account_info()).api_level


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_prints_its_url_and_stops_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with penstock_server("--port", "0", "--data", str(tmp_path)) as (process, said):
        assert await level(Settings(servers=(said["url"],))) > 0
        process.send_signal(number)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert "Traceback" not in complaints
        assert not any(map(is_running, said["pids"]))


def test_without_json_the_first_line_is_the_url(tmp_path: Path) -> None:
    command = [PENSTOCK, "server", "--port", "0", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("nats://127.0.0.1:")
        process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_no_server_survives_when_it_is_killed(tmp_path: Path, nodes: str) -> None:
    with penstock_server("--nodes", nodes, "--port", "0", "--data", str(tmp_path)) as (process, said):
        assert len(said["pids"]) == int(nodes)
        assert all(map(is_running, said["pids"]))
        process.kill()
        eventually(lambda: not any(map(is_running, said["pids"])), what="all servers to end", state=lambda: said)


def test_a_killed_child_ends_it_with_the_reason_and_the_log(tmp_path: Path) -> None:
    with penstock_server("--port", "0", "--data", str(tmp_path)) as (process, said):
        os.kill(said["pids"][0], signal.SIGKILL)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "nats-server was ended by SIGKILL" in complaints
        assert "Server is ready" in complaints


def test_a_taken_port_is_an_error_with_the_servers_words(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    said = fails(1, "--port", str(nats_server.port), "--leaf-port", "0", "--data", str(tmp_path))
    assert said.startswith("error: ")
    assert "address already in use" in said
    assert f"port {nats_server.port} is taken" in said
    assert "--port" in said
    said = fails(1, "--port", "0", "--leaf-port", str(nats_server.port), "--data", str(tmp_path))
    assert f"port {nats_server.port} is taken" in said
    assert "--leaf-port" in said


@pytest.mark.parametrize("data", ["file/below", "/proc/nope"])
def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path, data: str) -> None:
    (tmp_path / "file").write_text("")
    said = fails(1, "--port", "0", "--data", str(tmp_path / data))
    assert said.startswith("error: the data directory ")
    assert data in said


@pytest.mark.parametrize("host", ["nosuch.invalid", "203.0.113.7", "a" * 70])
def test_a_host_that_is_not_this_machine_fails_at_once(tmp_path: Path, host: str) -> None:
    assert f"cannot listen on host '{host}'" in fails(
        1, "--port", "0", "--data", str(tmp_path), "--host", host, "--no-login"
    )


def test_no_server_is_open_to_a_network_by_accident(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "somewhere.example"):
        assert "or say --no-login" in fails(64, "--port", "0", "--data", str(tmp_path), "--host", host)
    with penstock_server("--port", "0", "--data", str(tmp_path), "--host", "127.0.0.2") as (_, said):
        assert said["url"].startswith("nats://127.0.0.2:")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "2"],
        ["--port", "70000"],
        ["--nodes", "3", "--port", "65534"],
        ["--tls-cert", "x"],
        ["--tls-verify"],
        ["--no-such-flag"],
        ["--user", "u"],
        ["--user", "u", "--password", "p", "--token", "t"],
        ["--leaf-of", "://"],
        ["--leaf-of", "nonsense::::"],
        ["--leaf-of", "nats://[::1"],
        ["--max-payload", "bananas"],
        ["--max-payload", "0"],
        ["--sync-interval", "sometimes"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_64(tmp_path: Path, arguments: list[str]) -> None:
    assert fails(64, "--data", str(tmp_path), *arguments)


async def test_login_and_tls_are_asked_for(tmp_path: Path, tls_certificates: Certificates) -> None:
    tls = ["--tls-cert", tls_certificates.server_cert, "--tls-key", tls_certificates.server_key]
    flags = [*tls, "--tls-ca", tls_certificates.ca, "--tls-verify", "--user", "u", "--password", "p"]
    with penstock_server("--port", "0", "--data", str(tmp_path), *flags) as (_, said):
        assert said["url"].startswith("tls://")
        assert "u:p" not in json.dumps(said)
        settings = Settings(
            servers=(said["url"],),
            user="u",
            password="p",
            tls_ca=tls_certificates.ca,
            tls_cert=tls_certificates.client_cert,
            tls_key=tls_certificates.client_key,
        )
        assert await level(settings) > 0


@contextmanager
def hub_with_its_leaf_port_beside(data: Path) -> Iterator[EmbeddedServer]:
    """The port beside a free one may be taken, if only by some connection: then another pair is tried."""

    def started() -> EmbeddedServer | None:
        (port,) = free_ports(1, "127.0.0.1")
        try:
            return EmbeddedServer(data, port, leaf_port=port + LEAF_OFFSET).start()
        except PortTaken:
            return None

    hub = eventually(started, what="two free ports")
    assert hub
    try:
        yield hub
    finally:
        hub.stop()


async def test_a_leaf_joins_by_its_hubs_client_url_or_leaf_url(tmp_path: Path) -> None:
    with hub_with_its_leaf_port_beside(tmp_path / "hub") as hub:
        for number, url in enumerate((hub.url, hub.leaf_url)):
            data = str(tmp_path / f"leaf-{number}")
            domain = f"edge{number}"
            with penstock_server("--port", "0", "--data", data, "--leaf-of", url, "--domain", domain) as (_, said):
                assert said["domain"] == domain
                eventually(functools.partial(hub.reaches, domain), what="the leaf", state=hub.last_words)
                async with connect(hub.settings) as broker:
                    assert (await broker.jetstream.in_domain(domain).account_info()).domain == domain
            eventually(lambda: hub.monitor("/leafz")["leafnodes"] == 0, what="the leaf to be gone")


def test_a_client_port_without_a_leaf_port_beside_it_is_explained(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    said = fails(1, "--port", "0", "--data", str(tmp_path), "--leaf-of", nats_server.url)
    assert "leaf-node port" in said
