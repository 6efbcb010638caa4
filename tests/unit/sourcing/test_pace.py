"""The rate limit of a bridge."""

from __future__ import annotations

import pytest

from penstock.sourcing import bridge
from penstock.sourcing.bridge import Pace


class Clock:
    """Time that passes only when somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bridge, "time", made)
    return made


def test_messages_never_go_faster_than_the_rate(clock: Clock) -> None:
    pace, sent, started = Pace(1000), 0, clock.now
    for count in (300, 1, 1000, 50, 649):
        pace.wait(count)
        assert sent <= (clock.now - started) * 1000 + 1e-6, "what was sent before must have had its time"
        sent += count
    pace.wait(1)
    assert clock.slept == pytest.approx(2.0)


def test_time_that_passed_idle_is_not_made_up_for(clock: Clock) -> None:
    pace = Pace(1000)
    pace.wait(10)
    clock.now += 60
    pace.wait(1000)
    before = clock.slept
    pace.wait(1)
    assert clock.slept - before == pytest.approx(1.0)


def test_without_a_rate_nobody_waits(clock: Clock) -> None:
    pace = Pace(None)
    for _ in range(10):
        pace.wait(10_000)
    assert clock.slept == 0
