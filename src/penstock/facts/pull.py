"""One page of messages from a pull consumer, and their acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from penstock.errors import DeadlineExceeded, Unavailable
from penstock.facts.fact import FactParts, parts_of
from penstock.facts.pages import AnyDelivery, Delivery, SequenceRun
from penstock.jetstream.connection import Broker
from penstock.jetstream.consumer import NAK, AckSubject, ack_subject
from penstock.jetstream.fetch import Skimmer, skim, until_set
from penstock.wire import frames
from penstock.wire.frames import Message

D = TypeVar("D", bound=AnyDelivery)

NEVER = datetime.fromtimestamp(0, UTC)


class Delivered(NamedTuple):
    """A message with what its reply subject says about its delivery; the fields are those of `deliveries.take`."""

    subject: str
    data: bytes
    sequence: int
    attempt: int
    reply: str
    received_at: datetime
    headers: bytes
    number: int
    zero: int = 0

    def delivery(self) -> Delivery:
        return Delivery(self.sequence, self.number, self.attempt)

    def ack(self) -> AckSubject:
        """The rest of what its reply subject says."""
        return AckSubject.parse(self.reply)

    def parts(self) -> FactParts:
        """What a fact says beside its data; parsed when it is asked for."""
        return parts_of(self.subject, self.headers, AckSubject.stored_ns_of(self.reply) // 1000)


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
    about = (told.sequence, told.deliveries, message.reply, NEVER, message.headers, told.consumer_sequence)
    return Delivered(message.subject, message.data, *about)


class PagePuller:
    """Pulls over one link."""

    def __init__(self, link: Broker) -> None:
        self._link = link
        self._skimmer = Skimmer(Delivered, delivered)

    async def pull(self, stream: str, consumer: str, want: Want) -> list[Delivered]:
        """Return what is available now, up to the limits, by sequence; with `wait`, waits until there is something."""
        found = await skim(
            self._link, self._skimmer, stream, consumer, want.limit, max_bytes=want.max_bytes, wait=want.wait
        )
        return sorted(found, key=_sequence)


def _sequence(one: Delivered) -> int:
    return one[2]


def _ack_subject(ack: str, one: AnyDelivery) -> str:
    return ack_subject(ack, one.attempt, one.sequence, one.number)


async def acknowledge_in_order(link: Broker, ack: str, runs: Sequence[SequenceRun], within: float) -> bool:
    """Acknowledge runs of deliveries in one write, and wait until the server has taken the last acknowledgement.

    A server takes the acknowledgements of one connection in order, so where the consumer is on the very server that we
    are connected to, that answer stands for all of them. False when it did not come.
    """
    connection = await link.ready()
    lines = [line for run in runs for line in _ack_lines(ack, run)]
    reply = connection.inbox(lines[-1].removeprefix("PUB "))
    try:
        await connection.send((_ACK_BODY.join(lines) + f" {reply}{_ACK_BODY}").encode())
        await connection.wait(reply, within, "an acknowledgement")
    except DeadlineExceeded:
        return False
    finally:
        connection.forget(reply)
    return True


_ACK_BODY = " 4\r\n+ACK\r\n"


def _ack_lines(ack: str, run: SequenceRun) -> list[str]:
    """How the acknowledgements of a run begin."""
    sequence, number, count, attempt = run
    both = zip(range(sequence, sequence + count), range(number, number + count), strict=True)
    return [f"PUB {ack}.{attempt}.{one}.{delivery}.0.0" for one, delivery in both]


async def acknowledge(link: Broker, ack: str, deliveries: Iterable[D], within: float) -> list[D]:
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


def _acks(ack: str, deliveries: dict[str, D], inbox: str) -> bytes:
    """The bytes of many acknowledgements; both subjects are the server's or ours, so that nothing has to be checked."""
    lines = (f"PUB {_ack_subject(ack, one)} {inbox}.{number} 4\r\n+ACK\r\n" for number, one in deliveries.items())
    return "".join(lines).encode()


async def give_back(link: Broker, found: Iterable[Delivered]) -> None:
    """Nak these messages; best effort, since it only decides how soon they are redelivered."""
    try:
        connection = await link.ready()
        await connection.send(b"".join(frames.publish(one.reply, NAK) for one in found))
    except Unavailable:
        return
