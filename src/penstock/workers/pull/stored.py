"""Reading a range of a partition's messages without a consumer: in order, from any kind of stream.

A second consumer would hold messages back on an Interest stream, and is refused on a work queue. So messages are asked
for by direct get, many at a time, the next ones while the last are handled. Any replica may answer that, also one that
lags. What it has is complete up to the last message it shows; that there are no more, only the stream's leader can say.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.consume.messages import EPOCH, Message
from penstock.errors import DeadlineExceeded, MessageNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import parse_time
from penstock.wire import aio, frames, headers

BATCH = 100
"""Messages of one request, at most."""
BATCH_BYTES = 1024 * 1024
"""A worker may catch up with all its partitions at once: each has so much here, and as much on its way."""
ADDED = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)
"""Headers that direct get puts before those of the message."""


@dataclass(frozen=True, slots=True)
class Place:
    """The stream that is read, and how."""

    connection: aio.Connection
    jetstream: JetStream
    stream: str
    direct: bool
    """Whether the stream allows direct get; else its leader is asked for one message after the other."""


async def stored(place: Place, subjects: tuple[str, ...], first: int, last: int) -> AsyncGenerator[Message]:
    """The messages of these subjects from sequence `first` to `last`, in order. Those that are gone are left out."""
    ahead = [_Ahead(place, subject, first, last) for subject in subjects]
    try:
        while heads := [(head.sequence, one) for one in ahead if (head := await one.head())]:
            _, lowest = min(heads, key=lambda pair: pair[0])
            yield lowest.pop()
    finally:
        await asyncio.gather(*(one.close() for one in ahead))


class _Ahead:
    """The messages of one subject: some that have come, and the next ones on their way."""

    def __init__(self, place: Place, subject: str, first: int, last: int) -> None:
        self._place = place
        self._subject = subject
        self._last = last
        self._here: deque[Message] = deque()
        self._coming = self._ask(first)

    def _ask(self, first: int) -> asyncio.Task[list[Message]]:
        return asyncio.create_task(_next(self._place, self._subject, first, self._last))

    async def head(self) -> Message | None:
        """The next message; None when there is no more."""
        if not self._here:
            self._here.extend(await self._coming)
            if self._here:
                self._coming = self._ask(self._here[-1].sequence + 1)
        return self._here[0] if self._here else None

    def pop(self) -> Message:
        return self._here.popleft()

    async def close(self) -> None:
        self._coming.cancel()
        await asyncio.gather(self._coming, return_exceptions=True)


async def _next(place: Place, subject: str, first: int, last: int) -> list[Message]:
    """Some of the messages from `first` to `last`, the first of them included; empty when there are none."""
    if first > last:
        return []
    if place.direct and (found := await _batch(place, subject, max(first, 1))):
        return [message for message in found if message.sequence <= last]
    try:
        one = await place.jetstream.get_message(place.stream, max(first, 1), next_of=subject)
    except MessageNotFound:
        return []
    return [_message(one.subject, one.data, one.sequence, one.time, one.headers)] if one.sequence <= last else []


async def _batch(place: Place, subject: str, first: int) -> list[Message]:
    """What some replica has from there on: an answer that is empty, or ends, says nothing about the rest."""
    connection, found = place.connection, list[frames.Message]()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def came(frame: frames.Message) -> None:
        if not frame.status:
            found.append(frame)
        elif not ended.done():
            ended.set_result(None)

    inbox, api = connection.settings.new_inbox(), place.jetstream.subject(f"DIRECT.GET.{place.stream}")
    ask = {"seq": first, "next_by_subj": subject, "batch": BATCH, "max_bytes": BATCH_BYTES}
    sid = await connection.subscribe(inbox, handler=came)
    try:
        await connection.publish(api, json.dumps(ask).encode(), reply=inbox)
        async with asyncio.timeout(connection.settings.timeout):
            await ended
    except TimeoutError as exc:
        raise DeadlineExceeded(f"a direct get from {place.stream!r}", connection.settings.timeout) from exc
    finally:
        if connection.connected:
            await connection.unsubscribe(sid)
    return [_of_direct_get(frame) for frame in found]


def _of_direct_get(frame: frames.Message) -> Message:
    values = frame.header_values()
    about = {name: values[name][-1] for name in ("Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")}
    own = {name: some for name, some in values.items() if name not in ADDED}
    time = parse_time(about["Nats-Time-Stamp"])
    return _message(about["Nats-Subject"], frame.data, int(about["Nats-Sequence"]), time, own)


def _message(subject: str, data: bytes, sequence: int, time: datetime | None, values: dict[str, list[str]]) -> Message:
    nanoseconds = int(((time or EPOCH) - EPOCH).total_seconds() * 1_000_000) * 1000
    return Message(subject, data, sequence, 1, "", datetime.now(UTC), _block(values), stored_ns=nanoseconds)


def _block(values: dict[str, list[str]]) -> bytes:
    """The header block as it was; anybody may have written it, so nothing of it is refused here."""
    lines = "".join(f"{name}: {value}\r\n" for name, all_ in values.items() for value in all_)
    return headers.block(lines.encode("utf-8", "surrogateescape")) if lines else b""
