"""Parses the server's advisory about a message that a consumer gave up on. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from penstock.deadletter.letters import BY_ADVISORY, DeadLetter, Failure, of_message
from penstock.jetstream.model import NO_ADVISORY, ConsumerInfo, StoredMessage, parse_time
from penstock.subjects import is_literal, problem
from penstock.units import from_nanoseconds

MAX_DELIVER_TYPE: Final = "io.nats.jetstream.advisory.v1.max_deliver"
TERMINATED_TYPE: Final = "io.nats.jetstream.advisory.v1.terminated"
REMOVED_REASONS: Final = frozenset({"Message deleted by stream limits", "Unacknowledged message was deleted"})
"""Reasons in advisories about a message that was removed while a consumer had it: no consumer gave up on it."""
DEFAULT_ACK_WAIT: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Advisory:
    """A consumer gave up on a message: its deliveries ran out, or it was terminated."""

    stream: str
    consumer: str
    sequence: int
    deliveries: int
    time: datetime
    terminated: bool = False
    reason: str = ""

    @property
    def failure(self) -> Failure:
        if self.terminated:
            return Failure("Terminated", self.reason or "terminated by its consumer, which gave no reason")
        return Failure("MaxDeliveries", f"not acknowledged after {self.deliveries} deliveries")

    @property
    def concerns_letters(self) -> bool:
        return not (self.terminated and self.reason in REMOVED_REASONS)


def parse(data: bytes) -> Advisory | None:
    """Parse an advisory; None for anything else: any publisher with permission can write there."""
    try:
        raw = json.loads(data)
        if raw["type"] not in (MAX_DELIVER_TYPE, TERMINATED_TYPE):
            return None
        return Advisory(
            stream=_named(raw["stream"]),
            consumer=_named(raw["consumer"]),
            sequence=_positive(raw["stream_seq"]),
            deliveries=int(raw.get("deliveries", 0)),
            time=parse_time(raw.get("timestamp", "")) or datetime.now(UTC),
            terminated=raw["type"] == TERMINATED_TYPE,
            reason=str(raw.get("reason") or ""),
        )
    except NO_ADVISORY:
        return None


def _positive(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**63:
        raise ValueError(value)
    return value


def _named(value: Any) -> str:
    """The name of a stream or a consumer: one token of a subject."""
    if not isinstance(value, str) or "." in value or problem(value) or not is_literal(value):
        raise ValueError(value)
    return value


def letter(
    advisory: Advisory, message: StoredMessage | None, consumer: ConsumerInfo, captured_by: str = BY_ADVISORY
) -> DeadLetter:
    """Build the letter of a message that a consumer gave up on; without the message, from what is known."""
    filters = [one for one in consumer.filters if is_literal(one)]
    return of_message(
        subject=message.subject if message else filters[0] if len(filters) == 1 else "",
        stream=advisory.stream,
        sequence=advisory.sequence,
        stored=message.time if message else None,
        consumer=advisory.consumer,
        body=message.data if message else b"",
        headers=message.headers if message else {},
        deliveries=advisory.deliveries,
        failure=advisory.failure,
        failed_at=advisory.time,
        captured_by=captured_by,
        body_gone=message is None,
    )


def last_attempt(advisory: Advisory, consumer: ConsumerInfo) -> datetime:
    """About when the last delivery was made: its time to be acknowledged has passed since, unless it was terminated."""
    if advisory.terminated:
        return advisory.time
    waits = consumer.config.get("backoff") or [consumer.config.get("ack_wait")]
    return advisory.time - (from_nanoseconds(waits[-1]) if waits[-1] else DEFAULT_ACK_WAIT)
