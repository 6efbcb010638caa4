"""Partitioned workers: one consumer a worker on our pull loop, beside nats-py with one a worker and one a partition.

Compared is the CPU time of the worker processes: messages a CPU-second, whatever else the machine does. With `--soak`
only the long run is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

from crew import SUBJECTS, Crew, Outcome, Sample
from harness import Bench, Figure, Timed

from penstock.server.embedded import EmbeddedServer

SOAKS = True
RATE = 10_000
"""Messages a second that are offered while contestants are compared."""
SOAK_RATE = 5_000
SOAK_SECONDS = 600
OURS, ONE, EACH = "ours, a consumer a worker", "nats-py, a consumer a worker", "nats-py, a consumer a partition"
WAYS = {OURS: "ours", ONE: "nats-py", EACH: "nats-py-each"}
DRAINING = {"ours, backlog": "ours", "nats-py, backlog": "nats-py"}
MIB = 1024 * 1024
MORE_MEMORY = 2 * MIB
"""What a worker's memory may differ between two quarters of a long run, and still be flat."""


def run(bench: Bench) -> None:
    workers = bench.size(25, quick=4)
    crew = Crew(bench.enter(EmbeddedServer(data=bench.scratch / "nats")), workers, bench.scratch)
    if bench.soak_seconds:
        bench.about = (
            f"{workers} worker processes × {SUBJECTS} subjects, {SOAK_RATE:,} messages/s offered all the time."
        )
        bench.probe(lambda: soak(crew, bench.soak_seconds))
        return
    count = bench.size(200_000, quick=20_000)
    bench.unit = "messages/CPU-s"
    bench.about = (
        f"{workers} worker processes × {SUBJECTS} subjects, 200-byte messages offered at {RATE:,}/s, explicit "
        "acknowledgement; CPU time of the worker processes only. "
        "Backlog: everything is there before one worker begins."
    )
    last: dict[str, Outcome] = {}
    for name, way in WAYS.items():
        part = count // 5 if name == EACH else count  # it takes ten times as long, most of it in the server
        bench.add(name, partial(compare, crew, way, part, last), limit=None if name == OURS else OURS)
    for name, way in DRAINING.items():
        bench.add(name, partial(drain, crew, way, count), limit=None if way == "ours" else "ours, backlog")
    bench.goal(OURS, of=ONE, at_least=5)
    bench.goal("ours, backlog", of="nats-py, backlog", at_least=5)
    for name, way in WAYS.items():
        bench.probe(partial(figures_of, crew, name, way, last))
    for rate in () if bench.quick else (20_000, 50_000):
        bench.probe(partial(figures_at, crew, count, rate))
    bench.probe(lambda: soak(crew, bench.size(SOAK_SECONDS, quick=8)))


def compare(crew: Crew, way: str, count: int, last: dict[str, Outcome]) -> Timed:
    """All workers, at the offered rate; what the last round was like is kept for the figures."""
    outcome = last[way] = crew.work(way, count, RATE)
    return Timed(count, outcome.cpu)


def drain(crew: Crew, way: str, count: int) -> Timed:
    """One worker, and everything is there before it begins: as fast as it goes."""
    outcome = crew.alone().work(way, count, rate=0)
    early = sum(one["early"] for one in outcome.told)
    return Timed(count - early, outcome.cpu)


def figures_of(crew: Crew, name: str, way: str, last: dict[str, Outcome]) -> list[Figure]:
    """The last round of one way, at the offered rate of the comparison."""
    return figures(f"{RATE // 1000}k/s, {name}", last[way], crew.workers)


def figures_at(crew: Crew, count: int, rate: int) -> list[Figure]:
    """Ours at another offered rate."""
    return figures(f"{rate // 1000}k/s", crew.work("ours", count, rate), crew.workers)


def figures(at: str, outcome: Outcome, workers: int) -> list[Figure]:
    """How one way does at an offered rate. The goals are ours."""
    ours = not at.endswith((ONE, EACH))
    return [
        Figure(name=f"{at}: handled", value=outcome.count / outcome.seconds, unit="messages/s"),
        Figure(name=f"{at}: worker CPU", value=1e6 * outcome.cpu / outcome.count, unit="µs a message"),
        Figure(name=f"{at}: wake-ups of workers", value=outcome.wakeups, unit="for 1,000 messages"),
        Figure(name=f"{at}: server CPU", value=1e6 * outcome.server_cpu / outcome.count, unit="µs a message"),
        *(
            Figure(name=f"{at}: stored to handled, p{p}", value=1000 * outcome.latency(p), unit="ms")
            for p in (50, 95, 99)
        ),
        Figure(name=f"{at}: redelivered", value=outcome.redelivered, unit="%", at_most=3.0 if ours else None),
        Figure(name=f"{at}: memory of a worker, highest", value=outcome.peak_mib, unit="MiB"),
        Figure(
            name=f"{at}: consumers on the server", value=outcome.consumers, unit="", at_most=workers if ours else None
        ),
    ]


# -- the long run ------------------------------------------------------------------------------------------------------


def soak(crew: Crew, seconds: float) -> list[Figure]:
    """Memory and open files stay as they are."""
    samples: list[Sample] = []
    outcome = crew.work("ours", int(SOAK_RATE * seconds), SOAK_RATE, samples)
    name, compared = f"soak of {seconds / 60:.2g} minutes", "last quarter less first"
    memory, files = grown([one.memory for one in samples]), grown([one.files for one in samples])
    each, most = memory / crew.workers / MIB, MORE_MEMORY / MIB
    return [
        Figure(
            name=f"{name}: memory of a worker, {compared}",
            value=each,
            unit=f"MiB, {_flat(each, most)}",
            at_most=most,
        ),
        Figure(
            name=f"{name}: open files of all, {compared}",
            value=files,
            unit=f"more, {_flat(files, 0)}",
            at_most=0,
        ),
        Figure(name=f"{name}: handled", value=outcome.count / outcome.seconds, unit="messages/s"),
        Figure(name=f"{name}: redelivered", value=outcome.redelivered, unit="%", at_most=3.0),
        Figure(name=f"{name}: stored to handled, p99", value=1000 * outcome.latency(99), unit="ms"),
    ]


def grown(samples: Sequence[int]) -> float:
    """How much higher the median of the last quarter is than that of the first."""
    quarter = max(1, len(samples) // 4)
    return statistics.median(samples[-quarter:]) - statistics.median(samples[:quarter])


def _flat(value: float, most: float) -> str:
    return "flat" if value <= most else "NOT flat"
