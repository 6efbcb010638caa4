"""How a source stands, from what servers say."""

from __future__ import annotations

import pytest

from penstock.broker.model import ConsumerInfo, Json
from penstock.sourcing.links import unacknowledged


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
