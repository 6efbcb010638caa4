"""`penstock work --consumer`: one function on a declared durable, and how it is watched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest
from tests.support.commands import here

from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, stream_messages

PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], allow_atomic: true, max_age: 1d}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  charge: {stream: IN, filter: in.use, service: billing, ack_wait: 30s, max_deliver: 3, dlq: dlq.in.use}
"""
HANDLERS = """
    from dataclasses import dataclass

    import penstock

    @dataclass
    class Usage:
        id: int

    async def charge(usage: Usage, message: penstock.Message) -> None:
        if usage.id == 2:
            raise penstock.Reject("no twos")

    def by_context(message, context):
        assert context.delivery_count == 1 and message.json()

    def wants_a_socket(thing: int, other: set):
        pass
"""


@pytest.fixture
def folder(nats_server: EmbeddedServer, tmp_path: Path) -> Path:
    (tmp_path / "penstock.yaml").write_text(PLATFORM % nats_server.url)
    (tmp_path / "work_consumer_handlers.py").write_text(textwrap.dedent(HANDLERS))
    assert here("apply", cwd=tmp_path).returncode == 0
    with BlockingPublisher.connect(nats_server.settings) as publisher:
        publisher.publish_batch("IN", "in.use", [b'{"id": 1}', b'{"id": 2}', b'{"id": 3}', b"no json"])
    return tmp_path


def test_a_function_handles_a_declared_consumer_and_its_letters_go_where_the_file_says(
    folder: Path, nats_server: EmbeddedServer
) -> None:
    done = here("work", "work_consumer_handlers:charge", "--consumer", "charge", "--until-done", "--json", cwd=folder)
    assert done.returncode == 2, done.stderr
    (shown,) = json.loads(done.stdout)["consumers"]
    assert (shown["consumer"], shown["stream"], shown["handled"], shown["dead_letters"]) == ("charge", "IN", 2, 2)
    assert {one.data for one in stream_messages(nats_server.settings, "DLQ")} == {b'{"id": 2}', b"no json"}


def test_a_function_with_a_context_handles_a_consumer_that_no_file_declares(
    folder: Path, nats_server: EmbeddedServer
) -> None:
    (folder / "penstock.yaml").unlink()
    command = ["work", "work_consumer_handlers:by_context", "--consumer", "charge", "--stream", "IN", "--until-done"]
    done = here("--servers", nats_server.url, *command, "--concurrency", "2", cwd=folder)
    assert done.returncode in (0, 2), done.stderr
    assert "charge" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pattern", "in.{x}"], "--pattern: a durable consumer has no partitions"),
        (["--max-deliver", "5"], "its own ack_wait, max_deliver"),
        (["--batch", "5", "--ordered-by", "subject"], "do not go together"),
    ],
)
def test_flags_that_mean_nothing_on_a_consumer_are_wrong_usage(folder: Path, flags: list[str], said: str) -> None:
    done = here("work", "work_consumer_handlers:charge", "--consumer", "charge", *flags, cwd=folder)
    assert done.returncode == 64
    assert said in " ".join(done.stderr.split())


def test_mistakes_end_before_anything_is_handled(folder: Path) -> None:
    wrong = here("work", "work_consumer_handlers:wants_a_socket", "--consumer", "charge", cwd=folder)
    assert wrong.returncode == 64
    assert "'other'" in wrong.stderr
    missing = here("work", "work_consumer_handlers:charge", "--consumer", "nosuch", cwd=folder)
    assert missing.returncode == 1
    assert "nosuch" in missing.stderr
    alone = here("work", "work_consumer_handlers:by_context", "--stream", "IN", "--once", "--alone", "1", cwd=folder)
    assert alone.returncode == 64
    assert "only with --consumer" in alone.stderr


RUN = """
    import penstock

    app = penstock.App("penstock.yaml")

    @app.on_startup
    async def up():
        raise RuntimeError("no database")

    @app.consumer("charge")
    async def charge(message: penstock.Message) -> None: ...
"""


def test_what_goes_wrong_before_the_first_message_is_one_line(folder: Path, nats_server: EmbeddedServer) -> None:
    (folder / "run_hook.py").write_text(textwrap.dedent(RUN))
    (folder / "run_bad.py").write_text(
        "import penstock\napp = penstock.App()\n\n@app.consumer('c')\ndef h(x: set): ...\n"
    )
    hook = here("run", "run_hook:app", cwd=folder)
    assert (hook.returncode, "'up' failed: RuntimeError: no database" in hook.stderr) == (1, True), hook.stderr
    assert "run_hook.py, line 8)" in hook.stderr
    bad = here("run", "run_bad:app", cwd=folder)
    assert (bad.returncode, "run_bad.py, line 4)" in bad.stderr) == (64, True), bad.stderr
    (folder / "run_stream.py").write_text(
        "import penstock\napp = penstock.App()\n\n@app.consumer('c', stream='NO')\ndef h(x: dict): ...\n"
    )
    missing = here("--servers", nats_server.url, "run", "run_stream:app", cwd=folder)
    assert (missing.returncode, "has no stream 'NO': run `penstock apply`" in missing.stderr) == (1, True)
    assert here("run", "run_hook", cwd=folder).returncode == 64


def test_metrics_and_health_are_served_as_for_groups(folder: Path) -> None:
    command = [sys.executable, "-m", "penstock", "work", "work_consumer_handlers:charge", "--consumer", "charge"]
    with subprocess.Popen([*command, "--metrics-port", "0"], cwd=folder, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr
        line = next(line for line in worker.stderr if line.startswith("metrics: "))
        address = line.removeprefix("metrics: ").strip()

        def handled() -> bool:
            with urllib.request.urlopen(address) as answer:
                text = answer.read().decode()
            counts = [line for line in text.splitlines() if line.startswith("parti_handler_latency_seconds_count{")]
            return any('consumer="charge"' in line and line.endswith(" 2.0") for line in counts)

        eventually(handled, 30, "two messages to be counted")
        with urllib.request.urlopen(address.replace("/metrics", "/readyz")) as answer:
            assert answer.read() == b"ok\n"
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=30)
        assert worker.returncode == 2
