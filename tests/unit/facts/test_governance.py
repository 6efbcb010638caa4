"""Since when nobody reads through a consumer, as far as that can be known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.facts.governance import PrunedPosition, Seen, idle_since, restored
from penstock.jetstream.model import ConsumerInfo

NOW = datetime(2026, 11, 16, tzinfo=UTC)
LONG_AGO, LAST_WEEK, YESTERDAY = NOW - timedelta(days=90), NOW - timedelta(days=7), NOW - timedelta(days=1)


def consumer(
    delivered: int = 5, last: datetime | None = None, acked: datetime | None = None, **raw: Any
) -> ConsumerInfo:
    return ConsumerInfo.parse(
        {
            "stream_name": "S",
            "name": "c",
            "config": {},
            "created": LONG_AGO.isoformat(),
            "delivered": {"consumer_seq": delivered, "stream_seq": delivered, "last_active": _text(last)},
            "ack_floor": {"consumer_seq": delivered, "stream_seq": delivered, "last_active": _text(acked)},
            "num_pending": 3,
            "num_ack_pending": 0,
            "num_redelivered": 0,
            **raw,
        }
    )


def _text(at: datetime | None) -> str:
    return at.isoformat() if at else ""


def seen(at: datetime, delivered: int = 5) -> Seen:
    return Seen(at.isoformat(), delivered, delivered)


def test_what_the_server_remembers_counts() -> None:
    assert idle_since(consumer(last=LAST_WEEK, acked=YESTERDAY), seen(LONG_AGO), NOW) == YESTERDAY


def test_somebody_who_waits_for_messages_uses_it() -> None:
    assert idle_since(consumer(last=LAST_WEEK, num_waiting=1), None, NOW) == NOW
    assert idle_since(consumer(last=LAST_WEEK, push_bound=True), None, NOW) == NOW


def test_a_consumer_that_never_delivered_is_unused_since_it_was_made() -> None:
    assert idle_since(consumer(delivered=0), None, NOW) == LONG_AGO


def test_after_a_restart_of_the_server_nothing_is_known_at_the_first_look() -> None:
    assert idle_since(consumer(), None, NOW) == NOW


def test_a_consumer_that_is_where_it_was_at_an_earlier_look_is_unused_since_then() -> None:
    assert idle_since(consumer(), seen(LAST_WEEK), NOW) == LAST_WEEK


def test_a_consumer_that_has_moved_since_an_earlier_look_is_in_use() -> None:
    assert idle_since(consumer(), seen(LAST_WEEK, delivered=4), NOW) == NOW


def test_a_consumer_that_cannot_be_moved_is_made_with_another_start() -> None:
    config = {"name": "c", "deliver_policy": "new", "opt_start_time": "x", "ack_wait": 7}
    made = restored(PrunedPosition("S", "c", config, 41, 50, 3, "", ""))
    assert made == {"name": "c", "deliver_policy": "by_start_sequence", "opt_start_seq": 42, "ack_wait": 7}
