"""Nothing is lost when workers come, go and die: real processes, real signals, on all three retentions."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.workers.group_fleet import STREAM, Fleet, fleet
from tests.e2e.workers.group_tracker import Effect, judge

from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.workers.partitions import InBucket

RETENTIONS = ["limits", "workqueue", "interest"]
pytestmark = pytest.mark.kills


def short_on(retention: str) -> list[Any]:
    """All three retentions, of which `make test` takes one."""
    return [pytest.param(one, marks=pytest.mark.short if one == retention else ()) for one in RETENTIONS]


LONG_TTL = 3.0
"""Seconds: where nobody may lose its partitions, also on a machine that has too much to do."""


@pytest.mark.short
def test_the_judge_sees_loss_disorder_and_stale_effects() -> None:
    good = [Effect(1, 5, "a"), Effect(2, 5, "a"), Effect(2, 8, "b"), Effect(3, 8, "b")]
    verdict = judge({"p": 3}, {"p": good})
    assert verdict.clean
    assert verdict.duplicates == 1
    assert judge({"p": 4}, {"p": good}).lost == {"p": [4]}
    assert judge({"p": 3}, {"p": [*good[:1], good[3], Effect(2, 8, "b")]}).out_of_order
    assert judge({"p": 3}, {"p": [*good, Effect(3, 5, "a")]}).stale
    assert judge({"p": 3}, {"p": [*good, Effect(3, 8, "b")]}).unexplained
    assert judge({"p": 3}, {"p": [*good, Effect(3, 8, "c")]}).shared


@pytest.mark.parametrize("retention", short_on("limits"))
async def test_nothing_is_lost_when_a_group_grows_is_killed_and_shrinks(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    """4 workers, 8, then: the leader killed, one stopped past its lease, the broker killed in the middle of a
    rebalance, the bucket deleted, and 4 again."""
    async with fleet(nats_server, tmp_path, retention, workers=2) as group:
        group.start("a", "b")
        await group.settled(4)
        group.flood.start()
        await group.more_done(100)
        group.start("c", "d")
        await group.settled(8)

        group.kill(leader := await group.leader())
        group.start("e")
        stopped = min(group.processes.keys() - {leader, "e"})
        group.signal(stopped, signal.SIGSTOP)
        await group.settled(6)
        group.signal(stopped, signal.SIGCONT)
        await group.settled(8)

        group.start("f")
        nats_server.kill()
        nats_server.start()
        await group.settled(10)

        partitions = await InBucket(group.bucket).partitions()
        await group.control.jetstream.delete_stream(group.bucket.stream)
        await group.bucket.ensure()
        await InBucket(group.bucket).write(partitions)
        await group.settled(10)

        await group.more_done(50)
        leaving = sorted(group.processes)[:3]
        await group.stop(*leaving)
        await group.settled(4)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)
        assert group.flood.total > 500
        print(
            f"{retention}: {group.flood.total} messages, {verdict.duplicates} duplicates, refused {group.sink.refused}"
        )


@pytest.mark.parametrize("retention", short_on("limits"))
async def test_without_the_handoff_messages_are_lost(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    """The same check, with new owners that begin where their consumer is: it can fail, and does."""
    async with fleet(nats_server, tmp_path, retention, hand_over=False) as group:
        group.start("a", "b")
        await group.settled(2)
        group.flood.start()
        await group.more_done(50)
        group.kill("a")
        await group.settled(1)
        await group.more_done(20)
        verdict = await group.finish(patience=3.0)
        assert verdict.lost
        lost = verdict.wrong[0]
        trace = await group.explain(verdict)
        assert f"claim {lost}: " in trace, "who had it from where on"
        assert " done by " in trace, "who did what of it"


@pytest.mark.parametrize("retention", short_on("interest"))
async def test_an_owner_that_was_stopped_past_its_lease_is_fenced_and_takes_part_again(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    async with fleet(nats_server, tmp_path, retention, partitions=4, gated=True) as group:
        group.start("a", "b")
        await group.settled(2)
        a = await group.worker_id("a")
        mine = next(p for p, claim in (await group.claims()).items() if claim.owner == a)
        gate = group.sink.gates[mine, 5, "a"] = asyncio.Event()
        group.flood.start()
        await group.eventually(lambda: "a" in group.sink.begun[mine, 5], "the message to be begun")
        group.signal("a", signal.SIGSTOP)
        await group.eventually(lambda: any(e.number == 5 for e in group.sink.effects[mine]), "another to do it")
        group.signal("a", signal.SIGCONT)
        gate.set()
        await group.eventually(lambda: group.sink.refused["a"] > 0, "the stale effect to be refused")
        await group.settled(2)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)


@pytest.mark.parametrize("retention", short_on("limits"))
async def test_a_worker_that_is_killed_and_started_again_has_its_id_and_its_partitions_back(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    """Long before its lease is over: nobody else touches its partitions."""
    async with fleet(nats_server, tmp_path, retention, ttl=120.0) as group:
        group.start("a", "b")
        await group.settled(2)
        owners = {p: claim.owner for p, claim in (await group.claims()).items()}
        group.flood.start()
        await group.more_done(50)
        group.kill("a")
        group.start("a")
        await group.more_done(100)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)
        assert {p: claim.owner for p, claim in (await group.claims()).items()} == owners


@pytest.mark.parametrize("retention", short_on("workqueue"))
async def test_a_worker_that_comes_back_into_another_assignment_hands_over_what_it_had(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    """Killed, and meanwhile some of its partitions were given to another: its consumer is all that knows how far they
    are, and on an Interest stream all that keeps their messages."""
    async with fleet(nats_server, tmp_path, retention, ttl=120.0) as group:
        group.start("a", "b")
        await group.settled(2)
        group.flood.start()
        await group.more_done(50)
        killed = "b" if await group.leader() == "a" else "a"
        group.kill(killed)
        group.start("c")
        await group.eventually(group.assigned(3), "an assignment for the three")
        await group.more_done(50)
        group.start(killed)
        await group.settled(3)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)


@pytest.mark.short
async def test_a_group_goes_on_working_while_its_bucket_is_away(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    """Degraded: nobody renews, nobody is given up, and messages are handled all the same."""
    async with fleet(nats_server, tmp_path, "limits", ttl=LONG_TTL) as group:
        group.start("a", "b")
        await group.settled(2)
        group.flood.start()
        await group.more_done(20)
        owners = {p: claim.owner for p, claim in (await group.claims()).items()}
        await group.control.jetstream.update_stream(group.bucket.stream, {"subjects": ["elsewhere.>"]})
        started = asyncio.get_running_loop().time()
        await group.eventually(
            lambda: asyncio.get_running_loop().time() > started + 2 * LONG_TTL, "two leases to have passed"
        )
        await group.more_done(30)
        await group.control.jetstream.update_stream(group.bucket.stream, {"subjects": [f"$KV.{group.bucket.name}.>"]})
        await group.more_done(30)
        assert {p: claim.owner for p, claim in (await group.claims()).items()} == owners
        assert "degraded" in group.processes["a"].log.read_text()
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)
        assert verdict.duplicates == 0


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_nothing_is_lost_when_nodes_of_a_cluster_are_killed(
    nats_cluster: EmbeddedCluster, tmp_path: Path, retention: str
) -> None:
    """Three replicas of stream, consumers and bucket; the node that leads the stream is killed, then another one, and a
    worker too, each in the middle of a rebalance."""
    async with fleet(nats_cluster, tmp_path, retention, ttl=4.0, timeout=10.0) as group:
        group.start("a", "b")
        await group.settled(2)
        bucket = await group.control.jetstream.stream_info(group.bucket.stream)
        assert bucket.config["num_replicas"] == 3, "as the stream has"
        group.flood.start()
        await group.more_done(50)

        group.start("c")
        first = await stream_leader(group, nats_cluster)
        first.kill()
        await group.settled(3)
        await group.more_done(50)
        first.start()
        await group.eventually(lambda: whole(group), "the first node to have caught up: only then may another one go")

        other = next(node for node in nats_cluster.nodes if node is not first)
        group.kill("a")
        other.kill()
        await group.settled(2)
        await group.more_done(50)
        other.start()
        await group.eventually(lambda: whole(group), "all nodes to be up to date")

        await group.stop("b")
        await group.settled(1)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)
        print(f"{retention}: {group.flood.total} messages, {verdict.duplicates} duplicates")


async def whole(group: Fleet) -> bool:
    """Whether every replica of the stream, its consumers and the bucket is up to date."""
    jetstream = group.control.jetstream
    streams = [await jetstream.stream_info(name) for name in (STREAM, group.bucket.stream)]
    found: list[StreamInfo | ConsumerInfo] = [*streams, *await jetstream.consumers(STREAM)]
    return all(one.leader and all(r.current and not r.offline for r in one.replicas) for one in found)


async def stream_leader(group: Fleet, cluster: EmbeddedCluster) -> EmbeddedServer:
    led_by = (await group.control.jetstream.stream_info(STREAM)).leader
    return next(node for node in cluster.nodes if node.config.name == led_by)


@pytest.mark.soak
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_25_workers_become_100_and_25_again_within_a_minute(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str
) -> None:
    """Several workers a process, since 100 processes are more than two cores carry; one process of each size killed."""
    async with fleet(nats_server, tmp_path, retention, partitions=200, pause=0.2, workers=5, ttl=10.0) as group:
        group.patience = 300.0
        group.start(*(f"a{n}" for n in range(5)))
        await group.settled(25)
        group.flood.start()
        await group.more_done(500)
        group.start(*(f"b{n}" for n in range(15)))
        await group.settled(100)
        group.kill("b0")
        group.kill(await group.leader())
        await group.settled(90)
        await group.stop(*sorted(group.processes)[5:])
        await group.settled(25)
        verdict = await group.finish()
        assert verdict.clean, await group.explain(verdict)
        print(
            f"{retention}: {group.flood.total} messages, {verdict.duplicates} duplicates, refused {group.sink.refused}"
        )
