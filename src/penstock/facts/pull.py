"""One page of messages from a pull consumer, and their acknowledgements."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import ConsumerNotFound, DeadlineExceeded, ProtocolError, ServerBusy, Unavailable
from penstock.facts.pages import Delivery
from penstock.jetstream.connection import Broker
from penstock.wire import aio, frames
from penstock.wire.frames import Message
from penstock.wire.session import NO_RESPONDERS

NANOSECONDS = 1_000_000_000
MARGIN = 2.0  # seconds that an answer may come later than asked for
NAK = b"-NAK"


class Delivered(NamedTuple):
    """A message with what its reply subject says about its delivery."""

    message: Message
    delivery: Delivery
    stored_ns: int
    ack: str
    """What the subjects for acknowledgements of this consumer start with."""
    pending: int = 0
    """Messages that the consumer had not delivered for the first time yet, right after this delivery."""


@dataclass(frozen=True, slots=True)
class Want:
    """What one pull asks for."""

    limit: int
    max_bytes: int
    wait: float = 0.0
    """Seconds to wait for the first message."""


def delivered(message: Message) -> Delivered:
    """Read a reply subject: `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<attempt>.<seq>.<number>.<time>.…`."""
    tokens = message.reply.split(".")
    at = 4 if len(tokens) < 11 else 6
    try:
        attempt, sequence, number, stored_ns, pending = (int(token) for token in tokens[at : at + 5])
    except ValueError as exc:
        raise ProtocolError(f"a delivery with a reply subject that makes no sense: {message.reply!r}") from exc
    return Delivered(message, Delivery(sequence, number, attempt), stored_ns, ".".join(tokens[:at]), pending)


def ack_subject(ack: str, one: Delivery) -> str:
    """Where a delivery is acknowledged; the server does not look at time and pending."""
    return f"{ack}.{one.attempt}.{one.sequence}.{one.number}.0.0"


async def pull(link: Broker, stream: str, consumer: str, want: Want) -> list[Delivered]:
    """What is there at once, up to the limits; with `wait`, what is there once there is something."""
    subject = link.jetstream.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
    now = {"batch": want.limit, "no_wait": True, "max_bytes": want.max_bytes}
    found = await _asked(link, subject, now)
    if found or want.wait <= 0:
        return found
    first = {"batch": 1, "expires": int(want.wait * NANOSECONDS)}
    found = await _asked(link, subject, first)
    if found and want.limit > 1:
        found += await _asked(link, subject, {**now, "batch": want.limit - 1})
    return found


async def _asked(link: Broker, subject: str, ask: dict[str, Any]) -> list[Delivered]:
    connection = await link.ready()
    answers = _Answers(ask["batch"])
    inbox = link.settings.new_inbox()
    sid = await connection.subscribe(inbox, handler=answers.take)
    try:
        await connection.publish(subject, json.dumps(ask).encode(), reply=inbox)
        within = ask.get("expires", 0) / NANOSECONDS + max(MARGIN, link.settings.timeout)
        await _complete(link, connection, answers.ended, within, "a pull")
    finally:
        if connection.connected:
            await connection.unsubscribe(sid)
    if answers.too_large and not answers.messages and ask["batch"] >= 1:
        return await _asked(link, subject, {"batch": 1, "no_wait": True})  # larger than a page may be: alone, then
    _raise_refused(subject, answers.refused)
    return [delivered(message) for message in answers.messages]


def _raise_refused(subject: str, refused: tuple[int, str] | None) -> None:
    if not refused:
        return
    code, text = refused
    if code == NO_RESPONDERS:
        raise Unavailable(f"nobody answers on {subject!r}: the consumer has no leader right now")
    if "Deleted" in text:
        raise ConsumerNotFound(subject, code, 0, text)
    raise ServerBusy(subject, code, 0, text)


class _Answers:
    """What comes back for one pull request."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.messages: list[Message] = []
        self.too_large = False
        self.refused: tuple[int, str] | None = None
        self.ended = asyncio.Event()

    def take(self, message: Message) -> None:
        status = message.status
        if status is None:
            self.messages.append(message)
            if len(self.messages) < self._batch:
                return
        elif status[0] == 100:
            return
        elif "Message Size Exceeds" in status[1]:
            self.too_large = True
        elif status[0] not in (404, 408) and "Batch Completed" not in status[1]:
            self.refused = status
        self.ended.set()


async def _complete(link: Broker, connection: aio.Connection, ended: asyncio.Event, within: float, what: str) -> None:
    """Wait for an event that the connection's messages set; raise when it can no longer come."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while not ended.is_set():
        if link.denied:
            raise link.denied
        if not connection.connected:
            _ = connection.info  # raises what ended it
        if loop.time() >= deadline:
            raise DeadlineExceeded(what, within)
        try:
            async with asyncio.timeout(min(0.2, max(deadline - loop.time(), 0.001))):
                await ended.wait()
        except TimeoutError:
            continue


async def acknowledge(link: Broker, ack: str, deliveries: Iterable[Delivery], within: float) -> list[Delivery]:
    """Acknowledge deliveries, and wait until the server has written each of them down; returns those unanswered."""
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
        await _complete(link, connection, ended, within, "acknowledgements")
    except DeadlineExceeded:
        pass
    finally:
        if connection.connected:
            await connection.unsubscribe(sid)
    return list(left.values())


def _acks(ack: str, deliveries: dict[str, Delivery], inbox: str) -> bytes:
    """The bytes of many acknowledgements; both subjects are the server's or ours, so that nothing has to be checked."""
    lines = (f"PUB {ack_subject(ack, one)} {inbox}.{number} 4\r\n+ACK\r\n" for number, one in deliveries.items())
    return "".join(lines).encode()


async def give_back(link: Broker, found: Iterable[Delivered]) -> None:
    """Tell the server that these were not taken; whether it hears it only decides how soon they come again."""
    try:
        connection = await link.ready()
        await connection.send(b"".join(frames.publish(ack_subject(d.ack, d.delivery), NAK) for d in found))
    except Unavailable:
        return
