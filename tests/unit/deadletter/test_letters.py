"""Dead letters as values and as headers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deadletter import headers as names
from penstock.deadletter.letters import (
    MESSAGE_LIMIT,
    DeadLetter,
    Failure,
    any_time,
    escaped,
    event_id,
    is_for,
    letter_id,
    of_message,
    read,
    unescaped,
)
from penstock.jetstream.model import StoredMessage
from penstock.subjects import problem
from penstock.wire import headers as header_block

NOW = datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=UTC)


def letter(**changed: object) -> DeadLetter:
    made = DeadLetter(
        subject="platform.billing.usage.metered",
        stream="BILLING",
        sequence=42,
        stored=NOW - timedelta(hours=1),
        consumer="billing_worker",
        body=b'{"event_id": "e-1"}',
        headers={"Nats-Msg-Id": ("e-1",), "Trace": ("a", "b")},
        deliveries=10,
        failure=Failure("ValueError", "no price", "Traceback\n  line with a \\ backslash\nValueError: no price\n"),
        first_failure=NOW - timedelta(minutes=5),
        last_failure=NOW,
        event_id="e-1",
        replays=2,
    )
    return replace(made, **changed)  # type: ignore[arg-type]  # the tests change what they name


def carried(one: DeadLetter, subject: str | None = None) -> StoredMessage:
    """The letter as it comes back from its stream, through the bytes on the wire."""
    parsed = header_block.parse(header_block.encode(one.message_headers()))
    return StoredMessage("DLQ", subject or f"dlq.billing.usage_metered.{one.id}", 7, NOW, one.body, parsed)


def test_a_letter_comes_back_from_its_message_as_it_was() -> None:
    filed = read(carried(letter()))
    assert filed.letter == letter()
    assert filed.id == letter().id


def test_headers_that_mean_something_to_the_server_are_kept_without_their_meaning() -> None:
    made = letter(headers={"Nats-Msg-Id": ("e-1",), "Nats-Rollup": ("all",), "nats-ttl": ("1s",)}).message_headers()
    assert [name for name in made if name.lower().startswith("nats-")] == []
    assert made["Penstock-Dlq-Own-Nats-Rollup"] == ["all"]


@given(st.text(), st.text(), st.dictionaries(st.text(), st.text()))
def test_whatever_an_error_says_makes_headers_that_can_be_sent(message: str, stack: str, own: dict[str, str]) -> None:
    made = letter(failure=Failure("E", message, stack), headers={name: (value,) for name, value in own.items()})
    header_block.encode(made.message_headers())
    assert read(carried(made)).id == made.id


@pytest.mark.parametrize("subject", ["orders.\0", "orders.\udcff", "orders.a\x1bb"])
def test_no_subject_stops_a_letter_nor_becomes_another_one(subject: str) -> None:
    made = letter(subject=subject).message_headers()
    header_block.encode(made)
    assert problem(made["Penstock-Dlq-Subject"][0])


def test_values_that_were_no_utf8_do_not_stop_a_letter() -> None:
    parsed = header_block.parse(b"NATS/1.0\r\nOdd: \xff\xfe\r\n\r\n")
    header_block.encode(letter(headers={name: tuple(values) for name, values in parsed.items()}).message_headers())


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\0")))
def test_stack_traces_keep_their_lines(text: str) -> None:
    assert unescaped(escaped(text)) == text
    assert "\n" not in escaped(text)


def test_long_errors_are_cut_and_stacks_keep_their_end() -> None:
    try:
        raise ValueError("x" * 5_000)
    except ValueError as exc:
        failure = Failure.of(exc)
    assert len(failure.message) == MESSAGE_LIMIT
    assert failure.stack.rstrip().endswith("x")
    assert all(len(value) < 20_000 for values in letter(failure=failure).message_headers().values() for value in values)


def test_everyone_who_captures_a_message_of_a_consumer_gives_it_the_same_id() -> None:
    by_worker = letter()
    by_advisory = letter(failure=Failure("MaxDeliveries"), deliveries=0, replays=0, last_failure=None)
    assert by_worker.id == by_advisory.id


@pytest.mark.parametrize(
    "other",
    [{"stream": "PAYMENTS"}, {"consumer": "other"}, {"sequence": 43}, {"stored": NOW}],
    ids=["stream", "consumer", "sequence", "a stream made anew, with another message at that sequence"],
)
def test_another_message_or_consumer_has_another_id(other: dict[str, object]) -> None:
    assert letter(**other).id != letter().id


def test_an_id_without_its_time_finds_the_id_with_it() -> None:
    assert any_time(letter_id("S", "c", 1, None)) == any_time(letter_id("S", "c", 1, NOW))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("allocation 4711 not found", "allocation 4712 not found"),
        ("no row 6f9619ff-8b86-d011-b42d-00cf4fc964ff", "no row 00000000-8b86-d011-b42d-00cf4fc964ff"),
        ("object at 0x7f3a", "object at 0x7f3b"),
        ("digest 9a0364b9e99bb480dd25e1f0284c8555", "digest 0a0364b9e99bb480dd25e1f0284c8500"),
    ],
)
def test_errors_that_differ_in_ids_and_numbers_have_one_fingerprint(one: str, other: str) -> None:
    assert Failure("E", one).fingerprint == Failure("E", other).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        Failure("KeyError", "no price"),
        Failure("E", "no project"),
        Failure("E", "no price", 'File "a.py", line 3, in f'),
    ],
)
def test_errors_of_another_kind_have_another_fingerprint(other: Failure) -> None:
    assert Failure("E", "no price").fingerprint != other.fingerprint


def test_the_line_of_an_error_may_move_without_changing_its_fingerprint() -> None:
    one, other = (Failure("E", "m", f'  File "/{root}/a.py", line {n}, in f') for root, n in (("x", 3), ("y", 30)))
    assert one.fingerprint == other.fingerprint


def test_a_replayed_message_that_fails_again_keeps_count_and_first_failure() -> None:
    replayed = {names.REPLAYS: ["2"], names.FIRST_FAILURE: [NOW.isoformat()], names.LETTER: ["old.1"], "Own": ["x"]}
    again = of_message(
        subject="s",
        stream="S",
        sequence=9,
        stored=NOW,
        consumer="c",
        body=b"{}",
        headers=replayed,
        deliveries=3,
        failure=Failure("E"),
        failed_at=NOW + timedelta(hours=1),
    )
    assert (again.replays, again.first_failure, again.headers) == (2, NOW, {"Own": ("x",)})


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b'{"event_id": "e"}', {"Nats-Msg-Id": ["m"]}, "e"),
        (b'{"event_id": 7}', {}, "7"),
        (b"not json", {"Nats-Msg-Id": ["m"]}, "m"),
        (b'["event_id"]', {}, None),
        (b"[" * 100_000, {}, None),
    ],
)
def test_the_event_id_is_that_of_the_envelope_or_else_the_message_id(
    body: bytes, headers: dict[str, list[str]], expected: str | None
) -> None:
    assert event_id(body, headers) == expected


def test_a_bad_record_of_a_pipeline_is_a_letter() -> None:
    given_headers = {
        names.STREAM: ["BILLING"],
        names.SUBJECT: ["platform.billing.usage.metered"],
        names.SEQUENCE: ["5"],
        names.REASON: ["price is missing"],
        names.PIPELINE: ["usage_hourly"],
        "Own": ["kept"],
    }
    filed = read(StoredMessage("DLQ", "dlq.billing.usage_metered", 3, NOW, b"{", given_headers))
    assert (filed.letter.reader, filed.letter.sequence, filed.letter.failure.message) == (
        "usage_hourly",
        5,
        "price is missing",
    )
    assert filed.letter.headers == {"Own": ("kept",)}
    assert filed.id == letter_id("DLQ", "", 3, NOW)


def test_a_message_that_is_no_letter_at_all_can_still_be_read() -> None:
    filed = read(StoredMessage("DLQ", "dlq.odd", 1, NOW, b"?", {names.SEQUENCE: ["x"], names.LAST_FAILURE: ["never"]}))
    assert (filed.letter.reader, filed.letter.sequence, filed.letter.last_failure) == ("unknown", 0, NOW)


def test_a_replay_for_one_consumer_concerns_no_other() -> None:
    only = {names.ONLY: ["BILLING/billing_worker"]}
    assert is_for(only, "BILLING", "billing_worker")
    assert not is_for(only, "BILLING", "notification_relay")
    assert is_for({}, "BILLING", "notification_relay")
