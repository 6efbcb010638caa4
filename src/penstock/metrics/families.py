"""Metrics as values, and how Prometheus gets them. The only module that knows how metrics are written."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its kind (`counter`, `gauge` or `histogram`), its help, and the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...]


class Sample(NamedTuple):
    """A value of a metric; the value of a histogram is a `Histogram`."""

    name: str
    labels: tuple[str, ...]
    value: Any


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        if max(values, default=0.0) <= self.bounds[0]:  # as usual with many
            self.counts[0] += len(values)
        else:
            for bucket, count in Counter(map(partial(bisect_left, self.bounds), values)).items():
                self.counts[bucket] += count
        self.total += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants it: each bucket counts all below it."""
        rows, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


class Numbers(Collector):
    """Hands samples to Prometheus, whenever it asks."""

    def __init__(self, families: Mapping[str, Family], samples: Callable[[], Iterable[Sample]]) -> None:
        self._families = families
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        found = {name: _KINDS[one.kind](name, one.help, labels=one.labels) for name, one in self._families.items()}
        for name, labels, value in self._samples():
            if isinstance(value, Histogram):
                found[name].add_metric(labels, value.cumulative(), value.total)
            else:
                found[name].add_metric(labels, value)
        return iter(found.values())


def text(families: Mapping[str, Family], samples: Iterable[Sample]) -> bytes:
    """All metrics in Prometheus' text form, each with its help, labels escaped."""
    registry = CollectorRegistry()
    registry.register(Numbers(families, lambda: samples))
    return generate_latest(registry)
