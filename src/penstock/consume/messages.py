"""A delivered message, what a handler is told about it, and how it is answered. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from penstock.jetstream.consumer import ACK_PREFIX, EPOCH, AckSubject
from penstock.wire import frames
from penstock.wire import headers as header_block

ACKED = " 0\r\n\r\nPUB "
"""Between two acknowledgements: the end of an empty message, and the beginning of the next."""


class Message(NamedTuple):
    """One delivery of a stored message."""

    subject: str
    data: bytes
    sequence: int
    """Its place in the stream."""
    delivery_count: int
    """1 for the first delivery; counts on with every redelivery."""
    reply: str
    """Where it is acknowledged; empty when it was read without a consumer."""
    received_at: datetime
    raw_headers: bytes = b""
    delivery: int = 0
    """The number of this delivery among all of its consumer."""
    stored_ns: int = 0
    """When the stream stored it; 0 when `reply` says it."""

    @property
    def headers(self) -> dict[str, list[str]]:
        """The headers, parsed anew with every call."""
        return header_block.parse(self.raw_headers)

    @property
    def timestamp(self) -> datetime:
        """When the stream stored it."""
        nanoseconds = self.stored_ns or AckSubject.parse(self.reply).stored_ns
        return EPOCH + timedelta(microseconds=nanoseconds // 1000)

    @property
    def pending(self) -> int:
        """Messages that the consumer had behind it; 0 when it was read without a consumer."""
        return AckSubject.parse(self.reply).pending if self.reply else 0

    def json(self) -> Any:
        """The data as JSON. Raises `ValueError` when it is none."""
        return json.loads(self.data)


class MessageContext(NamedTuple):
    """Where and for whom a message is handled."""

    subject: str
    partition_id: str
    worker_id: str
    received_at: datetime
    delivery_count: int
    """1 for the first try. A message that only waited for its turn meanwhile is not a try."""
    fencing_token: int
    """Larger for every later owner of the partition: what keeps effects should refuse one lower than it has seen."""


def delivered(frame: frames.Message, received_at: datetime) -> Message | None:
    """The delivery in a frame; None when the frame is a status or something else."""
    reply = frame.reply
    if not reply.startswith(ACK_PREFIX):
        return None
    told = AckSubject.parse(reply)
    return Message(
        frame.subject,
        frame.data,
        told.sequence,
        told.deliveries,
        reply,
        received_at,
        frame.headers,
        told.consumer_sequence,
    )


def acks(replies: Sequence[str]) -> bytes:
    """Acknowledge all of them in one piece: an empty message to each."""
    return f"PUB {ACKED.join(replies)} 0\r\n\r\n".encode("utf-8", "surrogateescape")


def in_progress(replies: Iterable[str]) -> bytes:
    """Ask the server to wait longer for each of them."""
    return "".join([f"PUB {reply} 4\r\n+WPI\r\n" for reply in replies]).encode()
