"""Exactly once, by killing it: a streaming query from one stream to another, while its processes and the broker die.

The output's duplicate window is the shortest that the server takes: what is seen here is the ledger's work.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.spark.clusters import LOOPBACK, QUICK, python_without_package, spark_home, standalone_cluster
from tests.e2e.spark.copying import STARTED_WITHIN, Copy
from tests.support import processes

from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.spark import steps
from penstock.spark.ledger import STREAM as LEDGER
from penstock.testing import eventually

SEED = 20_240_615
RETENTIONS = pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
TWO_EXECUTORS = "local-cluster[2,1,1024]"
pytestmark = [pytest.mark.timeout(1200), pytest.mark.kills]

Begin = Callable[..., Copy]


@pytest.fixture
def begin(nats_server: EmbeddedServer, tmp_path: Path) -> Iterator[Begin]:
    made: list[Copy] = []

    def copy(**settings: Any) -> Copy:
        made.append(Copy(nats_server, tmp_path / "copy", **settings))
        made[-1].prepare()
        return made[-1]

    yield copy
    for one in made:
        one.end()


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment in which Spark runs executors as processes of their own."""
    return {"SPARK_HOME": str(spark_home(tmp_path / "spark")), "SPARK_LOCAL_IP": "127.0.0.1"}


def complaints(copy: Copy) -> list[str]:
    """What is wrong at the end; nothing, when every event is in the output once and the input is done with."""
    found = copy.wrong()
    if copy.committed_by_source() != copy.count:
        found.append(f"the durable is at {copy.committed_by_source()} of {copy.count}")
    if copy.retention != "limits" and copy.left_in_input():
        found.append(f"{copy.left_in_input()} left in the input")
    return found


# -- in short ----------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_a_few_crashes_of_workers_and_drivers_neither_lose_nor_repeat(begin: Begin) -> None:
    """Two starts of Spark: a worker dies in each step of a task, the driver between the commits of sink and Spark."""
    copy = begin(count=4000, retention="workqueue", rows_per_trigger=2000)
    copy.start()
    for step in (steps.OPENED, steps.STORED, steps.ENDED):
        processes.kill(copy.hold(step))
    copy.hold(steps.CLOSED)
    assert copy.closed_by_sink() == copy.committed_by_spark() + 1, "the sink is done, and Spark does not know"
    copy.kill_driver()
    copy.finish()
    assert copy.starts == 2
    assert complaints(copy) == []

    copy.link.stubbornly(lambda: copy.link.publish("out.event", b"7"))  # and the check can fail
    assert complaints(copy) == ["1 twice: [7]"]


# -- at one step -------------------------------------------------------------------------------------------------------


def test_a_crash_after_each_step_of_a_task_neither_loses_nor_repeats(begin: Begin) -> None:
    copy = begin(count=12_000, retention="workqueue", rows_per_trigger=2000)
    copy.start()
    for step in (steps.OPENED, steps.STORED, steps.ENDED):  # a worker dies: Spark runs the task again
        processes.kill(copy.hold(step))
    late = copy.hold(steps.INTENDED)
    copy.kill_driver()  # its worker stands still, and will go on when everything is over
    copy.finish()
    assert complaints(copy) == []
    processes.kill(late, signal.SIGCONT)
    eventually(lambda: not processes.is_running(late), within=120, what="the worker that woke up late has stopped")
    assert complaints(copy) == []


@RETENTIONS
def test_a_crash_between_the_commits_of_sink_spark_and_source_neither_loses_nor_repeats(
    begin: Begin, retention: str
) -> None:
    copy = begin(count=6000, retention=retention, rows_per_trigger=2000)
    copy.start()
    copy.hold(steps.CLOSED)
    assert copy.closed_by_sink() == copy.committed_by_spark() + 1, "the sink is done, and Spark does not know"
    copy.kill_driver()
    copy.hold(steps.COMMITTING)
    done = copy.end_of(copy.committed_by_spark())
    assert copy.committed_by_source() < done, "Spark is done, and the source does not know"
    if retention != "limits":
        assert copy.left_in_input() == copy.count - copy.committed_by_source(), "what is not committed stays"
    copy.kill_driver()
    sides = (steps.PURGING, steps.PURGED) if retention == "workqueue" else ()
    for step in sides:
        copy.hold(step)
        copy.kill_driver()
    copy.finish()
    assert copy.starts == 3 + len(sides)
    assert complaints(copy) == []


def test_without_the_ledger_a_crash_repeats_events(begin: Begin) -> None:
    """Shows that the checks here can fail: the logs are gone when the query comes back."""
    copy = begin(count=4000, rows_per_trigger=2000)
    copy.start()
    copy.hold(steps.STORED)
    copy.kill_driver()
    copy.link.call(lambda api: api.purge_stream(LEDGER))
    copy.finish()
    assert [complaint.split()[1] for complaint in complaints(copy)] == ["twice:"]


# -- anywhere ----------------------------------------------------------------------------------------------------------


def test_executors_need_only_the_dependencies_and_one_may_die(
    begin: Begin, cluster: dict[str, str], tmp_path: Path
) -> None:
    """Two executors in processes of their own, on a Python that has everything but this package: it is sent to them."""
    environment = {**cluster, **QUICK, "PYSPARK_PYTHON": str(python_without_package(tmp_path / "python"))}
    copy = begin(count=20_000, master=TWO_EXECUTORS, environment=environment)
    copy.start()
    _until_written(copy, copy.count // 4)
    assert copy.kill_executor()
    copy.finish()
    assert copy.starts == 1
    assert complaints(copy) == []


def killed_at_random(copy: Copy, kinds: list[Callable[[], object]], kills: int, seed: int) -> None:
    """Kill something, again and again, each time a random part of the events later."""
    rng = random.Random(seed)
    print(f"seed {seed}, {copy.count} events of a {copy.retention} stream, {kills} kills")
    points = sorted(rng.randrange(copy.count * 9 // 10) for _ in range(kills))
    order = (kinds * kills)[:kills]
    rng.shuffle(order)
    for point, kill in zip(points, order, strict=True):
        _until_written(copy, max(point, copy.written() + 1))  # it was at work since the last one
        print(f"{time.strftime('%X')} {kill.__name__} at {copy.written()} (planned {point}), start {copy.starts}")
        eventually(partial(_struck, copy, kill), 300, f"a process for {kill.__name__}", state=copy.processes)
    copy.finish()


def _struck(copy: Copy, kill: Callable[[], object]) -> object:
    """Kill; a query that was done before the blow came is started again, and hit then."""
    if copy.driver.poll() is not None:
        copy.start()
    return kill()


def _until_written(copy: Copy, count: int) -> None:
    def reached() -> bool:
        copy.stay_ahead()
        if copy.process is not None and copy.driver.poll() == 0 and copy.written() >= copy.published:
            raise RuntimeError(f"it has ended with {copy.written()} events in the output")
        if copy.process is None or copy.driver.poll() is not None:
            copy.start()
        return copy.written() >= count

    eventually(reached, within=STARTED_WITHIN, what=f"{count} events in the output", state=copy.last_words)


def test_random_kills_neither_lose_nor_repeat(begin: Begin) -> None:
    copy = begin(count=20_000, retention="interest")
    killed_at_random(copy, [copy.kill_driver, copy.kill_worker, copy.kill_broker], kills=4, seed=SEED)
    assert complaints(copy) == [], f"seed {SEED}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@RETENTIONS
def test_many_random_kills_neither_lose_nor_repeat(begin: Begin, cluster: dict[str, str], retention: str) -> None:
    spark = {"rows_per_trigger": 20_000, "master": TWO_EXECUTORS, "environment": cluster}
    copy = begin(count=500_000, retention=retention, ahead=100_000, **spark)
    kinds = [copy.kill_driver, copy.kill_executor, copy.kill_broker, copy.kill_worker]
    killed_at_random(copy, kinds, kills=20, seed=SEED + 1)
    assert complaints(copy) == [], f"seed {SEED + 1}"


# -- other numbers of cores --------------------------------------------------------------------------------------------

CORES = ("local[2,8]", "local[4,8]", "local[1,8]")
ADAPTIVE = {"spark.sql.adaptive.enabled": "true", "spark.sql.shuffle.partitions": "8"}


def test_restarts_on_other_numbers_of_cores_neither_lose_nor_repeat(begin: Begin) -> None:
    """The driver dies inside a batch, and after it is written: it is run again with other tasks."""
    copy = begin(count=9000, rows_per_trigger=3000, retention="workqueue", masters=CORES, shuffle=True, spark=ADAPTIVE)
    copy.start()
    for step in (steps.STORED, steps.CLOSED, steps.STORED):
        copy.hold(step)
        copy.kill_driver()
    copy.finish()
    assert copy.starts == 4
    assert complaints(copy) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@RETENTIONS
def test_many_restarts_on_other_numbers_of_cores_neither_lose_nor_repeat(begin: Begin, retention: str) -> None:
    spark: dict[str, Any] = {"rows_per_trigger": 20_000, "masters": CORES, "shuffle": True, "spark": ADAPTIVE}
    copy = begin(count=500_000, retention=retention, ahead=100_000, **spark)
    kinds: list[Callable[[], object]] = [copy.kill_driver, copy.kill_worker, copy.kill_driver, copy.kill_broker]
    killed_at_random(copy, kinds, kills=20, seed=SEED + 2)
    assert complaints(copy) == [], f"seed {SEED + 2}"


# -- clusters ----------------------------------------------------------------------------------------------------------


def killed_on_clusters(cluster: EmbeddedCluster, folder: Path, count: int, kills: int, **settings: Any) -> list[str]:
    """Copy with three nodes of NATS and two workers of Spark, and kill them; what is wrong in the end."""
    with standalone_cluster(folder, workers=2) as spark:
        small = {"spark.executor.memory": "512m", "spark.cores.max": "2", "spark.executor.cores": "1", **ADAPTIVE}
        environment = {**QUICK, "SPARK_LOCAL_IP": LOOPBACK, "PYSPARK_PYTHON": sys.executable}
        copy = Copy(
            cluster, folder / "copy", count=count, master=spark.url, replicas=3, shuffle=True, spark=small,
            environment=environment, **settings,
        )  # fmt: skip
        try:
            copy.prepare()
            kinds = [copy.kill_broker, spark.kill_worker, spark.kill_executor, copy.kill_driver]
            killed_at_random(copy, kinds, kills=kills, seed=SEED + 3)
            # Replicas delete what is acknowledged a moment later.
            eventually(lambda: copy.retention == "limits" or not copy.left_in_input(), 60, "an empty input")
            return complaints(copy)
        finally:
            copy.end()


def test_the_death_of_nodes_workers_and_executors_neither_loses_nor_repeats(
    nats_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    assert killed_on_clusters(nats_cluster, tmp_path, 20_000, 4, retention="workqueue") == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
@RETENTIONS
def test_many_deaths_of_nodes_workers_and_executors_neither_lose_nor_repeat(
    nats_cluster: EmbeddedCluster, tmp_path: Path, retention: str
) -> None:
    long: dict[str, Any] = {"retention": retention, "rows_per_trigger": 20_000, "ahead": 100_000}
    assert killed_on_clusters(nats_cluster, tmp_path, 500_000, 20, **long) == []
