"""Messages that a consumer gave to somebody else, and that were asked back: the order to hand them on in. Pure.

The server delivers them before any new message, but not in the order in which they were asked back. Its queue of
redeliveries leaves what is in it already where it is, and puts a message at its end that it could not send because
whoever asked for one was gone. So none of them is handed on before all of them are here.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from penstock.broker.model import ConsumerInfo
from penstock.workers.messages import Message


class Here(Protocol):
    """The sequences of a consumer that came and are not done; also those that the server was asked to deliver again
    later, if that is wanted: their place is kept."""

    def __call__(self, consumer: str, with_delayed: bool, /) -> Set[int]: ...


class Recall:
    """What has come since messages were asked back."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._early: dict[int, Message] = {}

    def keep(self, found: list[Message]) -> None:
        """Keep these: they may have been sent before the server was asked."""
        self._early |= {message.sequence: message for message in found}

    def add(self, found: list[Message]) -> bool:
        """Keep these. True: one of them was never delivered before, and so all that was asked back came before it."""
        self.keep(found)
        return any(message.delivery_count == 1 for message in found)

    def is_complete(self, consumer: ConsumerInfo, delivery: int, here: Set[int]) -> bool:
        """Whether everything is here that the consumer waits for; `delivery` is the number of the last that came."""
        received = delivery >= consumer.delivered_consumer_seq
        return received and consumer.ack_pending <= len(self._early.keys() | here)

    def in_order(self) -> list[Message]:
        """All of it, in the order of the stream."""
        return [self._early[sequence] for sequence in sorted(self._early)]
