"""`penstock consumer` against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sysconfig
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support.commands import ended
from tests.support.peers import acknowledge
from tests.support.streams import make_stream

from penstock.jetstream import Broker, ConsumerInfo, connect
from penstock.testing import EmbeddedServer, eventually_async

T = TypeVar("T")

HEADINGS = ["CONSUMER,", "FILTERS", "PENDING", "UNACKED", "REDELIVERED", "PULLS", "PAUSED"]
WITHIN = 30.0  # seconds
PENSTOCK = str(Path(sysconfig.get_path("scripts")) / "penstock")


@dataclass(frozen=True)
class Done:
    """What a command printed; `told` is its stderr without line breaks."""

    stdout: str
    stderr: str

    @property
    def told(self) -> str:
        return " ".join(self.stderr.split())


Run = Callable[..., Done]


@pytest.fixture
def run(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, which is quicker; it must end with `code`."""
    monkeypatch.setenv("COLUMNS", "100")

    def penstock(*arguments: str, code: int = 0) -> Done:
        done = ended("--servers", nats_server.url, "consumer", *arguments, code=code)
        return Done(done.stdout, done.stderr)

    return penstock


def on(server: EmbeddedServer, ask: Callable[[Broker], Awaitable[T]]) -> T:
    """What `ask` returns for a connection to the server."""

    async def asked() -> T:
        async with connect(server.settings) as broker:
            return await ask(broker)

    return asyncio.run(asked())


async def fill(broker: Broker, retention: str = "limits") -> None:
    """Ten messages on s.a and five on s.b; consumer `c` of s.a has acknowledged 4, and holds 2 in flight."""
    await make_stream(broker.jetstream, subjects=["s.*"], retention=retention)
    config = {"durable_name": "c", "ack_policy": "explicit", "filter_subject": "s.a"}
    await broker.jetstream.create_consumer("S", config)
    if retention == "interest":
        await broker.jetstream.create_consumer("S", {**config, "durable_name": "other", "filter_subject": "s.b"})
    for n in range(15):
        await broker.request("s.b" if n % 3 == 2 else "s.a", b"x", WITHIN)
    await acknowledge(broker.settings, "S", "c", 6, 4)

    async def counted() -> bool:  # the server counts for its consumers a moment after it has stored
        return (await broker.jetstream.consumer_info("S", "c")).unprocessed == 6

    await eventually_async(counted, state=lambda: broker.jetstream.consumer_info("S", "c"))


def info(server: EmbeddedServer) -> ConsumerInfo:
    return on(server, lambda broker: broker.jetstream.consumer_info("S", "c"))


def test_consumers_are_listed_and_shown(nats_server: EmbeddedServer, run: Run) -> None:
    assert run("ls").stdout == "no consumers\n"
    on(nats_server, fill)
    for arguments in (["ls"], ["ls", "S"]):
        (row,) = json.loads(run(*arguments, "--json").stdout)
        assert (row["stream"], row["name"], row["filters"]) == ("S", "c", ["s.a"])
        assert (row["pending"], row["ack_pending"], row["ack_floor"]) == (4, 2, 6)
        lines = run(*arguments).stdout.splitlines()
        assert lines[0].split() == HEADINGS
        assert lines[1].split() == ["S"]
        assert lines[2].split()[:3] == ["c", "4", "2"]
        assert lines[3].split() == ["s.a"]
    shown = run("show", "S", "c").stdout
    assert "ack_wait" in shown
    assert "30s" in shown
    assert json.loads(run("show", "S", "c", "--json").stdout)["config"]["durable_name"] == "c"


def test_what_does_not_exist_ends_with_1(nats_server: EmbeddedServer, run: Run) -> None:
    assert "stream not found" in run("ls", "NONE", code=1).stderr
    on(nats_server, fill)
    for arguments in (
        ["show", "S", "none"],
        ["pause", "S", "none", "--for", "1h"],
        ["resume", "S", "none"],
        ["reset", "S", "none", "--yes"],
    ):
        assert "consumer not found" in run(*arguments, code=1).stderr


def test_a_consumer_is_paused_and_resumed(nats_server: EmbeddedServer, run: Run) -> None:
    on(nats_server, fill)
    assert "paused until" in run("pause", "S", "c", "--for", "1h30m").stdout
    assert timedelta(minutes=85) < (info(nats_server).paused_for or timedelta()) <= timedelta(minutes=90)
    assert "for 1h" in run("ls").stdout
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    said = json.loads(run("pause", "S", "c", "--until", until.isoformat(), "--json").stdout)
    assert datetime.fromisoformat(said["paused_until"]) == until
    run("resume", "S", "c")
    assert not info(nats_server).paused


@pytest.mark.parametrize(
    "arguments",
    [
        ["pause", "S", "c"],
        ["pause", "S", "c", "--for", "1h", "--until", "2100-01-01T00:00:00Z"],
        ["pause", "S", "c", "--until", "2001-01-01T00:00:00Z"],
        ["pause", "S", "c", "--until", "2100-01-01T00:00:00"],
        ["pause", "S", "c", "--until", "tomorrow"],
        ["pause", "S", "c", "--for", "bananas"],
        ["pause", "S", "c", "--for", "999999w"],
        ["reset", "S", "c", "--to", "0", "--yes"],
        ["reset", "S", "c", "--to", "3", "--to-start", "--yes"],
        ["reset", "S", "c", "--to", "3"],
        ["show", "S"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_64(run: Run, arguments: list[str]) -> None:
    assert run(*arguments, code=64).stderr


@pytest.mark.parametrize(
    ("to", "said", "target", "pending"),
    [
        ([], "repeats 2 messages", 7, 6),
        (["--to-start"], "repeats 6 messages that were delivered before, 4 of them acknowledged before", 1, 10),
        (["--to", "8"], "repeats 1 message that were delivered before, up to 1 of them", 8, 5),
        (["--to", "13"], "skips 4 messages that are not acknowledged", 13, 2),
        (["--to", "16"], "skips 6 messages that are not acknowledged", 16, 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_reset_tells_what_it_repeats_and_skips(
    nats_server: EmbeddedServer, run: Run, to: list[str], said: str, target: int, pending: int
) -> None:
    on(nats_server, fill)
    done = run("reset", "S", "c", "--yes", "--json", *to)
    assert said in done.told
    assert json.loads(done.stdout)["reset_seq"] == target
    after = info(nats_server)
    assert (after.pending, after.ack_floor_stream_seq) == (pending, target - 1)
    names = on(nats_server, lambda broker: broker.jetstream.consumer_names("S"))
    assert names == ["c"], "what counted must not stay"


def test_a_reset_beyond_the_end_of_the_stream_is_refused(nats_server: EmbeddedServer, run: Run) -> None:
    on(nats_server, fill)
    for beyond in ("17", "99999"):
        told = run("reset", "S", "c", "--to", beyond, "--yes", code=1).told
        assert f"cannot continue at sequence {beyond}: the stream ends at 15" in told
        assert "reset it to 16" in told
    assert (info(nats_server).ack_floor_stream_seq, info(nats_server).pending) == (6, 4), "it must not have moved"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"deliver_policy": "new"}, "it delivers 'new', and the server moves only"),
        (
            {"deliver_policy": "by_start_sequence", "opt_start_seq": 5},
            "it starts at 5, and the server moves no consumer",
        ),
    ],
)
def test_a_reset_that_the_server_would_refuse_announces_no_effect(
    nats_server: EmbeddedServer, run: Run, config: dict[str, object], words: str
) -> None:
    on(nats_server, fill)
    other = {"durable_name": "other", "ack_policy": "explicit", **config}
    on(nats_server, lambda broker: broker.jetstream.create_consumer("S", other))
    told = run("reset", "S", "other", "--to", "2", "--yes", code=1).told
    assert words in told
    assert "repeats" not in told
    assert "now behind" not in told


def test_a_reset_goes_to_a_time(nats_server: EmbeddedServer, run: Run) -> None:
    on(nats_server, fill)
    at = on(nats_server, lambda broker: broker.jetstream.get_message("S", 8)).time
    assert at
    assert json.loads(run("reset", "S", "c", "--to-time", at.isoformat(), "--yes", "--json").stdout)["reset_seq"] == 8
    later = "2100-01-01T00:00:00Z"
    assert json.loads(run("reset", "S", "c", "--to-time", later, "--yes", "--json").stdout)["reset_seq"] == 16


@pytest.mark.parametrize(
    ("retention", "fate", "left"),
    [
        ("workqueue", "they stay behind", {"s.a": 6}),
        ("interest", "deletes those that no other consumer needs", {}),
    ],
)
def test_a_reset_forward_says_what_becomes_of_the_skipped_messages(
    nats_server: EmbeddedServer, run: Run, retention: str, fate: str, left: dict[str, int]
) -> None:
    on(nats_server, lambda broker: fill(broker, retention))
    told = run("reset", "S", "c", "--to", "16", "--yes").told
    assert "skips 6 messages" in told
    assert fate in told
    stream = on(nats_server, lambda broker: broker.jetstream.stream_info("S", subjects_filter="s.a"))
    assert stream.state.subjects == left, "it was told otherwise"
    assert "skips nothing" in run("reset", "S", "c", "--to-start", "--yes").told
    assert info(nats_server).pending == sum(left.values())


def test_a_reset_asks_on_a_terminal_and_no_means_no(nats_server: EmbeddedServer) -> None:
    on(nats_server, fill)
    for answer, code, floor in ((b"n\n", 1, 6), (b"y\n", 0, 0)):
        here, there = pty.openpty()
        try:
            os.write(here, answer)
            command = [PENSTOCK, "--servers", nats_server.url, "consumer", "reset", "S", "c", "--to-start"]
            done = subprocess.run(command, stdin=there, capture_output=True, text=True, timeout=60)
        finally:
            os.close(here)
            os.close(there)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert "Reset S / c to sequence 1?" in done.stderr
        assert info(nats_server).ack_floor_stream_seq == floor
