"""Commands that run until they are stopped print no password either: while they work, and when the broker dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.commands import without_ours
from tests.support.gateways import Papers
from tests.support.quickstarts import as_process

from penstock.errors import StreamNotFound
from penstock.jetstream import connect
from penstock.publish.plain import PlainPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import eventually

PASSWORD = "hunter2.s3cret"
HANDLERS = "from pathlib import Path\ndef handle(message, context): Path('handled').touch()\n"


@dataclass
class Place:
    """A folder, and two brokers that ask for the password: one to read from, one to write to."""

    folder: Path
    near: EmbeddedServer
    far: EmbeddedServer

    def url(self, server: EmbeddedServer) -> str:
        return f"nats://ann:{PASSWORD}@127.0.0.1:{server.config.port}"

    def platform(self) -> str:
        token = hashlib.sha256(b"token").hexdigest()
        declared = {
            "environments": {"dev": {"servers": [self.url(self.near)]}},
            "streams": {"S": {"subjects": ["s.>"]}},
            "gateway": {"identities": {"c": {"tokens": [{"sha256": token}], "subjects": ["s.>"]}}},
        }
        (self.folder / "penstock.yaml").write_text(json.dumps(declared))
        return str(self.folder / "penstock.yaml")

    def has_message(self, server: EmbeddedServer) -> bool:
        return asyncio.run(_messages(server.settings)) > 0

    def has_capturer(self) -> bool:
        return asyncio.run(_consumers(self.near.settings, "DLQ_ADVISORIES")) > 0

    def has_served(self) -> bool:
        return "https://" in self.shown()

    def runs(self) -> bool:
        return "nats://" in self.shown()

    def was_handled(self) -> bool:
        return (self.folder / "handled").exists()

    def is_replicated(self) -> bool:
        return self.has_message(self.far)

    def shown(self) -> str:
        return (self.folder / "shown").read_text()


async def _messages(settings: Settings) -> int:
    async with connect(settings) as broker:
        return (await broker.jetstream.stream_info("S")).state.messages


async def _consumers(settings: Settings, stream: str) -> int:
    async with connect(settings) as broker:
        try:
            return len(await broker.jetstream.consumer_names(stream))
        except StreamNotFound:
            return 0


async def _prepare(settings: Settings, publish: bool) -> None:
    async with connect(settings) as broker:
        await broker.jetstream.create_stream({"name": "S", "subjects": ["s.>"], "allow_direct": True})
        await broker.jetstream.create_consumer("S", {"durable_name": "reader", "ack_policy": "explicit"})
    if publish:
        async with PlainPublisher(settings) as publisher:
            await publisher.add("s.a", b"x")
            await publisher.finish()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with (
        EmbeddedServer(data=tmp_path / "near", user="ann", password=PASSWORD) as near,
        EmbeddedServer(data=tmp_path / "far", user="ann", password=PASSWORD) as far,
    ):
        asyncio.run(_prepare(near.settings, publish=True))
        asyncio.run(_prepare(far.settings, publish=False))
        (tmp_path / "handlers.py").write_text(HANDLERS)
        yield Place(tmp_path, near, far)


def leaf(place: Place) -> list[str]:
    url = f"nats://ann:{PASSWORD}@127.0.0.1:{place.near.config.leaf_port}"
    return ["server", "--port", "0", "--data", "leaf", "--leaf-of", url, "--user", "bob", "--password", PASSWORD]


COMMANDS: dict[str, tuple[Callable[[Place], list[str]], Callable[[Place], bool]]] = {
    "work": (lambda _: ["work", "handlers:handle", "--group", "g", "--stream", "S", "--partition", "a=s.a"],
             Place.was_handled),
    "replicate": (lambda place: ["replicate", "reader", "--to-servers", place.url(place.far)], Place.is_replicated),
    "dlq capture": (lambda _: ["dlq", "capture"], Place.has_capturer),
    "gateway": (lambda place: ["gateway", place.platform(), *Papers(place.folder).flags(), "--listen", "127.0.0.1:0",
                               "--admin", "127.0.0.1:0", "--drain", "0.1"], Place.has_served),
    "server": (leaf, Place.runs),
}  # fmt: skip
"""What is run, and when it is at work."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_at_work_prints_no_password(place: Place, name: str) -> None:
    words, is_at_work = COMMANDS[name]
    command = [sys.executable, "-m", "penstock", *words(place)]
    variables = {
        **without_ours(),
        "PYTHONPATH": str(place.folder),
        "PENSTOCK_SERVERS": place.url(place.near),
        "PENSTOCK_TIMEOUT": "2",
    }
    with (place.folder / "shown").open("wb") as shown:
        process = subprocess.Popen(command, cwd=place.folder, env=variables, stdout=shown, stderr=shown)
    try:
        eventually(lambda: is_at_work(place), what=f"{name} at work", state=place.shown)
        before = len(place.shown())
        place.near.kill()
        place.far.kill()
        with suppress(AssertionError):  # not all of them say something about it
            eventually(lambda: len(place.shown()) > before or process.poll() is not None, within=4)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
    assert PASSWORD not in place.shown()
    assert "Traceback" not in place.shown()


def test_the_quickstart_prints_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a server of its own, and the variables are those of another one."""
    monkeypatch.setenv("PENSTOCK_SERVERS", f"nats://ann:{PASSWORD}@127.0.0.1:1")
    done = as_process(tmp_path, "--no-spark", "--events", "200")
    assert "usage" in done.stdout
    assert PASSWORD not in done.stdout + done.stderr


@pytest.mark.kills
def test_a_benchmark_prints_no_password() -> None:
    variables = {**os.environ, "PENSTOCK_SERVERS": f"nats://ann:{PASSWORD}@127.0.0.1:1"}
    command = [sys.executable, "-m", "penstock", "bench", "plan", "--quick", "--rounds", "1"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "plan" in done.stdout
    assert PASSWORD not in done.stdout + done.stderr
