"""The JetStream API against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import nats
import pytest
from tests.support.streams import make_stream

from penstock import errors
from penstock.jetstream import Broker, JetStream, connect
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.wire import aio


async def test_stream_and_consumer_live_from_create_to_delete(broker: Broker, js: JetStream) -> None:
    await make_stream(js)
    await broker.request("s.a", b"one", 20)
    message = await js.get_message("S", 1)
    assert (message.subject, message.data) == ("s.a", b"one")
    await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
    assert [c.name for c in await js.consumers("S")] == ["c"]
    assert await js.consumer_names("S") == ["c"]
    assert (await js.consumer_info("S", "c")).pending == 1
    until = datetime.now(UTC) + timedelta(hours=1)
    assert await js.pause_consumer("S", "c", until) == until
    assert (await js.consumer_info("S", "c")).paused
    await js.resume_consumer("S", "c")
    assert not (await js.consumer_info("S", "c")).paused
    assert (await js.reset_consumer("S", "c", 2)).reset_seq == 2
    await js.delete_consumer("S", "c")
    with pytest.raises(errors.ConsumerNotFound):
        await js.consumer_info("S", "c")
    assert await js.purge_stream("S") == 1
    await js.delete_stream("S")
    with pytest.raises(errors.StreamNotFound):
        await js.stream_info("S")


async def test_a_consumer_is_never_moved_beyond_the_end_of_its_stream(broker: Broker, js: JetStream) -> None:
    await make_stream(js, subjects=["s"])
    await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
    for _ in range(6):
        await broker.request("s", b"", 20)
    for beyond in (8, 99_999):
        with pytest.raises(errors.ConfigError, match=f"at sequence {beyond}: the stream ends at 6.* reset it to 7"):
            await js.reset_consumer("S", "c", beyond)
    assert (await js.reset_consumer("S", "c", 7)).reset_seq == 7
    await broker.request("s", b"", 20)

    async def is_counted() -> bool:
        return (await js.consumer_info("S", "c")).pending == 1

    await eventually_async(is_counted, what="what comes after the reset to be counted, and not to be skipped")


async def test_creating_twice_changes_nothing_and_another_configuration_is_refused(js: JetStream) -> None:
    stream = {"name": "S", "subjects": ["s"], "max_msgs": 5}
    consumer = {"durable_name": "c", "ack_policy": "explicit", "deliver_policy": "new"}
    for _ in range(2):
        await js.create_stream(stream)
        await js.create_consumer("S", consumer)
    with pytest.raises(errors.AlreadyExists):
        await js.create_stream({**stream, "max_msgs": 6})
    with pytest.raises(errors.AlreadyExists):
        await js.create_consumer("S", {**consumer, "ack_wait": 7_000_000_000})


async def test_an_update_keeps_what_another_client_set_and_we_never_name(
    nats_server: EmbeddedServer, js: JetStream
) -> None:
    other = await nats.connect(nats_server.url)
    try:
        theirs = other.jetstream()
        await theirs.add_stream(name="S", subjects=["s"], description="theirs", max_msgs_per_subject=7)
        await theirs.add_consumer("S", durable_name="c", max_ack_pending=77, metadata={"owner": "them"})
        before = (await js.stream_info("S")).config
        after = (await js.update_stream("S", {"max_msgs": 100})).config
        assert {k: v for k, v in after.items() if v != before.get(k)} == {"max_msgs": 100}
        assert (after["description"], after["max_msgs_per_subject"]) == ("theirs", 7)
        before = (await js.consumer_info("S", "c")).config
        after = (await js.update_consumer("S", "c", lambda config: {**config, "ack_wait": 9_000_000_000})).config
        assert {k: v for k, v in after.items() if v != before.get(k)} == {"ack_wait": 9_000_000_000}
        assert after["max_ack_pending"] == 77
        assert after["metadata"]["owner"] == "them"
    finally:
        await other.close()


async def test_what_is_not_there_is_named_by_kind(js: JetStream) -> None:
    with pytest.raises(errors.StreamNotFound, match="'NONE'"):
        await js.stream_info("NONE")
    calls: Iterable[Awaitable[object]] = (
        js.delete_stream("NONE"),
        js.purge_stream("NONE"),
        js.update_stream("NONE", {}),
        js.consumers("NONE"),
    )
    for call in calls:
        with pytest.raises(errors.StreamNotFound):
            await call
    await make_stream(js, subjects=["s"])
    calls = (
        js.consumer_info("S", "none"),
        js.delete_consumer("S", "none"),
        js.update_consumer("S", "none", {}),
        js.reset_consumer("S", "none"),
        js.pause_consumer("S", "none", timedelta(1)),
    )
    for call in calls:
        with pytest.raises(errors.ConsumerNotFound):
            await call
    calls = (js.get_message("S", 5), js.get_message("S", last_of="s"), js.delete_message("S", 5))
    for call in calls:
        with pytest.raises(errors.MessageNotFound):
            await call


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a/b", "a\\b", "a\tb"])
async def test_a_name_that_is_none_is_refused_before_it_is_sent(js: JetStream, name: str) -> None:
    for call in (
        js.stream_info(name),
        js.create_stream({"name": name}),
        js.delete_stream(name),
        js.consumer_info("S", name),
        js.delete_consumer("S", name),
        js.consumers(name),
    ):
        with pytest.raises(errors.ConfigError):
            await call
    assert js.requests == 0


async def test_the_servers_words_are_kept(js: JetStream) -> None:
    with pytest.raises(errors.InvalidConfiguration, match="replicas > 1 not supported in non-clustered mode") as caught:
        await js.create_stream({"name": "S", "subjects": ["s"], "num_replicas": 3})
    assert (caught.value.code, caught.value.err_code) == (500, 10074)
    await make_stream(js, subjects=["s"])
    with pytest.raises(errors.InvalidConfiguration, match="overlap"):
        await js.create_stream({"name": "T", "subjects": ["s"]})
    with pytest.raises(errors.InvalidConfiguration, match="can not change"):
        await js.update_stream("S", {"storage": "memory"})
    with pytest.raises(errors.InvalidConfiguration, match="no_such_field"):
        await js.update_stream("S", {"no_such_field": 1})
    await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
    with pytest.raises(errors.InvalidConfiguration, match="deliver policy"):
        await js.update_consumer("S", "c", {"deliver_policy": "new"})


async def test_headers_are_read_as_they_were_written(broker: Broker, js: JetStream) -> None:
    await make_stream(js, subjects=["s"])
    block = "NATS/1.0\r\nPlain: a\r\nTwice: 1\r\nEmpty: \r\nTwice: 2\r\nOdd-ü: ä: =?b?\r\nlower: x\r\n\r\n".encode()
    frame = b"HPUB s %d %d\r\n" % (len(block), len(block) + 2) + block + b"hi\r\n"
    await broker.connection.send(frame)
    await broker.connection.flush()

    async def is_stored() -> bool:
        return (await js.stream_info("S")).state.messages == 1

    await eventually_async(is_stored, what="the message to be stored: nobody acknowledges it")
    message = await js.get_message("S", 1)
    assert message.headers == {
        "Plain": ["a"],
        "Twice": ["1", "2"],
        "Empty": [""],
        "Odd-ü": ["ä: =?b?"],
        "lower": ["x"],
    }
    assert message.data == b"hi"


async def test_subjects_that_are_the_same_in_json_are_listed_to_their_end(
    nats_server: EmbeddedServer, js: JetStream
) -> None:
    """A publisher chooses the bytes. Listing them went on for ever."""
    await make_stream(js, subjects=["s.>"])
    async with await aio.connect(nats_server.settings) as connection:
        for subject in (b"s.\xfe", b"s.\xff", b"s.\x85"):
            await connection.send(b"PUB %b 0\r\n\r\n" % subject)
        await connection.request("s.a", b"")  # answered once it and everything before it is stored
    info = await js.stream_info("S", subjects_filter="s.>")
    assert (info.state.messages, set(info.state.subjects)) == (4, {"s.\ufffd", "s.a"})


async def test_messages_are_found_by_sequence_and_by_subject(broker: Broker, js: JetStream) -> None:
    await make_stream(js, subjects=["s.*"])
    for n, subject in enumerate(("s.a", "s.b", "s.a"), start=1):
        await broker.request(subject, str(n).encode(), 20)
    assert (await js.get_message("S", last_of="s.a")).sequence == 3
    assert (await js.get_message("S", 2, next_of="s.a")).sequence == 3
    assert (await js.stream_info("S", subjects_filter=">")).state.subjects == {"s.a": 2, "s.b": 1}
    await js.delete_message("S", 2, erase=True)
    assert await js.purge_stream("S", subject="s.a", keep=1) == 1
    with pytest.raises(errors.MessageNotFound, match="message seq=2 of stream 'S'"):
        await js.get_message("S", 2)
    with pytest.raises(errors.ConfigError):
        await js.purge_stream("S", before_seq=1, keep=1)


async def test_listing_goes_beyond_one_page(js: JetStream) -> None:
    names = [f"S{n:03}" for n in range(300)]
    for name in names:
        await make_stream(js, name, subjects=[name], storage="memory")
    assert [stream.name for stream in await js.streams()] == names
    assert (await js.stream_names()) == names
    before = js.requests
    await js.streams()
    assert js.requests - before == 2
    consumers = [f"c{n:03}" for n in range(600)]
    for name in consumers:
        await js.create_consumer("S000", {"durable_name": name, "ack_policy": "explicit", "mem_storage": True})
    assert [consumer.name for consumer in await js.consumers("S000")] == consumers
    assert (await js.consumer_names("S000")) == consumers


async def test_a_listing_misses_nothing_while_streams_come_and_go(js: JetStream) -> None:
    stay = {f"M{n:03}" for n in range(300)}
    for name in (*sorted(stay), *(f"A{n}" for n in range(40))):
        await make_stream(js, name, subjects=[name], storage="memory")

    async def come_and_go() -> None:
        for n in range(40):
            await js.delete_stream(f"A{n}")
            await asyncio.sleep(0)

    changing = asyncio.create_task(come_and_go())
    for _ in range(5):
        assert stay <= {stream.name for stream in await js.streams()}
    await changing


@pytest.mark.kills
async def test_a_stream_that_no_server_answers_for_is_not_taken_for_absent(nats_cluster: EmbeddedCluster) -> None:
    async with connect(replace(nats_cluster.settings, timeout=15)) as broker:
        js = broker.jetstream
        names = [f"S{n}" for n in range(9)]
        for name in names:
            await make_stream(js, name, subjects=[name])
        holders = {stream.leader: stream.name for stream in await js.streams()}
        victim = next(node for node in nats_cluster.nodes if node.config.server_name in holders)
        victim.kill()
        unanswered = holders[victim.config.server_name]
        silent: list[list[str]] = []

        async def is_named() -> bool:
            """A cluster that has just lost a node may first not answer at all."""
            try:
                silent.append(sorted(stream.name for stream in await js.streams()))
            except errors.Unavailable as exc:
                return unanswered in str(exc)
            return False

        await eventually_async(is_named, within=60, what=f"{unanswered} to be named", state=lambda: silent)
        assert all(listed == names for listed in silent), "no listing leaves a stream out without a word"
        victim.start()

        async def all_answer() -> bool:
            try:
                return sorted(stream.name for stream in await js.streams()) == names
            except errors.Unavailable:
                return False

        await eventually_async(all_answer, within=60, what="all streams to be listed again")
