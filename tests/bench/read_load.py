"""Ways to read a stream without Spark."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import nats
import rawnats
from harness import Timed

from penstock.jetstream.pull import consumer_config
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.settings import Settings
from penstock.wire import frames
from penstock.wire.blocking import connect

STREAM, SUBJECT = "READ", "read.events"
DATA = b"x" * 200
PULL = 20_000
AHEAD = 16 * 1024 * 1024
"""Bytes of a pull request; two are under way."""


def fill(
    url: str, port: int, count: int, data: bytes = DATA, stream: str = STREAM, subject: str = SUBJECT, **config: Any
) -> None:
    """Make a stream of `count` messages."""
    rawnats.fresh_stream(port, stream, [subject], allow_direct=True, **config)
    step = max(1, min(5_000, 4_000_000 // len(data), count))
    chunk = frames.publish(subject, data) * (step - 1)
    with connect(Settings(servers=(url,))) as connection:
        for _ in range(count // step):
            connection.send(chunk)
            connection.request(subject, data, timeout=60)  # its answer comes when all before it are stored
    if (found := rawnats.stored(port, stream)) != count:
        raise AssertionError(f"{found} of {count} messages are in the stream")


def raw(port: int, count: int, size: int = len(DATA), stream: str = STREAM) -> Timed:
    """The read limit: only bytes are counted until the last message has come, and the server never waits for a request.

    Not everything is asked for at once: a server that is 64 MiB ahead of its reader gives it up.
    """
    connection = rawnats.RawConnection(port)
    name = f"raw{secrets.token_hex(4)}"
    body = {"stream_name": stream, "config": consumer_config(name, 1, ())}
    answer = connection.ask(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", body)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    pull = min(PULL, AHEAD // size)
    ask = json.dumps({"batch": pull, "expires": 60_000_000_000}).encode()
    request = frames.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", ask, reply=f"{connection.inbox}.read")
    # The subject of the last message's acknowledgement ends with "0 pending".
    last, seen, view = f".0 {size}\r\n".encode(), b"", memoryview(bytearray(4 * 1024 * 1024))
    total, asked = 0, 2 * pull * size
    started = time.perf_counter()
    connection.socket.sendall(request * 2)
    while last not in seen:
        received = connection.socket.recv_into(view)
        if not received:
            raise ConnectionError("the server has closed the connection")
        total += received
        if total > asked - pull * size:
            connection.socket.sendall(request)
            asked += pull * size
        # The mark stands before a body, which may still be on its way: look where it can be.
        seen = seen[-64:] + bytes(view[max(0, received - size - 256) : received])
    seconds = time.perf_counter() - started
    connection.close()
    return Timed(count, seconds)


def ours(url: str, count: int, direct: bool = False, stream: str = STREAM) -> Timed:
    """Our reader to Arrow."""
    started = time.perf_counter()
    wanted = Range(stream=stream, first=1, last=count, direct=direct)
    found = sum(batch.num_rows for batch in read_range(Settings(servers=(url,)), wanted))
    seconds = time.perf_counter() - started
    if found != count:
        raise AssertionError(f"{found} of {count} rows were read")
    return Timed(count, seconds)


async def nats_py(url: str, count: int) -> Timed:
    """nats-py, fetching by the thousand, without acknowledging."""
    async with await nats.connect(url) as client:
        stream = client.jetstream()
        config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE)
        subscription = await stream.pull_subscribe(SUBJECT, stream=STREAM, config=config)
        started, found = time.perf_counter(), 0
        while found < count:
            found += len(await subscription.fetch(1000, timeout=10))
        return Timed(found, time.perf_counter() - started)
