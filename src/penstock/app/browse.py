"""Reads the stored messages of a stream: with any retention, and without leaving a consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock import subjects
from penstock.errors import ConfigError, MessageNotFound, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StoredMessage, parse_time
from penstock.packs import MalformedPack, is_pack, rows_of
from penstock.units import parse_since
from penstock.wire import aio, frames

PAGE = 256
"""Messages of one request."""
LOOK_EVERY = 0.25
"""Seconds between two polls for new messages."""
NO_MESSAGES = {204, 404}
OWN = frozenset({"Nats-Stream", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Subject", "Nats-Num-Pending"})
"""Headers that a direct get adds."""
OWN_ALSO = frozenset({"Nats-Last-Sequence", "Nats-UpTo-Sequence"})


@dataclass(frozen=True, slots=True)
class StoredRow(StoredMessage):
    """One row of a pack, with the sequence of the message that holds it."""

    row: int
    """Its place in the pack, counted from 0."""


def unpacked(message: StoredMessage) -> Iterator[StoredMessage]:
    """The rows of a pack; any other message as it is. So is a pack that cannot be read."""
    if not is_pack(message.headers):
        yield message
        return
    try:
        rows = list(rows_of(message.subject, message.data, message.headers, message.time))
    except MalformedPack:
        yield message
        return
    for number, row in enumerate(rows):
        headers = {name: list(values) for name, values in row.headers.items()}
        subject = row.subject or message.subject
        yield StoredRow(message.stream, subject, message.sequence, row.timestamp, row.data, headers, number)


class Browser:
    """Reads a stream over one connection, which is reopened when it is lost."""

    def __init__(self, connection: aio.Connection, stream: str) -> None:
        settings = connection.settings
        self._connection = connection
        self._jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        self._stream = stream
        self._filters: tuple[str, ...] = ()

    async def messages(
        self,
        filters: str | Collection[str] = (),
        *,
        since: datetime | timedelta | str | None = None,
        first: int | None = None,
        last: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[StoredMessage]:
        """Messages in order, that match one of the filters; all of them without one.

        `since`: stored at that time or later; a text is a time, or a duration such as "1h" that counts back from now.
        `first` and `last`: sequences, both included. `follow`: continues with new messages.
        """
        self._filters = (filters,) if isinstance(filters, str) else tuple(filters)
        for one in self._filters:
            if problem := subjects.problem(one):
                raise ConfigError(f"{one!r} is no filter: {problem}")
        info = await self._jetstream.stream_info(self._stream)
        direct = bool(info.config.get("allow_direct"))
        position = max(first or 0, await self._start(since), info.state.first_seq, 1)
        end = info.state.last_seq if last is None else last
        while True:
            while position <= end:
                page = await (self._page(position) if direct else self._one(position))
                if not page:
                    break
                for message in page:
                    if message.sequence > end and not follow:
                        return
                    if self._wanted(message.subject):
                        yield message
                position = page[-1].sequence + 1
            if not follow or (last is not None and position > last):
                return
            await asyncio.sleep(LOOK_EVERY)
            end = (await self._jetstream.stream_info(self._stream)).state.last_seq if last is None else last

    async def _start(self, since: datetime | timedelta | str | None) -> int:
        """The first sequence that was stored at that time or later."""
        if since is None:
            return 1
        if isinstance(since, str):
            since = parse_since(since)
        moment = datetime.now(UTC) - since if isinstance(since, timedelta) else since
        try:
            return (await self._jetstream.get_message(self._stream, since=moment)).sequence
        except MessageNotFound:
            return (await self._jetstream.stream_info(self._stream)).state.last_seq + 1

    def _wanted(self, subject: str) -> bool:
        return len(self._filters) < 2 or any(subjects.matches(one, subject) for one in self._filters)

    @property
    def _filter(self) -> str:
        """What the server filters by; several filters are compared here."""
        return self._filters[0] if len(self._filters) == 1 else subjects.REST

    async def _one(self, position: int) -> Sequence[StoredMessage]:
        """Read one message of a stream without direct access."""
        try:
            return [await self._jetstream.get_message(self._stream, position, next_of=self._filter)]
        except MessageNotFound:
            return []

    async def _page(self, position: int) -> Sequence[StoredMessage]:
        """Many messages in one request, from whichever replica answers."""
        connection, inbox = self._connection, self._connection.settings.new_inbox()
        arrived: asyncio.Queue[frames.Message] = asyncio.Queue()
        sid = await connection.subscribe(inbox, handler=arrived.put_nowait)
        ask = {"seq": position, "batch": PAGE, "next_by_subj": self._filter}
        found: list[StoredMessage] = []
        try:
            subject = self._jetstream.subject(f"DIRECT.GET.{self._stream}")
            await connection.publish(subject, json.dumps(ask).encode(), reply=inbox)
            async with asyncio.timeout(connection.settings.timeout):
                while (frame := await arrived.get()).status is None:
                    found.append(self._stored(frame))
            code, text = frame.status
            if code not in NO_MESSAGES:
                raise Unavailable(f"stream {self._stream!r} answers {code} {text}")
        except TimeoutError as exc:
            if not found:
                raise Unavailable(f"stream {self._stream!r} has not answered in time") from exc
        finally:
            await connection.unsubscribe(sid)
        return found

    def _stored(self, frame: frames.Message) -> StoredMessage:
        headers = frame.header_values()
        own = {name: values for name, values in headers.items() if name not in OWN | OWN_ALSO}
        return StoredMessage(
            stream=self._stream,
            subject=headers["Nats-Subject"][-1],
            sequence=int(headers["Nats-Sequence"][-1]),
            time=parse_time(headers["Nats-Time-Stamp"][-1]),
            data=frame.data,
            headers=own,
        )
