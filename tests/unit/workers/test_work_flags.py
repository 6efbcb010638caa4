"""What the flags of `penstock work` come to."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cli.work import work
from penstock.cli.work_flags import Asked, asked
from penstock.errors import ConfigError
from penstock.jetstream.api import JetStream
from penstock.workers.group.assignment import Candidate, ConsistentHash, RoundRobin, Weighted, assign
from penstock.workers.partitions import Partition

FOUR = [f"--partition=p{n}=shop.p{n}" for n in range(4)]


def read(*arguments: str) -> Asked:
    params = work.make_context("work", ["operator:eq", "--stream", "SHOP", *arguments]).params
    handler = params.pop("handler")
    return asked(handler, params)


def partitions(found: Asked) -> list[Partition]:
    async def nobody(subject: str, payload: bytes, timeout: float) -> bytes:
        raise AssertionError("nothing is asked of a server")

    return list(asyncio.run(found.source(JetStream(nobody)).partitions()))


def test_weights_and_labels_from_the_shell_decide_who_has_what() -> None:
    found = read("--group", "g", *FOUR, "--strategy", "weighted", "--weight", "p0=3", "--partition-label", "p3=gpu")
    assert found.group
    workers = [Candidate("plain"), Candidate("gpu", capacity=2, labels=frozenset({"gpu"}))]
    owners = assign(partitions(found), workers, strategy=found.group.strategy).owners
    assert owners == {"p0": "gpu", "p1": "plain", "p2": "plain", "p3": "gpu"}


def test_a_star_in_an_id_stands_for_many_partitions_and_the_last_weight_counts() -> None:
    weights = ["--weight", "*=2", "--weight", "p3=9", "--partition-label", "p[12]=x", "--partition-label", "p*=y"]
    found = partitions(read("--group", "g", *FOUR, "--strategy", "weighted", *weights))
    assert [one.weight for one in found] == [2, 2, 2, 9]
    assert [sorted(one.labels) for one in found] == [["y"], ["x", "y"], ["x", "y"], ["y"]]


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ([], ConsistentHash()),
        (["--strategy", "round-robin"], RoundRobin()),
        (["--strategy", "weighted", "--capacity", "3"], Weighted()),
    ],
)
def test_a_strategy_is_called_by_its_name(flags: list[str], strategy: object) -> None:
    options = read("--group", "g", *FOUR, *flags).group
    assert options
    assert (options.strategy, options.capacity) == (strategy, 3 if "--capacity" in flags else 1)


def test_a_worker_says_its_labels_and_when_it_may_be_given_up() -> None:
    options = read("--group", "g", *FOUR, "--label", "gpu", "--label", "eu", "--ttl", "20s", "--instance", "pod").group
    assert options
    assert (options.labels, options.ttl, options.instance) == (frozenset({"gpu", "eu"}), 20.0, "pod")
    usual = read("--group", "g", *FOUR).group
    assert usual
    assert (usual.labels, usual.ttl) == (frozenset(), 15.0)


def test_durations_become_seconds() -> None:
    found = read("--alone", "1", *FOUR, "--backoff", "1s,1m", "--ack-wait", "2m", "--handler-timeout", "500ms")
    assert (found.worker.retries.backoff, found.worker.handler_timeout) == ((1.0, 60.0), 0.5)
    assert found.consumer["ack_wait"] == 120.0
    assert found.group is None


def test_hashed_partitions_are_known_before_a_server_is_asked() -> None:
    found = read("--group", "g", "--hashed", "3", "--pattern", "orders.{partition}.>")
    assert [one.subjects for one in found.known] == [("orders.0.>",), ("orders.1.>",), ("orders.2.>",)]
    assert tuple(partitions(found)) == found.known


def test_where_a_handler_runs_and_how_long_it_may_take_to_stop() -> None:
    found = read("--group", "g", "--pattern", "s.{p}", "--stop-within", "5s", "--inactive-threshold", "1h")
    assert (found.worker.stop_within, found.worker.threads) == (5.0, 0)
    assert found.consumer["inactive_threshold"] == 3600.0
    assert read("--group", "g", "--pattern", "s.{p}", "--threads", "4").worker.threads == 4
    with pytest.raises(ConfigError, match="in threads or in processes"):
        read("--group", "g", "--pattern", "s.{p}", "--threads", "4", "--processes", "2")
