"""How a source stands, from what servers say."""

from __future__ import annotations

import pytest

from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.sourcing.links import lag_of, reports, unacknowledged


def consumer(**changes: object) -> ConsumerInfo:
    raw: Json = {
        "stream_name": "O",
        "name": "reader",
        "config": {},
        "delivered": {"stream_seq": 9, "consumer_seq": 9, "last_active": "2030-01-01T00:00:00Z"},
        "ack_floor": {"stream_seq": 4, "consumer_seq": 4},
        "num_pending": 0,
        "num_ack_pending": 5,
        "num_redelivered": 0,
        "push_bound": True,
        "ts": "2030-01-01T00:01:00Z",
    }
    return ConsumerInfo.parse({**raw, **changes})


def test_deliveries_that_nobody_acknowledges_are_named_with_the_cure() -> None:
    said = unacknowledged(consumer())
    assert said is not None
    assert said.startswith("5 messages are delivered")
    assert "penstock consumer reset O reader --yes" in said


@pytest.mark.parametrize(
    "changes",
    [{"num_ack_pending": 0}, {"ts": "2030-01-01T00:00:03Z"}, {"push_bound": False}, {"paused": True}],
    ids=["all acknowledged", "just delivered", "nobody listens", "paused"],
)
def test_others_are_well(changes: Json) -> None:
    assert unacknowledged(consumer(**changes)) is None


def test_the_cure_of_another_domain_names_it() -> None:
    said = unacknowledged(consumer(), "$JS.site1.API")
    assert said is not None
    assert "`penstock --domain site1 consumer reset O reader --yes`" in said


@pytest.mark.parametrize(
    ("pending", "arrived", "lag"), [(0, 9, 0), (0, 7, 2), (3, 9, 3), (0, None, 5), (0, 0, 5)]
)  # 9 delivered, 4 acknowledged
def test_what_arrived_and_is_not_acknowledged_yet_is_no_lag(pending: int, arrived: int | None, lag: int) -> None:
    assert lag_of(consumer(num_pending=pending), arrived) == lag


def test_the_report_of_one_source_is_not_taken_for_that_of_another_with_the_same_origin() -> None:
    """The server's report names no consumer, and has an order of its own."""
    sources = [{"name": "L", "consumer": {"name": name, "deliver_subject": f"to.{name}"}} for name in ("a", "b")]
    config = {"name": "C", "sources": [*sources, {"name": "O", "filter_subject": "o.x"}]}
    state = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0}
    shown = [{"name": "L", "seq": 7}, {"name": "O", "filter_subject": "o.x", "seq": 3}, {"name": "L", "seq": 1}]
    info = StreamInfo.parse({"config": config, "state": state, "sources": shown})
    found = {(one.config.get("consumer") or {}).get("name"): one.arrived for one in reports(info)}
    assert found == {"a": None, "b": None, None: 3}
