"""`penstock init`: what it writes is linted, applied, run and tested as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from tests.support.commands import ended, here

from penstock.cli.main import penstock
from penstock.server.embedded import EmbeddedServer
from penstock.testing import stream_messages
from penstock.topology.load import load


def test_the_project_runs_as_it_stands(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    project = tmp_path / "shop"
    ended("init", project, "--servers", nats_server.url, "--stream", "ORDERS", "--subject", "orders.placed", "--yes")
    ended("lint", "--strict", cwd=project)
    text = (project / "penstock.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=penstock.schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json.loads((project / "penstock.schema.json").read_text()))
    ended("apply", cwd=project)
    (project / "events.jsonl").write_text('{"id": "a", "amount": 2.5}\n{"id": "b", "amount": -1}\n')
    ended("publish", "orders.placed", "--file", "events.jsonl", "--servers", nats_server.url, cwd=project)
    command = [sys.executable, "-m", "penstock", "run", "service:app", "--until-done"]
    ran = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr  # one of the events became a dead letter
    assert "shop_placed" in ran.stdout
    results = [one.data for one in stream_messages(nats_server.settings, "ORDERS_HANDLED") if one.data]
    assert results == [b'{"id":"a","doubled":5.0}']
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert "2 passed" in tested.stdout, tested.stdout
    again = here("init", project, "--yes")
    assert (again.returncode, "nothing was written" in again.stderr) == (1, True)


def test_five_questions_are_asked_and_an_empty_answer_is_the_default(tmp_path: Path) -> None:
    answers = "billing\n\nUSAGE\nusage.metered\n\n"
    done = CliRunner().invoke(penstock, ["init", str(tmp_path / "x")], input=answers)
    assert done.exit_code == 0, done.output
    assert sum(line.count("[") for line in done.stderr.splitlines()) == 5
    found = load(tmp_path / "x" / "penstock.yaml")
    assert found.name == "billing"
    assert found.environment.servers == ("nats://127.0.0.1:4222",)
    consumer = found.consumers["billing_metered"]
    assert (consumer.stream, consumer.filters, consumer.owner) == ("USAGE", ("usage.metered",), "my-team")


def test_with_flags_for_some_only_the_others_are_asked(tmp_path: Path) -> None:
    flags = ["--name", "a", "--stream", "S", "--owner", "o"]
    done = CliRunner().invoke(penstock, ["init", str(tmp_path / "x"), *flags], input="\n\n")
    assert done.exit_code == 0, done.output
    assert load(tmp_path / "x" / "penstock.yaml").consumers["a_created"].filters == ("s.created",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--name", "a.b"], "name of a service"),
        (["--stream", "a b"], "name of a stream"),
        (["--subject", "orders.>"], "subject of an event"),
        (["--subject", "dlq.x"], "choose another"),
        (["--servers", "nats://x:port"], "nats://x:port"),
    ],
)
def test_answers_that_cannot_be_are_wrong_usage_and_nothing_is_written(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    done = here("init", tmp_path / "x", "--yes", *flags)
    assert (done.returncode, said in done.stderr) == (64, True), done.stderr
    assert not (tmp_path / "x").exists()
