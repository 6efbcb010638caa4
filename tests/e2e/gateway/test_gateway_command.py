"""`penstock gateway` as an operator starts it: what is refused before anybody can call."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.gateways import Papers, RunningGateway, write_platform

NOBODY = "streams: {FACTS: {subjects: [facts.>]}}\n"


def run(file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return here("gateway", file, "--listen", "127.0.0.1:0", *flags)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "give --cert and --key, or say --insecure"),
        (["--cert", "x"], "--cert and --key go together"),
        (["--insecure", "--listen", "0.0.0.0:0"], "would send tokens in clear"),
        (["--insecure", "--require-certificate"], "--require-certificate needs --client-ca"),
        (["--insecure", "--admin", "9464"], "write HOST:PORT"),
        (["--insecure", "--admin", "0.0.0.0:0"], "or say --admin-exposed"),
        (["--insecure", "--admin", ":0"], "or say --admin-exposed"),
        (["--insecure", "--admin-exposed"], "give --admin HOST:PORT"),
    ],
)
def test_wrong_usage_is_told(tmp_path: Path, flags: list[str], reason: str) -> None:
    done = run(write_platform(tmp_path, "nats://127.0.0.1:1"), *flags)
    assert (done.returncode, reason in done.stderr) == (64, True), done.stderr


def test_a_gateway_that_nobody_may_call_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(NOBODY)
    done = run(file, "--insecure")
    assert (done.returncode, "declare `gateway.identities`" in done.stderr) == (1, True), done.stderr


def test_files_that_are_no_certificates_are_told(tmp_path: Path) -> None:
    Papers(tmp_path)
    file = write_platform(tmp_path, "nats://127.0.0.1:1")
    done = run(file, "--cert", str(file), "--key", str(tmp_path / "edge.key"))
    assert done.returncode == 1
    assert "the TLS files cannot be used" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_addresses_without_a_host_are_told_to_mean_all_interfaces(tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    file = write_platform(tmp_path, "nats://127.0.0.1:1")
    with RunningGateway(file, *papers.flags(), "--admin-exposed", listen=":0", admin=":0") as gateway:
        assert "--listen :0 means all interfaces of this machine" in gateway.log()
        assert "--admin :0 means all interfaces of this machine" in gateway.log()
    with RunningGateway(file, *papers.flags()) as gateway:
        assert "all interfaces" not in gateway.log()
