"""One page of messages from a pull consumer, and their acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import DeadlineExceeded, Unavailable
from penstock.facts.pages import Delivery
from penstock.jetstream.connection import Broker
from penstock.jetstream.consumer import NAK, AckSubject, ack_subject
from penstock.jetstream.fetch import fetch, until_set
from penstock.wire import frames
from penstock.wire.frames import Message


class Delivered(NamedTuple):
    """A message with what its reply subject says about its delivery."""

    message: Message
    delivery: Delivery
    stored_ns: int
    ack: str
    """The prefix of this consumer's acknowledgement subjects."""
    pending: int = 0
    """Messages that the consumer had not delivered for the first time yet, right after this delivery."""


@dataclass(frozen=True, slots=True)
class Want:
    """The limits of one pull."""

    limit: int
    max_bytes: int
    wait: float = 0.0
    """Seconds to wait for the first message."""


def delivered(message: Message) -> Delivered:
    """Read the reply subject of a message."""
    told = AckSubject.parse(message.reply)
    delivery = Delivery(told.sequence, told.consumer_sequence, told.deliveries)
    return Delivered(message, delivery, told.stored_ns, told.consumer_prefix, told.pending)


def _ack_subject(ack: str, one: Delivery) -> str:
    return ack_subject(ack, one.attempt, one.sequence, one.number)


async def pull(link: Broker, stream: str, consumer: str, want: Want) -> list[Delivered]:
    """Return what is available now, up to the limits; with `wait`, waits until there is something."""
    found = await fetch(link, stream, consumer, want.limit, max_bytes=want.max_bytes, wait=want.wait)
    return [delivered(message) for message in found]


async def acknowledge(link: Broker, ack: str, deliveries: Iterable[Delivery], within: float) -> list[Delivery]:
    """Acknowledge deliveries, and wait until the server has confirmed each of them; returns those unanswered."""
    left = {str(number): one for number, one in enumerate(deliveries)}
    if not left:
        return []
    connection = await link.ready()
    ended = asyncio.Event()
    inbox = link.settings.new_inbox()

    def take(message: Message) -> None:
        left.pop(message.subject.rpartition(".")[2], None)
        if not left:
            ended.set()

    sid = await connection.subscribe(f"{inbox}.*", handler=take)
    try:
        await connection.send(_acks(ack, left, inbox))
        await until_set(link, connection, ended, within, "acknowledgements")
    except DeadlineExceeded:
        pass
    finally:
        if connection.connected:
            await connection.unsubscribe(sid)
    return list(left.values())


def _acks(ack: str, deliveries: dict[str, Delivery], inbox: str) -> bytes:
    """The bytes of many acknowledgements; both subjects are the server's or ours, so that nothing has to be checked."""
    lines = (f"PUB {_ack_subject(ack, one)} {inbox}.{number} 4\r\n+ACK\r\n" for number, one in deliveries.items())
    return "".join(lines).encode()


async def give_back(link: Broker, found: Iterable[Delivered]) -> None:
    """Nak these messages; best effort, since it only decides how soon they are redelivered."""
    try:
        connection = await link.ready()
        await connection.send(b"".join(frames.publish(_ack_subject(d.ack, d.delivery), NAK) for d in found))
    except Unavailable:
        return
