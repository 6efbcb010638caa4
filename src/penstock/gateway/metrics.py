"""The gateway's own counts and times, and the progress of its consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.metrics.families import Family, Histogram, Sample, text
from penstock.observe.status import ConsumerStatus

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONSUMER = ("stream", "consumer")
FAMILIES = {
    f"penstock_gateway_{name}": family
    for name, family in {
        "calls_total": Family("counter", "Calls by method and outcome.", ("method", "outcome")),
        "facts_total": Family("counter", "Facts fetched, pages confirmed, facts appended.", ("method",)),
        "refused_total": Family("counter", "Calls that were turned away at the door, by reason.", ("reason",)),
        "call_seconds": Family("histogram", "How long calls took.", ("method",)),
        "running": Family("gauge", "Calls under way.", ()),
        "ready": Family("gauge", "1 when the broker answers and the gateway takes calls.", ()),
        "replication_lag_seconds": Family("gauge", "Age of the oldest fact that is not confirmed.", CONSUMER),
        "replication_lag_facts": Family("gauge", "Facts that are not confirmed.", CONSUMER),
        "frontier": Family("gauge", "Sequence up to which everything is confirmed.", CONSUMER),
        "unconfirmed": Family("gauge", "Facts fetched and not confirmed.", CONSUMER),
    }.items()
}


@dataclass(slots=True)
class Metrics:
    """Counters of one gateway process since its start."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By method and outcome."""
    facts: Counter[str] = field(default_factory=Counter)
    """Facts handed out, confirmed pages and facts appended, by method."""
    times: dict[str, Histogram] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that were turned away before they reached a method, by reason."""
    running: int = 0

    def called(self, method: str, outcome: str, seconds: float) -> None:
        self.calls[method, outcome] += 1
        self.times.setdefault(method, Histogram(BUCKETS)).observe(seconds)

    def text(self, consumers: Iterable[ConsumerStatus], ready: bool) -> bytes:
        """All metrics, each with its help. Lag and frontier of the granted consumers every gateway sees alike."""
        samples = (*self._own(ready), *(one for consumer in consumers for one in _progress(consumer)))
        return text(FAMILIES, (Sample(f"penstock_gateway_{name}", *rest) for name, *rest in samples))

    def _own(self, ready: bool) -> Iterator[Sample]:
        for labels, count in sorted(self.calls.items()):
            yield Sample("calls_total", labels, count)
        for method, count in sorted(self.facts.items()):
            yield Sample("facts_total", (method,), count)
        for reason, count in sorted(self.refused.items()):
            yield Sample("refused_total", (reason,), count)
        for method, times in sorted(self.times.items()):
            yield Sample("call_seconds", (method,), times)
        yield Sample("running", (), self.running)
        yield Sample("ready", (), int(ready))


def _progress(one: ConsumerStatus) -> Iterator[Sample]:
    labels = (one.stream, one.name)
    yield Sample("replication_lag_seconds", labels, one.lag.total_seconds())
    yield Sample("replication_lag_facts", labels, one.lag_messages)
    yield Sample("frontier", labels, one.ack_floor)
    yield Sample("unconfirmed", labels, one.ack_pending)
