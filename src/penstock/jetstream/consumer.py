"""Pull requests to a consumer, its answers, and acknowledgements of its deliveries. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import NamedTuple

from penstock.errors import ProtocolError
from penstock.jetstream.model import NANOSECONDS
from penstock.wire import frames
from penstock.wire.session import NO_RESPONDERS

ACK, NAK, IN_PROGRESS = b"+ACK", b"-NAK", b"+WPI"
ACK_PREFIX = frames.DELIVERED
SHORT_FORM = 9
"""Tokens of an acknowledgement subject without domain and account; the long form has eleven or more."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# -- acknowledgement subjects ------------------------------------------------------------------------------------------


class AckSubject(NamedTuple):
    """What the reply subject of a delivered message says about the delivery."""

    consumer_prefix: str
    """The common prefix of all acknowledgement subjects of the consumer."""
    deliveries: int
    """1 for the first delivery of the message; incremented with every redelivery."""
    sequence: int
    """The stream sequence of the message."""
    consumer_sequence: int
    """The consumer sequence of this delivery."""
    stored_ns: int
    """When the stream stored the message, in nanoseconds since 1970."""
    pending: int
    """Messages that the consumer had not delivered for the first time yet, right after this delivery."""

    @classmethod
    def parse(cls, reply: str) -> AckSubject:
        """`$JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERIES.SEQUENCE.CONSUMER_SEQUENCE.TIME.PENDING[.RANDOM]`.

        Raises `ProtocolError` for anything else.
        """
        tokens = reply.split(".")
        start = 4 if len(tokens) <= SHORT_FORM else 6
        try:
            numbers = [int(token) for token in tokens[start : start + 5]]
            return cls(".".join(tokens[:start]), *numbers)
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"a delivery has an invalid reply subject: {reply[:200]!r}") from exc

    @classmethod
    def stored_ns_of(cls, reply: str) -> int:
        """`stored_ns` of a reply subject, in less time than `parse` takes."""
        before, stored, _ = reply.rsplit(".", 2)
        return int(stored) if before.count(".") == SHORT_FORM - 3 else cls.parse(reply).stored_ns

    @property
    def stream(self) -> str:
        return self.consumer_prefix.split(".")[-2]

    @property
    def consumer(self) -> str:
        return self.consumer_prefix.split(".")[-1]

    @property
    def stored(self) -> datetime:
        """When the stream stored the message."""
        return EPOCH + timedelta(microseconds=self.stored_ns // 1000)


def consumer_prefix(stream: str, consumer: str) -> str:
    """Return the prefix of the acknowledgement subjects of a consumer in our own domain."""
    return f"{ACK_PREFIX}{stream}.{consumer}"


def ack_subject(prefix: str, deliveries: int, sequence: int, consumer_sequence: int) -> str:
    """Return the acknowledgement subject of a delivery; the server ignores time and pending."""
    return f"{prefix}.{deliveries}.{sequence}.{consumer_sequence}.0.0"


# -- pull requests -----------------------------------------------------------------------------------------------------


def next_verb(stream: str, consumer: str) -> str:
    """The verb of the JetStream API for a pull request, for `JetStream.subject`."""
    return f"CONSUMER.MSG.NEXT.{stream}.{consumer}"


def pull_request(
    batch: int,
    *,
    max_bytes: int | None = None,
    expires: float | None = None,
    heartbeat: float | None = None,
    no_wait: bool = False,
) -> bytes:
    """The body of a request for at most `batch` messages. Times are in seconds."""
    ask: dict[str, int | bool] = {"batch": batch}
    if max_bytes is not None:
        ask["max_bytes"] = max_bytes
    if expires is not None:
        ask["expires"] = int(expires * NANOSECONDS)
    if heartbeat is not None:
        ask["idle_heartbeat"] = int(heartbeat * NANOSECONDS)
    if no_wait:
        ask["no_wait"] = True
    return json.dumps(ask).encode()


class PullEvent(Enum):
    """What a status message says about a pull request."""

    HEARTBEAT = "nothing to deliver, and the request is open"
    ENDED = "the request is over"
    TOO_LARGE = "the request is over: the next message has more bytes than it allows"
    REFUSED = "the request is over: a limit of the consumer does not allow it"
    INTERRUPTED = "the consumer cannot be pulled from any more: its leader changed or its server stops"
    DELETED = "the consumer is gone, or is no pull consumer"
    NO_RESPONDERS = "nobody answers for the consumer"
    UNKNOWN = "a status that no server sends to a pull request"


class PullStatus(NamedTuple):
    """A status message that answers a pull request."""

    event: PullEvent
    code: int
    text: str
    left: int | None = None
    """Messages of the request that will not come; None when the server does not say it: then none of it will."""
    left_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, and the next one may be sent."""
        return self.event in (PullEvent.ENDED, PullEvent.TOO_LARGE, PullEvent.REFUSED)

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


_ENDED = ("Batch Completed",)
_INTERRUPTED = ("Leadership Change", "Server Shutdown")
_DELETED = ("Consumer Deleted", "Consumer is push based")


def pull_status(message: frames.Message) -> PullStatus | None:
    """What a message to the inbox of a pull request says about the request; None for a message of the stream."""
    if message.status is None:
        return None
    code, text = message.status
    headers = message.header_values()
    left, left_bytes = headers.get("Nats-Pending-Messages"), headers.get("Nats-Pending-Bytes", ["0"])
    return PullStatus(_event(code, text), code, text, int(left[0]) if left else None, int(left_bytes[0]))


def _event(code: int, text: str) -> PullEvent:
    if code == 100:
        return PullEvent.HEARTBEAT
    if code in (404, 408) or text.startswith(_ENDED):
        return PullEvent.ENDED
    if text.startswith("Message Size Exceeds"):
        return PullEvent.TOO_LARGE
    if code == NO_RESPONDERS:
        return PullEvent.NO_RESPONDERS
    if code != 409:
        return PullEvent.UNKNOWN
    if text.startswith(_DELETED):
        return PullEvent.DELETED
    return PullEvent.INTERRUPTED if text.startswith(_INTERRUPTED) else PullEvent.REFUSED
