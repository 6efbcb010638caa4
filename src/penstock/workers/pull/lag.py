"""How far a partition is behind: messages of it that are not done, and the age of the oldest of them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from penstock.consume.metrics import Lag
from penstock.errors import MessageNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, parse_time
from penstock.wire import aio
from penstock.workers.partitions import Partition

PASSING_LIVES = 5_000_000_000  # nanoseconds until the server itself removes a consumer that was made for counting


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


async def count(jetstream: JetStream, stream: str, partition: Partition, done: int) -> int:
    """Messages of a partition behind the sequence that is done, for streams without `allow_direct`.

    Asked of a consumer that delivers nothing and goes at once. On a work queue, where no second consumer may have the
    subjects, whatever is there is not done.
    """
    if (await jetstream.stream_info(stream)).config.get("retention") == "workqueue":
        infos = [await jetstream.stream_info(stream, subjects_filter=subject) for subject in partition.subjects]
        return sum(sum(info.state.subjects.values()) for info in infos)
    passing = await jetstream.create_consumer(stream, _passing_config(partition.subjects, done + 1))
    await jetstream.delete_consumer(stream, passing.name)
    return passing.pending


def _passing_config(subjects: Iterable[str], first: int) -> Json:
    """A consumer that is made to be asked how much it has before it."""
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
    """The first message not done, and what the server says comes after it: the header of a batch of one."""
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
