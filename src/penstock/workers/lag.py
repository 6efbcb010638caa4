"""How far a partition is behind: messages of it that are not done, and the age of the oldest of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.broker.jetstream import JetStream
from penstock.broker.model import parse_time
from penstock.errors import MessageNotFound
from penstock.wire import aio
from penstock.workers.partitions import Partition


@dataclass(frozen=True, slots=True)
class Lag:
    """Both are 0 when everything is done."""

    messages: int
    """-1 when the stream cannot count them (it has no `allow_direct`), and there are some."""
    seconds: float


async def measure(
    connection: aio.Connection,
    jetstream: JetStream,
    stream: str,
    partitions: Iterable[Partition],
    done: Mapping[str, int],
) -> dict[str, Lag]:
    """The lag of each partition behind the sequence that is done of it. One request a subject."""
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


async def _counted(connection: aio.Connection, jetstream: JetStream, stream: str, subject: str, first: int) -> Lag:
    """The first message not done, and what the server says comes after it: the header of a batch of one."""
    body = json.dumps({"seq": first, "next_by_subj": subject, "batch": 1}).encode()
    answer = await connection.request(jetstream.subject(f"DIRECT.GET.{stream}"), body)
    headers = answer.header_values()
    if "Nats-Sequence" not in headers:
        return Lag(0, 0.0)
    pending = int(headers.get("Nats-Num-Pending", ["0"])[0])
    return Lag(pending + 1, _age(parse_time(headers["Nats-Time-Stamp"][0])))


async def _looked(connection: aio.Connection, jetstream: JetStream, stream: str, subject: str, first: int) -> Lag:
    try:
        message = await jetstream.get_message(stream, first, next_of=subject)
    except MessageNotFound:
        return Lag(0, 0.0)
    return Lag(-1, _age(message.time))


def _age(time: datetime | None) -> float:
    return max((datetime.now(UTC) - time).total_seconds(), 0.0) if time else 0.0
