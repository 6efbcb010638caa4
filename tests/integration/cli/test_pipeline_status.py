"""`penstock pipeline ls` and `status` by name, of pipelines that are declared and have not run yet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.embedded import EmbeddedServer

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpuaas" / "penstock.yaml"


def asked(server: EmbeddedServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "--servers", server.url, "pipeline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["ls", "status"])
def test_pipelines_are_shown_by_name(nats_server: EmbeddedServer, command: str) -> None:
    done = asked(nats_server, command, "usage_hourly", "dlq_report", "--file", str(EXAMPLE), "--json")
    assert done.returncode == 0, done.stderr
    assert {one["name"] for one in json.loads(done.stdout)["pipelines"]} == {"usage_hourly", "dlq_report"}


def test_an_unknown_name_is_wrong_usage_and_the_known_ones_are_named(nats_server: EmbeddedServer) -> None:
    done = asked(nats_server, "status", "usage_daily", "--file", str(EXAMPLE))
    assert done.returncode == 64
    assert "no pipeline 'usage_daily'; known are" in " ".join(done.stderr.split())
    assert "usage_hourly" in " ".join(done.stderr.split())


def test_a_file_in_the_place_of_a_name_says_how_to_give_it(nats_server: EmbeddedServer) -> None:
    done = asked(nats_server, "ls", str(EXAMPLE))
    assert done.returncode == 64
    assert f"--file {EXAMPLE}" in " ".join(done.stderr.split())
