"""`penstock replicate` and `penstock append`: facts over a boundary, while everything is killed."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.commands import ended, here
from tests.support.gateways import TOKENS, RunningGateway, write_platform
from tests.support.streams import make_stream

from penstock.facts import Facts
from penstock.facts.fact import ID_HEADER
from penstock.publish.plain import PlainPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, stream_messages
from penstock.wire.frames import Message

CONSUMER = "reader"
SUBJECT = "facts.edge.n"
ACK_WAIT = 1_000_000_000
"""Nanoseconds: so long the facts of a replication that was killed wait before they come again."""


@dataclass
class Boundary:
    """Two servers, each reached over NATS or through a gateway of its own."""

    origin: EmbeddedServer
    destination: EmbeddedServer
    flags: list[str] = field(default_factory=list)
    gateways: list[RunningGateway] = field(default_factory=list)

    def reach(self, stack: ExitStack, folder: Path, origin: str, destination: str) -> None:
        for side, server, way in (("from", self.origin, origin), ("to", self.destination, destination)):
            if way == "nats":
                self.flags += [f"--{side}-servers", server.url]
                continue
            file = write_platform(folder, server.url, consumer=CONSUMER)
            self.gateways.append(stack.enter_context(RunningGateway(file, "--insecure")))
            self.flags += [f"--{side}-gateway", self.gateways[-1].url, f"--{side}-token", TOKENS["edge"]]

    def stored(self) -> list[Message]:
        return stream_messages(self.destination.settings, "FACTS")


async def prepare(boundary: Boundary, count: int) -> None:
    for server in (boundary.origin, boundary.destination):
        async with Facts(server.settings) as facts:
            await make_stream(facts.link.jetstream, "FACTS")
    async with Facts(boundary.origin.settings) as facts:
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "ack_wait": ACK_WAIT}
        await facts.link.jetstream.create_consumer("FACTS", {**config, "metadata": {"penstock.reader": "dedicated"}})
        for number in range(count):
            await facts.append_fact(SUBJECT, f"id-{number}", b"%d" % number, headers={"Kind": "n"})


@pytest.fixture
def boundary(tmp_path: Path) -> Iterator[Boundary]:
    with EmbeddedServer(tmp_path / "origin") as origin, EmbeddedServer(tmp_path / "destination") as destination:
        yield Boundary(origin, destination)


def ids(messages: list[Message]) -> list[str]:
    return [message.header_values()[ID_HEADER][0] for message in messages]


def test_facts_arrive_with_their_ids_headers_and_new_subjects(boundary: Boundary) -> None:
    asyncio.run(prepare(boundary, 25))

    async def plain() -> None:
        async with PlainPublisher(boundary.origin.settings) as publisher:
            await publisher.add("facts.plain", b"no fact", {"Penstock-Dlq-Only": "x"}, "message-1")
            await publisher.finish()

    asyncio.run(plain())
    flags = ["--from-servers", boundary.origin.url, "--to-servers", boundary.destination.url, "--until-caught-up"]
    mapped = ["--map", "facts.edge.*=facts.plant.$1", "--limit", "10", "--json"]
    done = json.loads(ended("replicate", CONSUMER, *flags, *mapped).stdout)
    assert (done["appended"], done["existed"], done["position"], done["caught_up"]) == (26, 0, 26, True)
    found = boundary.stored()
    assert ids(found) == [*(f"id-{number}" for number in range(25)), "FACTS.26"]
    assert {message.subject.rpartition(".")[0] for message in found} == {"facts.plant.n", "facts.plain"}
    assert found[0].header_values()["Kind"] == ["n"]
    assert "Penstock-Dlq-Only" not in found[-1].header_values()
    assert ended("replicate", CONSUMER, *flags).stdout == "appended 0 facts\n", "and no position that is not so"


def test_a_fact_with_other_content_on_the_other_side_ends_it_and_is_not_confirmed(boundary: Boundary) -> None:
    asyncio.run(prepare(boundary, 3))

    async def conflict() -> None:
        async with Facts(boundary.destination.settings) as facts:
            await facts.append_fact(SUBJECT, "id-1", b"other")

    asyncio.run(conflict())
    flags = ["--from-servers", boundary.origin.url, "--to-servers", boundary.destination.url, "--until-caught-up"]
    done = ended("replicate", CONSUMER, *flags, code=1)
    assert "id-1" in done.stderr
    assert "Traceback" not in done.stderr
    assert ids(boundary.stored()) == ["id-1", "id-0"]

    async def confirmed() -> int:
        async with Facts(boundary.origin.settings) as facts:
            (reader,) = await facts.link.jetstream.consumers("FACTS")
            return reader.ack_floor_stream_seq

    assert asyncio.run(confirmed()) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to-gateway", "gateway:8443"], "a URL such as https://"),
        (["--to-gateway", "http://g", "--to-servers", "nats://x"], "--to-servers is for NATS"),
        (["--map", "nonsense"], "is no mapping"),
        (["--limit", "0"], "0 is not in the range"),
    ],
)
def test_wrong_flags_are_wrong_usage(arguments: list[str], words: str) -> None:
    assert words in ended("replicate", CONSUMER, *arguments, code=64).stderr


def test_one_fact_is_appended_by_hand_over_nats_and_through_a_gateway(boundary: Boundary, tmp_path: Path) -> None:
    asyncio.run(prepare(boundary, 0))
    servers = ("--servers", boundary.origin.url)
    words = ("append", SUBJECT, "o-1")
    first = json.loads(ended(*servers, *words, "--data", '{"a": 1}', "--header", "Kind=x", "--json").stdout)
    assert first == {"stream": "FACTS", "sequence": 1, "existed": False}
    assert "was there before" in ended(*servers, *words, "--data", '{"a": 1}', "--header", "Kind=x").stdout
    assert "o-1" in ended(*servers, *words, "--data", "other", code=1).stderr
    ended(*servers, *words, code=64)
    ended(*servers, *words, "--data", "x", "--header", "nope", code=64)
    content = tmp_path / "fact"
    content.write_bytes(b"\xff\x00")
    assert ended(*servers, *words, "--file", tmp_path / "none", code=1).stderr.endswith("No such file or directory\n")
    with RunningGateway(write_platform(tmp_path, boundary.origin.url, consumer=CONSUMER), "--insecure") as gateway:
        through = ("append", SUBJECT, "o-2", "--file", content, "--gateway", gateway.url, "--json")
        done = here("--token", TOKENS["edge"], *through, variables={"PENSTOCK_SERVERS": "nats://127.0.0.1:9"})
        assert json.loads(done.stdout) == {"stream": "FACTS", "sequence": 2, "existed": False}
        ended("--token", "wrong", *through, code=1)
        ended("--token", TOKENS["edge"], "--user", "me", *through, code=64)
    assert [message.data for message in stream_messages(boundary.origin.settings, "FACTS")] == [
        b'{"a": 1}',
        b"\xff\x00",
    ]


WAYS = [("nats", "nats"), ("nats", "gateway"), ("gateway", "nats"), ("gateway", "gateway")]


@pytest.mark.kills
@pytest.mark.parametrize(
    ("ways", "seed", "count", "kills"),
    [
        pytest.param(("gateway", "nats"), 1, 20, 2, marks=pytest.mark.short),
        *((ways, seed, 120, 5) for ways in WAYS for seed in range(2, 5)),
    ],
    ids=str,
)
def test_killed_with_its_servers_and_gateways_it_carries_each_fact_once_and_in_order(
    boundary: Boundary, tmp_path: Path, ways: tuple[str, str], seed: int, count: int, kills: int
) -> None:
    rng = random.Random(seed)
    asyncio.run(prepare(boundary, count))
    with ExitStack() as stack:
        boundary.reach(stack, tmp_path, *ways)
        command = [sys.executable, "-m", "penstock", "replicate", CONSUMER, *boundary.flags, "--limit", "10"]
        running = subprocess.Popen(command)
        try:
            for point in sorted(rng.randrange(count) for _ in range(kills)):
                eventually(lambda point=point: len(boundary.stored()) > point, 120, f"fact {point}")  # type: ignore[misc]
                victim = rng.randrange(3 + len(boundary.gateways))
                if victim == 0:
                    running.kill()
                    running.wait()
                    running = subprocess.Popen(command)
                elif victim > 2:
                    boundary.gateways[victim - 3].restart()
                else:
                    server = (boundary.origin, boundary.destination)[victim - 1]
                    server.kill()
                    server.start()
            eventually(lambda: len(boundary.stored()) >= count, 120, f"all facts, seed {seed}")
        finally:
            ended_by_itself = running.poll()
            running.kill()
            running.wait()
        assert ended_by_itself is None, f"seed {seed}: it gave up with {ended_by_itself}"
        subprocess.run([*command, "--until-caught-up"], check=True, timeout=120)
    found = boundary.stored()
    assert ids(found) == [f"id-{number}" for number in range(count)], f"seed {seed}"
    assert [message.data for message in found] == [b"%d" % number for number in range(count)], f"seed {seed}"


def test_unused_consumers_are_shown_with_their_service_and_whether_they_are_declared(
    nats_server: EmbeddedServer,
) -> None:
    async def make() -> None:
        async with Facts(nats_server.settings) as facts:
            await make_stream(facts.link.jetstream, "FACTS")
            for name, told in {
                "declared": {"penstock.service": "billing", "penstock.platform": "gpuaas"},
                "wild": {},
            }.items():
                config = {"durable_name": name, "ack_policy": "explicit", "metadata": told}
                await facts.link.jetstream.create_consumer("FACTS", config)

    asyncio.run(make())
    command = ("--servers", nats_server.url, "consumer", "ls", "--unused", "0s")
    found = {one["name"]: (one["service"], one["declared"]) for one in json.loads(ended(*command, "--json").stdout)}
    assert found == {"declared": ("billing", True), "wild": (None, False)}
    shown = ended(*command).stdout
    assert "SERVICE" in shown
    assert "in gpuaas" in shown
