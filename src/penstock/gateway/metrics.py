"""The gateway's own counts and times, and the progress of its consumers, in Prometheus' text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.observe.status import ConsumerStatus

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PREFIX = "penstock_gateway"


@dataclass(slots=True)
class Times:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        for at, most in enumerate(BUCKETS):
            if seconds <= most:
                self.counts[at] += 1


@dataclass(slots=True)
class Metrics:
    """What one gateway process did since it started."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By method and outcome."""
    facts: Counter[str] = field(default_factory=Counter)
    """Facts handed out, confirmed pages and facts appended, by method."""
    times: dict[str, Times] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that were turned away before they reached a method, by reason."""
    running: int = 0

    def called(self, method: str, outcome: str, seconds: float) -> None:
        self.calls[method, outcome] += 1
        self.times.setdefault(method, Times()).add(seconds)

    def text(self, consumers: Iterable[ConsumerStatus], ready: bool) -> str:
        """All metrics, each with its help."""
        return "\n".join([*self._own(ready), *_progress(tuple(consumers))]) + "\n"

    def _own(self, ready: bool) -> Iterator[str]:
        yield from _head("calls_total", "counter", "Calls by method and outcome.")
        for (method, outcome), count in sorted(self.calls.items()):
            yield f'{PREFIX}_calls_total{{method="{method}",outcome="{outcome}"}} {count}'
        yield from _head("facts_total", "counter", "Facts fetched, pages confirmed, facts appended.")
        for method, count in sorted(self.facts.items()):
            yield f'{PREFIX}_facts_total{{method="{method}"}} {count}'
        yield from _head("refused_total", "counter", "Calls that were turned away at the door, by reason.")
        for reason, count in sorted(self.refused.items()):
            yield f'{PREFIX}_refused_total{{reason="{reason}"}} {count}'
        yield from _head("call_seconds", "histogram", "How long calls took.")
        for method, times in sorted(self.times.items()):
            for most, count in zip(BUCKETS, times.counts, strict=True):
                yield f'{PREFIX}_call_seconds_bucket{{method="{method}",le="{most:g}"}} {count}'
            yield f'{PREFIX}_call_seconds_bucket{{method="{method}",le="+Inf"}} {times.count}'
            yield f'{PREFIX}_call_seconds_sum{{method="{method}"}} {times.total:.6f}'
            yield f'{PREFIX}_call_seconds_count{{method="{method}"}} {times.count}'
        yield from _head("running", "gauge", "Calls under way.")
        yield f"{PREFIX}_running {self.running}"
        yield from _head("ready", "gauge", "1 when the broker answers and the gateway takes calls.")
        yield f"{PREFIX}_ready {int(ready)}"


def _progress(consumers: tuple[ConsumerStatus, ...]) -> Iterator[str]:
    """How far the granted consumers are: lag and frontier, which every gateway sees alike."""
    gauges = {
        "replication_lag_seconds": "Age of the oldest fact that is not confirmed.",
        "replication_lag_facts": "Facts that are not confirmed.",
        "frontier": "Sequence up to which everything is confirmed.",
        "unconfirmed": "Facts fetched and not confirmed.",
    }
    for name, help_ in gauges.items():
        yield from _head(name, "gauge", help_)
        for one in consumers:
            yield f'{PREFIX}_{name}{{stream="{one.stream}",consumer="{one.name}"}} {_value(name, one)}'


def _value(name: str, one: ConsumerStatus) -> int | float:
    match name:
        case "replication_lag_seconds":
            return one.lag.total_seconds()
        case "replication_lag_facts":
            return one.lag_messages
        case "frontier":
            return one.ack_floor
        case _:
            return one.ack_pending


def _head(name: str, kind: str, help_: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}_{name} {help_}"
    yield f"# TYPE {PREFIX}_{name} {kind}"
