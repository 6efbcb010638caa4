"""Atomic batches on a replicated stream: leaders that change, and a cluster that cannot decide."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.support.freezing import freeze
from tests.support.streams import make_stream

from penstock import errors
from penstock.publish import Batch, BatchAck, BatchOutcomeUnknown, BatchRef, BlockingPublisher, Publisher
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.testing.contents import stream_data
from penstock.testing.polling import eventually
from penstock.wire import blocking

MEMBERS = [b"%d" % number for number in range(5)]


def leader_of(cluster: EmbeddedCluster, publisher: BlockingPublisher) -> EmbeddedServer:
    name = blocking.run(publisher.jetstream.stream_info("S")).leader
    return next(node for node in cluster.nodes if node.config.name == name)


@contextmanager
def frozen(nodes: list[EmbeddedServer]) -> Iterator[None]:
    """Servers that are there and do nothing."""
    freeze(*(node.pid for node in nodes))
    try:
        yield
    finally:
        for node in nodes:
            os.kill(node.pid, signal.SIGCONT)


@pytest.fixture
def stream(nats_cluster: EmbeddedCluster) -> Iterator[EmbeddedServer]:
    """The leader of a new stream with three replicas."""
    with BlockingPublisher.connect(nats_cluster.settings) as publisher:
        blocking.run(make_stream(publisher.jetstream, allow_atomic=True, num_replicas=3))
        yield leader_of(nats_cluster, publisher)


@pytest.mark.kills
def test_a_commit_that_the_cluster_cannot_decide_yet_is_not_called_lost(
    nats_cluster: EmbeddedCluster, stream: EmbeddedServer
) -> None:
    followers = [node for node in nats_cluster.nodes if node is not stream]
    settings = replace(stream.settings, timeout=2.0)
    with BlockingPublisher.connect(settings) as publisher:
        batch = Batch("S")
        batch.extend("s.a", MEMBERS)
        flight = publisher.launch(batch)
        with frozen(followers):
            with pytest.raises(BatchOutcomeUnknown, match="no answer"):
                publisher.finish(publisher.send_commit(flight))
            with pytest.raises(BatchOutcomeUnknown, match="given out sequence 5 and stored 0"):
                publisher.resolve(flight.ref, settle=0)
        assert resolved(publisher, flight.ref) is not None
    assert stream_data(nats_cluster.settings, "S") == MEMBERS


def resolved(publisher: BlockingPublisher, ref: BatchRef) -> BatchAck | None:
    """What resolve says as soon as the cluster can decide again."""
    said: list[BatchAck | None] = []

    def decided() -> bool:
        try:
            said.append(publisher.resolve(ref, settle=0.1))
        except (BatchOutcomeUnknown, errors.Unavailable, errors.ServerBusy):
            return False
        return True

    eventually(decided, within=60)
    return said[0]


async def test_asking_for_message_ids_stores_nothing_on_a_replicated_stream(
    nats_cluster: EmbeddedCluster, stream: EmbeddedServer
) -> None:
    async with await Publisher.connect(nats_cluster.settings) as publisher:
        async with publisher.atomic("S") as batch:
            for name in ("a", "b"):
                await batch.add(f"s.{name}", b"", message_id=name)
        asked = [(f"s.{name}", name) for name in ("a", "b", "c", "d")]
        assert await publisher.stored_ids(asked) == {"a", "b"}
        assert await publisher.stored_ids(asked) == {"a", "b"}
        assert (await publisher.publish_batch("S", "s.c", [b""], message_id="c")).sequence == 3


@pytest.mark.kills
@pytest.mark.parametrize("frames_sent", [5, 3], ids=["commit", "no commit"])
def test_a_leader_killed_before_or_after_the_commit_leaves_all_or_nothing(
    nats_cluster: EmbeddedCluster, stream: EmbeddedServer, frames_sent: int
) -> None:
    others = [node.url for node in nats_cluster.nodes if node is not stream]
    settings = replace(nats_cluster.settings.with_servers(*others), timeout=3.0)
    with BlockingPublisher.connect(settings) as publisher:
        batch = Batch("S")
        batch.extend("s.a", MEMBERS)
        flight = publisher.launch(batch)
        first, last = publisher.connection.inbox(), publisher.connection.inbox()
        publisher.connection.send(b"".join(frames_of(b"".join(batch.commit(first, last)))[:frames_sent]))
        publisher.connection.flush()
        stream.kill()
        said = resolved(publisher, flight.ref)
    assert said is None or frames_sent == len(MEMBERS)
    # The survivors may still be choosing leaders: reading waits longer than the publisher did.
    assert stream_data(replace(settings, timeout=20.0), "S") == (MEMBERS if said else [])


def frames_of(data: bytes) -> list[bytes]:
    return re.split(rb"(?=HPUB )", data)[1:]
