"""Fast ingest against a real server: order, counts, gaps that are really made, acks that are really lost.

A contract: each test runs on the asyncio and on the blocking ingest, unless it says why not.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.support.connections import HALVES
from tests.support.publishers import AnyFastIngest, open_fast_ingest

from penstock.errors import AccessDenied, ConfigError, DeadlineExceeded, FeatureMissing
from penstock.jetstream import connect
from penstock.publish.fast import FastIngest
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.interruptions import FastIngestDisabled, IngestGap, MessageRefused, WrongStream
from penstock.publish.options import IngestOptions, Lost
from penstock.publish.plain import PlainPublisher
from penstock.publish.rows import Publication
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import LossyProxy, eventually_async, stream_data
from penstock.wire import headers

LIMITED = """authorization { users: [
    { user: all, password: p },
    { user: limited, password: p, permissions: { publish: { deny: ["s.secret"] } } } ] }"""


class Fast(Protocol):
    """Makes a fast ingest into stream S; `options` are those of `IngestOptions`."""

    def __call__(
        self, settings: Settings, on_lost: Callable[[Lost], object] | None = None, **options: Any
    ) -> AnyFastIngest: ...


@pytest.fixture(params=HALVES)
def fast(request: pytest.FixtureRequest) -> Fast:
    """Of the implementation that is tested."""

    def make(settings: Settings, on_lost: Callable[[Lost], object] | None = None, **options: Any) -> AnyFastIngest:
        return open_fast_ingest(request.param, settings, "S", on_lost, **options)

    return make


async def make_stream(settings: Settings, name: str = "S", **config: Any) -> None:
    async with connect(settings) as broker:
        subject = f"{name.lower()}.>"
        await broker.jetstream.create_stream({"name": name, "subjects": [subject], "allow_batched": True, **config})


async def contents(settings: Settings, name: str = "S") -> list[bytes]:
    """The data of every message in the stream, in order."""
    return await asyncio.to_thread(stream_data, settings, name)


def numbered(count: int, start: int = 1) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


def message_with(seq: int, batch: bytes = rb"\w+") -> Callable[[bytes], bool]:
    """Whether a published control line is the message (not ping or end) with this batch sequence, once."""
    pattern = re.compile(rb"\." + batch + rb"\.\d+\.(?:ok|fail)\.%d\.[01]\.\$FI " % seq)
    seen: list[bytes] = []

    def drop(line: bytes) -> bool:
        if seen or not pattern.search(line):
            return False
        seen.append(line)
        return True

    return drop


@pytest.fixture
def proxy(nats_server: EmbeddedServer) -> Iterator[LossyProxy]:
    with LossyProxy(nats_server.port) as made:
        yield made


async def test_messages_are_stored_in_order_and_the_ack_says_where(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings, flow=7) as ingest:
        for data in numbered(100):
            await ingest.add("s.a", data)
        await ingest.add_many(("s.b", data) for data in numbered(100, 101))
        await ingest.add_data("s.c", numbered(100, 201))
    assert ingest.ack
    assert (ingest.ack.stream, ingest.ack.sequence, ingest.ack.count) == ("S", 300, 300)
    assert (ingest.stored, ingest.ack.lost, ingest.ack.maybe_twice) == (300, 0, 0)
    assert await contents(nats_server.settings) == numbered(300)


async def test_headers_and_message_ids_are_stored_and_a_flush_in_between_settles(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings, flow=7) as ingest:
        for data in numbered(100):
            await ingest.add("s.a", data)
        await ingest.add_many([("s.b", data, {"Kind": "b"}, data.decode()) for data in numbered(100, 101)])
        assert await ingest.flush() == 200
        assert (ingest.stored, ingest.sequence) == (200, 200)
        await ingest.add_data("s.c", numbered(100, 201))
    assert ingest.ack
    assert (ingest.ack.sequence, ingest.ack.count) == (300, 300)
    assert await contents(nats_server.settings) == numbered(300)
    async with connect(nats_server.settings) as broker:
        message = await broker.jetstream.get_message("S", 150)
    assert message.headers == {"Kind": ["b"], "Nats-Msg-Id": ["150"]}


async def test_increments_of_counters_are_taken(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings, allow_msg_counter=True)
    async with fast(nats_server.settings) as ingest:
        for _ in range(3):
            await ingest.add("s.hits", b"", {"Nats-Incr": "+2"})
    assert await contents(nats_server.settings) == [b'{"val":"2"}', b'{"val":"4"}', b'{"val":"6"}']


async def test_an_async_iterable_can_be_added(nats_server: EmbeddedServer) -> None:
    """Asyncio only: blocking code has no async iterables."""
    await make_stream(nats_server.settings)

    async def messages() -> AsyncIterator[tuple[str, bytes]]:
        for data in numbered(300):
            yield "s.a", data

    async with FastIngest(nats_server.settings, "S") as ingest:
        assert await ingest.add_many(messages()) == 300
    assert await contents(nats_server.settings) == numbered(300)


async def test_prepared_messages_are_stored_as_they_are(nats_server: EmbeddedServer) -> None:
    """Blocking only: the Spark sink has its headers encoded already."""
    await make_stream(nats_server.settings)

    def work() -> None:
        with BlockingFastIngest(nats_server.settings, "S") as ingest:
            assert ingest.add_prepared([("s.a", b"", b"1"), ("s.b", headers.encode({"Kind": "b"}), b"2")]) == 2

    await asyncio.to_thread(work)
    assert await contents(nats_server.settings) == numbered(2)
    async with connect(nats_server.settings) as broker:
        assert (await broker.jetstream.get_message("S", 2)).headers == {"Kind": ["b"]}


async def test_a_flush_returns_when_everything_added_is_stored_and_knows_the_sequence(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings, flow=100) as ingest:
        for count in (1, 2, 100, 200, 3):
            await ingest.add_data("s.a", numbered(count))
            position = await ingest.flush()
            assert ingest.stored == position == ingest.added == ingest.sequence
            async with connect(nats_server.settings) as broker:
                assert (await broker.jetstream.stream_info("S")).state.messages == position


async def test_an_empty_ingest_commits_to_nothing(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings) as ingest:
        assert await ingest.flush() == 0
    assert ingest.ack
    assert (ingest.ack.sequence, ingest.ack.count) == (0, 0)


async def test_messages_of_a_caller_that_pauses_are_stored_without_a_flush(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings, idle_after=0.1) as ingest:
        await ingest.add("s.a", b"1")
        await eventually_async(lambda: ingest.stored == 1, what="the first message to be settled")
        assert ingest.sequence == 1
        await ingest.add("s.a", b"2")
    assert await contents(nats_server.settings) == numbered(2)


async def test_an_exception_in_the_block_ends_the_ingest_and_keeps_what_was_sent(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    ingest = fast(nats_server.settings)

    async def work() -> None:
        async with ingest:
            await ingest.add_data("s.a", numbered(10))
            await ingest.flush()
            raise KeyError

    with pytest.raises(KeyError):
        await work()
    assert ingest.ack is None
    assert await contents(nats_server.settings) == numbered(10)


async def test_duplicate_ids_are_stored_once_and_count_as_stored(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    rows: list[Publication] = [("s.a", data, None, data.decode()) for data in numbered(20)]
    for batch in (rows[:12], rows, rows):
        async with fast(nats_server.settings, flow=5) as ingest:
            await ingest.add_many(batch)
        assert ingest.ack
        assert ingest.ack.count == len(batch)
    assert await contents(nats_server.settings) == numbered(20)


async def test_several_ingests_share_a_stream_each_in_its_own_order(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)

    async def one(letter: str) -> None:
        async with fast(nats_server.settings, flow=500) as ingest:
            await ingest.add_many((f"s.{letter}", letter.encode() + data) for data in numbered(700))

    await asyncio.gather(*(one(letter) for letter in "abc"))
    found = await contents(nats_server.settings)
    for letter in (b"a", b"b", b"c"):
        assert [data[1:] for data in found if data[:1] == letter] == numbered(700)


async def test_large_messages_are_bounded_by_bytes_in_flight(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    large = [b"%d" % n + bytes(100_000) for n in range(30)]
    async with fast(nats_server.settings, max_outstanding_bytes=300_000) as ingest:
        await ingest.add_data("s.a", large)
    assert await contents(nats_server.settings) == large


# -- gaps --------------------------------------------------------------------------------------------------------------


async def test_a_lost_message_fails_the_ingest_and_everything_before_it_is_stored(
    nats_server: EmbeddedServer, proxy: LossyProxy, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    proxy.drop_up = message_with(33)
    with pytest.raises(IngestGap) as raised:
        async with fast(Settings(servers=(proxy.url,)), flow=10) as ingest:
            await ingest.add_data("s.a", numbered(100))
    assert (raised.value.stored, raised.value.last) == (32, 33)
    assert ingest.stored == 32
    assert await contents(nats_server.settings) == numbered(32)


async def test_a_message_lost_at_the_very_end_is_noticed_by_the_commit(
    nats_server: EmbeddedServer, proxy: LossyProxy, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    proxy.drop_up = message_with(100)
    with pytest.raises(IngestGap) as raised:
        async with fast(Settings(servers=(proxy.url,))) as ingest:
            await ingest.add_data("s.a", numbered(100))
    assert raised.value.stored == 99
    assert await contents(nats_server.settings) == numbered(99)


async def test_with_continue_the_callback_hears_of_lost_messages_and_the_rest_is_stored(
    nats_server: EmbeddedServer, proxy: LossyProxy, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    drops = [message_with(seq) for seq in (33, 34, 60, 100)]
    proxy.drop_up = lambda line: any(drop(line) for drop in drops)
    lost: list[Lost] = []
    async with fast(Settings(servers=(proxy.url,)), lost.append, flow=10, on_gap="continue") as ingest:
        await ingest.add_data("s.a", numbered(100))
    assert [(one.first, one.last) for one in lost] == [(33, 34), (60, 60), (100, 100)]
    assert ingest.ack
    assert (ingest.ack.count, ingest.ack.lost, ingest.ack.sequence) == (96, 4, 96)
    gone = {b"33", b"34", b"60", b"100"}
    assert await contents(nats_server.settings) == [data for data in numbered(100) if data not in gone]


@pytest.mark.parametrize("seq", [1, 2, 33, 100])
async def test_with_resend_lost_messages_are_sent_again_in_order(
    nats_server: EmbeddedServer, proxy: LossyProxy, seq: int, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    proxy.drop_up = message_with(seq)
    options: dict[str, Any] = {"flow": 10, "on_gap": "resend", "ack_timeout": 0.5}
    async with fast(Settings(servers=(proxy.url,)), **options) as ingest:
        await ingest.add_data("s.a", numbered(100))
    assert ingest.ack
    # Of a batch that never began the server only says that it does not know it: its one message is in doubt.
    assert (ingest.ack.count, ingest.ack.maybe_twice) == (100, int(seq == 1))
    assert await contents(nats_server.settings) == numbered(100)


async def test_lost_acks_are_asked_for_again(nats_server: EmbeddedServer, proxy: LossyProxy, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    acks: list[bytes] = []

    def every_other_ack(line: bytes) -> bool:
        if re.search(rb"\.[01]\.\$FI ", line):
            acks.append(line)
            return len(acks) % 2 == 0
        return False

    proxy.drop_down = every_other_ack
    async with fast(Settings(servers=(proxy.url,)), flow=10, max_outstanding_acks=1, ack_timeout=0.2) as ingest:
        await ingest.add_data("s.a", numbered(100))
    assert len(acks) > 5
    assert await contents(nats_server.settings) == numbered(100)


# -- what the server refuses -------------------------------------------------------------------------------------------


async def test_a_stream_without_allow_batched_is_named_with_the_change_that_helps(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings, allow_batched=False)
    with pytest.raises(FastIngestDisabled, match="allow_batched: true"):
        async with fast(nats_server.settings) as ingest:
            await ingest.add("s.a", b"1")


async def test_a_server_without_fast_ingest_is_refused_before_anything_is_sent(
    tmp_path: Path, old_nats_server_binary: Path, fast: Fast
) -> None:
    with (
        EmbeddedServer(data=tmp_path, binary=old_nats_server_binary) as old,
        pytest.raises(FeatureMissing, match=r"needs nats-server 2\.14"),
    ):
        await fast(old.settings).__aenter__()


async def test_a_stream_that_never_answers_is_given_up_after_a_while(
    nats_server: EmbeddedServer, proxy: LossyProxy, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    proxy.drop_down = lambda line: b".$FI " in line
    with pytest.raises(DeadlineExceeded, match="fast ingest into stream 'S'"):
        async with fast(Settings(servers=(proxy.url,)), ack_timeout=0.05, patience=0.5) as ingest:
            await ingest.add("s.a", b"1")


async def test_a_missing_permission_is_said_at_once(tmp_path: Path, fast: Fast) -> None:
    with EmbeddedServer(data=tmp_path, extra=LIMITED) as server:
        await make_stream(replace(server.settings, user="all", password="p"))
        limited = replace(server.settings, user="limited", password="p")
        with pytest.raises(AccessDenied, match=r"s\.secret"):
            async with fast(limited) as ingest:
                await ingest.add_many([("s.a", b"1"), ("s.secret", b"2")])
        with pytest.raises(AccessDenied, match=r"s\.secret"):
            async with fast(limited) as ingest:
                await ingest.add("s.secret", b"3")


async def test_a_missing_permission_ends_the_ingest_for_every_later_call(tmp_path: Path, fast: Fast) -> None:
    async def flush_and_commit(ingest: AnyFastIngest) -> None:
        async with ingest:
            await ingest.add_many([("s.a", b"1"), ("s.secret", b"2")])
            for call in (ingest.flush, ingest.flush, ingest.commit):
                with pytest.raises(AccessDenied, match=r"s\.secret"):
                    await call()

    with EmbeddedServer(data=tmp_path, extra=LIMITED) as server:
        await make_stream(replace(server.settings, user="all", password="p"))
        with pytest.raises(AccessDenied, match=r"s\.secret"):
            await flush_and_commit(fast(replace(server.settings, user="limited", password="p")))


async def test_a_missing_permission_is_said_at_once_to_a_plain_publisher(tmp_path: Path) -> None:
    """Asyncio only: there is no blocking plain publisher."""
    with EmbeddedServer(data=tmp_path, extra=LIMITED) as server:
        await make_stream(replace(server.settings, user="all", password="p"))
        async with PlainPublisher(replace(server.settings, user="limited", password="p")) as plain:
            await plain.add("s.secret", b"4")
            with pytest.raises(AccessDenied, match=r"s\.secret"):
                await plain.finish()


async def test_a_commit_can_be_repeated_but_nothing_added_after_it(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings) as ingest:
        await ingest.add("s.a", b"1")
        ack = await ingest.commit()
        assert await ingest.commit() == ack
        with pytest.raises(ConfigError, match="is committed"):
            await ingest.add("s.a", b"2")
    assert ingest.ack == ack
    assert await contents(nats_server.settings) == [b"1"]


async def test_an_ingest_is_used_inside_its_block_and_once(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    ingest, committed = fast(nats_server.settings), fast(nats_server.settings)
    with pytest.raises(ConfigError, match="is not open"):
        await ingest.add("s.a", b"1")
    with suppress(KeyError):
        async with ingest:
            await ingest.add("s.a", b"1")
            await ingest.flush()
            raise KeyError("the caller's")
    for late in (ingest.add("s.a", b"2"), ingest.flush(), ingest.commit(), ingest.__aenter__()):
        with pytest.raises(ConfigError, match=r"is not open|was opened before"):
            await late
    async with committed:
        await committed.add("s.a", b"2")
    assert await committed.flush() == 1
    with pytest.raises(ConfigError, match="was opened before"):
        await committed.__aenter__()
    assert await contents(nats_server.settings) == [b"1", b"2"]


async def test_calls_that_are_cancelled_lose_nothing_that_was_added(nats_server: EmbeddedServer) -> None:
    """Asyncio only: a blocking call cannot be cancelled."""
    await make_stream(nats_server.settings)
    seed = 7
    chance = random.Random(seed)
    async with FastIngest(nats_server.settings, "S", IngestOptions(flow=50)) as ingest:
        for number in range(1, 3_001):
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.choice((0, 0.0001, 0.001))):
                    await ingest.add("s.a", b"%d" % number)
                    if chance.random() < 0.05:
                        await ingest.flush()
            if number == 1_500:
                nats_server.kill()
                nats_server.start()
    assert ingest.added == 3_000, f"seed {seed}"
    found = await contents(nats_server.settings)
    assert list(dict.fromkeys(found)) == numbered(3_000), f"seed {seed}"
    assert ingest.ack
    assert len(found) <= 3_000 + ingest.ack.maybe_twice, f"seed {seed}"


async def test_a_subject_that_no_stream_takes_is_an_error_with_its_position(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    with pytest.raises(WrongStream, match="no stream takes subject 'nowhere'"):
        async with fast(nats_server.settings, no_responders_timeout=0) as ingest:
            await ingest.add("nowhere", b"1")
    with pytest.raises(WrongStream) as raised:
        async with fast(nats_server.settings, no_responders_timeout=0) as ingest:
            await ingest.add_many([("s.a", b"1"), ("s.a", b"2"), ("nowhere", b"3"), ("s.a", b"4")])
    assert (raised.value.position, raised.value.stored, ingest.stored) == (3, 2, 2)
    assert await contents(nats_server.settings) == numbered(2)


async def test_a_subject_of_another_stream_ends_the_ingest_before_it(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    await make_stream(nats_server.settings, "T")
    with pytest.raises(WrongStream, match=r"stream 'T' takes subject 't\.a'"):
        async with fast(nats_server.settings) as ingest:
            await ingest.add_many([("s.a", b"1"), ("s.a", b"2"), ("t.a", b"3")])
    assert await contents(nats_server.settings) == numbered(2)
    assert await contents(nats_server.settings, "T") == []


@pytest.mark.parametrize("on_gap", ["fail", "resend"])
@pytest.mark.parametrize("batched", [True, False])
async def test_another_stream_never_gets_a_message_of_the_ingest_not_even_the_first(
    nats_server: EmbeddedServer, on_gap: str, batched: bool, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    await make_stream(nats_server.settings, "T", allow_batched=batched)
    for before in (0, 1, 2):
        with pytest.raises(WrongStream, match=r"stream 'T' takes subject 't\.a'"):
            async with fast(nats_server.settings, on_gap=on_gap) as ingest:
                await ingest.add_many([("s.a", b"x")] * before + [("t.a", b"y")] * 2 + [("s.a", b"z")])
        assert ingest.stored == before
    assert await contents(nats_server.settings) == [b"x"] * 3
    assert await contents(nats_server.settings, "T") == []


async def test_a_first_message_as_large_as_the_server_takes_is_stored(nats_server: EmbeddedServer, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    largest = bytes(1024 * 1024)
    async with fast(nats_server.settings) as ingest:
        await ingest.add("s.a", largest)
        await ingest.add("s.a", largest)
    assert await contents(nats_server.settings) == [largest, largest]


@pytest.mark.parametrize("at", [1, 5])
async def test_a_refused_message_ends_the_ingest_before_it(nats_server: EmbeddedServer, at: int, fast: Fast) -> None:
    await make_stream(nats_server.settings)
    rows: list[Publication] = [
        ("s.a", data, {"Nats-Expected-Last-Sequence": "77"} if n == at else None) for n, data in enumerate_(20)
    ]
    with pytest.raises(MessageRefused, match="wrong last sequence") as raised:
        async with fast(nats_server.settings) as ingest:
            await ingest.add_many(rows)
    assert (raised.value.position, ingest.stored) == (at, at - 1)
    assert await contents(nats_server.settings) == numbered(at - 1)


@pytest.mark.parametrize("at", [1, 5])
async def test_with_continue_a_refused_message_is_reported_and_left_out(
    nats_server: EmbeddedServer, at: int, fast: Fast
) -> None:
    await make_stream(nats_server.settings, max_msg_size=1000)
    rows: list[Publication] = [("s.a", bytes(2000) if n == at else data) for n, data in enumerate_(20)]
    lost: list[Lost] = []
    async with fast(nats_server.settings, lost.append, on_gap="continue") as ingest:
        await ingest.add_many(rows)
    assert [(one.first, one.last) for one in lost] == [(at, at)]
    assert "exceeds maximum" in lost[0].reason
    assert ingest.ack
    assert (ingest.ack.count, ingest.ack.lost) == (19, 1)
    assert await contents(nats_server.settings) == [data for n, data in enumerate_(20) if n != at]


async def test_messages_the_server_would_hang_up_on_are_refused_before_they_are_sent(
    nats_server: EmbeddedServer, fast: Fast
) -> None:
    await make_stream(nats_server.settings)
    async with fast(nats_server.settings) as ingest:
        for bad in (bytes(1024 * 1024 + 1), "text"):
            with pytest.raises(ConfigError):
                await ingest.add("s.a", bad)  # type: ignore[arg-type]
            with pytest.raises(ConfigError):
                await ingest.add_many([("s.a", bad)])  # type: ignore[list-item]
        for subject in ("s.*", "s a", "s.a\r\nPING", ""):
            with pytest.raises(ConfigError):
                await ingest.add(subject, b"1")
        await ingest.add("s.a", b"1")
    assert await contents(nats_server.settings) == [b"1"]


def enumerate_(count: int) -> list[tuple[int, bytes]]:
    return list(enumerate(numbered(count), 1))
