"""Ways to carry a stream from one server to another, each timed by itself."""

from __future__ import annotations

import re
import time

import nats
import rawnats
from harness import Timed
from nats.js.api import AckPolicy, ConsumerConfig

from penstock.errors import NotFound
from penstock.jetstream.api import JetStream
from penstock.settings import Settings
from penstock.sourcing import modes
from penstock.sourcing.bridge import Bridge, BridgeConfig
from penstock.sourcing.flow import Flow
from penstock.sourcing.receiver import Receiver
from penstock.wire import blocking

ORIGIN, COPY, READER = "ORIGIN", "COPY", "reader"
SUBJECT = "bench.event"
TO = "to.reader"
DATA = b"x" * 200
LAST = re.compile(rb"\$JS\.ACK\.[^ ]*?\.1\.(\d+)\.(\d+)\.\d+\.\d+ ")
"""Stream and delivery number in the reply subject of a message."""
ASKS = re.compile(rb"(\$JS\.FC\.[^ ]+) [0-9 ]+\r\nNATS/1\.0 100 FlowControl Request")


def fresh_consumer(url: str) -> None:
    """The durable of the origin, at its beginning; the one of the bridge is gone."""
    settings = Settings(servers=(url,))
    with blocking.connect(settings) as connection:
        js = JetStream(connection.requester(), settings.domain)
        for name in (READER, "bench"):
            try:
                blocking.run(js.delete_consumer(ORIGIN, name))
            except NotFound:
                continue
        config = {**modes.required(READER, TO), "max_ack_pending": modes.MAX_ACK_PENDING}
        blocking.run(js.create_consumer(ORIGIN, config))


def raw_push(port: int, count: int) -> Timed:
    """Bytes only looked at for the last message and for flow-control requests, which are answered."""
    raw = rawnats.RawConnection(port)
    buffer, kept = bytearray(1 << 21), 0
    view = memoryview(buffer)
    started = time.perf_counter()
    raw.socket.sendall(f"SUB {TO} 7\r\n".encode())
    last = 0
    while last < count:
        end = kept + raw.socket.recv_into(view[kept:])
        at = buffer.rfind(b" $JS.ACK.", 0, end)
        found = LAST.match(buffer, at + 1, end) if at >= 0 else None
        last = int(found[1]) if found else last
        asks = ASKS.search(buffer, 0, end) if buffer.find(b"FlowControl", 0, end) >= 0 else None
        if asks:
            raw.socket.sendall(_answer(asks[1], *_before(buffer, asks.start())))
        # A line may be cut: what is behind the last message is looked at again, once.
        tail = min(end - (asks.end() if asks else max(at, 0)), 512)
        buffer[:tail] = buffer[end - tail : end]
        kept = tail
    seconds = time.perf_counter() - started
    raw.close()
    return Timed(count, seconds)


def _before(buffer: bytearray, end: int) -> tuple[int, int]:
    """Stream and delivery number of the last message before a place in the buffer."""
    at = buffer.rfind(b" $JS.ACK.", 0, end)
    found = LAST.match(buffer, at + 1, end) if at >= 0 else None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _answer(reply: bytes, sequence: int, delivery: int) -> bytes:
    lines = b"NATS/1.0\r\nNats-Last-Consumer: %d\r\nNats-Last-Stream: %d\r\n\r\n" % (delivery, sequence)
    head = lines if sequence else b"NATS/1.0\r\n\r\n"
    return b"HPUB %s %d %d\r\n%s\r\n" % (reply, len(head), len(head), head)


def receiver(url: str, count: int) -> Timed:
    """Our receiver, with a sink that stores at once."""
    seen = 0
    with Receiver(Settings(servers=(url,)), ORIGIN, READER, Flow()) as made:
        started = time.perf_counter()  # as with the bare socket: it is connected, and has just subscribed
        for chunk in made.chunks():
            if chunk:
                seen += len(chunk)
                made.stored(chunk.last_sequence)
            if seen >= count:
                return Timed(seen, time.perf_counter() - started)
    raise AssertionError("chunks never end by themselves")


def bridge(origin: str, destination: str, count: int) -> Timed:
    config = BridgeConfig(name="bench", origin=ORIGIN, destination=COPY)
    made = Bridge(config, Settings(servers=(origin,)), Settings(servers=(destination,)))
    started = time.perf_counter()
    made.run(lambda: made.statistics().stored >= count)
    return Timed(count, time.perf_counter() - started)


def servers_own(url: str, count: int) -> Timed:
    """A source through the durable, over the leaf link."""
    settings = Settings(servers=(url,))
    with blocking.connect(settings) as connection:
        js = JetStream(connection.requester(), settings.domain)
        consumer = {"name": READER, "deliver_subject": TO}
        source = {"name": ORIGIN, "external": {"api": "$JS.leaf.API", "deliver": ""}, "consumer": consumer}
        started = time.perf_counter()
        blocking.run(js.update_stream(COPY, {"sources": [source]}))
        while blocking.run(js.stream_info(COPY)).state.messages < count:
            time.sleep(0.02)
        return Timed(count, time.perf_counter() - started)


async def nats_py(origin: str, destination: str, count: int) -> Timed:
    """What one would write by hand: fetch, publish, acknowledge."""
    async with await nats.connect(origin) as source, await nats.connect(destination) as target:
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=10_000)
        reading = await source.jetstream().pull_subscribe(SUBJECT, durable="bench", stream=ORIGIN, config=config)
        writing = target.jetstream()
        carried, started = 0, time.perf_counter()
        while carried < count:
            for message in await reading.fetch(min(500, count - carried)):
                await writing.publish(message.subject, message.data, headers=message.headers)
                await message.ack()
                carried += 1
        return Timed(carried, time.perf_counter() - started)
