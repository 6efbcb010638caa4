"""The reset of a consumer: what it does to the state, what the server allows, and readers to whom it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.peers import acknowledge, nats_py
from tests.support.streams import make_stream

from penstock.errors import ApiError, ConfigError
from penstock.jetstream import Broker, JetStream, connect
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.wire.blocking import run


@pytest.fixture
async def broker(shared_server: EmbeddedServer) -> AsyncIterator[Broker]:
    async with connect(shared_server.settings) as made:
        await make_stream(made.jetstream)
        for number in range(1, 11):
            await made.request("s.x", b"%d" % number, 20)
        yield made
        await made.jetstream.delete_stream("S")


async def consumer(js: JetStream, **config: object) -> str:
    await js.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit", "max_ack_pending": 100, **config})
    return "c"


async def taken(broker: Broker, count: int, acknowledged: int) -> None:
    """Fetch some, and acknowledge the first of them."""
    await acknowledge(broker.settings, "S", "c", count, acknowledged)


async def test_an_empty_reset_forgets_what_is_in_flight_and_keeps_the_ack_floor(broker: Broker) -> None:
    js = broker.jetstream
    await consumer(js)
    await taken(broker, 6, 4)
    done = await js.reset_consumer("S", "c")
    info = done.consumer
    assert done.reset_seq == 5
    assert (info.ack_floor_stream_seq, info.ack_floor_consumer_seq) == (4, 0)
    assert (info.delivered_stream_seq, info.delivered_consumer_seq) == (4, 0)
    assert (info.ack_pending, info.redelivered, info.pending) == (0, 0, 6)
    assert info.config["durable_name"] == "c", "the answer shows the configuration, as that of a create does"


@pytest.mark.parametrize("seq", [2, 5, 9])
async def test_a_reset_to_a_sequence_moves_either_way_and_delivers_from_there(broker: Broker, seq: int) -> None:
    js = broker.jetstream
    await consumer(js)
    await taken(broker, 6, 4)
    done = await js.reset_consumer("S", "c", seq)
    assert (done.reset_seq, done.consumer.ack_floor_stream_seq) == (seq, seq - 1)
    async with nats_py(broker.settings) as peer:
        (message,) = await (await peer.pull_subscribe_bind("c", "S")).fetch(1, timeout=20)
    assert (message.metadata.sequence.stream, message.metadata.sequence.consumer) == (seq, 1)


async def test_sequence_zero_is_refused_before_the_server_is_asked(broker: Broker) -> None:
    await consumer(broker.jetstream)
    before = broker.jetstream.requests
    with pytest.raises(ConfigError, match="1 or above, not to 0"):
        await broker.jetstream.reset_consumer("S", "c", 0)
    assert broker.jetstream.requests == before


@pytest.mark.parametrize(
    "start",
    [
        {"deliver_policy": "new"},
        {"deliver_policy": "last"},
        {"deliver_policy": "last_per_subject", "filter_subject": "s.>"},
    ],
    ids=lambda start: start["deliver_policy"],
)
async def test_other_deliver_policies_allow_only_an_empty_reset(broker: Broker, start: dict[str, str]) -> None:
    js = broker.jetstream
    await consumer(js, **start)
    with pytest.raises(ApiError):
        await js.reset_consumer("S", "c", 5)
    assert (await js.reset_consumer("S", "c")).reset_seq >= 1


async def test_a_consumer_does_not_go_back_before_its_start_sequence(broker: Broker) -> None:
    js = broker.jetstream
    await consumer(js, deliver_policy="by_start_sequence", opt_start_seq=5)
    with pytest.raises(ApiError):
        await js.reset_consumer("S", "c", 4)
    assert (await js.reset_consumer("S", "c", 5)).reset_seq == 5
    assert (await js.reset_consumer("S", "c", 8)).reset_seq == 8


async def test_a_consumer_does_not_go_back_before_its_start_time(broker: Broker) -> None:
    js = broker.jetstream
    stored = (await js.get_message("S", 5)).time
    assert stored is not None
    await consumer(js, deliver_policy="by_start_time", opt_start_time=stored.isoformat())
    with pytest.raises(ApiError):
        await js.reset_consumer("S", "c", 4)
    assert (await js.reset_consumer("S", "c", 5)).reset_seq == 5
    assert datetime.now(UTC) - stored < timedelta(minutes=5)


def test_an_ordered_reader_whose_consumer_is_reset_by_others_makes_a_new_one_and_misses_nothing(
    nats_server: EmbeddedServer,
) -> None:
    count, got, resets = 200_000, [], 0
    with BlockingPublisher.connect(nats_server.settings) as publisher:
        js = publisher.jetstream
        run(make_stream(js, allow_atomic=True))
        for start in range(0, count, 1000):
            publisher.publish_batch("S", "s.x", [b"%d" % n for n in range(start, start + 1000)])
        for batch in read_range(nats_server.settings, Range(stream="S", first=1, last=count)):
            got += batch.column("sequence").to_pylist()
            names = run(js.consumer_names("S"))
            if resets < 3 and names:
                run(js.reset_consumer("S", names[0], 1 if resets % 2 else count))
                resets += 1
    assert resets == 3
    assert got == list(range(1, count + 1))
