"""The receiver against a real origin: losses on the way, resets by others, acknowledgements only for what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.errors import ConfigError, ConnectionLost, Unavailable
from penstock.jetstream.api import JetStream
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.sourcing.flow import Flow
from penstock.sourcing.receiver import Receiver, consumer_config
from penstock.testing import LossyProxy, eventually
from penstock.wire import blocking


class Origin:
    """A stream with numbered messages, and its consumer."""

    def __init__(self, server: EmbeddedServer, retention: str = "limits", **choices: Any) -> None:
        self.server = server
        self.publisher = BlockingPublisher.connect(server.settings)
        self.js: JetStream = self.publisher.jetstream
        self.published = 0
        blocking.run(make_stream(self.js, "O", allow_atomic=True, retention=retention))
        blocking.run(self.js.create_consumer("O", consumer_config("r", "to.r", **choices)))

    def publish(self, count: int) -> None:
        data = [b"%d" % n for n in range(self.published + 1, self.published + count + 1)]
        for start in range(0, count, 1000):
            self.publisher.publish_batch("O", "o.x", data[start : start + 1000])
        self.published += count

    def reset(self, seq: int | None = None) -> None:
        blocking.run(self.js.reset_consumer("O", "r", seq))

    @property
    def floor(self) -> int:
        return blocking.run(self.js.consumer_info("O", "r")).ack_floor_stream_seq

    @property
    def messages(self) -> int:
        return blocking.run(self.js.stream_info("O")).state.messages


Make = Callable[..., Origin]


@pytest.fixture
def make_origin(nats_server: EmbeddedServer) -> Iterator[Make]:
    made: list[Origin] = []

    def make(*args: str, **choices: Any) -> Origin:
        made.append(Origin(nats_server, *args, **choices))
        return made[-1]

    yield make
    for one in made:
        one.publisher.close()


class Sink:
    """Takes chunks, and what happens after so many messages."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.events: list[tuple[int, Callable[[], object]]] = []

    def after(self, count: int, event: Callable[[], object]) -> None:
        self.events.append((count, event))

    def take(self, receiver: Receiver, until: int, store: bool = True) -> None:
        """Receive until message `until` was taken."""
        if self.got and self.got[-1] >= until:
            return
        for chunk in receiver.chunks():
            if chunk:
                self.got += [int(data) for data in chunk.rows().data]
                if store:
                    receiver.stored(chunk.last_sequence)
                self._happen()
            if self.got and self.got[-1] >= until:
                return

    def _happen(self) -> None:
        while self.events and len(self.got) >= self.events[0][0]:
            self.events.pop(0)[1]()


def idle_until(receiver: Receiver, condition: Callable[[], bool]) -> None:
    """Keep the receiver answering until the condition holds."""
    chunks: Iterator[object] = receiver.chunks()

    def looked() -> bool:
        next(chunks)
        return condition()

    eventually(looked, 60, "the origin to hear of it")


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_everything_arrives_in_order_and_is_acknowledged_once_stored(
    nats_server: EmbeddedServer, make_origin: Make, retention: str
) -> None:
    origin, sink = make_origin(retention), Sink()
    origin.publish(3_000)
    with Receiver(nats_server.settings, "O", "r", Flow()) as receiver:
        sink.take(receiver, 3_000)
        idle_until(receiver, lambda: origin.floor == 3_000)
    assert sink.got == list(range(1, 3_001))
    # The server removes what is acknowledged after it has said so.
    left = 3_000 if retention == "limits" else 0
    eventually(lambda: origin.messages == left, what=f"{left} messages left", state=lambda: origin.messages)


def test_what_the_sink_has_not_stored_is_not_acknowledged_and_comes_again(
    nats_server: EmbeddedServer, make_origin: Make
) -> None:
    origin, sink, again = make_origin("workqueue"), Sink(), Sink()
    origin.publish(500)
    with Receiver(nats_server.settings, "O", "r", Flow()) as receiver:
        sink.take(receiver, 500, store=False)
        for _ in zip(range(8), receiver.chunks(), strict=False):  # two seconds of heartbeats
            assert origin.floor == 0
    assert origin.messages == 500
    with Receiver(nats_server.settings, "O", "r", Flow()) as receiver:
        again.take(receiver, 500)
    assert sink.got == again.got == list(range(1, 501))


@pytest.mark.parametrize("lost", [1, 2, 700, 1_999, 2_000], ids=lambda n: f"delivery {n}")
def test_a_message_lost_on_the_way_is_asked_for_again_in_order(
    nats_server: EmbeddedServer, make_origin: Make, lost: int
) -> None:
    origin, sink, flow = make_origin(), Sink(), Flow()
    origin.publish(2_000)
    dropped: list[bytes] = []

    def drop(line: bytes) -> bool:
        hit = b" $JS.ACK." in line and line.split(b".")[-3] == b"%d" % lost and not dropped
        if hit:
            dropped.append(line)
        return hit

    with LossyProxy(nats_server.port) as proxy:
        proxy.drop_down = drop
        settings = nats_server.settings.with_servers(proxy.url)
        with Receiver(settings, "O", "r", flow) as receiver:
            sink.take(receiver, 2_000)
    assert dropped, "the proxy was to lose a message"
    assert sink.got == list(range(1, 2_001))


def test_an_answer_that_is_lost_is_given_again(nats_server: EmbeddedServer, make_origin: Make) -> None:
    origin, sink = make_origin("workqueue"), Sink()
    lost: list[bytes] = []

    def drop(line: bytes) -> bool:
        if b"$JS.FC" in line and len(lost) < 2:
            lost.append(line)
            return True
        return False

    origin.publish(1_000)
    with LossyProxy(nats_server.port) as proxy:
        proxy.drop_up = drop
        with Receiver(nats_server.settings.with_servers(proxy.url), "O", "r", Flow()) as receiver:
            sink.take(receiver, 1_000)
            idle_until(receiver, lambda: origin.messages == 0)
    assert len(lost) == 2
    assert sink.got == list(range(1, 1_001))


def test_others_may_reset_the_consumer_at_any_time_and_nothing_is_repeated_or_stuck(
    nats_server: EmbeddedServer,
    make_origin: Make,
) -> None:
    origin, sink, flow = make_origin(max_ack_pending=500), Sink(), Flow()
    origin.publish(6_000)
    sink.after(500, origin.reset)
    sink.after(1_500, lambda: origin.reset(1))
    sink.after(3_000, lambda: origin.reset(2_000))
    with Receiver(nats_server.settings, "O", "r", flow) as receiver:
        sink.take(receiver, 6_000)
        idle_until(receiver, lambda: origin.floor == 6_000)
    assert sink.got == list(range(1, 6_001))
    assert flow.restarts + flow.gaps >= 3


def test_a_reset_forward_skips_what_lies_between(nats_server: EmbeddedServer, make_origin: Make) -> None:
    origin, sink = make_origin(max_ack_pending=500), Sink()
    origin.publish(6_000)
    sink.after(1_000, lambda: origin.reset(5_001))
    with Receiver(nats_server.settings, "O", "r", Flow()) as receiver:
        sink.take(receiver, 6_000)
    assert sink.got == sorted(set(sink.got)), "repeated or out of order"
    assert sink.got[-1_000:] == list(range(5_001, 6_001))
    assert len(sink.got) < 6_000


def test_a_new_receiver_goes_on_where_the_sink_is_after_the_connection_broke(
    nats_server: EmbeddedServer, make_origin: Make
) -> None:
    origin, sink = make_origin(), Sink()
    origin.publish(5_000)
    with LossyProxy(nats_server.port) as proxy:
        settings = nats_server.settings.with_servers(proxy.url)
        sink.after(1_000, proxy.cut)
        with pytest.raises(ConnectionLost), Receiver(settings, "O", "r", Flow()) as receiver:
            sink.take(receiver, 10_000)
        with Receiver(settings, "O", "r", Flow(sink.got[-1])) as receiver:
            sink.take(receiver, 5_000)
    assert sink.got == list(range(1, 5_001))


def test_a_consumer_that_vanishes_is_an_error_and_not_silence(nats_server: EmbeddedServer, make_origin: Make) -> None:
    origin, sink = make_origin(), Sink()
    origin.publish(10)
    with Receiver(nats_server.settings, "O", "r", Flow()) as receiver:
        sink.take(receiver, 10)
        blocking.run(origin.js.delete_consumer("O", "r"))
        with pytest.raises(Unavailable, match="silent"):
            sink.take(receiver, 11)


def test_a_consumer_of_another_kind_is_refused_with_reasons(nats_server: EmbeddedServer, make_origin: Make) -> None:
    origin = make_origin()
    blocking.run(origin.js.create_consumer("O", {"durable_name": "pull", "ack_policy": "explicit"}))
    with pytest.raises(ConfigError, match=r"pull consumer.*ack_policy is explicit"):
        Receiver(nats_server.settings, "O", "pull", Flow())


def test_chunks_are_record_batches_too(nats_server: EmbeddedServer, make_origin: Make) -> None:
    origin = make_origin()
    origin.publish(100)
    seen = []
    with Receiver(nats_server.settings, "O", "r", Flow(40)) as receiver:
        for chunk in receiver.chunks():
            if chunk:
                rows = chunk.rows().sequences
                assert chunk.record_batch().column("sequence").to_pylist() == rows
                seen += rows
            if seen and seen[-1] == 100:
                break
    assert seen == list(range(41, 101))
