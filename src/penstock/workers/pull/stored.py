"""Reads and counts a range of a partition's messages without a consumer: in order, from any kind of stream.

A second consumer would hold messages back on an Interest stream, and is refused on a work queue. So messages are read
by direct get, many at a time, the next ones while the last are handled. Any replica may answer, also one that lags. Its
answer is complete up to the last message it contains; only the stream's leader can say that there are no more.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.consume.messages import Message
from penstock.consume.metrics import Lag
from penstock.errors import DeadlineExceeded, MessageNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import EPOCH
from penstock.jetstream.model import Json, parse_time
from penstock.wire import aio, frames, headers
from penstock.workers.partitions import Partition

BATCH = 100
"""Maximum number of messages of one request."""
BATCH_BYTES = 1024 * 1024
"""Bytes of one request. A worker may catch up with all its partitions at once: each has this much in memory, and as
much requested."""
ADDED = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)
"""Headers that direct get adds before those of the message."""


@dataclass(frozen=True, slots=True)
class StoredStream:
    """The stream that is read, and how."""

    connection: aio.Connection
    jetstream: JetStream
    stream: str
    direct: bool
    """Whether the stream allows direct get; otherwise its leader is asked for one message at a time."""


async def stored(place: StoredStream, subjects: tuple[str, ...], first: int, last: int) -> AsyncGenerator[Message]:
    """Yield the messages of these subjects from sequence `first` to `last`, in order. Deleted ones are left out."""
    ahead = [_Ahead(place, subject, first, last) for subject in subjects]
    try:
        while heads := [(head.sequence, one) for one in ahead if (head := await one.head())]:
            _, lowest = min(heads, key=lambda pair: pair[0])
            yield lowest.pop()
    finally:
        await asyncio.gather(*(one.close() for one in ahead))


class _Ahead:
    """The messages of one subject: some received, and the next ones requested."""

    def __init__(self, place: StoredStream, subject: str, first: int, last: int) -> None:
        self._place = place
        self._subject = subject
        self._last = last
        self._here: deque[Message] = deque()
        self._coming = self._ask(first)

    def _ask(self, first: int) -> asyncio.Task[list[Message]]:
        return asyncio.create_task(_next(self._place, self._subject, first, self._last))

    async def head(self) -> Message | None:
        """Return the next message; None when there are no more."""
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


async def _next(place: StoredStream, subject: str, first: int, last: int) -> list[Message]:
    """Return some of the messages from `first` to `last`, the first of them included; empty when there are none."""
    if first > last:
        return []
    if place.direct and (found := await _batch(place, subject, max(first, 1))):
        return [message for message in found if message.sequence <= last]
    try:
        one = await place.jetstream.get_message(place.stream, max(first, 1), next_of=subject)
    except MessageNotFound:
        return []
    return [_message(one.subject, one.data, one.sequence, one.time, one.headers)] if one.sequence <= last else []


async def _batch(place: StoredStream, subject: str, first: int) -> list[Message]:
    """Return what some replica has from `first` on: an empty answer, or its end, says nothing about the rest."""
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
    """Return the header block as it was stored; any publisher may have written it, so nothing is rejected here."""
    lines = "".join(f"{name}: {value}\r\n" for name, all_ in values.items() for value in all_)
    return headers.block(lines.encode("utf-8", "surrogateescape")) if lines else b""


PASSING_LIVES = 5_000_000_000  # nanoseconds until the server itself removes a consumer that was made for counting


async def measure(
    connection: aio.Connection,
    jetstream: JetStream,
    stream: str,
    partitions: Iterable[Partition],
    done: Mapping[str, int],
) -> dict[str, Lag]:
    """Measure the lag of each partition after the sequence that is done. One request per subject."""
    config = (await jetstream.stream_info(stream)).config
    direct = bool(config.get("allow_direct"))
    found = {}
    for partition in partitions:
        first = done.get(partition.id, 0) + 1
        lags = [
            await (_counted if direct else _looked)(connection, jetstream, stream, subject, first)
            for subject in partition.subjects
        ]
        unknown = any(lag.messages < 0 for lag in lags)
        found[partition.id] = Lag(
            -1 if unknown else sum(lag.messages for lag in lags), max(lag.seconds for lag in lags)
        )
    return found


async def count(jetstream: JetStream, stream: str, partition: Partition, done: int) -> int:
    """Count the messages of a partition after the sequence that is done, for streams without `allow_direct`.

    Uses a consumer that delivers nothing and is deleted at once. On a work queue, where no second consumer may have the
    subjects, every stored message is not done.
    """
    if (await jetstream.stream_info(stream)).config.get("retention") == "workqueue":
        infos = [await jetstream.stream_info(stream, subjects_filter=subject) for subject in partition.subjects]
        return sum(sum(info.state.subjects.values()) for info in infos)
    passing = await jetstream.create_consumer(stream, _passing_config(partition.subjects, done + 1))
    await jetstream.delete_consumer(stream, passing.name)
    return passing.pending


def _passing_config(subjects: Iterable[str], first: int) -> Json:
    """Return the configuration of a consumer created only to read its pending count."""
    return {
        "name": f"count-{secrets.token_hex(5)}",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "ack_policy": "none",
        "filter_subjects": sorted(subjects),
        "mem_storage": True,
        "inactive_threshold": PASSING_LIVES,
    }


async def _counted(connection: aio.Connection, jetstream: JetStream, stream: str, subject: str, first: int) -> Lag:
    """Return the first message not done, and the server's count of those after it: the header of a batch of one."""
    body = json.dumps({"seq": first, "next_by_subj": subject, "batch": 1}).encode()
    answer = await connection.request(jetstream.subject(f"DIRECT.GET.{stream}"), body)
    headers = answer.header_values()
    if "Nats-Sequence" not in headers:
        return Lag(0, 0.0)
    pending = int(headers.get("Nats-Num-Pending", ["0"])[-1])
    return Lag(pending + 1, _age(parse_time(headers["Nats-Time-Stamp"][-1])))


async def _looked(connection: aio.Connection, jetstream: JetStream, stream: str, subject: str, first: int) -> Lag:
    try:
        message = await jetstream.get_message(stream, first, next_of=subject)
    except MessageNotFound:
        return Lag(0, 0.0)
    return Lag(-1, _age(message.time))


def _age(time: datetime | None) -> float:
    return max((datetime.now(UTC) - time).total_seconds(), 0.0) if time else 0.0
