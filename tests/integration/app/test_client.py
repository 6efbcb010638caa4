"""The front door: one object to publish, read and keep, for asyncio and for code that blocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.streams import make_stream

import penstock
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.jetstream.kv import NoBucket, bucket_layout
from penstock.publish import WrongSequence
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async


@pytest.fixture
def server(nats_server: EmbeddedServer) -> EmbeddedServer:
    return nats_server


async def test_messages_are_published_and_looked_at_on_every_retention_without_a_consumer(
    server: EmbeddedServer,
) -> None:
    async with penstock.connect(server.url) as client:
        streams: dict[str, dict[str, Any]] = {
            "L": {},
            "D": {"allow_direct": True},
            "W": {"retention": "workqueue"},
            "I": {"retention": "interest", "allow_direct": True},
        }
        for name, config in streams.items():
            await make_stream(client.jetstream, name, **config)
            if name == "I":
                await client.jetstream.create_consumer(name, {"durable_name": "c", "ack_policy": "explicit"})
            sequences = [
                await client.publish(f"{name.lower()}.{n % 2}", {"n": n}, headers={"X": str(n)}) for n in range(600)
            ]
            assert sequences == list(range(1, 601))
            stream = client.stream(name)
            found = [one async for one in stream.messages()]
            assert [one.sequence for one in found] == sequences
            assert (found[5].data, found[5].headers) == (b'{"n":5}', {"X": ["5"]})
            some = [one.sequence async for one in stream.messages([f"{name.lower()}.1"], first=100, last=103)]
            assert some == [100, 102]
            both = [one.sequence async for one in stream.messages([f"{name.lower()}.{n}" for n in (0, 1)], last=3)]
            assert both == [1, 2, 3]
            assert [one async for one in stream.messages(since=datetime.now(UTC) + timedelta(hours=1))] == []
            assert len([one async for one in stream.messages(since="1h")]) == 600
            assert len(await client.jetstream.consumer_names(name)) == (name == "I")


async def test_what_comes_is_followed(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await make_stream(client.jetstream, "S", allow_direct=True)
        await client.publish("s.a", b"1")
        seen = []
        async for message in client.stream("S").messages(follow=True):
            seen.append(message.data)
            if len(seen) < 3:
                await client.publish("s.a", b"%d" % (len(seen) + 1))
            else:
                break
    assert seen == [b"1", b"2", b"3"]


async def test_a_message_goes_to_one_subject_that_a_stream_takes(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await make_stream(client.jetstream, "S")
        with pytest.raises(ConfigError, match="wildcard"):
            await client.publish("s.*", b"x")
        with pytest.raises(Unavailable, match=r"no stream takes 'elsewhere\.a'"):
            await client.publish("elsewhere.a", b"x")
        await client.publish("s.a", b"x")
        assert [one.sequence async for one in client.stream("S").messages("s.a")] == [1]


async def test_a_server_that_was_restarted_is_spoken_to_again(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await make_stream(client.jetstream, "S", allow_atomic=True)
        await make_stream(client.jetstream, "KV_b", subjects=["$KV.b.>"], allow_direct=True)
        await client.publish("s.a", b"1")
        server.kill()
        server.start()
        await eventually_async(lambda: not client._publisher.connection.connected, 10, "the loss to be noticed")
        assert (await client.stream("S").info()).state.messages == 1
        server.kill()
        server.start()
        await eventually_async(lambda: not client._publisher.connection.connected, 10, "the loss to be noticed")
        assert [one.data async for one in client.stream("S").messages()] == [b"1"]
        server.kill()
        server.start()
        await eventually_async(lambda: not client._publisher.connection.connected, 10, "the loss to be noticed")
        assert await client.kv("b").get("k") is None


async def test_mistakes_are_told(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await make_stream(client.jetstream, "S", max_msg_size=10)
        with pytest.raises(ConfigError, match="no filter"):
            assert [one async for one in client.stream("S").messages(["a..b"])]
        with pytest.raises(PenstockError, match=r"publish to 's\.a': message size exceeds"):
            await client.publish("s.a", b"x" * 100)
        with pytest.raises(Unavailable):
            await client.publish("nobody.takes", b"")
        with pytest.raises(ConfigError, match="cannot be the data"):
            await client.publish("s.a", object())
    with pytest.raises(ConfigError, match="closed"):
        await client.publish("s.a", b"")


async def test_several_keys_change_at_once_or_not_at_all(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await client.jetstream.create_stream(
            {"name": "KV_users", "subjects": ["$KV.users.>"], "max_msgs_per_subject": 1, "allow_atomic": True}
        )
        users = client.kv("users")
        assert await users.put("a", {"balance": 10}, revision=0) == 1
        assert await users.put("b", {"balance": 0}) == 2
        async with users.atomic() as batch:
            batch.put("a", {"balance": 4}, revision=1)
            batch.put("b", {"balance": 6}, revision=2)
        late = users.atomic()
        late.put("b", {"balance": 100}, revision=4)
        late.put("a", {"balance": 100}, revision=1)
        with pytest.raises(WrongSequence):
            await late.__aexit__(None)
        found = [await users.get(key) for key in "ab"]
        assert [one and one.value for one in found] == [b'{"balance":4}', b'{"balance":6}']
        await users.delete("a")
        assert await users.get("a") is None
        assert await users.get("nosuch") is None


async def test_single_keys_need_no_more_than_any_bucket_has(server: EmbeddedServer) -> None:
    """A bucket as other tools make it takes no atomic batches."""
    async with penstock.connect(server.url) as client:
        await client.jetstream.create_stream(bucket_layout("plain", "made by another tool"))
        plain = client.kv("plain")
        assert await plain.put("a", 1, revision=0) == 1
        assert await plain.put("a", 2, revision=1) == 2
        with pytest.raises(WrongSequence, match="key 'a' of stream 'KV_plain' no longer has revision 1"):
            await plain.put("a", 3, revision=1)
        with pytest.raises(WrongSequence, match="no longer has revision 0"):
            await plain.delete("a", revision=0)
        await plain.delete("a", revision=2)
        assert await plain.get("a") is None
        assert await plain.put("a", 4) == 4
        with pytest.raises(ConfigError, match="wildcard"):
            await plain.put("b.*", 1)
        with pytest.raises(NoBucket, match="there is no bucket 'nosuch'"):
            await client.kv("nosuch").get("a")
        with pytest.raises(NoBucket, match="does the bucket exist"):
            await client.kv("nosuch").put("a", 1)


async def test_facts_are_appended_read_by_page_and_confirmed(server: EmbeddedServer) -> None:
    async with penstock.connect(server.url) as client:
        await make_stream(client.jetstream, "FACTS")
        await client.jetstream.create_consumer(
            "FACTS", {"durable_name": "edge", "ack_policy": "explicit", "ack_wait": 2_000_000_000}
        )
        for number in (1, 2, 2, 3):
            await client.append_fact("facts.a", f"f-{number}", {"n": number})
        seen = []
        async for page in client.reader("edge").pages(limit=2, wait=0.5):
            seen.append([fact.id for fact in page.facts])
            await page.confirm()
        assert seen == [["f-1", "f-2"], ["f-3"]]
        assert (await client.consumer("edge", "FACTS").info()).unprocessed == 0


def test_code_that_blocks_has_the_same(server: EmbeddedServer) -> None:
    with penstock.connect_blocking(server.url) as client:
        client.jetstream.create_stream({"name": "S", "subjects": ["s.>"], "allow_atomic": True, "allow_direct": True})
        assert client.publish("s.a", {"n": 1}) == 1
        with client.atomic("S") as batch:
            batch.add("s.a", b"2")
            batch.add("s.b", b"3")
        found: list[Any] = list(client.stream("S").messages(["s.a"]))
        assert [one.data for one in found] == [b'{"n":1}', b"2"]
        with pytest.raises(Unavailable):
            client.publish("nobody.takes", b"")
        client.append_fact("s.facts", "f-1", b"x")
        client.jetstream.create_consumer(
            "S", {"durable_name": "edge", "ack_policy": "explicit", "filter_subject": "s.facts.>"}
        )
        seen = []
        for page in client.reader("edge").pages(wait=0.5):
            seen += [fact.id for fact in page.facts]
            page.confirm()
        assert seen == ["f-1"]


async def test_keys_of_a_bucket_in_another_domain_change_there_and_not_in_a_bucket_of_the_same_name_here(
    tmp_path: Path,
) -> None:
    layout = {"name": "KV_users", "subjects": ["$KV.users.>"], "max_msgs_per_subject": 1, "allow_atomic": True}
    with (
        EmbeddedServer(tmp_path / "hub", domain="hub") as hub,
        EmbeddedServer(tmp_path / "edge", domain="edge", leaf_of=hub.leaf_url) as edge,
    ):
        await eventually_async(lambda: hub.reaches("edge"), 30, "the leaf")
        for server in (hub, edge):
            async with penstock.connect(server.url) as client:
                await client.jetstream.create_stream(layout)
        async with penstock.connect(edge.url, domain="hub") as client:
            users = client.kv("users")
            await users.put("a", 1)
            async with users.atomic() as batch:
                batch.put("a", 2)
                batch.put("b", 3)
            found = [await users.get(key) for key in "ab"]
            assert [one and one.value for one in found] == [b"2", b"3"]
        async with penstock.connect(edge.url) as client:
            assert await client.kv("users").get("a") is None
            assert await client.kv("users").get("b") is None
