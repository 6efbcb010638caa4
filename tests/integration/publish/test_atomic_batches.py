"""Atomic batches against a real server: what the document promises, and its limits.

A contract: each test runs on the asyncio and on the blocking publisher, unless it says why not.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from tests.support.connections import HALVES
from tests.support.publishers import AnyBatch, AnyPublisher, connect_publisher, loss_noticed

from penstock import errors, publish
from penstock.publish import BlockingPublisher, Publisher
from penstock.publish import batch as batch_module
from penstock.publish.batch import Batch, drop
from penstock.publish.loading import PartlyStored
from penstock.server.embedded import EmbeddedServer
from penstock.testing.polling import eventually_async
from penstock.wire import aio, frames, headers

STREAM = {"name": "S", "subjects": ["s.>"], "allow_atomic": True}


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> str:
    """Which of the two publishers is tested."""
    return str(request.param)


@pytest.fixture
async def publisher(nats_server: EmbeddedServer, half: str) -> AsyncIterator[AnyPublisher]:
    async with await connect_publisher(half, nats_server.settings) as made:
        await made.jetstream.create_stream(STREAM)
        yield made


@pytest.fixture
async def asyncio_publisher(nats_server: EmbeddedServer) -> AsyncIterator[Publisher]:
    """For tests that are about the asyncio publisher only."""
    async with await Publisher.connect(nats_server.settings) as made:
        await made.jetstream.create_stream(STREAM)
        yield made


@pytest.fixture
def blocking_publisher(nats_server: EmbeddedServer, asyncio_publisher: Publisher) -> Iterator[BlockingPublisher]:
    """For tests that are about the blocking publisher only."""
    with BlockingPublisher.connect(nats_server.settings) as made:
        yield made


async def stored(publisher: AnyPublisher, stream: str = "S") -> list[bytes]:
    """The payloads in the stream, in order."""
    state = (await publisher.jetstream.stream_info(stream)).state
    found = []
    for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
        found.append((await publisher.jetstream.get_message(stream, sequence)).data)
    return found


async def fill(batch: AnyBatch, count: int) -> None:
    for number in range(count):
        await batch.add("s.a", b"%d" % number)


# -- the promise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eob", [False, True], ids=["commit on last", "eob"])
async def test_leaving_the_block_stores_all_next_to_each_other(publisher: AnyPublisher, eob: bool) -> None:
    await publisher.publish_batch("S", "s.before", [b"before"])
    async with publisher.atomic("S", eob=eob) as batch:
        assert await batch.add("s.a", b"a", headers={"Colour": ["red", "blue"]}) == 0
        assert await batch.add("s.b", b"b", message_id="id-b") == 1
        assert await batch.add("s.c", b"") == 2
    ack = batch.ack
    assert (ack.stream, ack.sequence, ack.batch_id, ack.count) == ("S", 4, batch.batch_id, 3)
    assert [ack.sequence_of(index) for index in range(3)] == [2, 3, 4] == list(ack.sequences)
    messages = [await publisher.jetstream.get_message("S", sequence) for sequence in ack.sequences]
    assert [(m.subject, m.data) for m in messages] == [("s.a", b"a"), ("s.b", b"b"), ("s.c", b"")]
    assert messages[0].headers["Colour"] == ["red", "blue"]
    assert messages[1].headers["Nats-Msg-Id"] == ["id-b"]
    assert "Colour" not in messages[1].headers


@pytest.mark.parametrize("flushed", [False, True])
async def test_an_exception_inside_stores_nothing(publisher: AnyPublisher, flushed: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S") as batch:
            await fill(batch, 5)
            if flushed:
                await batch.flush()
            raise ZeroDivisionError
    assert await stored(publisher) == []
    with pytest.raises(errors.ConfigError, match="not committed"):
        _ = batch.ack


async def test_members_that_are_flushed_one_by_one_are_stored_like_others(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"a")
        await batch.flush()
        await batch.add("s.b", b"b", headers={"X": "y"})
        await batch.flush()
        await batch.add("s.c", b"c")
    assert list(batch.ack.sequences) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"a")
            await batch.add("s.a", b"b")
            await batch.flush()
            raise ZeroDivisionError
    ack = await publisher.publish_batch("S", ["s.a", "s.b"], [b"1", b"2"], headers=[{"A": "1"}, None])
    assert list(ack.sequences) == [4, 5]
    assert await stored(publisher) == [b"a", b"b", b"c", b"1", b"2"]


def test_several_blocking_batches_can_be_under_way(blocking_publisher: BlockingPublisher) -> None:
    """Blocking only: `begin` and `finish` are what tasks are to asyncio."""
    flights = []
    for number in range(4):
        content = Batch("S")
        content.extend("s.a", [b"%d" % number] * 100)
        flights.append(blocking_publisher.begin(content))
    acks = [blocking_publisher.finish(flight) for flight in flights]
    assert [ack.first_sequence for ack in acks] == [1, 101, 201, 301]


async def test_a_batch_is_committed_once_also_by_hand_inside_the_block(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S") as batch:
        await fill(batch, 2)
        ack = await batch.commit()
    assert batch.ack == ack
    with pytest.raises(errors.ConfigError, match="make a new one"):
        await batch.commit()
    with pytest.raises(errors.ConfigError, match="make a new one"):
        await batch.add("s.a", b"")
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"", expected_last_sequence=0)
        with pytest.raises(publish.WrongSequence):
            await batch.commit()
    assert await stored(publisher) == [b"0", b"1"]


async def test_data_that_is_not_bytes_is_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(errors.ConfigError, match="not str"):
        await batch.add("s.a", "text")  # type: ignore[arg-type] # that is the point
    with pytest.raises(errors.ConfigError, match="not int"):
        await publisher.publish_batch("S", "s.a", [b"", 1])  # type: ignore[list-item] # that is the point


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_thousand_messages_are_stored_and_one_more_is_refused_before_anything_is_sent(
    publisher: AnyPublisher,
) -> None:
    async with publisher.atomic("S") as batch:
        await fill(batch, 1000)
    assert batch.ack.count == 1000
    with pytest.raises(publish.TooLarge, match="chunked=True"):
        async with publisher.atomic("S") as batch:
            await fill(batch, 1001)
    assert batch.content.sent == 0
    with pytest.raises(publish.TooLarge):
        await publisher.publish_batch("S", "s.a", [b""] * 1001)
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1000


@pytest.mark.parametrize("eob", [False, True], ids=["commit on last", "eob"])
async def test_the_server_takes_1000_messages_and_refuses_1001(
    publisher: AnyPublisher, monkeypatch: pytest.MonkeyPatch, eob: bool
) -> None:
    """The server's own limit, with our check out of the way."""
    async with publisher.atomic("S", eob=eob) as batch:
        await fill(batch, 1000)
    assert batch.ack.count == 1000
    monkeypatch.setattr("penstock.publish.batch.MAX_MESSAGES", 1001)
    monkeypatch.setattr("penstock.publish.batch._SEQUENCE_LINES", [b"%d\r\n" % n for n in range(1004)])
    with pytest.raises(publish.TooLarge) as caught:
        async with publisher.atomic("S", eob=eob) as batch:
            await fill(batch, 1001)
    assert caught.value.err_code == 10199
    assert batch.content.sent == 1001
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1000


async def test_chunks_are_atomic_each_by_itself(publisher: AnyPublisher) -> None:
    with pytest.raises(ZeroDivisionError):
        async with publisher.atomic("S", chunked=True) as batch:
            for number in range(2500):
                assert await batch.add("s.a", b"%d" % number) == number
            raise ZeroDivisionError
    assert [ack.count for ack in batch.acks] == [1000, 1000]
    async with publisher.atomic("S", chunked=True) as batch:
        for number in range(1001):
            await batch.add("s.a", b"%d" % number)
    assert [ack.count for ack in batch.acks] == [1000, 1]
    assert batch.sequence_of(1000) == 3001
    assert (await publisher.jetstream.get_message("S", 3001)).data == b"1000"


async def test_chunks_are_named_after_the_series(publisher: AnyPublisher) -> None:
    async with publisher.atomic("S", chunked=True, batch_id="series") as batch:
        for number in range(1001):
            await batch.add("s.a", b"%d" % number)
    assert [(ack.batch_id, ack.count) for ack in batch.acks] == [("series-0", 1000), ("series-1", 1)]
    assert batch.sequence_of(1000) == 1001
    with pytest.raises(publish.BadId):
        publisher.atomic("S", chunked=True, batch_id="i" * 60)


@pytest.fixture
async def crowd(nats_server: EmbeddedServer, publisher: AnyPublisher) -> AsyncIterator[Sequence[publish.AtomicBatch]]:
    """As many open batches as the server takes."""
    async with await Publisher.connect(nats_server.settings, in_flight=60) as greedy:
        held = [greedy.atomic("S") for _ in range(50)]
        for batch in held:
            await fill(batch, 2)
            await batch.flush()
        yield held


def refusals_of(batch: AnyBatch) -> list[publish.TooManyInFlight]:
    """What the server answers to a batch because it is crowded, as it comes."""
    seen: list[publish.TooManyInFlight] = []
    accepted = batch.content.accepted

    def watched(first: frames.Message) -> None:
        try:
            accepted(first)
        except publish.TooManyInFlight as refusal:
            seen.append(refusal)
            raise

    batch.content.accepted = watched  # type: ignore[method-assign] # to see the refusals
    return seen


async def test_the_51st_batch_in_flight_waits_for_a_place(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch]
) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    refusals = refusals_of(batch)
    waiting = asyncio.create_task(batch.commit())
    await eventually_async(lambda: len(refusals) >= 2, what="the server to refuse it twice")
    assert not waiting.done()
    await crowd[0].commit()
    assert (await waiting).count == 3
    for one in crowd[1:]:
        await one.commit()
    assert (await publisher.jetstream.stream_info("S")).state.messages == 2 * 50 + 3


@pytest.mark.parametrize("before", [0, 1], ids=["all at once", "after a flush that sent nothing"])
async def test_a_flush_waits_for_a_place_too(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch], before: int
) -> None:
    """A single member is not sent by `flush`, as it may be the one that commits: the batch begins with the next."""
    batch = publisher.atomic("S")
    refusals = refusals_of(batch)
    if before:
        await batch.add("s.a", b"first")
        await batch.flush()
        assert batch.content.sent == 0
    await fill(batch, 3)
    flushing = asyncio.create_task(batch.flush())
    await eventually_async(lambda: len(refusals) >= 2, what="the server to refuse it twice")
    await crowd[0].commit()
    await flushing
    assert (await batch.commit()).count == 3 + before


async def test_too_many_in_flight_is_an_error_when_patience_ends(
    publisher: AnyPublisher, crowd: Sequence[publish.AtomicBatch]
) -> None:
    publisher.patience = 0.3
    with pytest.raises(publish.TooManyInFlight) as caught:
        await publisher.publish_batch("S", "s.a", [b"1", b"2"])
    assert caught.value.err_code == 10210
    assert caught.value.retryable


async def test_one_publisher_keeps_below_its_own_limit(
    nats_server: EmbeddedServer, asyncio_publisher: Publisher
) -> None:
    """Asyncio only: a blocking publisher serves one thread, which decides by itself how many it begins."""
    async with await Publisher.connect(nats_server.settings, in_flight=1, patience=0.1) as narrow:
        batch = narrow.atomic("S")
        await fill(batch, 2)
        await batch.flush()
        with pytest.raises(publish.TooManyInFlight, match="too many"):
            await narrow.publish_batch("S", "s.a", [b"x"])
        await batch.commit()
        await narrow.publish_batch("S", "s.a", [b"x"])


async def test_ten_seconds_of_silence_end_a_batch(nats_server: EmbeddedServer, asyncio_publisher: Publisher) -> None:
    """Both publishers in one test, since it takes the server's ten seconds."""
    async with publish.Abandonments(nats_server.settings) as watch:
        other = await connect_publisher("blocking", nats_server.settings)
        batches: list[AnyBatch] = [asyncio_publisher.atomic("S"), other.atomic("S")]
        for batch in batches:
            await fill(batch, 3)
            await batch.flush()
        await eventually_async(lambda: watch.statistics().total == 2, within=60, what="the server to give up")
    assert watch.statistics().counts == {"S": {"timeout": 2}}
    for batch in batches:
        with pytest.raises(publish.TimedOut, match="10 s without a message"):
            await batch.commit()
    await other.close()
    assert await stored(asyncio_publisher) == []


async def test_a_batch_id_has_at_most_64_characters(nats_server: EmbeddedServer, publisher: AnyPublisher) -> None:
    ack = await publisher.publish_batch("S", "s.a", [b"x"], batch_id="i" * 64)
    assert ack.batch_id == "i" * 64
    with pytest.raises(publish.BadId, match="this one has 65"):
        publisher.atomic("S", batch_id="i" * 65)
    with pytest.raises(publish.BadId):
        publisher.atomic("S", batch_id="")
    # The server's own word for it, with our check out of the way.
    async with await aio.connect(nats_server.settings) as raw:
        reply = raw.inbox()
        await raw.send(drop("i" * 65, b"s.a", reply))
        answer = await raw.wait(reply)
    content = Batch("S")
    content.add("s.a", b"")
    with pytest.raises(publish.BadId) as caught:
        content.accepted(answer)
    assert caught.value.err_code == 10179


# -- expectations and duplicates ---------------------------------------------------------------------------------------


async def test_a_wrong_expected_sequence_rejects_all_and_says_what_is_there(publisher: AnyPublisher) -> None:
    await publisher.publish_batch("S", ["s.a", "s.b"], [b"1", b"2"])
    async with publisher.atomic("S") as batch:
        await batch.add("s.a", b"3", expected_last_sequence=2, expected_last_subject_sequence=1)
        await batch.add("s.b", b"4", expected_last_subject_sequence=2)
        await batch.add("s.b", b"5")
    with pytest.raises(publish.WrongSequence, match="4 was expected, and it is 5") as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"6", expected_last_sequence=4)
            await batch.add("s.b", b"7")
    assert (caught.value.expected, caught.value.actual) == ((4,), 5)
    with pytest.raises(publish.WrongSequence) as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.c", b"8", expected_last_subject_sequence=0)
            await batch.add("s.b", b"9", expected_last_subject_sequence=2)
    assert (caught.value.expected, caught.value.actual) == ((0, 2), 5)
    assert await stored(publisher) == [b"1", b"2", b"3", b"4", b"5"]


async def test_an_expectation_that_the_batch_itself_breaks_is_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    await batch.add("s.a", b"")
    with pytest.raises(errors.ConfigError, match="first message of a batch"):
        await batch.add("s.b", b"", expected_last_sequence=0)
    with pytest.raises(errors.ConfigError, match=r"first message on 's\.a'"):
        await batch.add("s.a", b"", expected_last_subject_sequence=0)


async def test_expectations_under_concurrent_writers_let_exactly_one_win_each_round(
    nats_server: EmbeddedServer, publisher: AnyPublisher, half: str
) -> None:
    """Several writers increment a counter of two subjects with compare-and-swap: no update is lost."""
    await publisher.publish_batch("S", ["s.n", "s.sum"], [b"0", b"0"])
    conflicts = 0

    async def increment(own: AnyPublisher, times: int) -> None:
        nonlocal conflicts
        while times:
            counter = await own.jetstream.get_message("S", last_of="s.n")
            try:
                async with own.atomic("S") as batch:
                    value = b"%d" % (int(counter.data) + 1)
                    await batch.add("s.n", value, expected_last_subject_sequence=counter.sequence)
                    await batch.add("s.sum", value)
            except publish.WrongSequence:
                conflicts += 1
                continue
            times -= 1

    writers = [await connect_publisher(half, nats_server.settings) for _ in range(4)]
    await asyncio.gather(*(increment(writer, 10) for writer in writers))
    for writer in writers:
        await writer.close()
    assert await stored(publisher) == [b"%d" % (n // 2) for n in range(82)]
    assert conflicts > 0


async def test_a_duplicate_message_id_rejects_the_whole_batch(publisher: AnyPublisher) -> None:
    await publisher.publish_batch("S", "s.a", [b"1", b"2"], message_id="chunk-1")
    with pytest.raises(publish.DuplicateId, match="'chunk-1' is already stored") as caught:
        await publisher.publish_batch("S", "s.a", [b"1", b"2"], message_id="chunk-1")
    assert caught.value.message_id == "chunk-1"
    with pytest.raises(publish.DuplicateId, match="one of its 2 message ids") as caught:
        async with publisher.atomic("S") as batch:
            await batch.add("s.a", b"3", message_id="new")
            await batch.add("s.a", b"4", message_id="chunk-1")
    assert caught.value.message_id is None
    assert caught.value.ids == ("new", "chunk-1")
    batch = publisher.atomic("S")
    await batch.add("s.a", b"", message_id="twice")
    with pytest.raises(publish.RepeatedId, match="'twice' comes twice in it"):
        await batch.add("s.a", b"", message_id="twice")
    assert await stored(publisher) == [b"1", b"2"]


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_a_stream_that_does_not_allow_it_says_which_change_does(publisher: AnyPublisher) -> None:
    await publisher.jetstream.create_stream({"name": "PLAIN", "subjects": ["plain"]})
    with pytest.raises(publish.NotEnabled, match="allow_atomic: true"):
        await publisher.publish_batch("PLAIN", "plain", [b"x"])
    await publisher.jetstream.update_stream("PLAIN", {"allow_atomic": True})
    await publisher.publish_batch("PLAIN", "plain", [b"x"])
    # Taken back while the publisher still believes it: the server says the same.
    await publisher.jetstream.update_stream("PLAIN", {"allow_atomic": False})
    with pytest.raises(publish.NotEnabled, match="allow_atomic: true") as caught:
        await publisher.publish_batch("PLAIN", "plain", [b"x", b"y"])
    assert caught.value.err_code == 10174


async def test_a_missing_stream_and_a_foreign_subject_are_named(publisher: AnyPublisher) -> None:
    with pytest.raises(errors.StreamNotFound):
        await publisher.publish_batch("NONE", "s.a", [b"x"])
    publisher.no_responders_timeout = 0
    with pytest.raises(publish.NobodyListens, match=r"'other\.x'"):
        await publisher.publish_batch("S", "other.x", [b"x"])
    with pytest.raises(publish.Gap, match=r"not the stream's: other\.x;") as caught:
        await publisher.publish_batch("S", ["s.a", "other.x", "s.a"], [b"1", b"2", b"3"])
    assert caught.value.strangers == ("other.x",)
    await publisher.jetstream.create_stream({"name": "TWIN", "subjects": ["twin"], "allow_atomic": True})
    with pytest.raises(publish.Gap, match="not the stream's: twin;"):
        await publisher.publish_batch("S", "twin", [b"x"])
    assert await stored(publisher) == []
    assert await stored(publisher, "TWIN") == []


async def test_a_member_over_the_streams_size_limit_is_a_gap(publisher: AnyPublisher) -> None:
    await publisher.jetstream.update_stream("S", {"max_msg_size": 1000})
    with pytest.raises(publish.Gap, match="max_msg_size"):
        await publisher.publish_batch("S", "s.a", [b"1", b"x" * 2000, b"3"])


REFUSED: list[tuple[dict[str, Any], list[bytes], dict[str, str], str]] = [
    ({"max_msgs": 2, "discard": "new"}, [b"x"] * 3, {}, "maximum messages exceeded"),
    ({"max_bytes": 300, "discard": "new"}, [b"x" * 200] * 3, {}, "maximum bytes exceeded"),
    ({"max_msg_size": 200}, [b"x" * 1000], {}, "message size exceeds maximum"),
    ({}, [b"x"], {"Nats-TTL": "10s"}, "TTL is disabled"),
    ({"deny_purge": True}, [b"x"], {"Nats-Rollup": "sub"}, "rollup not permitted"),
    ({"sealed": True}, [b"x"], {}, "sealed stream"),
]
"""What a stream is like, a batch, a header of all its messages, and the reason for which the server refuses it."""


@pytest.mark.parametrize(("config", "payloads", "header", "reason"), REFUSED, ids=[row[3] for row in REFUSED])
async def test_a_final_refusal_is_a_rejection_with_the_servers_reason(
    publisher: AnyPublisher, config: dict[str, Any], payloads: list[bytes], header: dict[str, str], reason: str
) -> None:
    await publisher.jetstream.create_stream({"name": "NO", "subjects": ["no"], "allow_atomic": True})
    await publisher.jetstream.update_stream("NO", config)
    with pytest.raises(publish.BatchRejected, match=reason) as caught:
        await publisher.publish_batch("NO", "no", payloads, headers=[header] * len(payloads))
    assert isinstance(caught.value, publish.StreamFull) == ("exceeded" in reason)
    assert not caught.value.retryable
    assert await stored(publisher, "NO") == []


async def test_increments_of_counters_are_stored_as_a_batch(publisher: AnyPublisher) -> None:
    for name in ("HITS", "OTHER"):
        config = {"name": name, "subjects": [f"{name}.>"], "allow_atomic": True, "allow_msg_counter": True}
        await publisher.jetstream.create_stream(config)
    async with publisher.atomic("HITS") as batch:
        for number in (1, 2, 3):
            await batch.add("HITS.page", b"", headers={"Nats-Incr": f"+{number}"})
    assert await stored(publisher, "HITS") == [b'{"val":"1"}', b'{"val":"3"}', b'{"val":"6"}']
    with pytest.raises(publish.Gap, match=r"not the stream's: OTHER\.page;"):
        await publisher.publish_batch("HITS", "OTHER.page", [b""], headers=[{"Nats-Incr": "+1"}])
    assert await stored(publisher, "OTHER") == []


IN_ORDER: list[tuple[int, dict[str, str], int]] = [
    (10054, {}, 4000),
    (10200, {"Nats-Batch-Commit": "7"}, 0),
    (10177, {"Nats-Expected-Last-Msg-Id": "x"}, 0),
    (10168, {"Nats-Incr": "+1"}, 0),
    (10060, {"Nats-Expected-Stream": "OTHER"}, 0),
    (10166, {"Nats-TTL": "10s"}, 0),
    (10201, {"Nats-Msg-Id": "there"}, 0),
    (10071, {"Nats-Expected-Last-Sequence": "77"}, 0),
    (10111, {"Nats-Rollup": "sub"}, 0),
    (10077, {}, 0),
]
"""What is wrong with a message that commits, as docs/publishing.md lists it: the error, its headers, and its size."""


async def test_a_commit_is_checked_in_the_order_that_the_page_says(asyncio_publisher: Publisher) -> None:
    full = {"max_msgs": 1, "discard": "new", "max_msg_size": 3000, "allow_atomic": True}
    await asyncio_publisher.jetstream.create_stream({"name": "FULL", "subjects": ["full"], **full})
    await asyncio_publisher.publish_batch("FULL", "full", [b""], message_id="there")
    connection = asyncio_publisher.connection
    for number, (expected, own, size) in enumerate(IN_ORDER):
        _, next_own, next_size = IN_ORDER[min(number + 1, len(IN_ORDER) - 1)]
        values = {
            "Nats-Batch-Id": f"b{number}",
            "Nats-Batch-Sequence": "1",
            "Nats-Batch-Commit": "1",
            **next_own,
            **own,
        }
        block, data, reply = headers.encode(values), b"x" * max(size, next_size), connection.inbox("full")
        await connection.send(
            b"HPUB full %b %d %d\r\n%b%b\r\n" % (reply.encode(), len(block), len(block) + len(data), block, data)
        )
        answer = json.loads((await connection.wait(reply, what="the commit")).data)
        assert answer["error"]["err_code"] == expected, (own, next_own, answer)


async def test_a_publishers_name_begins_the_ids_of_its_batches(nats_server: EmbeddedServer, half: str) -> None:
    for name in ("", "a.b", "x" * 33, "ü"):
        with pytest.raises(errors.ConfigError, match="a publisher's name"):
            batch_module.checked_publisher(name)
    if half == "blocking":
        with BlockingPublisher.connect(nats_server.settings, name="billing") as blocking_one:
            ids = [blocking_one.atomic("S").batch_id, blocking_one.atomic("S", chunked=True).batch_id]
    else:
        async with await Publisher.connect(nats_server.settings, name="billing") as made:
            ids = [made.atomic("S").batch_id, made.atomic("S", chunked=True).batch_id]
    assert all(one.startswith("billing.") for one in ids)


async def test_headers_that_have_no_place_in_a_batch_are_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(publish.UnsupportedHeader, match="Nats-Expected-Last-Msg-Id"):
        await batch.add("s.a", b"", headers={"Nats-Expected-Last-Msg-Id": "x"})
    with pytest.raises(errors.ConfigError, match="written by the batch itself"):
        await batch.add("s.a", b"", headers={"nats-batch-id": "x"})
    with pytest.raises(errors.ConfigError, match="wildcard"):
        await batch.add("s.*", b"")
    with pytest.raises(errors.ConfigError, match="at least one message"):
        await batch.commit()


async def test_a_message_larger_than_the_server_takes_is_refused_before_anything_is_sent(
    publisher: AnyPublisher,
) -> None:
    limit = publisher.connection.info.max_payload
    with pytest.raises(errors.ConfigError, match=r"message 1 of the batch, for 's\.b'"):
        await publisher.publish_batch("S", ["s.a", "s.b"], [b"x", b"x" * limit])
    almost = [b"x" * (limit - 300)]
    assert (await publisher.publish_batch("S", "s.a", almost)).count == 1


def test_errors_survive_pickling() -> None:
    ref = publish.BatchRef("S", "id", 3, "s.a", 7)
    told = ("S", "id", 400, 10176, "incomplete")
    samples: list[errors.PenstockError] = [
        publish.BatchOutcomeUnknown(ref, "lost"),
        publish.NotEnabled(*told),
        publish.Gap(*told, ("x",)),
        publish.TimedOut(*told, 11.0),
        publish.DuplicateId(*told, ("a", "b")),
        PartlyStored(*told, ("a", "b"), 3),
        publish.WrongSequence(*told, (1,), 2),
        publish.NobodyListens("S", "x"),
        errors.ConnectionLost("nats://x", "why"),
    ]
    for error in samples:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert again.__dict__ == error.__dict__
        assert str(again) == str(error)


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_many_tasks_share_one_publisher(asyncio_publisher: Publisher) -> None:
    """Asyncio only: a blocking publisher is for one thread."""
    rng = random.Random(7)
    sizes = [rng.randint(1, 20) for _ in range(100)]

    async def one(number: int, size: int) -> publish.BatchAck:
        return await asyncio_publisher.publish_batch("S", "s.a", [b"%d" % number] * size)

    acks = await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
    payloads = await stored(asyncio_publisher)
    for number, ack in enumerate(acks):
        assert payloads[ack.first_sequence - 1 : ack.sequence] == [b"%d" % number] * sizes[number]
    assert len(payloads) == sum(sizes)


async def test_a_lost_connection_is_replaced_for_the_next_batch(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    await publisher.publish_batch("S", "s.a", [b"1"])
    opened = publisher.connection.opened
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await publisher.publish_batch("S", "s.a", [b"2"])).sequence == 2
    assert publisher.connection.opened == opened + 1


async def test_a_lost_connection_is_replaced_for_requests_too(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    await publisher.publish_batch("S", "s.a", [b"1"])
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await publisher.jetstream.stream_info("S")).state.messages == 1


async def test_a_batch_of_which_nothing_was_sent_survives_a_lost_connection(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    batch = publisher.atomic("S")
    await batch.add("s.a", b"1")
    await batch.flush()
    assert batch.content.sent == 0
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    assert (await batch.commit()).sequence == 1


async def test_a_batch_that_was_sent_in_part_ends_with_its_connection_and_nothing_of_it_is_stored(
    nats_server: EmbeddedServer, publisher: AnyPublisher
) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    await batch.flush()
    nats_server.kill()
    nats_server.start()
    await loss_noticed(publisher)
    with pytest.raises(errors.ConnectionLost):
        await batch.commit()
    assert await batch.resolve() is None
    await publisher.publish_batch("S", "s.a", [b"next"])
    assert await stored(publisher) == [b"next"]


async def test_a_cancelled_publish_ends_wherever_it_is(asyncio_publisher: Publisher) -> None:
    """Else Ctrl-C, or a timeout around it, would be lost in it. Asyncio only: a blocking call cannot be cancelled."""
    for steps in range(12):
        task = asyncio.create_task(asyncio_publisher.publish_batch("S", "s.a", [b"x"] * 3))
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task


# -- wrong calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"subject": None}, "a subject is text"),
        ({"subject": "s.\ud800"}, "surrogate"),
        ({"headers": {"A": 1}}, "header 'A' must have a name and a value of text"),
        ({"headers": {"A": b"x"}}, "header 'A' must have a name and a value of text"),
        ({"headers": {"A": ["x", 1]}}, "header 'A' must have a name and a value of text"),
        ({"headers": {1: "x"}}, "1 is no name"),
        ({"headers": [("A", "x")]}, "is no name"),
        ({"headers": {"A": "\ud800"}}, "surrogate"),
        ({"message_id": 5}, "must have a name and a value of text"),
        ({"message_id": ""}, "the message id is empty"),
    ],
)
async def test_what_cannot_be_a_message_is_refused_with_a_reason(
    publisher: AnyPublisher, call: dict[str, Any], words: str
) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(errors.ConfigError, match=words):
        await batch.add(**{"subject": "s.a", "data": b"", **call})


async def test_an_ended_batch_cannot_be_flushed(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    await batch.abandon()
    with pytest.raises(errors.ConfigError, match="committed or dropped already"):
        await batch.flush()


async def test_a_closed_publisher_says_so_and_opens_nothing(publisher: AnyPublisher) -> None:
    await publisher.close()
    with pytest.raises(errors.ConfigError, match="publisher is closed"):
        await publisher.publish_batch("S", "s.a", [b"1"])
    assert not publisher.connection.connected
