"""Metrics: the promised names, right numbers, and rules and dashboards that name only what exists."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.consume.messages import Message
from penstock.consume.metrics import METRICS, Lag, WorkerMetrics, WorkerSnapshot, samples
from penstock.metrics.families import Histogram, Numbers

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = [DEPLOY / "prometheus" / "workers.rules.yaml", DEPLOY / "grafana" / "workers.json"]
PROMISED = {
    "parti_consumer_messages_total",
    "parti_consumer_redeliveries_total",
    "parti_consumer_inflight",
    "parti_consumer_update_duration_seconds",
    "parti_consumer_subject_count",
    "parti_handler_latency_seconds",
    "parti_consumer_update_failures_total",
    "parti_consumer_update_skipped_total",
}
LABELS = {"worker": "3", "consumer": "etch-3"}


def expressions(path: Path) -> list[str]:
    """Every query of a rules file or a dashboard."""
    if path.suffix == ".yaml":
        return [rule["expr"] for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    board = json.loads(path.read_text())
    variables = [one["query"] for one in board["templating"]["list"]]
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]] + variables


def known_names() -> set[str]:
    parts = {f"{name}_{part}" for name, one in METRICS.items() if one.kind == "histogram" for part in PARTS}
    return {name for name, one in METRICS.items() if one.kind != "histogram"} | parts


PARTS = ("bucket", "sum", "count")


def exposed(*workers: WorkerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(Numbers(METRICS, lambda: samples(lambda: workers)))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    shown = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in shown}


def value(found: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **more: str) -> float:
    return found[name, tuple(sorted({**LABELS, **more}.items()))]


def test_every_promised_metric_exists() -> None:
    assert set(METRICS) >= PROMISED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rules_and_dashboards_name_only_metrics_that_exist(path: Path) -> None:
    found = expressions(path)
    named = {name for expression in found for name in re.findall(r"parti_\w+", expression)}
    assert len(found) >= 8
    assert named - known_names() == set()


def test_the_check_of_names_can_fail() -> None:
    assert {"parti_consumer_message_total"} - known_names()


def test_alerts_cover_what_an_operator_must_know() -> None:
    text = " ".join(expressions(FILES[0]))
    for name in ("redeliveries_total", "subject_count", "update_failures_total", "consumer_inflight", "lag_seconds"):
        assert name in text


def test_numbers_come_out_under_their_names_and_labels() -> None:
    metrics = WorkerMetrics("3", "etch-3", subject_limit=500)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    reply = "$JS.ACK.S.etch-3.{}.7.9.1767225600000000000.41"
    metrics.came([Message("s", b"", 7, count, reply.format(count), now) for count in (1, 2)], 1)
    metrics.handled([0.002, 0.2])
    metrics.update_applied(0.03, 80)
    metrics.update_skipped()
    metrics.update_failed()
    metrics.look = lambda: WorkerSnapshot(partitions=80, outstanding=5, held=4, parked=1)
    metrics.lag = {"t.c": Lag(12, 3.5)}
    metrics.handoffs["in"] = 2
    found = exposed(metrics)
    assert value(found, "parti_consumer_messages_total") == 2
    assert value(found, "parti_consumer_redeliveries_total") == 1
    assert value(found, "parti_consumer_inflight") == 41 + 5
    assert value(found, "parti_consumer_subject_count") == 80
    assert value(found, "parti_consumer_subject_limit") == 500
    assert value(found, "parti_consumer_update_skipped_total") == 1
    assert value(found, "parti_consumer_update_failures_total") == 1
    assert value(found, "parti_consumer_update_duration_seconds_count") == 1
    assert value(found, "parti_handler_latency_seconds_count") == 2
    assert value(found, "parti_handler_latency_seconds_sum") == pytest.approx(0.202)
    assert value(found, "parti_handler_latency_seconds_bucket", le="0.0025") == 1
    assert value(found, "parti_handler_latency_seconds_bucket", le="+Inf") == 2
    assert value(found, "parti_partition_lag_messages", partition="t.c") == 12
    assert value(found, "parti_partition_lag_seconds", partition="t.c") == 3.5
    assert value(found, "parti_handoffs_total", direction="in") == 2
    assert value(found, "parti_held_messages") == 4


def test_two_workers_of_one_process_are_told_apart() -> None:
    found = exposed(WorkerMetrics("1", "etch-1"), WorkerMetrics("2", "etch-2"))
    assert {dict(labels)["worker"] for name, labels in found if name == "parti_claims"} == {"1", "2"}


def test_a_bucket_holds_its_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]


def test_the_share_of_quick_handlers_is_measured_against_their_own_percentile() -> None:
    made = WorkerMetrics("3", "etch-3")
    assert made.service_level() == (0.0, 1.0)
    made.handled([0.01] * 97 + [0.019, 0.03, 0.04])
    assert made.service_level() == (0.01, 0.98)
    assert value(exposed(made), "parti_handler_p95_seconds") == 0.01
    assert value(exposed(made), "parti_handler_within_ratio") == 0.98
    made.handled([0.01] * 10_000)
    assert made.service_level() == (0.01, 1.0), "only the latest count"
