"""The example's pipelines compute what one gets by hand from what was published."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from penstock.examples import example_dir, load_module
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.pipelines import pipeline
from penstock.spark.runs import PipelineResult, run
from penstock.testing.contents import stream_messages
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.wire.blocking import run as blocking

METERED, CREDITED = "platform.billing.usage.metered", "platform.payments.balance_credited"
LOW, DEPLETED = "platform.billing.low_balance_warning", "platform.billing.balance_depleted"
ROLLED_UP = "platform.billing.usage.rolled_up"
START, SHIFT = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=6)
SEED, EVENTS, PROJECTS = 7, 700, 4
BAD = {METERED: [b"no json", b'{"event_id":"x","occurred_at":"2026-01-01T00:00:00Z","payload":{"project_id":"p"}}']}
"""Records that no pipeline can use: no JSON at all, and a charge without seconds and price."""

Hour = tuple[str, datetime]
Alert = tuple[str, str, Decimal, datetime]


@dataclass
class Books:
    """The accounts of the simulated cloud, kept by hand."""

    balances: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    usage: dict[Hour, tuple[int, Decimal]] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)

    def enter(self, events: Iterable[Any]) -> set[Hour]:
        """Book a shift's events, in the order of their time; returns the hours that changed."""
        booked = sorted((one for one in events if one.subject in (METERED, CREDITED)), key=_time_and_id)
        for one in booked:
            amount = one.payload["amount"] if one.subject == CREDITED else -one.payload["price"]
            self._move(one.payload["project_id"], Decimal(str(amount)), one.occurred_at)
        return {self._use(one) for one in booked if one.subject == METERED}

    def _move(self, project: str, amount: Decimal, when: datetime) -> None:
        before = self.balances[project]
        after = self.balances[project] = before + amount
        if before > 0 >= after:
            self.alerts.append((DEPLETED, project, after, when))
        elif before >= 20 > after:
            self.alerts.append((LOW, project, after, when))

    def _use(self, event: Any) -> Hour:
        hour = (event.payload["project_id"], event.occurred_at.replace(minute=0, second=0, microsecond=0))
        seconds, charge = self.usage.get(hour, (0, Decimal()))
        self.usage[hour] = (seconds + event.payload["gpu_seconds"], charge + Decimal(str(event.payload["price"])))
        return hour


def _time_and_id(event: Any) -> tuple[datetime, str]:
    return event.occurred_at, event.event_id


@pytest.fixture
def platform(streams: Any) -> Platform:
    """The example's platform, with its streams on the server."""
    found = load(example_dir() / "penstock.yaml", "dev")
    for stream in found.streams.values():
        blocking(streams.api.create_stream(stream.config))
    return found


def publish_shift(settings: Settings, number: int) -> list[Any]:
    """Simulate a shift and publish it, with some events twice and some that are bad; returns the events."""
    simulator = load_module(example_dir() / "simulator.py", "gpuaas_simulator")
    steps = list(simulator.simulate(SEED + number, START + SHIFT * number, SHIFT, EVENTS, PROJECTS))
    with BlockingPublisher.connect(settings) as publisher:
        for step in steps:
            subjects, bodies = zip(*((one.subject, one.encode()) for one in step.events), strict=True)
            publisher.publish_batch(step.stream, subjects, bodies)
        again = [one for step in steps for one in step.events if one.subject in (METERED, CREDITED)][::25]
        for one in again:
            publisher.publish_batch(one.stream, one.subject, [one.encode()])
        for subject, bad in BAD.items():
            publisher.publish_batch("BILLING", subject, bad)
    return [one for step in steps for one in step.events]


def everything(settings: Settings, platform: Platform) -> dict[tuple[str, int], tuple[str, bytes]]:
    """Every message of every stream, by stream and sequence: none was ever deleted."""
    return {
        (name, sequence): (message.subject, message.data)
        for name in platform.streams
        for sequence, message in enumerate(stream_messages(settings, name), start=1)
    }


def table(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
    )
    return found


def utc(time: datetime) -> datetime:
    """Spark's timestamps in Parquet are UTC and do not say so."""
    return time.replace(tzinfo=UTC)


def on(subject: str, settings: Settings) -> list[dict[str, Any]]:
    """The events on a subject of BILLING."""
    return [json.loads(one.data) for one in stream_messages(settings, "BILLING") if one.subject == subject]


def run_all(spark: SparkSession, platform: Platform, settings: Settings, base: Path) -> dict[str, PipelineResult]:
    results = run(spark, [pipeline(platform, name, settings, base) for name in platform.pipelines], once=True)
    assert [result.error for result in results] == [None] * 4
    return {result.name: result for result in results}


def check_lake(base: Path, published: dict[tuple[str, int], tuple[str, bytes]]) -> None:
    rows = table(base / "lake/events")
    found = {(row["stream"], row["sequence"]): (row["subject"], row["body"].encode()) for row in rows}
    assert found == published
    assert len(rows) == len(published)


def check_usage(base: Path, settings: Settings, books: Books, changed: Sequence[set[Hour]]) -> None:
    hours = {(row["project_id"], utc(row["hour"]["start"])): row for row in table(base / "lake/usage_hourly")}
    assert {hour: (row["gpu_seconds"], row["charge"]) for hour, row in hours.items()} == books.usage
    said = on(ROLLED_UP, settings)
    assert len(said) == sum(len(hours) for hours in changed), "every change is published once"
    last = {(one["project_id"], datetime.fromisoformat(one["hour"]["start"])): one for one in said}
    assert {hour: (one["gpu_seconds"], Decimal(str(one["charge"]))) for hour, one in last.items()} == books.usage


def check_alerts(base: Path, settings: Settings, books: Books) -> None:
    said = [
        (
            subject,
            one["payload"]["project_id"],
            Decimal(str(one["payload"]["balance"])),
            datetime.fromisoformat(one["occurred_at"]),
        )
        for subject in (LOW, DEPLETED)
        for one in on(subject, settings)
    ]
    kept = [
        (r["subject"], r["project_id"], r["balance"], utc(r["occurred_at"]))
        for r in table(base / "lake/balance_alerts")
    ]
    assert sorted(said) == sorted(kept) == sorted(books.alerts)
    assert {subject for subject, *_ in said} == {LOW, DEPLETED}, "the simulated shifts have both"


def check_dead_letters(base: Path, shifts: int) -> None:
    rows = table(base / "lake/dlq_report")
    found = {(row["gave_up"], row["stream"], row["cause"].split(":")[0]): row["letters"] for row in rows}
    check = "it is not true that coalesce(payload.price, payload.amount) IS NOT NULL"
    assert found == {
        ("usage_hourly", "BILLING", "the body is not JSON"): shifts,
        ("usage_hourly", "BILLING", "field payload.gpu_seconds is missing"): shifts,
        ("balance_watch", "BILLING", "the body is not JSON"): shifts,
        ("balance_watch", "BILLING", check): shifts,
    }


@pytest.mark.timeout(900)
@pytest.mark.kills  # `make test` runs the same pipelines in the quickstart
@pytest.mark.parametrize("shifts", [1, 2])
def test_the_examples_pipelines_compute_what_the_books_say_run_after_run(
    jetstream: SparkSession, nats_server: EmbeddedServer, platform: Platform, tmp_path: Path, shifts: int
) -> None:
    settings, books, changed = nats_server.settings, Books(), []
    for shift in range(shifts):
        changed.append(books.enter(publish_shift(settings, shift)))
        published = everything(settings, platform)
        results = run_all(jetstream, platform, settings, tmp_path)
        check_lake(tmp_path, published)
        check_usage(tmp_path, settings, books, changed)
        check_alerts(tmp_path, settings, books)
        check_dead_letters(tmp_path, shifts=shift + 1)
        assert results["usage_hourly"].progress.bad_records == len(BAD[METERED])
