"""A defect of nats-server 2.15.1 that costs a message, and that a query says so.

Where consuming deletes, deleted messages leave marks in the stream's last block. When nothing is published while a
whole block fills with them, the server removes that block at its next tidying, every two minutes, and with it marks the
last message of the stream as deleted, although it is alive in an earlier block. A server that is killed later reads
its blocks anew and believes the mark. A single message published meanwhile keeps it from happening.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.spark.commit import commit
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.spark.link import Link
from penstock.spark.loss import MessagesGone
from penstock.testing import eventually

COUNT, CONSUMED = 500_000, 400_000
TIDIED_WITHIN = 200.0  # seconds


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_a_message_that_the_server_lost_while_it_was_killed_is_missed(tmp_path: Path, retention: str) -> None:
    with EmbeddedServer(data=tmp_path / "nats") as server, Link(server.settings) as link:
        stream = {"name": "IN", "subjects": ["in.>"], "allow_atomic": True, "allow_direct": True}
        link.call(lambda api: api.create_stream({**stream, "retention": retention}))
        options = {"servers": server.url, "stream": "IN", "consumer": "d", "startingOffsets": "consumer"}
        reader = JetStreamDataSource(options).streamReader(COLUMNS)
        start = reader.initialOffset()
        _publish(server)
        found = link.call(lambda api: api.consumer_info("IN", "d"))
        commit(link, link.stream_info("IN"), found, CONSUMED)
        folder = next(tmp_path.glob("nats/**/IN/msgs"))
        before = len(list(folder.glob("*.blk")))
        eventually(lambda: len(list(folder.glob("*.blk"))) < before, TIDIED_WITHIN, "the server to tidy up its blocks")
        server.kill()
        server.start()
        done = {**start, "sequence": CONSUMED}
        end = reader.latestOffset(done, reader.getDefaultReadLimit())
        assert link.stream_info("IN").state.deleted, "this server does not lose it: take the note out of docs/spark.md"
        with pytest.raises(MessagesGone, match="1 message of stream 'IN' is gone"):
            reader.partitions(done, end)
        reader.stop()


def _publish(server: EmbeddedServer) -> None:
    with BlockingPublisher.connect(server.settings) as publisher:
        for first in range(0, COUNT, 1000):
            publisher.publish_batch("IN", "in.event", [b"%d" % n for n in range(first, first + 1000)])
