"""What is open of the pull requests to one consumer."""

from __future__ import annotations

import json

import pytest

from penstock.jetstream import JetStream
from penstock.jetstream.consumer import PullEvent
from penstock.jetstream.requests import PullRequests
from penstock.wire import frames


async def _nobody(subject: str, payload: bytes, timeout: float) -> bytes:
    raise AssertionError("nothing is sent here")


@pytest.fixture
def requests() -> PullRequests:
    return PullRequests(JetStream(_nobody, domain="hub"), "ORDERS", "worker", "_INBOX.x.pull")


def status(line: str, left: int | None = None) -> frames.Message:
    pending = "" if left is None else f"Nats-Pending-Messages: {left}\r\nNats-Pending-Bytes: 0\r\n"
    return frames.Message("_INBOX.x.pull", 1, "", f"NATS/1.0 {line}\r\n{pending}\r\n".encode(), b"")


def test_a_request_goes_to_the_consumer_of_its_domain_and_is_answered_at_the_inbox(requests: PullRequests) -> None:
    head, body, _ = requests.request(50, max_bytes=1000, expires=30, heartbeat=5).split(b"\r\n")

    assert head.startswith(b"PUB $JS.hub.API.CONSUMER.MSG.NEXT.ORDERS.worker _INBOX.x.pull ")
    assert json.loads(body) == {"batch": 50, "max_bytes": 1000, "expires": 30 * 10**9, "idle_heartbeat": 5 * 10**9}
    assert requests.asked == 50


def test_what_comes_is_no_longer_open_and_what_comes_beyond_it_counts_for_nothing(requests: PullRequests) -> None:
    requests.request(50)
    requests.received(20)
    assert requests.asked == 30
    requests.received(40)
    assert requests.asked == 0


def test_an_ended_request_leaves_the_others_open(requests: PullRequests) -> None:
    requests.request(50)
    requests.request(50)
    requests.status(status("408 Request Timeout", left=45))
    assert requests.asked == 55


def test_a_request_that_was_served_whole_takes_nothing_from_the_others(requests: PullRequests) -> None:
    requests.request(50)
    requests.status(status("409 Batch Completed", left=0))
    assert requests.asked == 50


def test_after_a_refusal_no_request_counts_as_open(requests: PullRequests) -> None:
    requests.request(50)
    found = requests.status(status("409 Exceeded MaxWaiting"))
    assert found
    assert found.event is PullEvent.REFUSED
    assert requests.asked == 0


def test_a_heartbeat_and_a_message_of_the_stream_change_nothing(requests: PullRequests) -> None:
    requests.request(50)
    requests.status(status("100 Idle Heartbeat"))
    assert requests.status(frames.Message("orders.eu", 1, "", b"", b"data")) is None
    assert requests.asked == 50
