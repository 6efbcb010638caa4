"""What is decided about dead letters without a server: selection, groups, edits, advisories, the audit's open ends."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from penstock.deadletter import advisories, audit
from penstock.deadletter.advisories import REMOVED_REASONS
from penstock.deadletter.audit import AuditRecord, Deed, ReplayChunk
from penstock.deadletter.editing import NotEditable, edited, merge_patch
from penstock.deadletter.letters import DeadLetter, FailedDelivery, Failure, FiledLetter
from penstock.deadletter.replay import ReplayOptions, message_headers, obstacle
from penstock.deadletter.selection import Selection, grouped
from penstock.deadletter.tally import REFUSALS_KEPT, Tally
from penstock.deadletter.targets import nowhere_to_go
from penstock.errors import ConfigError
from penstock.jetstream.model import ConsumerInfo
from penstock.publish.advisories import Abandonment

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def filed(sequence: int = 1, **changed: object) -> FiledLetter:
    facts: dict[str, object] = {
        "subject": "orders.placed",
        "stream": "ORDERS",
        "sequence": sequence,
        "stored": NOW,
        "consumer": "billing",
        "body": b'{"event_id": "e", "price": 1}',
        "failure": Failure("ValueError", f"order {sequence} has no price"),
        "last_failure": NOW + timedelta(minutes=sequence),
        "event_id": "e",
        **changed,
    }
    letter = DeadLetter(**facts)  # type: ignore[arg-type]  # the tests name fields of it
    return FiledLetter(letter, "DLQ", f"dlq.orders.placed.{letter.id}", 10 + sequence, NOW)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (Selection(), True),
        (Selection(readers=("billing",)), True),
        (Selection(readers=("ORDERS/billing",)), True),
        (Selection(readers=("PAYMENTS/billing",)), False),
        (Selection(errors=("ValueError",)), True),
        (Selection(errors=("NO PRICE",)), True),
        (Selection(errors=(filed().letter.fingerprint,)), True),
        (Selection(errors=("KeyError",)), False),
        (Selection(since=NOW + timedelta(minutes=1)), True),
        (Selection(since=NOW + timedelta(minutes=2)), False),
        (Selection(until=NOW + timedelta(minutes=1)), False),
        (Selection(ids=(filed().id[:6],)), True),
        (Selection(ids=("zzz",)), False),
        (Selection(readers=("billing",), errors=("KeyError",)), False),
    ],
)
def test_a_letter_must_match_all_that_is_given(wanted: Selection, matches: bool) -> None:
    assert wanted.matches(filed()) is matches


def test_letters_of_one_consumer_and_cause_are_one_group() -> None:
    other = filed(9, failure=Failure("KeyError", "'project'"), replays=2)
    groups = grouped([filed(1), filed(2), filed(3), other, filed(4, consumer="shipping")])
    assert [(group.reader, group.error, group.count) for group in groups] == [
        ("billing", "ValueError", 3),
        ("billing", "KeyError", 1),
        ("shipping", "ValueError", 1),
    ]
    assert (groups[0].oldest, groups[0].newest) == (NOW + timedelta(minutes=1), NOW + timedelta(minutes=3))
    assert (groups[0].template, groups[1].most_replays) == ("order # has no price", 2)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ('{"price": 2}', {"event_id": "e", "price": 2}),
        ('{"price": null}', {"event_id": "e"}),
        ('{"payload": {"a": {"b": 1}}}', {"event_id": "e", "price": 1, "payload": {"a": {"b": 1}}}),
    ],
)
def test_a_merge_patch_changes_what_it_names(patch: str, expected: dict[str, object]) -> None:
    assert json.loads(edited(filed().letter, merge_patch(patch))) == expected


@pytest.mark.parametrize("patch", ["[]", "{", "5"])
def test_an_edit_that_is_no_json_object_is_refused_before_anything_is_done(patch: str) -> None:
    with pytest.raises(ConfigError):
        merge_patch(patch)


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}'], ids=["bytes", "brackets", "surrogate"])
def test_an_edit_of_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(NotEditable):
        edited(filed(body=body).letter, merge_patch("{}"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"body_gone": True}, "body is gone"),
        ({"subject": ""}, "subject is not known"),
        ({"subject": "orders.*"}, "subject is not known"),
        ({"subject": "orders.a\x1bb"}, "subject is not known"),
        ({"subject": "orders." + "x" * 3_900}, "longer than"),
        ({"subject": "dlq.orders.placed"}, "dead letter itself"),
        ({"replays": 3}, "replayed 3 times"),
    ],
)
def test_what_cannot_be_replayed_says_why(changed: dict[str, object], why: str | None) -> None:
    found = obstacle(filed(1, **changed), ReplayOptions())
    assert (found is None) if why is None else (why in str(found))


def test_only_letters_of_consumers_can_be_replayed_for_their_consumer() -> None:
    assert obstacle(filed(consumer=None, pipeline="usage"), ReplayOptions(only_failed=True))
    assert obstacle(filed(consumer=None, pipeline="usage"), ReplayOptions()) is None


def test_a_replayed_message_gives_no_old_orders_to_the_server() -> None:
    made = message_headers(filed(headers={"Nats-Rollup": ("all",), "Trace": ("t",)}), ReplayOptions())
    assert "Nats-Rollup" not in made
    assert (made["Trace"], made["Nats-Expected-Stream"], made["Penstock-Dlq-Replays"]) == (["t"], "ORDERS", "1")


# -- advisories --------------------------------------------------------------------------------------------------------


def advisory(**changed: object) -> bytes:
    raw = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "timestamp": "2026-03-04T05:06:07.123456789Z",
        "stream": "ORDERS",
        "consumer": "billing",
        "stream_seq": 7,
        "deliveries": 5,
        **changed,
    }
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"type": 5}', advisory(type="other"), advisory(stream_seq="x"), b"[" * 100_000,
     advisory(stream_seq=-4), advisory(stream_seq=0), advisory(stream_seq=2**64), advisory(deliveries=float("inf")),
     advisory(stream=["a"]), advisory(stream="a b"), advisory(consumer="a.b"), advisory(consumer=">"),
     advisory(timestamp=5), advisory(timestamp="9999-12-31T23:59:59-23:00")],
    ids=lambda data: data[:70].decode(),
)  # fmt: skip
def test_what_is_no_advisory_is_passed_over(data: bytes) -> None:
    """Whoever may publish there can write anything: it must not end those who read."""
    assert advisories.parse(data) is None


@pytest.mark.parametrize("data", [b"", b"5", b"[" * 100_000, b"{}", b'{"stream": "S", "timestamp": 5}'])
def test_what_is_no_abandoned_batch_is_passed_over(data: bytes) -> None:
    assert Abandonment.parse(data) is None


def test_an_advisory_says_what_was_given_up_and_why() -> None:
    exhausted = advisories.parse(advisory())
    ended = advisories.parse(advisory(type=advisories.TERMINATED_TYPE, reason="no price"))
    assert exhausted
    assert ended
    assert (exhausted.sequence, exhausted.deliveries, exhausted.failure.type) == (7, 5, "MaxDeliveries")
    assert ended.failure == Failure("Terminated", "no price")


@pytest.mark.parametrize("reason", sorted(REMOVED_REASONS))
def test_messages_removed_under_a_consumers_hands_are_no_dead_letters(reason: str) -> None:
    removed = advisories.parse(advisory(type=advisories.TERMINATED_TYPE, reason=reason))
    assert removed
    assert not removed.concerns_letters


@pytest.mark.parametrize(
    ("config", "seconds"), [({"ack_wait": 10**9}, 1), ({"backoff": [10**9, 2 * 10**9]}, 2), ({}, 30)]
)
def test_the_last_attempt_began_an_ack_wait_before_the_advisory(config: dict[str, object], seconds: int) -> None:
    found = advisories.parse(advisory())
    assert found
    assert found.time - advisories.last_attempt(found, consumer(config)) == timedelta(seconds=seconds)


def consumer(config: dict[str, object]) -> ConsumerInfo:
    nowhere = {"stream_seq": 0, "consumer_seq": 0}
    counts = {"num_pending": 0, "num_ack_pending": 0, "num_redelivered": 0}
    return ConsumerInfo.parse(
        {
            "stream_name": "ORDERS",
            "name": "billing",
            "config": config,
            "delivered": nowhere,
            "ack_floor": nowhere,
            **counts,
        }
    )


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.ORDERS.billing.3.7.9.1772600767123456789.0",
        "$JS.ACK.hub.ACCOUNTHASH.ORDERS.billing.3.7.9.1772600767123456789.0.token",
    ],
)
def test_a_reply_subject_tells_what_was_delivered(reply: str) -> None:
    found = FailedDelivery.parse(reply)
    assert (found.stream, found.consumer, found.deliveries, found.sequence) == ("ORDERS", "billing", 3, 7)
    assert found.stored.microsecond == 123456


# -- the audit ---------------------------------------------------------------------------------------------------------


def chunk(number: int) -> ReplayChunk:
    return ReplayChunk(deed=Deed(run="r", actor="me"), number=number, letters=(f"l{number}",), floors={"ORDERS": 5})


def test_chunks_that_were_begun_and_not_ended_are_open() -> None:
    told = [chunk(0).begun(), chunk(0).ended("done"), chunk(1).begun()]
    assert audit.open_chunks(json.loads(one) for one in told) == [chunk(1)]


def test_a_record_names_the_letter_that_was_settled_and_no_later_one_of_the_same_message() -> None:
    record = AuditRecord(action=audit.REPLAYED, deed=Deed(run="r", actor="me"), letter=filed(), target=("ORDERS", 9))
    known = set(audit.settled([record.json()]))
    again = FiledLetter(filed().letter, "DLQ", filed().subject, 99, NOW)
    assert audit.place(filed()) in known
    assert audit.place(again) not in known


def test_tallies_of_tasks_come_to_the_driver_as_they_were_and_add_up() -> None:
    tally = Tally(done=3, found_done=1, skipped=Counter({"too often": 2}))
    tally.refuse("l", "no stream")
    assert Tally.parse(tally.encoded()) == tally
    both = tally.plus(Tally.parse(tally.encoded()))
    assert (both.done, both.found_done, both.skipped, both.refused_total, both.left) == (
        6,
        2,
        {"too often": 4},
        2,
        6,
    )


def test_a_tally_keeps_the_first_refusals_and_counts_all() -> None:
    tally = Tally()
    for number in range(REFUSALS_KEPT + 5):
        tally.refuse(f"l{number}", "no stream")
    both = tally.plus(tally)
    assert (len(both.refused), both.refused_total) == (REFUSALS_KEPT, 2 * (REFUSALS_KEPT + 5))
    assert (len(tally.refused), tally.refused_total, tally.left) == (
        REFUSALS_KEPT,
        REFUSALS_KEPT + 5,
        REFUSALS_KEPT + 5,
    )


@pytest.mark.parametrize(
    ("stream", "streams", "why"),
    [
        ("ORDERS", {"ORDERS": ["orders.>"]}, None),
        ("ORDERS", {"NEW": ["orders.>"]}, "its stream 'ORDERS' is gone"),
        ("ORDERS", {"ORDERS": ["o.>"], "NEW": ["orders.>"]}, "'ORDERS' no longer takes its subject"),
        ("ORDERS", {"ORDERS": []}, "'ORDERS' no longer takes its subject"),
        ("", {"ORDERS": ["orders.>"]}, None),
        ("", {"ORDERS": ["o.>"]}, "no stream takes its subject"),
    ],
)
def test_a_letter_has_nowhere_to_go_when_its_stream_does_not_take_it(
    stream: str, streams: dict[str, list[str]], why: str | None
) -> None:
    found = nowhere_to_go(filed(stream=stream).letter, streams)
    assert found is None if why is None else why in (found or "")
