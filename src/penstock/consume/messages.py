"""A delivered message, the context that a handler gets, and the bytes of acknowledgements. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from penstock.jetstream.consumer import ACK_PREFIX, EPOCH, AckSubject
from penstock.packs import PackedRow, rows_of
from penstock.wire import frames
from penstock.wire import headers as header_block

ACKED = " 0\r\n\r\nPUB "
"""Separates two acknowledgements: the end of an empty message, and the start of the next."""


class Message(NamedTuple):
    """One delivery of a stored message."""

    subject: str
    data: bytes
    sequence: int
    """Its stream sequence."""
    delivery_count: int
    """1 for the first delivery; incremented with every redelivery."""
    reply: str
    """Its acknowledgement subject; empty when it was read without a consumer."""
    received_at: datetime
    raw_headers: bytes = b""
    delivery: int = 0
    """The consumer sequence of this delivery."""
    stored_ns: int = 0
    """When the stream stored it; 0 when `reply` contains it."""

    @property
    def headers(self) -> dict[str, list[str]]:
        """The headers, parsed at every access."""
        return header_block.parse(self.raw_headers)

    @property
    def timestamp(self) -> datetime:
        """When the stream stored it."""
        nanoseconds = self.stored_ns or AckSubject.parse(self.reply).stored_ns
        return EPOCH + timedelta(microseconds=nanoseconds // 1000)

    @property
    def pending(self) -> int:
        """Messages that the consumer had not delivered yet; 0 when it was read without a consumer."""
        return AckSubject.parse(self.reply).pending if self.reply else 0

    def json(self) -> Any:
        """Return the data parsed as JSON. Raises `ValueError` when it is not JSON."""
        return json.loads(self.data)

    def rows(self) -> Iterator[PackedRow]:
        """Yield the rows of a pack, each with its subject, data, headers and time; of any other message, itself.

        Raises `MalformedPack` for a message that is marked as a pack and cannot be read as one.
        """
        return rows_of(self.subject, self.data, self.headers, self.timestamp)


class MessageContext(NamedTuple):
    """Where and for whom a message is handled."""

    subject: str
    partition_id: str
    worker_id: str
    received_at: datetime
    delivery_count: int
    """1 for the first attempt. A redelivery of a message that only waited for its turn is not an attempt."""
    fencing_token: int
    """Larger for every later owner of the partition: a store of effects should refuse one lower than it has seen."""


def delivered(frame: frames.Message, received_at: datetime) -> Message | None:
    """Return the delivery in a frame; None when the frame is a status or something else."""
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
    """Return the bytes that acknowledge all of them: an empty message to each."""
    return f"PUB {ACKED.join(replies)} 0\r\n\r\n".encode("utf-8", "surrogateescape")


def in_progress(replies: Iterable[str]) -> bytes:
    """Return the bytes that extend the ack deadline of each of them."""
    return "".join([f"PUB {reply} 4\r\n+WPI\r\n" for reply in replies]).encode()
