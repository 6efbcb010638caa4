"""Acknowledgement subjects, pull requests and their status messages, as servers write and read them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from penstock.errors import ProtocolError
from penstock.jetstream.consumer import (
    AckSubject,
    PullEvent,
    ack_subject,
    consumer_prefix,
    pull_request,
    pull_status,
)
from penstock.sourcing.receiver import delivery_of
from penstock.wire.frames import Message

NUMBERS = "3.41.17.1700000000123456789.5"
SHORT = f"$JS.ACK.S.c.{NUMBERS}"
FORMS = {
    "short": SHORT,
    "with domain and account": f"$JS.ACK.hub.ACCOUNT.S.c.{NUMBERS}",
    "with a random token": f"$JS.ACK.hub.ACCOUNT.S.c.{NUMBERS}.r4nd0m",
    "without a domain": f"$JS.ACK._.ACCOUNT.S.c.{NUMBERS}.r4nd0m",
}


@pytest.mark.parametrize("reply", FORMS.values(), ids=FORMS)
def test_every_form_of_an_acknowledgement_subject_says_the_same(reply: str) -> None:
    told = AckSubject.parse(reply)
    assert (told.stream, told.consumer) == ("S", "c")
    assert (told.deliveries, told.sequence, told.consumer_sequence, told.pending) == (3, 41, 17, 5)
    assert told.stored == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    assert reply.startswith(f"{told.consumer_prefix}.3.41.17.")


@pytest.mark.parametrize("reply", FORMS.values(), ids=FORMS)
def test_a_receiver_finds_the_delivery_number_in_every_form(reply: str) -> None:
    assert delivery_of(reply.encode()) == 17


@pytest.mark.parametrize("reply", ["", "$JS.ACK.S.c", "$JS.ACK.S.c.1.2.3.4", "$JS.ACK.S.c.1.2.x.4.5", "_INBOX.a.b"])
def test_anything_else_is_refused(reply: str) -> None:
    with pytest.raises(ProtocolError, match="invalid reply subject"):
        AckSubject.parse(reply)


def test_a_delivery_is_acknowledged_where_it_came_from() -> None:
    told = AckSubject.parse(SHORT)
    assert ack_subject(told.consumer_prefix, 3, 41, 17) == "$JS.ACK.S.c.3.41.17.0.0"
    assert consumer_prefix("S", "c") == told.consumer_prefix


def test_a_request_has_only_the_limits_that_are_given() -> None:
    assert json.loads(pull_request(5)) == {"batch": 5}
    full = pull_request(5, max_bytes=100, expires=1.5, heartbeat=0.5, no_wait=True)
    assert json.loads(full) == {
        "batch": 5,
        "max_bytes": 100,
        "expires": 1_500_000_000,
        "idle_heartbeat": 500_000_000,
        "no_wait": True,
    }


def status(line: str, headers: str = "") -> Message:
    return Message("inbox", 1, "", f"NATS/1.0 {line}\r\n{headers}\r\n".encode(), b"")


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("100 Idle Heartbeat", PullEvent.HEARTBEAT),
        ("404 No Messages", PullEvent.ENDED),
        ("408 Request Timeout", PullEvent.ENDED),
        ("409 Batch Completed", PullEvent.ENDED),
        ("409 Message Size Exceeds MaxBytes", PullEvent.TOO_LARGE),
        ("409 Exceeded MaxRequestBatch of 5", PullEvent.REFUSED),
        ("409 Leadership Change", PullEvent.INTERRUPTED),
        ("409 Server Shutdown", PullEvent.INTERRUPTED),
        ("409 Consumer Deleted", PullEvent.DELETED),
        ("409 Consumer is push based", PullEvent.DELETED),
        ("503", PullEvent.NO_RESPONDERS),
        ("418 Teapot", PullEvent.UNKNOWN),
    ],
)
def test_each_status_says_what_becomes_of_the_request(line: str, event: PullEvent) -> None:
    found = pull_status(status(line))
    assert found
    assert found.event is event
    assert str(found).strip() == line


def test_a_request_that_ends_early_says_what_is_left_of_it() -> None:
    found = pull_status(status("408 Request Timeout", "Nats-Pending-Messages: 7\r\nNats-Pending-Bytes: 99\r\n"))
    assert found
    assert (found.left, found.left_bytes) == (7, 99)


def test_a_message_of_the_stream_is_no_status_even_if_its_headers_have_a_status_line() -> None:
    assert pull_status(Message("s", 1, SHORT, b"NATS/1.0 408 Request Timeout\r\n\r\n", b"x")) is None
    assert pull_status(Message("s", 1, SHORT, b"", b"x")) is None
