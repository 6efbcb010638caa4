"""The embedded nats-server: it starts, is noticed when it dies, and never outlives its parent."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import is_running
from tests.support.streams import make_stream

from penstock.errors import AccessDenied, ConfigError, DeadlineExceeded, ServerFailed
from penstock.jetstream import connect
from penstock.publish.plain import PlainPublisher
from penstock.server import cluster as cluster_module
from penstock.server import embedded
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer, PortTaken, find_binary
from penstock.server.ports import free_ports
from penstock.server.server_config import ClusterMember
from penstock.testing import Certificates, LeafPair, eventually, eventually_async, leaf_pair
from penstock.wire import blocking


async def store_and_read(server: EmbeddedServer | EmbeddedCluster, replicas: int = 1) -> None:
    async with connect(server.settings) as broker:
        await make_stream(broker.jetstream, subjects=["s"], num_replicas=replicas)
        async with PlainPublisher(server.settings) as publisher:  # it waits until the cluster knows the stream
            await publisher.add("s", b"kept")
            await publisher.finish()
        assert (await broker.jetstream.get_message("S", 1)).data == b"kept"


async def test_jetstream_answers_as_soon_as_start_returns(nats_server: EmbeddedServer) -> None:
    await store_and_read(nats_server)


def test_a_server_that_listens_but_whose_jetstream_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    port, *routes = free_ports(4, "127.0.0.1")
    alone = ClusterMember(name="c", port=routes[0], route_ports=tuple(routes))  # two of three nodes never come
    server = EmbeddedServer(data=tmp_path, port=port, cluster=alone).spawn()
    try:
        eventually(server._find_monitoring_port, what="all listeners", state=server.last_words)
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ServerFailed, match="not ready within"):
            server.wait_until_ready(within=1)
        assert not server.alive, "what was never ready is not left running"
    finally:
        server.kill()


def test_a_second_server_leaves_the_configuration_of_the_first_alone(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "LOCK_WITHIN", 0.1)
    before = {path: path.read_text() for path in nats_server.data.rglob("*") if path.suffix in (".conf", ".ports")}
    with pytest.raises(ServerFailed):
        EmbeddedServer(data=nats_server.data).start()
    assert len(before) == 2
    assert {path: path.read_text() for path in before} == before


async def test_a_restart_keeps_the_ports_and_the_data(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path) as server:
        await store_and_read(server)
        before = (server.url, server.leaf_url)
        server.kill()
        assert not server.alive
        server.start()
        assert (server.url, server.leaf_url) == before
        async with connect(server.settings) as broker:
            assert (await broker.jetstream.get_message("S", 1)).data == b"kept"


def test_only_loopback_is_listened_on(nats_server: EmbeddedServer) -> None:
    def addresses(port: int) -> list[str]:
        listening = Path("/proc/net/tcp").read_text()
        return re.findall(rf": (\w{{8}}):{port:04X} 00000000:0000 0A", listening)

    def only_loopback(port: int) -> bool:
        return addresses(port) == ["0100007F"]

    for port in (nats_server.port, nats_server.config.leaf_port, nats_server.monitoring_port):
        # The table is no snapshot: while connections come and go, a line may be in it twice or not at all.
        eventually(partial(only_loopback, port), 10, f"port {port}", partial(addresses, port))


def test_a_taken_port_fails_with_the_servers_own_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTaken, match="address already in use"):
        EmbeddedServer(data=tmp_path, port=taken.getsockname()[1], leaf_port=0).start()


def test_bad_configuration_fails_with_the_servers_own_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no_such_option"):
        EmbeddedServer(data=tmp_path, extra="no_such_option: 1").start()


def test_two_servers_do_not_share_a_data_directory(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "LOCK_WITHIN", 0.1)
    with pytest.raises(ServerFailed, match="another server is running on the data directory"):
        EmbeddedServer(data=nats_server.data).start()


def test_a_binary_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATS_SERVER", str(tmp_path / "nowhere"))
    with pytest.raises(ServerFailed, match="nowhere"):
        find_binary()


def test_a_killed_server_is_noticed_and_its_end_explained(tmp_path: Path) -> None:
    noticed: list[EmbeddedServer] = []
    with EmbeddedServer(data=tmp_path, on_exit=noticed.append) as server:
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: noticed, what="the callback")
        assert not server.alive
        assert "SIGKILL" in str(server.failure())
        assert server.wait() == -signal.SIGKILL


def test_an_end_that_was_asked_for_is_not_reported(tmp_path: Path) -> None:
    noticed: list[EmbeddedServer] = []
    with EmbeddedServer(data=tmp_path, on_exit=noticed.append) as server:
        pass
    assert server.wait() is not None
    for thread in threading.enumerate():
        if thread.name == "nats-server":
            thread.join(5)
    assert noticed == []


PARENT = """
import sys, threading, time
from penstock.server.embedded import EmbeddedServer
server = EmbeddedServer(data=sys.argv[1])
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
{then}
print(server.pid, flush=True)
time.sleep(600)
"""


def parent(tmp_path: Path, then: str = "") -> tuple[subprocess.Popen[str], int]:
    """A process that starts a server from a thread which then ends, and the server's process id."""
    script = PARENT.format(then=textwrap.dedent(then))
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout
    process.stdout.close()


def test_no_server_survives_a_killed_parent(tmp_path: Path) -> None:
    process, pid = parent(tmp_path)
    assert is_running(pid), "the server must outlive the thread that started it"
    end(process)
    eventually(lambda: not is_running(pid), what=f"server {pid} to end with its parent")


def test_no_server_survives_a_killed_parent_whose_fork_lives_on(tmp_path: Path) -> None:
    fork = """
    import os
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    """
    process, child = parent(tmp_path, fork)
    try:
        assert process.stdout
        pid = int(process.stdout.readline())
        end(process)
        eventually(lambda: not is_running(pid), what=f"server {pid} to end with its parent")
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_frozen_server_does_not_survive_a_killed_parent(tmp_path: Path) -> None:
    process, pid = parent(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    end(process)
    eventually(lambda: not is_running(pid), what=f"frozen server {pid} to end with its parent")


def test_a_detached_server_outlives_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOCK_WITHIN", 0.1)
    process, pid = parent(tmp_path, "server.detach()")
    try:
        end(process)
        with pytest.raises(ServerFailed, match="another server is running"):
            EmbeddedServer(data=tmp_path).start()
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: not is_running(pid), what=f"server {pid} to stop")


@pytest.mark.parametrize("login", [{"user": 'ü"\\$x', "password": "p# {}//"}, {"token": "s3cret'\""}, {}], ids=str)
@pytest.mark.parametrize("tls", ["plain", "tls", "client certificates"])
async def test_settings_of_a_server_connect_to_it(
    tmp_path: Path, tls_certificates: Certificates, login: dict[str, Any], tls: str
) -> None:
    chosen = None if tls == "plain" else tls_certificates.server_tls(verify=tls != "tls")
    with EmbeddedServer(data=tmp_path, tls=chosen, **login) as server:
        await store_and_read(server)
    assert (tmp_path / "nats-server.conf").stat().st_mode & 0o077 == 0


async def test_a_message_of_eight_mebibytes_fits_when_asked_for(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path, max_payload=9 << 20, sync_interval="always") as server:
        async with connect(server.settings) as broker:
            await make_stream(broker.jetstream, subjects=["s"])
            await broker.request("s", b"x" * (8 << 20), 30)
            assert len((await broker.jetstream.get_message("S", 1)).data) == 8 << 20


@pytest.mark.kills
@pytest.mark.short
async def test_three_nodes_keep_a_stream_when_one_is_killed(nats_cluster: EmbeddedCluster) -> None:
    await store_and_read(nats_cluster, replicas=3)
    leader = eventually(lambda: nats_cluster.leader, what="a leader")
    leader.kill()
    assert not nats_cluster.alive
    eventually(lambda: nats_cluster.leader not in (None, leader), within=60, what="another leader")

    async def read() -> bytes | None:
        """None while the stream, which chooses a leader of its own, has none: a request is not answered then."""
        with suppress(DeadlineExceeded):
            async with connect(replace(nats_cluster.settings, timeout=2)) as broker:
                return (await broker.jetstream.get_message("S", 1)).data
        return None

    assert await eventually_async(read, within=60, what="the stream's leader") == b"kept"


@pytest.mark.kills
@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_a_cluster_of_which_a_route_port_was_taken_meanwhile_chooses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlucky: int
) -> None:
    """Whichever node it is: the others, which never get a leader without it, must not be waited for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = free_ports(3, "127.0.0.1")
        chosen = iter([[*found[:unlucky], taken.getsockname()[1], *found[unlucky + 1 :]]])
        monkeypatch.setattr(cluster_module, "free_ports", lambda *args: next(chosen, None) or free_ports(*args))
        with EmbeddedCluster(data=tmp_path) as cluster:
            assert cluster.alive


async def test_a_cluster_can_ask_for_login_and_certificates(tmp_path: Path, tls_certificates: Certificates) -> None:
    tls = tls_certificates.server_tls(verify=True)
    with EmbeddedCluster(data=tmp_path, user="u", password="p", tls=tls) as cluster:
        await store_and_read(cluster, replicas=3)


def test_many_servers_started_at_once_find_ports_of_their_own(tmp_path: Path) -> None:
    servers = [EmbeddedServer(data=tmp_path / str(n)) for n in range(12)]
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(EmbeddedServer.start, servers))
        assert len({server.port for server in servers}) == len(servers)
        assert all(server.alive for server in servers)
    finally:
        for server in servers:
            server.stop()


async def test_a_leaf_has_a_domain_of_its_own_that_the_hub_reaches(nats_leaf: LeafPair) -> None:
    async with connect(nats_leaf.leaf.settings) as broker:
        await make_stream(broker.jetstream, "ONLY_LEAF", subjects=["l"])
    async with connect(nats_leaf.hub.settings) as broker:
        assert await broker.jetstream.stream_names() == []
        assert await broker.jetstream.in_domain("leaf").stream_names() == ["ONLY_LEAF"]
    nats_leaf.hub.kill()
    eventually(lambda: not nats_leaf.leaf.linked, what="the leaf to miss its hub")
    nats_leaf.hub.start()
    nats_leaf.wait_until_linked()


@pytest.mark.parametrize("verify", [False, True])
def test_a_leaf_joins_a_hub_with_login_and_tls(tmp_path: Path, tls_certificates: Certificates, verify: bool) -> None:
    tls = tls_certificates.server_tls(verify=verify)
    with leaf_pair(tmp_path, user="u", password="p w/@:", tls=tls) as pair:
        assert pair.leaf.linked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"user": "u"}, "go together"),
        ({"user": "u", "password": "p", "token": "t"}, "only one"),
        ({"leaf_of": "hub"}, "nats://hub.example:7422"),
        ({"user": "a\nb", "password": "p"}, "control characters"),
    ],
)
def test_contradicting_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EmbeddedServer(data=tmp_path, **options).start()


def test_a_process_without_the_password_joins_no_cluster(nats_cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Without one, a server of anybody on this machine could list and read every stream."""
    member = nats_cluster.nodes[0].config.cluster
    assert member
    files = [EmbeddedServer.config_path(node.data) for node in nats_cluster.nodes]
    assert all(member.password in file.read_text() and file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert member.password not in repr(nats_cluster.nodes[0].config)
    stranger = replace(member, port=free_ports(1, "127.0.0.1")[0], password="")
    joining = EmbeddedServer(tmp_path / "stranger", name="stranger", cluster=stranger, jetstream=False)
    try:
        joining.spawn()
        refused = partial(any_line, nats_cluster.nodes[0], "uthentication error")
        eventually(refused, what="a refusal", state=lambda: joining.log_tail(50) + nats_cluster.nodes[0].log_tail(50))
        assert not [one for one in routes(nats_cluster.nodes[0]) if one == "stranger"]
    finally:
        joining.kill()


def any_line(server: EmbeddedServer, words: str) -> bool:
    return any(words in line for line in server.log_tail(1000))


def test_monitoring_tells_only_those_who_know_its_path(nats_server: EmbeddedServer) -> None:
    """It has no login, and would list streams and connections to every user of the machine."""
    for path in ("/", "/jsz?streams=1", "/connz", "/varz", "/healthz"):
        connection = http.client.HTTPConnection("127.0.0.1", nats_server.monitoring_port, timeout=10)
        with closing(connection):
            connection.request("GET", path)
            assert connection.getresponse().status == 404
    assert nats_server.monitor("/jsz")["streams"] == 0
    assert nats_server.config.monitoring_path not in repr(nats_server.config)


def test_users_with_letters_beyond_ascii_log_in(tmp_path: Path) -> None:
    users = ({"user": "sérvice", "password": "pä$s", "permissions": {"publish": ["ö.>"]}},)
    with EmbeddedServer(tmp_path, users=users) as server:
        with pytest.raises(AccessDenied):
            blocking.connect(server.settings)
        settings = replace(server.settings, user="sérvice", password="pä$s")
        with blocking.connect(settings) as connection:
            connection.publish("ö.a", b"")
            connection.flush()


def routes(server: EmbeddedServer) -> list[str]:
    return [route["remote_name"] for route in server.monitor("/routez").get("routes") or ()]


def test_the_configuration_is_private_even_if_the_file_existed(tmp_path: Path) -> None:
    path = EmbeddedServer.config_path(tmp_path)
    path.write_text("# an older one")
    path.chmod(0o644)
    with EmbeddedServer(data=tmp_path, user="u", password="p"):
        assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServerFailed, match="cannot be used"):
        EmbeddedServer(data=tmp_path).start()
    assert not (tmp_path / "elsewhere").exists()
