"""The metrics of a worker, and their Prometheus names.

Counting costs a few additions per message: values are turned into metrics only at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.consume.messages import Message
from penstock.metrics import endpoint
from penstock.metrics.endpoint import Health, always_well
from penstock.metrics.families import Family, Histogram, Numbers, Sample

HANDLER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
UPDATE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

RECENT = 10_000
"""Number of latest handler calls for the percentile, and for the share below twice that percentile."""
LABELS = ("worker", "consumer")
MOST_LABELS = 500
"""Maximum number of partitions of a worker with a label value of their own."""
OTHERS = "(others)"


def _metric(kind: str, help_: str, *labels: str) -> Family:
    return Family(kind, help_, (*LABELS, *labels))


METRICS = {
    "parti_consumer_messages_total": _metric("counter", "Messages that were delivered to the worker."),
    "parti_consumer_redeliveries_total": _metric("counter", "Deliveries that were not the first of their message."),
    "parti_consumer_inflight": _metric("gauge", "Messages that are delivered and not done, or wait to be delivered."),
    "parti_consumer_update_duration_seconds": _metric("histogram", "How long updates of the consumer took."),
    "parti_consumer_update_failures_total": _metric("counter", "Updates of the consumer that failed."),
    "parti_consumer_update_skipped_total": _metric("counter", "Updates that changed nothing, or were joined."),
    "parti_consumer_subject_count": _metric("gauge", "Filter subjects of the worker's consumers."),
    "parti_consumer_subject_limit": _metric("gauge", "Filter subjects that the worker's consumers may have."),
    "parti_consumer_duplicate_subjects_total": _metric("counter", "Subjects that came twice in an assignment."),
    "parti_handler_latency_seconds": _metric("histogram", "How long handlers took, of messages that were done."),
    "parti_handler_p95_seconds": _metric("gauge", "95th percentile of the last 10,000 handler calls."),
    "parti_handler_within_ratio": _metric("gauge", "Share of them that took less than twice the 95th percentile."),
    "parti_handler_failures_total": _metric("counter", "Tries that ended with an error."),
    "parti_dead_letters_total": _metric("counter", "Messages that were given up and kept as dead letters."),
    "parti_repeated_total": _metric("counter", "Deliveries of messages that were done already; not handled again."),
    "parti_held_messages": _metric("gauge", "Messages in the memory of the worker."),
    "parti_parked_messages": _metric("gauge", "Messages of slow partitions that wait at the server."),
    "parti_partitions": _metric("gauge", "Partitions of the worker."),
    "parti_partitions_left_out": _metric("gauge", "Partitions that are not served: their subjects do not fit."),
    "parti_handler_oldest_seconds": _metric("gauge", "How long the handler has been running that began first."),
    "parti_handlers_long_running": _metric("gauge", "Handlers that have been running for 30 s or more."),
    "parti_partition_messages_total": _metric("counter", "Messages that are done.", "partition"),
    "parti_partition_latency_seconds": _metric("gauge", "What a message takes, on average.", "partition"),
    "parti_partition_lag_messages": _metric("gauge", "Messages that are not done.", "partition"),
    "parti_partition_lag_seconds": _metric("gauge", "Age of the oldest one not done.", "partition"),
    "parti_handoffs_total": _metric("counter", "Partitions that changed hands.", "direction"),
    "parti_claims": _metric("gauge", "Claims on partitions that the worker holds."),
    "parti_leader_changes_total": _metric("counter", "Times that another worker became the leader."),
}
"""All metrics; alert rules and dashboards name only these."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a partition. Both values are 0 when everything is done."""

    messages: int
    """-1 when the stream cannot count them (it has no `allow_direct`), and there are some."""
    seconds: float


class WorkerSnapshot(NamedTuple):
    """The state of a worker at one moment."""

    partitions: int = 0
    outstanding: int = 0
    """Messages delivered and not done."""
    held: int = 0
    """Those of them held in memory with their data."""
    parked: int = 0
    """Those of them that are parked."""
    behind: int = 0
    """Messages left in the backlogs of partitions that catch up, when last measured."""
    oldest: float = 0.0
    """Seconds that the longest-running handler has run."""
    long_running: int = 0
    """Handlers that have been running for long."""
    handled: Mapping[str, tuple[int, float]] = {}
    """By partition: messages done, and the average seconds per message."""


class WorkerMetrics:
    """The metrics of one worker. A group's member adds the group's."""

    def __init__(self, worker_id: str, consumer: str, subject_limit: int = 0) -> None:
        self.worker_id = worker_id
        self.consumer = consumer
        self.messages = 0
        self.redeliveries = 0
        self.pending: int | Message = 0
        """Messages not delivered yet, or the last message, which says it: it is parsed when asked for."""
        self.look: Callable[[], WorkerSnapshot] = WorkerSnapshot
        """Called at every scrape; the worker sets its own function here."""
        self.repeats = 0
        self.failures = 0
        self.dead_letters = 0
        self.latency = Histogram(HANDLER_BUCKETS)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.updates = Histogram(UPDATE_BUCKETS)
        self.update_failures = 0
        self.updates_failing = 0
        """Failed updates since the last successful one."""
        self.left_out = 0
        """Partitions that are not served because of the subject cap."""
        self.updates_skipped = 0
        self.subjects = 0
        self.subject_limit = subject_limit
        self.duplicates = 0
        self.lag: dict[str, Lag] = {}
        """Lag by partition; measured periodically."""
        self.handoffs: Counter[str] = Counter()
        """Handoffs by direction: `in` and `out`."""
        self.claims = 0
        self.leader_changes = 0

    # -- reported by the consumer ----------------------------------------------------------------------------------

    def update_applied(self, seconds: float, subjects: int) -> None:
        self.updates.observe(seconds)
        self.updates_failing = 0
        self.subjects = subjects

    def update_failed(self) -> None:
        self.update_failures += 1
        self.updates_failing += 1

    def update_skipped(self) -> None:
        self.updates_skipped += 1

    def duplicate_subjects(self, count: int) -> None:
        self.duplicates += count

    # -- reported by the pull loop and the handlers ------------------------------------------------------------------

    def came(self, batch: list[Message], redelivered: int) -> None:
        self.messages += len(batch)
        self.redeliveries += redelivered
        self.pending = batch[-1]

    def handled(self, latencies: list[float]) -> None:
        self.latency.observe_all(latencies)
        self._recent.extend(latencies)

    def service_level(self) -> tuple[float, float]:
        """Return the 95th percentile of the latest calls, and the share below twice that; 0 and 1 without calls."""
        recent = sorted(self._recent.copy())
        if not recent:
            return 0.0, 1.0
        p95 = recent[(len(recent) * 95 - 1) // 100]
        return p95, bisect_left(recent, 2 * p95) / len(recent) if p95 else 1.0

    def failed(self, error: BaseException) -> None:
        self.failures += 1

    def dead(self) -> None:
        self.dead_letters += 1

    def repeated(self) -> None:
        self.repeats += 1

    @property
    def done(self) -> int:
        """Messages whose handler succeeded."""
        self.look()
        return self.latency.count

    def values(self) -> dict[str, Any]:
        """The value of each metric without further labels."""
        now = self.look()
        p95, within = self.service_level()
        pending = self.pending if isinstance(self.pending, int) else self.pending.pending
        return {
            "parti_consumer_messages_total": self.messages,
            "parti_consumer_redeliveries_total": self.redeliveries,
            "parti_consumer_inflight": max(pending + now.outstanding, now.behind),
            "parti_consumer_update_duration_seconds": self.updates,
            "parti_consumer_update_failures_total": self.update_failures,
            "parti_consumer_update_skipped_total": self.updates_skipped,
            "parti_consumer_subject_count": self.subjects,
            "parti_consumer_subject_limit": self.subject_limit,
            "parti_consumer_duplicate_subjects_total": self.duplicates,
            "parti_handler_latency_seconds": self.latency,
            "parti_handler_p95_seconds": p95,
            "parti_handler_within_ratio": within,
            "parti_handler_failures_total": self.failures,
            "parti_dead_letters_total": self.dead_letters,
            "parti_repeated_total": self.repeats,
            "parti_held_messages": now.held,
            "parti_parked_messages": now.parked,
            "parti_partitions": now.partitions,
            "parti_partitions_left_out": self.left_out,
            "parti_handler_oldest_seconds": now.oldest,
            "parti_handlers_long_running": now.long_running,
            "parti_claims": self.claims,
            "parti_leader_changes_total": self.leader_changes,
        }

    def labelled(self) -> dict[str, dict[str, float]]:
        """The values of the metrics with one further label, by its value."""
        handled = self.look().handled
        return {
            "parti_partition_messages_total": _few({id_: count for id_, (count, _) in handled.items()}, sum),
            "parti_partition_latency_seconds": _few({id_: seconds for id_, (_, seconds) in handled.items()}, max),
            "parti_partition_lag_messages": _few({id_: lag.messages for id_, lag in self.lag.items()}, sum),
            "parti_partition_lag_seconds": _few({id_: lag.seconds for id_, lag in self.lag.items()}, max),
            "parti_handoffs_total": dict(self.handoffs),
        }


def _few(by_partition: dict[str, float], joined: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Return the first partitions by id, and all others as one: the number of labels is bounded."""
    if len(by_partition) <= MOST_LABELS:
        return by_partition
    ids = sorted(by_partition)
    rest = joined(by_partition[id_] for id_ in ids[MOST_LABELS:])
    return {**{id_: by_partition[id_] for id_ in ids[:MOST_LABELS]}, OTHERS: rest}


Workers = Callable[[], Iterable[WorkerMetrics]]
"""Returns the current workers of a process."""


def samples(workers: Workers) -> Iterator[Sample]:
    """Yield the metrics of a process' workers."""
    for worker in workers():
        labels = (worker.worker_id, worker.consumer)
        for name, value in worker.values().items():
            yield Sample(name, labels, value)
        for name, by_label in worker.labelled().items():
            yield from (Sample(name, (*labels, label), value) for label, value in by_label.items())


def serve(
    port: int, workers: Workers, address: str = "127.0.0.1", health: Callable[[], Health] = always_well
) -> tuple[int, Callable[[], None]]:
    """Serve `/metrics`, `/healthz` and `/readyz`; returns the port (0: any free one), and a function that stops it."""
    return endpoint.serve(port, address, health, Numbers(METRICS, lambda: samples(workers)))
