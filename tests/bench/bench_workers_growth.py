"""How a group of workers grows: rebalance time and KV traffic by partitions and workers, and updates that work."""

from __future__ import annotations

from functools import partial

import group_load
from group_load import TTL, WINDOWS, Growth, Shared
from harness import Bench, Figure

from penstock.server.embedded import EmbeddedServer

PARTITIONS = (100, 1_000, 10_000)
WORKERS = (5, 25, 100)
SUCCESS = 99.9
"""Percent of consumer updates."""


def run(bench: Bench) -> None:
    bench.about = (
        f"All workers in one process, on a stream without messages; windows of {WINDOWS.cold_start:g} s (first "
        f"assignment) and {WINDOWS.planned:g} s (one worker leaves) are part of the times, heartbeats (every "
        f"{TTL / 4:g} s) part of the KV traffic, which is what is published to the group's bucket: messages, and bytes "
        "of subject, headers and value."
    )
    server, seen = bench.enter(EmbeddedServer(data=bench.scratch / "nats")), list[Growth]()
    for partitions in (100,) if bench.quick else PARTITIONS:
        for workers in (3,) if bench.quick else WORKERS:
            bench.probe(partial(growth, server, partitions, workers, seen))
    bench.probe(lambda: [updates(seen)])


def growth(server: EmbeddedServer, partitions: int, workers: int, seen: list[Growth]) -> list[Figure]:
    found, of = group_load.share(server, partitions, workers), f"{partitions:,} partitions, {workers} workers"
    seen.append(found)
    return [*_change(f"{of}, first", found.first), *_change(f"{of}, one leaves", found.leaving)]


def _change(what: str, found: Shared) -> list[Figure]:
    return [
        Figure(name=what, column="shared after", value=found.seconds, unit="s"),
        Figure(name=what, column="partitions moved", value=found.moved, unit=""),
        Figure(name=what, column="KV messages", value=found.traffic.messages, unit=""),
        Figure(name=what, column="KV traffic", value=found.traffic.bytes / 1024, unit="KiB"),
    ]


def updates(seen: list[Growth]) -> Figure:
    """Of all consumers, in all of these."""
    worked, failed = sum(one.updates for one in seen), sum(one.failures for one in seen)
    share = 100.0 * worked / (worked + failed)
    return Figure(name=f"consumer updates that worked, of {worked + failed}", value=share, unit="%", at_least=SUCCESS)
