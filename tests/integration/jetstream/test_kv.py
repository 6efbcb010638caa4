"""The one client of KV buckets on a real server: revisions, conflicts, and answers that are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.errors import ConnectionLost, OutcomeUnknown, Unavailable
from penstock.jetstream.connection import Broker, WrongRevision
from penstock.jetstream.kv import KeyValue, NoBucket, bucket_layout, is_deleted
from penstock.jetstream.model import Json
from penstock.server.embedded import EmbeddedServer
from penstock.wire.headers import Headers


class Lossy(Broker):
    """Loses the answer to a publish: after the message was stored, or with the message itself."""

    arrives = True
    server: EmbeddedServer | None = None

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None, what: str = "") -> Json:
        if self.arrives:
            await super().publish(subject, data, headers, what)
        if self.server:
            self.server.kill()
        raise ConnectionLost("a server", "as if")


@pytest.fixture
async def bucket(broker: Broker) -> AsyncIterator[KeyValue]:
    await broker.jetstream.create_stream(bucket_layout("b", "for a test"))
    yield KeyValue(broker, "b")
    if broker.connection.connected:
        await broker.jetstream.delete_stream("KV_b")


async def test_a_value_replaces_only_the_revision_it_was_made_for(bucket: KeyValue) -> None:
    first = await bucket.write("k", b"1", 0)
    second = await bucket.write("k", b"2", first)
    for stale in (0, first):
        with pytest.raises(WrongRevision, match="write key 'k' of bucket 'b'"):
            await bucket.write("k", b"3", stale)
    found = await bucket.newest("k")
    assert found
    assert (found.data, found.sequence) == (b"2", second)
    assert bucket.writes == 2


async def test_keys_are_listed_and_a_marker_is_no_value(bucket: KeyValue) -> None:
    await bucket.write("a.1", b"x")
    await bucket.write("b.1", b"", None, {"KV-Operation": "DEL"})
    assert await bucket.keys() == ["a.1", "b.1"]
    assert await bucket.keys("a.>") == ["a.1"]
    found = await bucket.newest("b.1")
    assert found
    assert is_deleted(found)
    assert await bucket.newest("c") is None


async def test_without_a_bucket_nothing_is_written_and_that_may_change(broker: Broker) -> None:
    missing = KeyValue(broker, "missing")
    assert not await missing.exists()
    assert await missing.keys() == []
    with pytest.raises(NoBucket) as caught:
        await missing.write("k", b"1")
    assert caught.value.retryable


async def test_a_lost_answer_is_decided_by_a_look_at_the_key(bucket: KeyValue, nats_server: EmbeddedServer) -> None:
    async with Lossy(nats_server.settings) as lossy:
        mine = KeyValue(lossy, "b")
        first = await mine.write("k", b"mine", 0)
        assert (await bucket.newest("k")).sequence == first  # type: ignore[union-attr] # it is there
        lossy.arrives = False
        await bucket.write("k", b"another's", first)
        with pytest.raises(Unavailable, match="was not written"):
            await mine.write("k", b"mine too", first)
        with pytest.raises(Unavailable, match="was not written"):
            await mine.write("never", b"x", 0)


async def test_a_value_from_before_is_not_taken_for_ours(bucket: KeyValue, nats_server: EmbeddedServer) -> None:
    before = await bucket.write("k", b"same")
    async with Lossy(nats_server.settings) as lossy:
        lossy.arrives = False
        with pytest.raises(Unavailable, match="was not written"):
            await KeyValue(lossy, "b").write("k", b"same", before)


async def test_when_nobody_can_look_the_outcome_is_unknown(bucket: KeyValue, nats_server: EmbeddedServer) -> None:
    async with Lossy(replace(nats_server.settings, timeout=1.0)) as lossy:
        lossy.server = nats_server
        with pytest.raises(OutcomeUnknown, match="key 'k'"):
            await KeyValue(lossy, "b").write("k", b"x", 0)
