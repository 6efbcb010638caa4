"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from penstock.app.once import OnceBatch, ResultOrigin
from penstock.consume import messages
from penstock.consume.messages import MessageContext
from penstock.packs import PackedRow

Atomic = Callable[[str, ResultOrigin], OnceBatch]


class Message:
    """One delivery of a stored message."""

    __slots__ = ("_atomic", "_batches", "_context", "_origin", "delivery")

    def __init__(
        self, delivery: messages.Message, origin: ResultOrigin, atomic: Atomic, context: MessageContext | None = None
    ) -> None:
        """`context`: the group's context of the message."""
        self.delivery = delivery
        """The message as group workers see it."""
        self._origin = origin
        self._atomic = atomic
        self._context = context
        self._batches = 0

    @property
    def subject(self) -> str:
        return self.delivery.subject

    @property
    def data(self) -> bytes:
        return self.delivery.data

    @property
    def headers(self) -> dict[str, list[str]]:
        """The headers, parsed at every access."""
        return self.delivery.headers

    @property
    def stream(self) -> str:
        return self._origin.stream

    @property
    def consumer(self) -> str:
        """The durable, or the group."""
        return self._origin.consumer

    @property
    def sequence(self) -> int:
        """Its stream sequence."""
        return self.delivery.sequence

    @property
    def delivery_count(self) -> int:
        """1 for the first attempt; incremented with every retry."""
        return self._context.delivery_count if self._context else self.delivery.delivery_count

    @property
    def partition(self) -> str:
        """In a group: the partition that the message belongs to."""
        return self._context.partition_id if self._context else ""

    @property
    def token(self) -> int:
        """In a group: larger for every later owner of the partition. A store of effects should refuse one lower than it
        has seen."""
        return self._context.fencing_token if self._context else 0

    @property
    def context(self) -> MessageContext:
        """Where and for whom it is handled; on a consumer each subject counts as a partition."""
        subject, received = self.subject, self.delivery.received_at
        return self._context or MessageContext(subject, subject, self.consumer, received, self.delivery_count, 0)

    @property
    def timestamp(self) -> datetime:
        """When the stream stored it."""
        return self.delivery.timestamp

    def json(self) -> Any:
        """Return the data parsed as JSON. Raises `ValueError` when it is not JSON."""
        return self.delivery.json()

    def rows(self) -> Iterator[PackedRow]:
        """Yield the rows of a pack, each with its subject, data, headers and time; of any other message, itself.

        Raises `MalformedPack` for a message that is marked as a pack and cannot be read as one.
        """
        return self.delivery.rows()

    def atomic(self, stream: str) -> OnceBatch:
        """A batch of results for a stream, stored once however often this message is delivered.

        async with message.atomic("BILLING") as batch:
            batch.add("billing.charged", charge)
        """
        self._batches += 1
        return self._atomic(stream, self._origin.of(self.sequence, self._batches))

    def __repr__(self) -> str:
        return f"<Message {self.stream} #{self.sequence} {self.subject}>"
