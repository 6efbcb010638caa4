"""The status snapshot against a real server."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.streams import make_stream

from penstock.cli.common import out
from penstock.cli.status import render
from penstock.jetstream import Broker, connect
from penstock.observe.collecting import StatusWatch, collect
from penstock.observe.status import ConsumerStatus, Status
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async


async def consumer(broker: Broker, stream: str = "S", **config: object) -> None:
    await broker.jetstream.create_consumer(stream, {"durable_name": "c", "ack_policy": "explicit", **config})


async def status_of(broker: Broker) -> Status:
    return await collect(broker.jetstream)


def shown(status: Status) -> str:
    with out.capture() as printed:
        out.print(render(status))
    return printed.get()


async def pull(broker: Broker, count: int, stream: str = "S") -> list[str]:
    """Fetch `count` messages of the consumer `c`; the subjects to acknowledge them on."""
    connection, inbox = broker.connection, broker.settings.new_inbox()
    await connection.subscribe(inbox)
    await connection.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.c", json.dumps({"batch": count}).encode(), reply=inbox
    )
    return [(await connection.receive(20)).reply for _ in range(count)]


async def lagging(broker: Broker, messages: int, since: datetime | None = None) -> ConsumerStatus:
    """The one consumer, once it lags so many messages behind, of which the oldest was stored then.

    The server counts a message for its consumers a moment after it has acknowledged it.
    """
    found: list[tuple[datetime, ConsumerStatus]] = []

    async def counted() -> bool:
        began = datetime.now(UTC)
        (status,) = (await status_of(broker)).consumers
        found[:] = [(began, status)]
        return status.lag_messages == messages

    await eventually_async(counted, what=f"a lag of {messages} messages", state=lambda: found)
    ((began, status),) = found
    if since:
        assert began - since <= status.lag <= datetime.now(UTC) - since
    return status


async def test_lag_counts_messages_and_the_age_of_the_oldest_unacknowledged_one(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await consumer(broker, filter_subject="s.wanted")
        await broker.request("s.other", b"", 20)
        await broker.request("s.wanted", b"1", 20)
        await asyncio.sleep(0.3)  # the messages must differ in age
        await broker.request("s.wanted", b"2", 20)

        one, two = [(await broker.jetstream.get_message("S", sequence)).time for sequence in (2, 3)]
        before = await lagging(broker, 2)
        assert before.lag >= timedelta(seconds=0.3)

        first, _ = await pull(broker, 2)
        in_flight = await lagging(broker, 2, since=one)
        assert in_flight.ack_pending == 2
        assert in_flight.lag >= before.lag

        await broker.request(first, b"+ACK", 20)
        await lagging(broker, 1, since=two)


async def test_a_consumer_that_has_acknowledged_everything_has_no_lag(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await consumer(broker)
        await broker.request("s.a", b"", 20)
        (ack,) = await pull(broker, 1)
        await broker.request(ack, b"+ACK", 20)
        (status,) = (await status_of(broker)).consumers
        assert (status.lag_messages, status.lag) == (0, timedelta())


async def test_lag_of_several_filters_is_that_of_the_oldest_match(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await consumer(broker, filter_subjects=["s.a", "s.b"])
        await broker.request("s.b", b"", 20)
        await asyncio.sleep(0.3)  # the messages must differ in age
        await broker.request("s.a", b"", 20)
        status = await lagging(broker, 2)
        assert status.lag >= timedelta(seconds=0.3)


async def test_dead_letters_are_counted_in_all_and_by_the_consumer_that_names_their_subject(
    nats_server: EmbeddedServer,
) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await make_stream(broker.jetstream, "DLQ")
        await consumer(broker, metadata={"penstock.dlq": "dlq.s"})
        letters = [f"dlq.s.{number:016x}.1" for number in range(5)]
        for subject in ("dlq.s", "dlq.s", "dlq.else", "dlq.s.deeper.0123456789abcdef.1", *letters):
            await broker.request(subject, b"", 20)
        status = await status_of(broker)
        assert status.dead_letters == 9
        assert status.consumers[0].dead_letters == 7
        assert "9 dead letters" in shown(status)
        await broker.jetstream.purge_stream("DLQ", keep=1)
        assert "1 dead letter\n" in shown(await status_of(broker))


async def test_sources_show_their_lag(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await make_stream(broker.jetstream, "COPY", sources=[{"name": "S"}])
        by_name = {stream.name: stream for stream in (await status_of(broker)).streams}
        assert [source.name for source in by_name["COPY"].sources] == ["S"]
        assert by_name["S"].sources == ()


async def test_a_consumer_that_moves_while_its_stream_does_not_is_seen_with_the_next_look(
    nats_server: EmbeddedServer,
) -> None:
    """Reset, paused or read by somebody again: on a server with few streams nobody waits ten looks for it."""
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream, "S")
        await consumer(broker)
        for _ in range(5):
            await broker.publish("s.a", b"x")
        watch = StatusWatch(broker.jetstream)
        for first in (5, 3, 4, 2):
            await watch.look(await watch.streams())
            await broker.jetstream.reset_consumer("S", "c", first)
            (found,) = (await watch.look(await watch.streams())).consumers
            assert found.lag_messages == 6 - first


async def test_on_a_large_server_what_moves_is_seen_with_the_next_look_and_the_rest_is_not_asked_for(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.observe.collecting.FEW_STREAMS", 2)
    monkeypatch.setattr("penstock.observe.collecting.IN_TURN", 2)
    async with connect(nats_server.settings) as broker:
        for number in range(40):
            await make_stream(broker.jetstream, f"S{number}", subjects=[f"s{number}.>"])
            await consumer(broker, f"S{number}")
        watch = StatusWatch(broker.jetstream)

        async def lags() -> dict[str, int]:
            found = await watch.look(await watch.streams())
            return {one.stream: one.lag_messages for one in found.consumers if one.lag_messages}

        first = await watch.look(await watch.streams())
        asked = broker.jetstream.requests
        again = await watch.look(await watch.streams())
        assert broker.jetstream.requests - asked < 20
        assert list(map(id, again.consumers)) == list(map(id, first.consumers))
        assert list(map(id, again.streams)) == list(map(id, first.streams))

        await broker.publish("s7.a", b"x")
        await lags()  # the server counts a message for its consumers a moment after it has acknowledged it
        assert await lags() == {"S7": 1}
        (reply,) = await pull(broker, 1, "S7")
        await lags()
        await broker.request(reply, b"+ACK", 20)
        assert await lags() == {}, "read by somebody again, while the stream stands still"
        await broker.jetstream.delete_stream("S7")
        found = await watch.look(await watch.streams())
        assert {(one.stream, one.name) for one in found.consumers} == {
            (f"S{number}", "c") for number in range(40) if number != 7
        }


async def test_letters_of_a_consumer_that_was_not_there_before_are_counted(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await make_stream(broker.jetstream)
        await make_stream(broker.jetstream, "DLQ")
        await broker.publish("dlq.s.0123456789abcdef.1", b"x")
        watch = StatusWatch(broker.jetstream)
        await watch.look(await watch.streams())
        await consumer(broker, metadata={"penstock.dlq": "dlq.s"})
        (found,) = (await watch.look(await watch.streams())).consumers
        assert found.dead_letters == 1
