"""Groups in the platform file: what is read, what is refused, and what follows from them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.commands import here

import penstock
from penstock.errors import ConfigError
from penstock.jetstream.model import ConsumerInfo
from penstock.topology.lint import lint
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.topology.permissions import of_group, permissions
from penstock.topology.resource import Actual, Desired, Resource
from penstock.topology.verify import undeclared

STREAMS = {"S": {"subjects": ["s.>"], "max_age": "1d"}, "DLQ": {"subjects": ["dlq.>"], "max_age": "1d"}}
GROUP = {"stream": "S", "partitions": "s.{device}", "dlq": "dlq.s.tele", "owner": "edge", "purpose": "reads devices"}


def platform(folder: Path, group: Any, **more: Any) -> Platform:
    file = folder / "penstock.yaml"
    file.write_text(yaml.safe_dump({"streams": STREAMS, "groups": {"tele": group}, **more}))
    return load(file)


def test_a_group_is_read_with_everything_it_says(tmp_path: Path) -> None:
    more = {"max_deliver": 7, "backoff": ["1s", "1m"], "ack_wait": "2m", "max_ack_pending": 9, "start": "new",
            "strategy": "round-robin", "service": "edge-worker"}  # fmt: skip
    spec = platform(tmp_path, {**GROUP, **more}).groups["tele"]
    assert (spec.stream, spec.pattern, spec.filters, spec.dlq) == ("S", "s.{device}", ("s.*",), "dlq.s.tele")
    assert (spec.max_deliver, spec.ack_wait, spec.max_ack_pending) == (7, timedelta(minutes=2), 9)
    assert (spec.backoff, spec.start, spec.strategy) == ((timedelta(seconds=1), timedelta(minutes=1)), "new",
                                                         "round_robin")  # fmt: skip
    assert lint(platform(tmp_path, {**GROUP, **more})) == lint(platform(tmp_path, GROUP))


def test_an_environment_changes_a_group(tmp_path: Path) -> None:
    environments = {"dev": {"groups": {"tele": {"max_deliver": 2}}}}
    assert platform(tmp_path, GROUP, environments=environments).groups["tele"].max_deliver == 2


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({**GROUP, "stream": "T"}, "group 'tele' reads stream 'T', which is not declared"),
        ({**GROUP, "partition": "x"}, "partitions"),
        ({"stream": "S"}, "partitions"),
        ({**GROUP, "partitions": "s.{a}{b}"}, "is not a subject pattern"),
        ({**GROUP, "partitions": ["s.a", "s.{b}"]}, "a pattern stands alone"),
        ({**GROUP, "partitions": ["s.a", "s.*"]}, "overlaps another"),
        ({**GROUP, "hashed": 4}, "{partition} in it"),
        ({**GROUP, "partitions": ["s.a", "s.b"], "hashed": 4}, "{partition} in it"),
        ({**GROUP, "strategy": "fair"}, "consistent_hash, round_robin or weighted"),
    ],
)
def test_what_cannot_be_right_is_told_with_its_line(tmp_path: Path, group: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"penstock\.yaml:\d+:") as told:
        platform(tmp_path, group)
    assert words in str(told.value)


def test_a_group_is_a_user_of_its_own_or_part_of_its_service(tmp_path: Path) -> None:
    alone = platform(tmp_path, GROUP)
    wanted = of_group(alone, "tele", "S", "dlq.s.tele")
    assert wanted in permissions(alone)
    consumers = {"reader": {"stream": "S", "filter": "s.a", "service": "edge-worker"}}
    (service,) = [
        one
        for one in permissions(platform(tmp_path, {**GROUP, "service": "edge-worker"}, consumers=consumers))
        if one.kind not in ("dead letters", "pages")
    ]
    assert service.user == "edge-worker"
    assert set(wanted.publish) <= set(service.publish) | {"$JS.API.CONSUMER.INFO.S.>"}
    assert "$KV.penstock_facts.book.S.reader" in service.publish


def test_the_consumers_of_a_declared_group_are_not_undeclared(tmp_path: Path) -> None:
    desired = Desired.of(platform(tmp_path, GROUP))

    def info(name: str) -> ConsumerInfo:
        place = {"stream_seq": 0, "consumer_seq": 0}
        config = {"durable_name": name}
        return ConsumerInfo.parse(
            {
                "stream_name": "S",
                "name": name,
                "config": config,
                "delivered": place,
                "ack_floor": place,
                "num_pending": 0,
                "num_ack_pending": 0,
                "num_redelivered": 0,
            }
        )

    consumers = {Resource("S", name): info(name) for name in ("tele-worker-0", "telemetry", "other-1")}
    found = undeclared(desired, Actual({}, consumers))
    assert [one.consumer for one in found] == ["other-1", "telemetry"]


def test_a_handler_takes_from_the_file_what_it_does_not_say(tmp_path: Path) -> None:
    declared = platform(tmp_path, {**GROUP, "max_deliver": 7, "start": "new", "ack_wait": "2m"})
    app, other = penstock.App(declared.path), penstock.App(declared.path)

    @app.workers("S", group="tele")
    @other.workers("S", group="tele", partitions=["s.a"], dlq="dlq.s.mine", max_deliver=1)
    async def read(message: penstock.Message) -> None: ...

    own, from_file = other.groups[0].resolved(declared), app.groups[0].resolved(declared)
    assert (from_file.worker.dlq, from_file.worker.retries.max_deliver) == ("dlq.s.tele", 7)
    assert (from_file.options.start, from_file.consumer) == ("new", {"ack_wait": 120.0})
    assert from_file.pattern
    assert from_file.pattern.text == "s.{device}"
    assert (own.worker.dlq, own.worker.retries.max_deliver, own.pattern) == ("dlq.s.mine", 1, None)


def test_a_group_without_partitions_is_told_where_it_is_written_or_when_it_starts(tmp_path: Path) -> None:
    bare, declared = penstock.App(), platform(tmp_path, GROUP)
    with pytest.raises(ConfigError, match="'other' has no partitions"):
        bare.workers("S", group="other")(lambda message: None)
    app = penstock.App(declared.path)
    app.workers("S", group="other")(lambda message: None)
    app.workers("T", group="tele")(lambda message: None)
    with pytest.raises(ConfigError, match="'other' has no partitions"):
        app.groups[0].resolved(declared)
    with pytest.raises(ConfigError, match=r"works on 'T', but .* declares it on 'S'"):
        app.groups[1].resolved(declared)


def test_work_takes_a_group_from_the_file_and_flags_win(tmp_path: Path) -> None:
    """Told by what it refuses, before any server is asked."""
    (tmp_path / "group_handlers.py").write_text("def handle(message, context): pass")
    platform(tmp_path, GROUP, environments={"dev": {"servers": ["nats://127.0.0.1:1"]}})
    work = ["work", "group_handlers:handle", "--group"]
    declared = here(*work, "tele", cwd=tmp_path)
    assert (declared.returncode, "127.0.0.1:1" in declared.stderr) == (1, True), declared.stderr
    unknown = here(*work, "other", cwd=tmp_path)
    assert (unknown.returncode, "name the stream with --stream" in unknown.stderr) == (64, True)
    both = here(*work, "tele", "--hashed", "3", cwd=tmp_path)
    assert (both.returncode, "say what the partitions are" in both.stderr) == (64, True)
