"""Fast ingest while connections are cut and processes are killed: what was told to be stored is stored, in order.

Without message ids, copies are bounded by what the ingest says may be there twice; with them there are none.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.jetstream import connect
from penstock.publish.fast import FastIngest
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.interruptions import IngestInterrupted
from penstock.publish.options import IngestOptions
from penstock.publish.rows import Publication
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import EmbeddedCluster, LossyProxy, eventually, eventually_async, stream_data

SEED = 20_240_607


def fast(settings: Settings, **options: Any) -> FastIngest:
    return FastIngest(settings, "S", IngestOptions(**options), lambda _: None)


async def prepare(settings: Settings, **config: Any) -> None:
    async with connect(settings) as broker:
        await make_stream(broker.jetstream, allow_batched=True, **config)


def rows(count: int, with_ids: bool) -> list[Publication]:
    return [("s.a", b"%d" % n, None, str(n) if with_ids else None) for n in range(1, count + 1)]


def verdict(found: list[bytes], told: int, count: int, maybe_twice: int) -> list[str]:
    """What is wrong with a stream into which 1 to `count` were ingested; `told` of them were reported as stored."""
    numbers = [int(data) for data in found]
    first_seen = list(dict.fromkeys(numbers))
    copies = sum(times - 1 for times in Counter(numbers).values())
    wrong = []
    if missing := sorted(set(range(1, told + 1)) - set(numbers)):
        wrong.append(f"reported as stored, but not there: {missing[:10]}")
    if first_seen != sorted(first_seen) or (first_seen and first_seen != list(range(1, first_seen[-1] + 1))):
        wrong.append(f"out of order, or with holes: {first_seen[:5]} … {first_seen[-5:]}")
    if first_seen and first_seen[-1] > count:
        wrong.append(f"never published: {first_seen[-1]}")
    if copies > maybe_twice:
        wrong.append(f"{copies} copies, but at most {maybe_twice} were announced")
    return wrong


@pytest.mark.parametrize(
    ("found", "told", "maybe_twice"),
    [
        ([1, 2, 4], 3, 0),  # one that was reported is missing
        ([1, 2], 3, 0),  # the last that was reported is missing
        ([1, 3, 2], 3, 0),  # order
        ([1, 2, 2, 3], 3, 0),  # a copy nobody announced
        ([1, 2, 3, 5], 3, 0),  # a hole behind what was reported
    ],
)
def test_the_check_of_these_tests_can_fail(found: list[int], told: int, maybe_twice: int) -> None:
    assert verdict([b"%d" % n for n in found], told, 5, maybe_twice)


def test_the_check_of_these_tests_accepts_announced_copies() -> None:
    assert verdict([b"1", b"2", b"3", b"2", b"3", b"4"], told=4, count=4, maybe_twice=2) == []


@pytest.mark.parametrize("at", [1, 2, 50, 99, 100, 200, "end"])
async def test_a_connection_cut_at_any_message_loses_and_repeats_nothing(
    nats_server: EmbeddedServer, at: int | str
) -> None:
    await prepare(nats_server.settings)
    mark = re.compile(rb"\.fail\.%d\.[01]\.\$FI " % at if isinstance(at, int) else rb"\.3\.\$FI ")
    with LossyProxy(nats_server.port) as proxy:
        cuts: list[bytes] = []

        def cut_once(line: bytes) -> bool:
            if not cuts and mark.search(line):
                cuts.append(line)
                proxy.cut()
                return True
            return False

        proxy.drop_up = cut_once
        async with fast(Settings(servers=(proxy.url,)), flow=20) as ingest:
            await ingest.add_many(rows(200, with_ids=False))
    assert cuts
    assert ingest.ack
    assert ingest.ack.count == 200
    # Of a batch that never began the server only says that it does not know it: its one message is in doubt.
    assert ingest.ack.maybe_twice == int(at == 1)
    assert await asyncio.to_thread(stream_data, nats_server.settings, "S") == [b"%d" % n for n in range(1, 201)]


async def test_connections_cut_again_and_again_lose_nothing(nats_server: EmbeddedServer) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    count = 5_000
    await prepare(nats_server.settings)
    with LossyProxy(nats_server.port) as proxy:

        def cut_now_and_then(_: bytes) -> bool:
            if rng.random() < 0.002:
                proxy.cut()
            return False

        proxy.drop_up = cut_now_and_then
        async with fast(Settings(servers=(proxy.url,)), flow=100) as ingest:
            await ingest.add_many(rows(count, with_ids=False))
    found = await asyncio.to_thread(stream_data, nats_server.settings, "S")
    assert verdict(found, count, count, ingest.maybe_twice) == []
    assert int(found[-1]) == count


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_killed_server_loses_nothing_that_was_told_to_be_stored(
    nats_server: EmbeddedServer, with_ids: bool, blocking: bool
) -> None:
    count = 20_000
    await prepare(nats_server.settings)
    told: list[int] = []

    *most, last = rows(count, with_ids)  # the last one comes after the kill, however late that is

    def kill_and_look(ingest: FastIngest | BlockingFastIngest) -> None:
        eventually(lambda: ingest.stored > count // 4, 60, "a quarter to be stored")
        told.append(ingest.stored)
        nats_server.kill()
        told[0] = max(told[0], ingest.stored)
        nats_server.start()

    ingest: FastIngest | BlockingFastIngest
    if blocking:
        with BlockingFastIngest(nats_server.settings, "S", IngestOptions(flow=200), lambda _: None) as ingest:
            killer = asyncio.create_task(asyncio.to_thread(kill_and_look, ingest))
            await asyncio.to_thread(ingest.add_many, most)
            await killer
            await asyncio.to_thread(ingest.add_many, [last])
    else:
        async with fast(nats_server.settings, flow=200) as ingest:
            killer = asyncio.create_task(asyncio.to_thread(kill_and_look, ingest))
            await ingest.add_many(most)
            await killer
            await ingest.add_many([last])
    assert told[0] < count
    found = await asyncio.to_thread(stream_data, nats_server.settings, "S")
    assert verdict(found, count, count, ingest.maybe_twice) == []
    assert verdict(found, told[0], count, ingest.maybe_twice) == []
    if with_ids:
        assert found == [b"%d" % n for n in range(1, count + 1)]
        assert ingest.maybe_twice == 0


@pytest.mark.kills
@pytest.mark.short
async def test_with_on_doubt_fail_a_killed_server_is_reported_with_what_is_stored(nats_server: EmbeddedServer) -> None:
    await prepare(nats_server.settings)
    ingest = fast(nats_server.settings, flow=50, on_doubt="fail", idle_after=60)

    async def interrupted() -> None:
        async with ingest:
            await ingest.add_many(rows(120, with_ids=False))
            await eventually_async(lambda: ingest.stored == 100, what="the second ack")
            nats_server.kill()
            nats_server.start()
            await ingest.flush()

    with pytest.raises(IngestInterrupted) as raised:
        await interrupted()
    assert (raised.value.stored, raised.value.in_doubt) == (100, 20)
    found = await asyncio.to_thread(stream_data, nats_server.settings, "S")
    assert verdict(found, 100, 120, 0) == []


PUBLISHER = """
import sys
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.options import IngestOptions
from penstock.settings import Settings

with BlockingFastIngest(Settings(servers=(sys.argv[1],)), "S", IngestOptions(flow=100), print) as ingest:
    for n in range(1, 10_000_000):
        ingest.add("s.a", b"%d" % n)
        if n % 100 == 0:
            print(ingest.stored, flush=True)
"""


@pytest.mark.kills
@pytest.mark.short
def test_a_killed_publisher_leaves_what_it_reported_in_order(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    asyncio.run(prepare(nats_server.settings))
    output = tmp_path / "stored"
    with output.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", PUBLISHER, nats_server.url], stdout=out)
    try:
        eventually(lambda: output.read_bytes().count(b"\n") > 100, 60, "the publisher to report")
    finally:
        child.kill()
        child.wait()
    told = int(output.read_text().rsplit("\n", 2)[-2])
    found = stream_data(nats_server.settings, "S")
    assert told > 0
    assert verdict(found, told, 10_000_000, 0) == []


@pytest.mark.kills
async def test_a_killed_leader_of_a_replicated_stream_loses_nothing(nats_cluster: EmbeddedCluster) -> None:
    count = 10_000
    patient = replace(nats_cluster.settings, timeout=30.0)  # a cluster without a node takes its time to answer
    await prepare(patient, num_replicas=3)
    async with connect(patient) as broker:
        leader = (await broker.jetstream.stream_info("S")).leader
    node = next(node for node in nats_cluster.nodes if node.config.server_name == leader)
    # Connected to a follower: messages travel over a route, and may really be lost there.
    settings = patient.with_servers(*(other.url for other in nats_cluster.nodes if other is not node))

    async with fast(settings, flow=100, on_gap="resend", patience=60) as ingest:

        def kill() -> int:
            eventually(lambda: ingest.stored > count // 4, 60, "a quarter to be stored")
            node.kill()
            return ingest.stored

        *most, last = rows(count, with_ids=True)  # the last one comes after the kill, however late that is
        killer = asyncio.create_task(asyncio.to_thread(kill))
        await ingest.add_many(most)
        told = await killer
        await ingest.add_many([last])
        await ingest.flush()
    assert told < count
    found = await asyncio.to_thread(stream_data, settings, "S")
    assert verdict(found, count, count, 0) == []
