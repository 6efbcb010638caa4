"""Plan, apply and verify against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.streams import delete_streams, make_stream

from penstock import errors
from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import Broker
from penstock.jetstream.model import Json
from penstock.server.embedded import EmbeddedServer
from penstock.testing import EmbeddedCluster, eventually_async
from penstock.topology import actual, apply, verify
from penstock.topology.plan import Change, ChangeKind, Plan, plan
from penstock.topology.resource import Actual, Desired, Resource
from penstock.topology.risk import Risk

SECOND = 1_000_000_000
ME = "shop"


def desired(*streams: Json, platform: str = ME, **consumers: Json) -> Desired:
    """Streams by their configuration; consumers of the first stream by name."""
    configs: dict[Resource, Json] = {Resource(s["name"]): s for s in streams}
    for name, config in consumers.items():
        base = {"durable_name": name, "name": name, "ack_policy": "explicit"}
        configs[Resource(streams[0]["name"], name)] = {**base, **config}
    return Desired(platform, configs)


async def planned(js: JetStream, want: Desired, **options: bool) -> Plan:
    return plan(want, await actual.read(js, want), **options)


async def applied(js: JetStream, want: Desired, **options: bool) -> tuple[Change, ...]:
    """Plan and apply; afterwards nothing is left to do."""
    options = {"allow_destroy": True, **options}
    done = await apply.apply(js, await planned(js, want, **options), allow_destroy=options["allow_destroy"])
    assert (await planned(js, want, **options)).changes == ()
    return done


@pytest.fixture
async def empty(shared_server: EmbeddedServer) -> AsyncIterator[Broker]:
    """A server shared by this file's tests, without any stream."""
    async with connect(shared_server.settings) as opened:
        yield opened
        await delete_streams(opened.jetstream)


# -- the server's rules ------------------------------------------------------------------------------------------------

BASE: Json = {"name": "S", "subjects": ["s.>"]}
MESSAGES = 6

STREAM_CHANGES: list[tuple[Json, Json, Risk]] = [
    ({}, {"description": "x"}, Risk.SAFE),
    ({}, {"subjects": ["s.>", "t.>"]}, Risk.SAFE),
    ({}, {"max_msgs": 3}, Risk.LOSES_DATA),
    ({}, {"max_msgs": MESSAGES}, Risk.SAFE),
    ({"discard": "new"}, {"discard": "new", "max_msgs": 3}, Risk.SAFE),
    ({}, {"max_bytes": 100}, Risk.LOSES_DATA),
    ({}, {"max_bytes": 100_000}, Risk.SAFE),
    ({}, {"max_msgs_per_subject": 1}, Risk.LOSES_DATA),
    ({}, {"max_msgs_per_subject": 5}, Risk.SAFE),
    ({}, {"max_age": 3600 * SECOND}, Risk.SAFE),
    ({}, {"max_age": 60 * SECOND}, Risk.SAFE),
    ({}, {"retention": "interest"}, Risk.LOSES_DATA),
    ({}, {"retention": "workqueue"}, Risk.IMPOSSIBLE),
    ({}, {"storage": "memory"}, Risk.IMPOSSIBLE),
    ({}, {"persist_mode": "async"}, Risk.IMPOSSIBLE),
    ({}, {"allow_msg_counter": True}, Risk.IMPOSSIBLE),
    ({"deny_delete": True}, {"deny_delete": False}, Risk.IMPOSSIBLE),
    ({"deny_purge": True}, {}, Risk.IMPOSSIBLE),
    ({"allow_msg_ttl": True}, {"allow_msg_ttl": False}, Risk.IMPOSSIBLE),
    ({"allow_msg_schedules": True}, {}, Risk.IMPOSSIBLE),
    ({}, {"deny_delete": True, "deny_purge": True, "allow_msg_ttl": True}, Risk.SAFE),
    ({}, {"allow_atomic": True, "allow_batched": True, "allow_direct": True}, Risk.SAFE),
    ({"allow_atomic": True, "allow_direct": True}, {}, Risk.SAFE),
    ({}, {"compression": "s2", "duplicate_window": 5 * SECOND, "max_msg_size": 1000, "max_consumers": 9}, Risk.SAFE),
    ({"compression": "s2"}, {}, Risk.SAFE),
    ({}, {"republish": {"src": "s.*", "dest": "again.{{wildcard(1)}}"}, "no_ack": True}, Risk.SAFE),
    ({}, {"placement": {"tags": ["ssd"]}, "metadata": {"team": "x"}}, Risk.SAFE),
    ({"metadata": {"team": "x"}}, {}, Risk.SAFE),
    ({}, {"consumer_limits": {"max_ack_pending": 2000}}, Risk.SAFE),
    ({}, {"subject_transform": {"src": "s.*", "dest": "s.{{wildcard(1)}}.x"}}, Risk.SAFE),
    ({"max_msgs": 100, "max_age": 3600 * SECOND}, {}, Risk.SAFE),
    ({}, {"discard": "new", "max_msgs_per_subject": 9, "discard_new_per_subject": True}, Risk.SAFE),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "risk"), STREAM_CHANGES)
async def test_the_server_does_to_a_stream_what_the_plan_says(
    empty: Broker, before: Json, after: Json, risk: Risk
) -> None:
    js = empty.jetstream
    await applied(js, desired({**BASE, **before}))
    for n in range(MESSAGES):
        if not before.get("allow_msg_counter"):
            await empty.request(f"s.{n % 2}", b"x" * 50, 20)
    want = desired({**BASE, **after})
    (change,) = (await planned(js, want)).changes
    assert change.risk is risk, change
    if risk is Risk.IMPOSSIBLE:
        with pytest.raises(errors.InvalidConfiguration):
            await apply._update(js, change)
    await applied(js, want)

    async def left() -> int:
        return (await js.stream_info("S")).state.messages

    if risk is Risk.SAFE:
        assert await left() == MESSAGES
    else:
        await eventually_async(lambda: _below(left, MESSAGES), what="messages to go", state=left)


FROM: Json = {"deliver_policy": "by_start_sequence"}
PUSH: Json = {"deliver_subject": "d"}
CONSUMER_CHANGES: list[tuple[Json, Json, Risk]] = [
    ({}, {"ack_wait": 7 * SECOND, "max_deliver": 5, "max_ack_pending": 9, "headers_only": True}, Risk.SAFE),
    ({"ack_wait": 7 * SECOND, "max_deliver": 5}, {}, Risk.SAFE),
    ({}, {"backoff": [SECOND, 2 * SECOND], "max_deliver": 5, "ack_wait": 9 * SECOND}, Risk.SAFE),
    ({"backoff": [SECOND, 2 * SECOND], "max_deliver": 5}, {"max_deliver": 5}, Risk.SAFE),
    ({}, {"max_batch": 5, "max_expires": SECOND, "max_bytes": 1000, "sample_freq": "50"}, Risk.SAFE),
    ({}, {"description": "x", "metadata": {"team": "x"}, "num_replicas": 1}, Risk.SAFE),
    ({}, {"priority_groups": ["g"], "priority_policy": "overflow"}, Risk.SAFE),
    ({}, {"inactive_threshold": 3600 * SECOND}, Risk.SAFE),
    ({"filter_subjects": ["s.0", "s.1"]}, {"filter_subject": "s.1"}, Risk.SAFE),
    ({"filter_subject": "s.1"}, {"filter_subjects": ["s.0", "s.1"]}, Risk.LOSES_POSITION),
    ({"filter_subject": "s.1"}, {}, Risk.LOSES_POSITION),
    ({}, {"ack_policy": "all"}, Risk.LOSES_POSITION),
    ({}, {"deliver_policy": "new"}, Risk.LOSES_POSITION),
    ({**FROM, "opt_start_seq": 2}, {**FROM, "opt_start_seq": 3}, Risk.LOSES_POSITION),
    ({}, {"replay_policy": "original"}, Risk.LOSES_POSITION),
    ({}, {"max_waiting": 9}, Risk.LOSES_POSITION),
    ({}, {"mem_storage": True}, Risk.LOSES_POSITION),
    ({}, {"deliver_subject": "d"}, Risk.LOSES_POSITION),
    ({"deliver_subject": "d"}, {"deliver_subject": "e", "rate_limit_bps": 10_000}, Risk.SAFE),
    (PUSH, {**PUSH, "idle_heartbeat": SECOND, "flow_control": True}, Risk.LOSES_POSITION),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "risk"), CONSUMER_CHANGES)
async def test_the_server_does_to_a_consumer_what_the_plan_says(
    empty: Broker, before: Json, after: Json, risk: Risk
) -> None:
    js = empty.jetstream
    await applied(js, desired(BASE, c=before))
    created = (await js.consumer_info("S", "c")).created
    want = desired(BASE, c=after)
    (change,) = (await planned(js, want)).changes
    assert change.risk is risk, change
    if change.kind is ChangeKind.RECREATE:
        with pytest.raises(errors.ApiError):
            await apply._update(js, change)
    await applied(js, want)
    is_the_same_one = (await js.consumer_info("S", "c")).created == created
    assert is_the_same_one == (change.kind is ChangeKind.UPDATE)


async def test_a_changed_source_copies_again_as_the_plan_warns(empty: Broker) -> None:
    js = empty.jetstream
    origin, copy = {"name": "O", "subjects": ["o.>"]}, {"name": "COPY", "sources": [{"name": "O"}]}
    await applied(js, desired(origin, copy))
    for n in range(MESSAGES):
        await empty.request(f"o.{n % 2}", b"x", 20)

    async def copied() -> int:
        return (await js.stream_info("COPY")).state.messages

    await eventually_async(lambda: _is(copied, MESSAGES), 60, state=copied)
    want = desired(origin, {**copy, "sources": [{"name": "O", "filter_subject": "o.1"}]})
    assert [c.risk for c in (await planned(js, want)).changes] == [Risk.LOSES_POSITION]
    await applied(js, want)
    await eventually_async(lambda: _is(copied, MESSAGES + MESSAGES // 2), 60, state=copied)


async def _is(look: Any, wanted: int) -> bool:
    return bool(await look() == wanted)


async def _below(look: Any, limit: int) -> bool:
    return bool(await look() < limit)


async def test_a_subject_can_move_from_one_stream_to_another_in_one_apply(empty: Broker) -> None:
    js = empty.jetstream
    await applied(js, desired({"name": "A", "subjects": ["a"]}, {"name": "B", "subjects": ["b", "x"]}))
    want = desired({"name": "A", "subjects": ["a", "x"]}, {"name": "B", "subjects": ["b"]})
    assert [c.risk for c in await applied(js, want, allow_destroy=False)] == [Risk.SAFE, Risk.SAFE]


# -- what is left alone ------------------------------------------------------------------------------------------------


async def test_what_another_client_set_survives_an_apply(empty: Broker) -> None:
    js = empty.jetstream
    await applied(js, desired(BASE, c={"ack_wait": 5 * SECOND}))
    await js.update_consumer("S", "c", {"max_batch": 7})
    await js.update_consumer("S", "c", lambda config: {**config, "metadata": {**config["metadata"], "theirs": "x"}})
    await js.update_stream("S", {"max_msg_size": 999})
    done = await applied(js, desired({**BASE, "description": "new"}, c={"ack_wait": 6 * SECOND}))
    assert len(done) == 2
    consumer, stream = await js.consumer_info("S", "c"), await js.stream_info("S")
    assert (consumer.config["max_batch"], consumer.config["ack_wait"]) == (7, 6 * SECOND)
    assert consumer.config["metadata"]["theirs"] == "x"
    assert stream.config["max_msg_size"] == 999


class NewerServer:
    """A real server, seen through a pane that adds a field which this version does not know.

    It remembers the field like a server would: an update that leaves it out resets it.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.fields: dict[str, Any] = {}

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        body = json.loads(payload) if payload else {}
        if ".CREATE." in subject or ".UPDATE." in subject:
            config = body.get("config", body)
            self.fields[config["name"]] = config.pop("future", None)
        answer = json.loads(await self.broker.request(subject, json.dumps(body).encode() if body else b"", timeout))
        for info in [answer, *(answer.get("streams") or ()), *(answer.get("consumers") or ())]:
            if isinstance(info, dict) and (config := info.get("config")) and self.fields.get(config["name"]):
                config["future"] = self.fields[config["name"]]
        return json.dumps(answer).encode()


async def test_a_field_of_a_newer_server_survives_an_apply(empty: Broker) -> None:
    newer = NewerServer(empty)
    js = JetStream(newer)
    await applied(js, desired(BASE, c={"ack_wait": 5 * SECOND}))
    await js.update_stream("S", {"future": {"deep": [1, 2]}})
    await js.update_consumer("S", "c", {"future": "kept"})
    await applied(js, desired({**BASE, "description": "new"}, c={"ack_wait": 6 * SECOND}))
    assert newer.fields == {"S": {"deep": [1, 2]}, "c": "kept"}
    assert (await js.consumer_info("S", "c")).config["ack_wait"] == 6 * SECOND


async def test_prune_removes_only_what_the_platform_owns(empty: Broker) -> None:
    js = empty.jetstream
    await applied(js, desired(BASE, {"name": "GONE", "subjects": ["gone"]}, kept={}, dropped={}))
    await applied(js, desired({"name": "THEIRS", "subjects": ["theirs"]}, platform="another"))
    await make_stream(js, "NOBODYS", subjects=["nobodys"])
    await js.create_consumer("S", {"durable_name": "foreign", "ack_policy": "explicit"})
    await empty.request("gone", b"x", 20)
    want = desired(BASE, kept={})
    assert not await planned(js, want), "without prune nothing is removed"
    with pytest.raises(apply.ApplyRefused, match="GONE"):
        await apply.apply(js, await planned(js, want, prune=True))
    assert len(await js.stream_names()) == 4, "a refused apply does nothing"
    await applied(js, want, prune=True)
    assert set(await js.stream_names()) == {"S", "THEIRS", "NOBODYS"}
    assert {c.name for c in await js.consumers("S")} == {"kept", "foreign"}


async def test_an_unmarked_resource_is_adopted_and_can_be_pruned_then(empty: Broker) -> None:
    js = empty.jetstream
    await make_stream(js)
    (change,) = await applied(js, desired(BASE), allow_destroy=False)
    assert change.only_marks
    await applied(js, Desired(ME, {}), prune=True)
    assert await js.stream_names() == []


# -- loss is refused ---------------------------------------------------------------------------------------------------


async def test_an_apply_that_would_lose_something_does_nothing_at_all(empty: Broker) -> None:
    js = empty.jetstream
    await applied(js, desired(BASE, c={}))
    want = desired({"name": "FIRST", "subjects": ["f"]}, {**BASE, "storage": "memory"})
    with pytest.raises(apply.ApplyRefused, match=r"stream S \(impossible.*--allow-destroy"):
        await apply.apply(js, await planned(js, want))
    assert await js.stream_names() == ["S"]


@pytest.mark.parametrize(
    ("stream", "consumer", "words"),
    [
        ({"max_msgs": 3}, {"filter_subject": "s.0"}, r"stream S \(loses data"),
        ({}, {}, r"consumer c of S \(loses position"),
    ],
    ids=["data", "position"],
)
async def test_a_change_that_the_server_would_make_is_refused_when_it_loses_something(
    empty: Broker, stream: Json, consumer: Json, words: str
) -> None:
    js = empty.jetstream
    await applied(js, desired(BASE, c={"filter_subject": "s.0"}))
    for n in range(MESSAGES):
        await empty.request(f"s.{n % 2}", b"x", 20)
    before = await js.consumer_info("S", "c")
    want = desired({**BASE, **stream}, {"name": "OTHER", "subjects": ["o"]}, c=consumer)
    with pytest.raises(apply.ApplyRefused, match=f"{words}.*--allow-destroy"):
        await apply.apply(js, await planned(js, want))
    assert await js.stream_names() == ["S"], "nothing is done, not even what would lose nothing"
    assert (await js.stream_info("S")).state.messages == MESSAGES
    assert (await js.consumer_info("S", "c")).config == before.config


# -- crashes -----------------------------------------------------------------------------------------------------------

CRASH_PLATFORM = desired(
    *({"name": f"S{n}", "subjects": [f"s{n}"]} for n in range(4)), platform=ME, c0={}, c1={}, c2={}, c3={}
)


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("steps", [1, 4, 7])
async def test_a_server_killed_in_the_middle_of_an_apply_is_told_apart_and_completed(
    nats_server: EmbeddedServer, steps: int
) -> None:
    def kill_after(change: Change, done: int, total: int) -> None:
        if done == steps:
            nats_server.kill()

    async with connect(replace(nats_server.settings, timeout=3.0)) as broker:
        made = await planned(broker.jetstream, CRASH_PLATFORM)
        with pytest.raises(apply.ApplyError) as caught:
            await apply.apply(broker.jetstream, made, progress=kill_after)
    assert len(caught.value.done) == steps
    assert (*caught.value.done, caught.value.failed, *caught.value.not_done) == made.changes
    assert isinstance(caught.value.cause, errors.Unavailable | errors.OutcomeUnknown)
    assert f"stopped at {made.changes[steps].resource}" in str(caught.value)
    nats_server.start()
    async with connect(nats_server.settings) as broker:
        assert len(await applied(broker.jetstream, CRASH_PLATFORM)) == len(made.changes) - steps


async def test_a_stream_that_a_crash_left_half_made_is_made_by_the_next_apply(nats_server: EmbeddedServer) -> None:
    async with connect(nats_server.settings) as broker:
        await applied(broker.jetstream, CRASH_PLATFORM)
    nats_server.kill()
    (meta,) = nats_server.data.rglob("streams/S1/meta.inf")
    meta.unlink()  # what a kill between making the directory and writing the file leaves behind
    nats_server.start()
    async with connect(nats_server.settings) as broker:
        assert [c.resource for c in await applied(broker.jetstream, CRASH_PLATFORM)] == [Resource("S1")]
    assert nats_server.monitor("/healthz")["status"] == "ok"


class LostAnswer:
    """Kills the server after it has carried out the nth change, and before we hear of it."""

    def __init__(self, broker: Broker, server: EmbeddedServer, nth: int) -> None:
        self.broker, self.server, self.left = broker, server, nth

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        if not self.server.alive:
            raise errors.BrokerUnreachable((self.server.url,), "killed")
        answer = await self.broker.request(subject, payload, timeout)
        self.left -= ".CREATE." in subject
        if self.left == 0:
            self.server.kill()
            raise errors.DeadlineExceeded(subject, timeout)
        return answer


@pytest.mark.parametrize("nth", [1, 6])
async def test_a_change_whose_answer_was_lost_is_not_made_twice(nats_server: EmbeddedServer, nth: int) -> None:
    async with connect(nats_server.settings) as broker:
        js = JetStream(LostAnswer(broker, nats_server, nth), timeout=3)
        with pytest.raises(apply.ApplyError) as caught:
            await apply.apply(js, await planned(broker.jetstream, CRASH_PLATFORM))
    assert len(caught.value.done) == nth - 1
    nats_server.start()
    async with connect(nats_server.settings) as broker:
        done = await applied(broker.jetstream, CRASH_PLATFORM)
    # The server had carried it out: it may have been lost with the crash, but is never there twice or half.
    assert len(CRASH_PLATFORM.configs) - nth <= len(done) <= len(CRASH_PLATFORM.configs) - nth + 1


# -- health ------------------------------------------------------------------------------------------------------------


async def verified(js: JetStream, want: Desired) -> list[str]:
    return _lines(want, await actual.read(js, want))


def _lines(want: Desired, found: Actual) -> list[str]:
    return [f"{f.resource}: {f.problem}" for f in verify.verify(want, found)]


async def test_verify_finds_what_is_missing_drifted_or_not_sourcing(empty: Broker) -> None:
    js = empty.jetstream
    await make_stream(js, "O", subjects=["o"])
    want = desired(BASE, {"name": "COPY", "sources": [{"name": "NOWHERE"}]}, c={"ack_wait": 30 * SECOND})
    assert await verified(js, want) == [
        "stream S: does not exist; run `penstock apply`",
        "stream COPY: does not exist; run `penstock apply`",
        "consumer c of S: does not exist; run `penstock apply`",
    ]
    await applied(js, want)
    await js.update_consumer("S", "c", {"ack_wait": 60 * SECOND})
    found = verify.verify(want, await actual.read(js, want))
    assert [(f.name, f.before, f.after) for f in found[0].fields] == [("ack_wait", 60 * SECOND, 30 * SECOND)]
    assert found[1].check is verify.Check.SOURCES
    # The latter once the server has tried, which it does in its own time.
    assert re.search("NOWHERE (was never heard|fails: stream not found)", found[1].problem)


async def test_verify_is_content_with_what_somebody_else_marked_or_nobody(empty: Broker) -> None:
    await make_stream(empty.jetstream)
    assert await verified(empty.jetstream, desired(BASE)) == []


@pytest.mark.kills
async def test_verify_notices_a_dead_replica_and_a_stream_without_a_leader(nats_cluster: EmbeddedCluster) -> None:
    want = desired({**BASE, "num_replicas": 3}, {"name": "ONE", "subjects": ["one"], "num_replicas": 1}, c={})
    async with connect(replace(nats_cluster.settings, timeout=15.0)) as broker:
        await applied(broker.jetstream, want)
    async with connect(replace(nats_cluster.settings, timeout=3.0)) as broker:
        js = broker.jetstream
        await eventually_async(lambda: _nothing(_findings(js, want)), within=60, state=lambda: _findings(js, want))
        doomed = (await js.stream_info("ONE")).leader
        next(node for node in nats_cluster.nodes if node.config.server_name == doomed).kill()

        async def noticed() -> Actual | None:
            try:
                found = await actual.read(js, want)
            except errors.PenstockError:
                return None  # a cluster that has just lost a node may first not answer at all
            lines = _lines(want, found)
            replica = any(line.startswith(f"stream S: replica on {doomed} ") for line in lines)
            return found if replica and f"stream ONE: {NOBODY}" in lines else None

        found = await eventually_async(noticed, within=120, state=lambda: _findings(js, want))
        assert found
        assert not plan(want, found), "what does not answer is not created again"
        with pytest.raises(errors.Unavailable, match="nobody answers for stream ONE"):
            actual.require_answers(found)


NOBODY = "nobody answers for it: it has no leader"


async def _nothing(findings: Any) -> bool:
    return not await findings


async def _findings(js: JetStream, want: Desired) -> list[str]:
    try:
        return await verified(js, want)
    except errors.PenstockError as exc:
        return [str(exc)]


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_reading_takes_a_request_a_page_and_one_a_stream_with_consumers(empty: Broker) -> None:
    js = empty.jetstream
    for n in range(300):
        await make_stream(js, f"S{n}", subjects=[f"s{n}"], storage="memory")
    for n in range(300):
        await js.create_consumer("S0", {"durable_name": f"c{n}", "ack_policy": "explicit", "mem_storage": True})
    want = desired(*({"name": f"S{n}", "subjects": [f"s{n}"]} for n in range(300)))
    before = js.requests
    found = await actual.read(js, want)
    assert (len(found.streams), len(found.consumers)) == (300, 300)
    assert js.requests - before <= 5  # two pages of streams, one of names, two pages of consumers
