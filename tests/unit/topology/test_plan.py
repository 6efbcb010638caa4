"""The planner: what differs, what that costs, and in which order it can be done."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.topology import compare, ownership
from penstock.topology.model import DEFAULT_NAME
from penstock.topology.plan import Change, ChangeKind, Plan, plan
from penstock.topology.resource import Actual, Desired, Resource
from penstock.topology.risk import Risk

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
ME = "shop"

STREAM_DEFAULTS: Json = {
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 2 * MINUTE,
    "compression": "none",
    "allow_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_msg_ttl": False,
    "consumer_limits": {},
}
CONSUMER_DEFAULTS: Json = {
    "deliver_policy": "all",
    "ack_policy": "explicit",
    "ack_wait": 30 * SECOND,
    "max_deliver": -1,
    "replay_policy": "instant",
    "max_waiting": 512,
    "max_ack_pending": 1000,
    "num_replicas": 0,
}
SERVER_METADATA = {"_nats.level": "5", "_nats.ver": "2.15.1"}


def shown(config: Json, defaults: Json) -> Json:
    """A configuration as the server shows it after it was written: with its defaults and its own metadata."""
    written = {name: value for name, value in config.items() if value not in (None, False, "", [])}
    full = {**defaults, **written, "metadata": {**(config.get("metadata") or {}), **SERVER_METADATA}}
    if full.get("max_age") and "duplicate_window" not in written:
        full["duplicate_window"] = min(full["max_age"], full["duplicate_window"])
    return full


def stream_info(config: Json, messages: int = 0, subjects: int = 1, size: int = 0, age: str = "00:10:00") -> StreamInfo:
    state = {"messages": messages, "bytes": size, "first_seq": 1, "last_seq": messages, "num_subjects": subjects}
    if messages:
        state["first_ts"] = "2026-01-01T00:00:00Z"  # type: ignore[assignment]
    return StreamInfo.parse({"config": shown(config, STREAM_DEFAULTS), "state": state, "ts": f"2026-01-01T{age}Z"})


def consumer_info(stream: str, config: Json) -> ConsumerInfo:
    zero = {"stream_seq": 0, "consumer_seq": 0}
    counts = {"num_pending": 0, "num_ack_pending": 0, "num_redelivered": 0}
    name = config["durable_name"]
    full = shown(config, CONSUMER_DEFAULTS)
    return ConsumerInfo.parse(
        {"stream_name": stream, "name": name, "config": full, "delivered": zero, "ack_floor": zero, **counts}
    )


def desired(*streams: Json, platform: str = ME, **consumers: Json) -> Desired:
    """Streams by their configuration; consumers of the first stream by name."""
    configs: dict[Resource, Json] = {Resource(s["name"]): s for s in streams}
    for name, config in consumers.items():
        stream = config.pop("stream", streams[0]["name"])
        configs[Resource(stream, name)] = {"durable_name": name, "name": name, **config}
    return Desired(platform, configs)


def applied(want: Desired, have: Actual, **options: bool) -> Actual:
    """What a server would have after the plan was carried out."""
    streams, consumers = dict(have.streams), dict(have.consumers)
    for change in plan(want, have, **options).changes:
        _carry_out(change, streams, consumers)
    return Actual(streams, consumers)


def _carry_out(change: Change, streams: dict[str, StreamInfo], consumers: dict[Resource, ConsumerInfo]) -> None:
    resource, is_stream = change.resource, change.resource.consumer is None
    have = (
        (streams.get(resource.stream) if is_stream else consumers.get(resource))
        if change.kind is ChangeKind.UPDATE
        else None
    )
    if change.config is None:
        streams.pop(resource.stream, None) if is_stream else consumers.pop(resource, None)
        return
    names = [field.name for field in change.fields]
    config = compare.patched(have.config, change.config, names) if have else change.config
    if is_stream:
        streams[resource.stream] = stream_info(config)
    else:
        consumers[resource] = consumer_info(resource.stream, config)


def only(made: Plan) -> Change:
    assert len(made.changes) == 1, made.changes
    return made.changes[0]


def changed_stream(before: Json, after: Json, **content: Any) -> Change:
    """The one change when an owned stream's declaration goes from `before` to `after`."""
    base = {"name": "S", "subjects": ["s.>"]}
    owned = ownership.marked({**base, **before}, ME)
    return only(plan(desired({**base, **after}), Actual({"S": stream_info(owned, **content)})))


def changed_consumer(before: Json, after: Json, stream: Json | None = None) -> Change:
    base = {"name": "S", "subjects": ["s.>"], **(stream or {})}
    owned = ownership.marked({"durable_name": "c", "name": "c", **before}, ME)
    have = Actual(
        {"S": stream_info(ownership.marked(base, ME), messages=5)}, {Resource("S", "c"): consumer_info("S", owned)}
    )
    return only(plan(desired(base, c=dict(after)), have))


# -- what is compared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "server"),
    [
        ({"subjects": ["b", "a"]}, {"subjects": ["a", "b"]}),
        ({"max_msgs": 0}, {"max_msgs": -1}),
        ({"max_age": 0}, {}),
        ({"allow_atomic": False}, {}),
        ({"metadata": {"team": "x"}}, {"metadata": {"team": "x", "_nats.ver": "2.15.1", "other": "y"}}),
        ({"consumer_limits": {"max_ack_pending": 5}}, {"consumer_limits": {"max_ack_pending": 5, "x": 1}}),
        ({"sources": [{"name": "A"}, {"name": "B"}]}, {"sources": [{"name": "B", "opt_start_seq": 0}, {"name": "A"}]}),
        ({"placement": {"tags": []}}, {"placement": {}}),
        ({"filter_subject": "a"}, {"filter_subjects": ["a"]}),
        ({"filter_subjects": ["b", "a"]}, {"filter_subjects": ["a", "b"]}),
        ({"backoff": [SECOND, MINUTE], "ack_wait": HOUR}, {"backoff": [SECOND, MINUTE], "ack_wait": SECOND}),
        ({"opt_start_time": "2026-01-01T00:00:00Z"}, {"opt_start_time": "2026-01-01T01:00:00+01:00"}),
        ({"sample_freq": "50"}, {"sample_freq": "50%"}),
        ({}, {"max_batch": 7}),
        ({"duplicate_window": 0}, {"duplicate_window": 2 * MINUTE}),
    ],
)
def test_two_ways_to_say_the_same_are_no_difference(declared: Json, server: Json) -> None:
    assert compare.differences(declared, server) == []


def test_a_difference_names_the_field_with_both_values() -> None:
    change = changed_consumer({"ack_wait": 30 * SECOND}, {"ack_wait": 60 * SECOND})
    assert (change.kind, change.risk) == (ChangeKind.UPDATE, Risk.SAFE)
    assert compare.FieldChange("ack_wait", 30 * SECOND, 60 * SECOND) in change.fields


def test_fields_that_nobody_declared_are_left_alone() -> None:
    have = stream_info(ownership.marked({"name": "S", "subjects": ["s"]}, ME))
    have.config["max_msgs"] = 5
    have.config["field_of_a_newer_server"] = {"deep": True}
    assert not plan(desired({"name": "S", "subjects": ["s"]}), Actual({"S": have}))


def test_an_update_keeps_fields_that_nobody_knows() -> None:
    config = {"name": "S", "max_age": 5, "future": 1, "metadata": {"theirs": "x", "penstock.platform": ME}}
    patched = compare.patched(config, {"max_age": 9, "metadata": {"ours": "y"}}, ["max_age", "metadata.ours"])
    assert patched == {**config, "max_age": 9, "metadata": {**config["metadata"], "ours": "y"}}  # type: ignore[dict-item]


def test_a_field_taken_out_of_the_file_goes_back_to_the_servers_default() -> None:
    change = changed_stream({"max_msgs": 100, "metadata": {"team": "a"}}, {})
    assert {(f.name, f.before, f.after) for f in change.fields if not ownership.is_mark(f.name)} == {
        ("max_msgs", 100, None),
        ("metadata.team", "a", None),
    }
    assert change.config is not None
    patched = compare.patched(
        {"max_msgs": 100, "metadata": {"team": "a"}}, change.config, [f.name for f in change.fields]
    )
    assert "max_msgs" not in patched
    assert "team" not in patched["metadata"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"storage": "file"}, {}),
        ({"discard": "old"}, {}),
        ({"retention": "limits"}, {}),
        ({"compression": "none", "max_msgs": -1, "max_age": 0, "allow_direct": False}, {}),
        ({"duplicate_window": 2 * MINUTE}, {}),
        ({"duplicate_window": MINUTE, "max_age": MINUTE}, {"max_age": MINUTE}),
        ({"subjects": ["S"]}, {}),
    ],
)
def test_a_line_that_says_the_default_can_be_taken_out_of_a_stream_without_a_change(before: Json, after: Json) -> None:
    have = Actual({"S": stream_info(ownership.marked({"name": "S", **before}, ME), messages=5)})
    have.streams["S"].config.setdefault("subjects", ["S"])
    change = only(plan(desired({"name": "S", **after}), have, allow_destroy=True))
    assert (change.kind, change.risk, change.only_marks) == (ChangeKind.UPDATE, Risk.SAFE, True), change


@pytest.mark.parametrize(
    ("before", "limits"),
    [
        ({"ack_wait": 30 * SECOND}, {}),
        ({"max_deliver": -1, "replay_policy": "instant", "max_waiting": 512, "num_replicas": 0}, {}),
        ({"max_ack_pending": 1000}, {"max_ack_pending": 5000}),
        ({"max_ack_pending": 50, "inactive_threshold": HOUR}, {"max_ack_pending": 50, "inactive_threshold": HOUR}),
    ],
)
def test_a_line_that_says_the_default_can_be_taken_out_of_a_consumer_without_a_change(
    before: Json, limits: Json
) -> None:
    change = changed_consumer(before, {}, {"consumer_limits": limits})
    assert (change.kind, change.risk, change.only_marks) == (ChangeKind.UPDATE, Risk.SAFE, True), change


def test_one_filter_becoming_several_replaces_the_field_the_server_refuses_beside_it() -> None:
    patched = compare.patched({"filter_subject": "a"}, {"filter_subjects": ["a", "b"]}, ["filter_subjects"])
    assert patched == {"filter_subjects": ["a", "b"]}


# -- ownership ---------------------------------------------------------------------------------------------------------


def test_an_unmarked_resource_that_is_declared_is_adopted_safely() -> None:
    change = only(
        plan(desired({"name": "S", "subjects": ["s"]}), Actual({"S": stream_info({"name": "S", "subjects": ["s"]})}))
    )
    assert (change.kind, change.risk, change.only_marks) == (ChangeKind.UPDATE, Risk.SAFE, True)


def test_what_another_platform_owns_keeps_its_marks() -> None:
    theirs = stream_info(ownership.marked({"name": "S", "subjects": ["s"]}, "another"))
    assert not plan(desired({"name": "S", "subjects": ["s"]}), Actual({"S": theirs}))


def owned_by(platform: str, **fields: Any) -> Actual:
    """A stream and its consumer, both of one platform."""
    stream = ownership.marked({"name": "S", "subjects": ["s"], **fields}, platform)
    consumer = ownership.marked({"durable_name": "c", "name": "c", "ack_wait": MINUTE}, platform)
    return Actual({"S": stream_info(stream)}, {Resource("S", "c"): consumer_info("S", consumer)})


WANTED: Json = {"name": "S", "subjects": ["s"], "max_msgs": 5, "storage": "memory"}


def test_what_another_platform_owns_is_not_changed() -> None:
    made = plan(desired(WANTED, c={"ack_wait": HOUR}), owned_by("another", max_age=HOUR), allow_destroy=True)
    assert [(c.kind, c.risk, c.owner) for c in made.changes] == [(ChangeKind.UPDATE, Risk.IMPOSSIBLE, "another")] * 2
    assert all("owned by platform 'another'" in c.reason and "--take-over" in c.reason for c in made.changes)


def test_what_another_platform_owns_can_be_taken_over_and_keeps_what_only_that_one_declared() -> None:
    wanted = {"name": "S", "subjects": ["s"], "max_msgs": 5}
    made = plan(desired(wanted, c={"ack_wait": MINUTE}), owned_by("another", max_age=HOUR), take_over=True)
    assert [(c.kind, c.risk, c.owner) for c in made.changes] == [(ChangeKind.UPDATE, Risk.SAFE, "another")] * 2
    assert {f.name for f in made.changes[0].fields if not ownership.is_mark(f.name)} == {"max_msgs"}
    assert ownership.owner(made.changes[0].config or {}) == ME


def test_what_a_file_without_a_name_made_goes_over_to_the_file_once_it_has_one() -> None:
    want = desired({"name": "S", "subjects": ["s"]}, c={"ack_wait": MINUTE})
    made = plan(want, owned_by(DEFAULT_NAME))
    assert [(c.risk, c.only_marks, c.owner) for c in made.changes] == [(Risk.SAFE, True, None)] * 2


def test_a_file_without_a_name_owns_nothing_that_it_could_prune() -> None:
    unrelated = Desired(DEFAULT_NAME, {Resource("MINE"): {"name": "MINE"}})
    assert plan(unrelated, owned_by(DEFAULT_NAME)).orphans == ()
    with pytest.raises(ConfigError, match="add `name: <platform>`"):
        plan(unrelated, owned_by(DEFAULT_NAME), prune=True)


@pytest.mark.parametrize(("readers", "kinds"), [(["S"], [ChangeKind.UPDATE, ChangeKind.DELETE]), ([], [])])
def test_a_file_without_a_name_removes_a_managed_consumer_only_of_its_own_streams(
    readers: list[str], kinds: list[ChangeKind]
) -> None:
    managed = ownership.marked({"durable_name": "m", "name": "m", "metadata": {"penstock.sourcing": "S"}}, DEFAULT_NAME)
    have = Actual(
        {"S": stream_info({"name": "S"}), "O": stream_info(ownership.marked({"name": "O"}, DEFAULT_NAME))},
        {Resource("O", "m"): consumer_info("O", managed)},
    )
    want = Desired(DEFAULT_NAME, {Resource(name): {"name": name} for name in readers})
    assert [change.kind for change in plan(want, have).changes] == kinds


@pytest.mark.parametrize(("messages", "risk"), [(0, Risk.LOSES_POSITION), (3, Risk.LOSES_DATA)])
def test_pruning_a_stream_names_the_consumers_of_others_that_go_with_it(messages: int, risk: Risk) -> None:
    have = Actual(
        {"S": stream_info(ownership.marked({"name": "S"}, ME), messages=messages)},
        {
            Resource("S", "mine"): consumer_info("S", ownership.marked({"durable_name": "mine"}, ME)),
            Resource("S", "foreign"): consumer_info("S", {"durable_name": "foreign"}),
        },
    )
    (change,) = [c for c in plan(Desired(ME, {}), have, prune=True).changes if c.resource == Resource("S")]
    assert change.risk is risk
    assert change.reason.endswith("consumers that this platform does not own go with it: foreign")


def test_prune_deletes_only_what_the_platform_owns() -> None:
    mine, theirs = ownership.marked({"name": "MINE"}, ME), ownership.marked({"name": "THEIRS"}, "another")
    have = Actual(
        {"MINE": stream_info(mine), "THEIRS": stream_info(theirs), "NOBODYS": stream_info({"name": "NOBODYS"})}
    )
    want = Desired(ME, {})
    assert plan(want, have).orphans == (Resource("MINE"),)
    assert not plan(want, have)
    assert [c.resource for c in plan(want, have, prune=True).changes] == [Resource("MINE")]


@pytest.mark.parametrize(("messages", "risk"), [(0, Risk.SAFE), (3, Risk.LOSES_DATA)])
def test_pruning_a_stream_loses_data_once_it_held_a_message(messages: int, risk: Risk) -> None:
    have = Actual({"S": stream_info(ownership.marked({"name": "S"}, ME), messages=messages)})
    assert only(plan(Desired(ME, {}), have, prune=True)).risk is risk


# -- what a change costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "content", "risk"),
    [
        ({}, {"description": "x"}, {}, Risk.SAFE),
        ({}, {"num_replicas": 3}, {}, Risk.SAFE),
        ({}, {"subjects": ["s.>", "t.>"]}, {}, Risk.SAFE),
        ({"subjects": ["s.a", "s.b"]}, {"subjects": ["s.>"]}, {}, Risk.SAFE),
        ({"subjects": ["s.>", "t.>"]}, {"subjects": ["s.>"]}, {}, Risk.LOSES_DATA),
        ({}, {"storage": "memory"}, {}, Risk.IMPOSSIBLE),
        ({"persist_mode": "async"}, {"persist_mode": "default"}, {}, Risk.IMPOSSIBLE),
        ({}, {"allow_msg_counter": True}, {}, Risk.IMPOSSIBLE),
        ({}, {"first_seq": 9}, {}, Risk.IMPOSSIBLE),
        ({}, {"retention": "workqueue"}, {}, Risk.IMPOSSIBLE),
        ({"retention": "workqueue"}, {"retention": "interest"}, {}, Risk.IMPOSSIBLE),
        ({}, {"retention": "interest"}, {}, Risk.LOSES_DATA),
        ({"retention": "interest"}, {"retention": "limits"}, {}, Risk.SAFE),
        ({}, {"deny_delete": True}, {}, Risk.SAFE),
        ({"deny_delete": True}, {"deny_delete": False}, {}, Risk.IMPOSSIBLE),
        ({"allow_msg_ttl": True}, {}, {}, Risk.IMPOSSIBLE),
        ({}, {"sealed": True}, {}, Risk.LOSES_DATA),
        ({}, {"max_msgs": 10}, {"messages": 10}, Risk.SAFE),
        ({}, {"max_msgs": 9}, {"messages": 10}, Risk.LOSES_DATA),
        ({"discard": "new"}, {"discard": "new", "max_msgs": 9}, {"messages": 10}, Risk.SAFE),
        ({"discard": "new", "max_msgs": 9}, {"discard": "old", "max_msgs": 9}, {"messages": 10}, Risk.LOSES_DATA),
        ({"max_msgs": 9}, {}, {"messages": 9}, Risk.SAFE),
        ({}, {"max_bytes": 99}, {"messages": 1, "size": 100}, Risk.LOSES_DATA),
        ({}, {"max_bytes": 100}, {"messages": 1, "size": 100}, Risk.SAFE),
        ({}, {"max_age": 9 * MINUTE}, {"messages": 1, "age": "00:10:00"}, Risk.LOSES_DATA),
        ({}, {"max_age": 11 * MINUTE}, {"messages": 1, "age": "00:10:00"}, Risk.SAFE),
        ({}, {"max_age": 9 * MINUTE}, {"messages": 0}, Risk.SAFE),
        ({}, {"max_msgs_per_subject": 1}, {"messages": 5, "subjects": 5}, Risk.SAFE),
        ({}, {"max_msgs_per_subject": 1}, {"messages": 6, "subjects": 5}, Risk.LOSES_DATA),
        ({"discard": "new"}, {"discard": "new", "max_msgs_per_subject": 1}, {"messages": 9}, Risk.LOSES_DATA),
        ({}, {"sources": [{"name": "O"}]}, {}, Risk.SAFE),
        ({"sources": [{"name": "O"}]}, {}, {}, Risk.SAFE),
        ({"sources": [{"name": "O"}]}, {"sources": [{"name": "O", "filter_subject": "a"}]}, {}, Risk.LOSES_POSITION),
        ({"mirror": {"name": "O"}}, {"mirror": {"name": "P"}}, {}, Risk.IMPOSSIBLE),
        ({"mirror": {"name": "O"}}, {}, {}, Risk.LOSES_POSITION),
    ],
)  # fmt: skip
def test_what_a_change_of_a_stream_costs(before: Json, after: Json, content: dict[str, Any], risk: Risk) -> None:
    change = changed_stream(before, after, **content)
    assert change.risk is risk
    assert change.kind is (ChangeKind.RECREATE if risk is Risk.IMPOSSIBLE else ChangeKind.UPDATE)
    assert bool(change.reason) or risk is Risk.SAFE


INTEREST = {"retention": "interest"}


@pytest.mark.parametrize(
    ("before", "after", "stream", "kind", "risk"),
    [
        ({}, {"ack_wait": 5 * SECOND}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({}, {"max_deliver": 5}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({}, {"max_ack_pending": 5}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({}, {"headers_only": True}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({}, {"ack_policy": "all"}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({}, {"deliver_policy": "new"}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({}, {"deliver_policy": "new"}, INTEREST, ChangeKind.RECREATE, Risk.LOSES_DATA),
        ({}, {"replay_policy": "original"}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({}, {"max_waiting": 5}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({}, {"mem_storage": True}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({}, {"deliver_subject": "d"}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({"deliver_subject": "d"}, {"deliver_subject": "e"}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({}, {"idle_heartbeat": 9}, {}, ChangeKind.RECREATE, Risk.LOSES_POSITION),
        ({"filter_subject": "s.a"}, {"filter_subject": "s.b"}, {}, ChangeKind.UPDATE, Risk.LOSES_POSITION),
        ({"filter_subject": "s.a"}, {"filter_subjects": ["s.a", "s.b"]}, {}, ChangeKind.UPDATE, Risk.LOSES_POSITION),
        ({"filter_subject": "s.a"}, {}, {}, ChangeKind.UPDATE, Risk.LOSES_POSITION),
        ({"filter_subjects": ["s.a", "s.b"]}, {"filter_subject": "s.a"}, {}, ChangeKind.UPDATE, Risk.SAFE),
        ({"filter_subjects": ["s.a", "s.b"]}, {"filter_subject": "s.a"}, INTEREST, ChangeKind.UPDATE, Risk.LOSES_DATA),
        ({}, {"inactive_threshold": HOUR}, {}, ChangeKind.UPDATE, Risk.SAFE),
    ],
)  # fmt: skip
def test_what_a_change_of_a_consumer_costs(
    before: Json, after: Json, stream: Json, kind: ChangeKind, risk: Risk
) -> None:
    change = changed_consumer(before, after, stream)
    assert (change.kind, change.risk) == (kind, risk)
    assert bool(change.reason) or risk is Risk.SAFE


def test_a_subject_that_another_stream_takes_over_is_not_lost() -> None:
    have = {
        name: stream_info(ownership.marked({"name": name, "subjects": subjects}, ME))
        for name, subjects in {"NEW": ["n.>"], "OLD": ["o.>", "x.>"]}.items()
    }
    made = plan(
        desired({"name": "NEW", "subjects": ["n.>", "x.>"]}, {"name": "OLD", "subjects": ["o.>"]}), Actual(have)
    )
    assert [(c.resource.name, c.risk) for c in made.changes] == [("OLD", Risk.SAFE), ("NEW", Risk.SAFE)]


def test_the_duplicate_window_shrinks_with_max_age_as_the_server_demands() -> None:
    change = changed_stream({}, {"max_age": MINUTE})
    assert compare.FieldChange("duplicate_window", 2 * MINUTE, MINUTE) in change.fields


def test_with_allow_destroy_an_impossible_stream_and_its_consumers_are_made_anew() -> None:
    base = {"name": "S", "subjects": ["s.>"]}
    owned = ownership.marked({"durable_name": "c", "name": "c"}, ME)
    have = Actual(
        {"S": stream_info(ownership.marked(base, ME), messages=4)}, {Resource("S", "c"): consumer_info("S", owned)}
    )
    want = desired({**base, "storage": "memory"}, c={})
    assert [c.risk for c in plan(want, have).with_risk(Risk.IMPOSSIBLE)] == [Risk.IMPOSSIBLE]
    made = plan(want, have, allow_destroy=True)
    assert [(c.kind, c.risk, c.resource.type) for c in made.changes] == [
        (ChangeKind.RECREATE, Risk.LOSES_DATA, "stream"),
        (ChangeKind.RECREATE, Risk.LOSES_POSITION, "consumer"),
    ]
    assert "4 messages" in made.changes[0].reason


# -- order -------------------------------------------------------------------------------------------------------------


def names(made: Plan) -> list[str]:
    return [change.resource.name for change in made.changes]


def test_origins_come_before_what_sources_from_them_and_streams_before_consumers() -> None:
    want = desired(
        {"name": "ALL", "sources": [{"name": "A"}, {"name": "ELSEWHERE", "external": {"api": "$JS.x.API"}}]},
        {"name": "COPY", "mirror": {"name": "ALL"}},
        {"name": "A", "subjects": ["a"]},
        reader={"stream": "ALL"},
    )
    assert names(plan(want, Actual())) == ["A", "ALL", "COPY", "reader"]


def test_deletions_come_last_and_in_the_reverse_order() -> None:
    have = applied(desired({"name": "A", "subjects": ["a"]}, {"name": "B", "sources": [{"name": "A"}]}, c={}), Actual())
    want = desired({"name": "N", "subjects": ["n"]})
    assert names(plan(want, have, prune=True)) == ["N", "c", "B", "A"]


def test_a_renamed_stream_is_deleted_before_its_subjects_are_taken_over() -> None:
    have = applied(desired({"name": "OLD", "subjects": ["x.>"]}), Actual())
    want = desired({"name": "NEW", "subjects": ["x.y"]}, {"name": "OTHER", "subjects": ["o"]})
    assert names(plan(want, have, prune=True)) == ["OTHER", "OLD", "NEW"]


def test_a_circle_of_subjects_still_lists_every_change() -> None:
    have = applied(desired({"name": "A", "subjects": ["a"]}, {"name": "B", "subjects": ["b"]}), Actual())
    want = desired({"name": "A", "subjects": ["b"]}, {"name": "B", "subjects": ["a"]})
    assert sorted(names(plan(want, have))) == ["A", "B"]


# -- the whole ---------------------------------------------------------------------------------------------------------

TOKENS = st.sampled_from(["a", "b", "c", "*"])
SUBJECTS = st.lists(TOKENS.map(lambda token: f"x.{token}"), min_size=1, max_size=3, unique=True)
LIMIT = st.sampled_from([-1, 0, 1, 1000])
STREAMS = st.fixed_dictionaries(
    {"subjects": SUBJECTS},
    optional={
        "description": st.sampled_from(["", "x"]),
        "retention": st.sampled_from(["limits", "interest", "workqueue"]),
        "storage": st.sampled_from(["file", "memory"]),
        "max_msgs": LIMIT,
        "max_bytes": LIMIT,
        "max_age": st.sampled_from([0, MINUTE, HOUR]),
        "duplicate_window": st.sampled_from([SECOND, 2 * SECOND]),
        "allow_atomic": st.booleans(),
        "deny_delete": st.booleans(),
        "sources": st.lists(st.sampled_from([{"name": "O"}, {"name": "P", "filter_subject": "p"}]), max_size=2),
        "consumer_limits": st.sampled_from([{}, {"max_ack_pending": 3}]),
        "metadata": st.dictionaries(st.sampled_from(["team", "tier"]), st.sampled_from(["x", "y"]), max_size=2),
    },
)
CONSUMERS = st.fixed_dictionaries(
    {},
    optional={
        "ack_policy": st.sampled_from(["explicit", "all"]),
        "ack_wait": st.sampled_from([SECOND, MINUTE]),
        "backoff": st.sampled_from([[], [SECOND, MINUTE]]),
        "max_deliver": st.sampled_from([-1, 5]),
        "filter_subjects": SUBJECTS,
        "headers_only": st.booleans(),
        "metadata": st.dictionaries(st.sampled_from(["team", "tier"]), st.sampled_from(["x", "y"]), max_size=2),
    },
)
PLATFORMS = st.tuples(
    st.dictionaries(st.sampled_from(["S", "T"]), STREAMS, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["c", "d"]), CONSUMERS, max_size=2),
).map(lambda drawn: desired(*({"name": name, **config} for name, config in drawn[0].items()), platform=ME, **drawn[1]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PLATFORMS, PLATFORMS)
def test_after_a_plan_was_carried_out_there_is_nothing_left_to_do(first: Desired, second: Desired) -> None:
    have = applied(first, Actual(), prune=True)
    assert not plan(first, have, prune=True)
    have = applied(second, have, allow_destroy=True, prune=True)
    assert plan(second, have, prune=True).changes == ()
