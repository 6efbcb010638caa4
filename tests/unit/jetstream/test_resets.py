"""What a reset repeats or skips, decided without a server, against a count by hand of a small stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.jetstream.resets import ResetCounts, bounds, effect


def consumer(floor: int, delivered: int, ack_pending: int, pending: int) -> ConsumerInfo:
    raw: dict[str, Any] = {
        "stream_name": "S",
        "name": "c",
        "config": {},
        "delivered": {"stream_seq": delivered, "consumer_seq": 0},
        "ack_floor": {"stream_seq": floor, "consumer_seq": 0},
        "num_pending": pending,
        "num_ack_pending": ack_pending,
        "num_redelivered": 0,
    }
    return ConsumerInfo.parse(raw)


def stream(last: int, retention: str) -> StreamInfo:
    state = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": last, "consumer_count": 1}
    return StreamInfo.parse({"config": {"name": "S", "retention": retention}, "state": state})


@pytest.mark.parametrize("seed", range(40))
def test_the_effect_is_what_counting_by_hand_gives(seed: int) -> None:
    rng = random.Random(seed)
    matching = sorted(rng.sample(range(1, 41), rng.randrange(1, 30)))
    delivered = rng.choice([0, *matching])
    seen = [seq for seq in matching if seq <= delivered]
    acked = {seq for seq in seen if rng.random() < 0.6}
    unacked = [seq for seq in seen if seq not in acked]
    floor = (min(unacked) - 1) if unacked else delivered
    target = rng.randrange(1, 45)

    info = consumer(floor, delivered, len(unacked), len(matching) - len(seen))

    def at(first: int) -> int:
        return sum(seq >= first for seq in matching)

    found = effect(info, target, ResetCounts(at(target), at(floor + 1), at(delivered + 1)))

    repeated = [seq for seq in seen if seq >= target]
    skipped = [seq for seq in matching if seq < target and seq not in acked]
    assert found.repeated == len(repeated), f"seed {seed}"
    if found.exact:
        assert found.skipped == len(skipped), f"seed {seed}"
        assert found.repeated_acked == len(acked.intersection(repeated)), f"seed {seed}"
    else:
        assert found.skipped >= len(skipped), f"seed {seed}"
        assert found.repeated_acked >= len(acked.intersection(repeated)), f"seed {seed}"


def test_where_counting_would_disturb_the_stream_bounds_are_given() -> None:
    info = consumer(floor=10, delivered=14, ack_pending=3, pending=50)
    inside = bounds(info, 20, stream(100, "workqueue"))
    assert (inside.skipped, inside.exact, inside.fate) == (9, False, "left behind")
    everything = bounds(info, 101, stream(100, "interest"))
    assert (everything.skipped, everything.exact, everything.fate) == (53, True, "deleted")
    back = bounds(info, 1, stream(100, "workqueue"))
    assert (back.repeated, back.repeated_acked, back.skipped, back.exact) == (3, 0, 0, True)
