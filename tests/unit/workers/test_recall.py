"""When recalled messages may be handed on, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.broker.model import ConsumerInfo
from penstock.workers.messages import Message
from penstock.workers.recall import Recall


def message(sequence: int, count: int = 2) -> Message:
    return Message("s.p", b"", sequence, count, "", datetime.now(UTC))


def consumer(ack_pending: int, delivered: int) -> ConsumerInfo:
    return ConsumerInfo.parse(
        {
            "stream_name": "S",
            "name": "c",
            "config": {},
            "num_ack_pending": ack_pending,
            "num_pending": 0,
            "num_redelivered": 0,
            "delivered": {"consumer_seq": delivered, "stream_seq": 20},
            "ack_floor": {"consumer_seq": 0, "stream_seq": 0},
        }
    )


def test_recalled_messages_are_handed_on_in_the_order_of_the_stream() -> None:
    recall = Recall(0.0)
    assert not recall.add([message(8), message(9)])
    assert not recall.add([message(7)])
    assert [one.sequence for one in recall.in_order()] == [7, 8, 9]


def test_a_new_message_shows_that_all_that_was_recalled_came_before_it() -> None:
    recall = Recall(0.0)
    assert not recall.add([message(8), message(7)])
    assert recall.add([message(21, count=1), message(22, count=1)])
    assert [one.sequence for one in recall.in_order()] == [7, 8, 21, 22]


def test_without_a_new_message_they_wait_until_everything_that_is_out_is_here() -> None:
    recall = Recall(0.0)
    recall.add([message(8), message(9)])
    assert not recall.is_complete(consumer(ack_pending=4, delivered=12), delivery=12, here={3})
    assert recall.is_complete(consumer(ack_pending=3, delivered=12), delivery=12, here={3})
    assert recall.is_complete(consumer(ack_pending=3, delivered=12), delivery=12, here={3, 9})


def test_they_wait_as_long_as_deliveries_are_on_their_way() -> None:
    recall = Recall(0.0)
    recall.add([message(8)])
    assert not recall.is_complete(consumer(ack_pending=1, delivered=13), delivery=12, here=set())


def test_a_message_that_comes_twice_is_answered_where_it_came_last() -> None:
    recall = Recall(0.0)
    recall.add([message(8, count=2)])
    recall.add([message(8, count=3)])
    assert [one.delivery_count for one in recall.in_order()] == [3]
