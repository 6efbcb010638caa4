"""Metrics of gateway and bridge are what Prometheus reads, whatever names others have chosen."""

from __future__ import annotations

import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.metrics import Metrics
from penstock.metrics.families import text
from penstock.sourcing import metrics as bridges
from penstock.sourcing.bridge import BridgeStatistics

NASTY = 'a"b\\c\nd'


def read(raw: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values."""
    families = text_string_to_metric_families(raw.decode())
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


def test_a_gateway_tells_calls_times_and_the_progress_of_consumers() -> None:
    metrics = Metrics()
    metrics.called("FetchFacts", "ok", 0.003)
    metrics.called("FetchFacts", NASTY, 7.0)
    metrics.refused[NASTY] += 2
    consumer: Any = SimpleNamespace(
        stream="S", name=NASTY, lag=timedelta(seconds=1.5), lag_messages=3, ack_floor=7, ack_pending=2
    )
    found = read(metrics.text([consumer], ready=True))
    assert found["penstock_gateway_calls_total", ("FetchFacts", "ok")] == 1
    assert found["penstock_gateway_calls_total", ("FetchFacts", NASTY)] == 1
    assert found["penstock_gateway_refused_total", (NASTY,)] == 2
    assert found["penstock_gateway_call_seconds_bucket", ("0.005", "FetchFacts")] == 1
    assert found["penstock_gateway_call_seconds_count", ("FetchFacts",)] == 2
    assert found["penstock_gateway_ready", ()] == 1
    assert found["penstock_gateway_frontier", (NASTY, "S")] == 7
    assert found["penstock_gateway_replication_lag_seconds", (NASTY, "S")] == 1.5


def test_a_bridge_tells_its_statistics_and_a_lag_that_is_not_known() -> None:
    statistics = BridgeStatistics(stored=10, position=12)
    found = read(text(bridges.FAMILIES, bridges.samples(NASTY, statistics)))
    assert found["penstock_bridge_stored_total", (NASTY,)] == 10
    assert found["penstock_bridge_position", (NASTY,)] == 12
    assert math.isnan(found["penstock_bridge_lag", (NASTY,)])
