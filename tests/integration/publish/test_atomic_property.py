"""Random batches from several publishers at once, with kills, gaps, duplicates and expectations.

Whatever happens, the stream holds a whole number of committed batches, each contiguous and in order, and exactly those
that the publishers were told about.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.support.streams import make_stream

from penstock import errors
from penstock.jetstream import JetStream
from penstock.jetstream.model import StoredMessage
from penstock.publish import (
    AtomicBatch,
    Batch,
    BatchAck,
    BatchOutcomeUnknown,
    DuplicateId,
    Gap,
    Publisher,
    WrongSequence,
)
from penstock.server.embedded import EmbeddedServer
from penstock.wire import aio

SEED = 1_000_003
SUBJECTS = ["s.a", "s.b", "s.c"]


@dataclass
class Tracker:
    """What the publishers believe, and what the stream says about it."""

    sizes: dict[str, int] = field(default_factory=dict)
    acks: dict[str, BatchAck] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Batches that must not be there, and why."""

    def violations(self, messages: list[StoredMessage]) -> list[str]:
        """Everything in the stream that should not be so. Pure: it knows nothing of servers."""
        found: list[str] = []
        seen: set[str] = set()
        place = 0
        while place < len(messages):
            told = json.loads(messages[place].data)
            name, size = told["batch"], self.sizes.get(told["batch"], 0)
            run = messages[place : place + max(size, 1)]
            expected = [{"batch": name, "member": number} for number in range(size)]
            if [json.loads(message.data) for message in run] != expected:
                found.append(f"at {run[0].sequence}: batch {name} is not whole, or not in order")
                place += 1
                continue
            if name in seen:
                found.append(f"at {run[0].sequence}: batch {name} is there twice")
            if name in self.absent:
                found.append(f"at {run[0].sequence}: batch {name} is there, though: {self.absent[name]}")
            if name in self.acks and list(self.acks[name].sequences) != [m.sequence for m in run]:
                found.append(f"at {run[0].sequence}: batch {name} was acknowledged as {self.acks[name]}")
            seen.add(name)
            place += size
        found.extend(f"batch {name} was acknowledged and is not there" for name in self.acks.keys() - seen)
        found.extend(
            f"batch {name} is there, and nobody was told" for name in seen - self.acks.keys() - self.absent.keys()
        )
        return found


class Writer:
    """One publisher that does random things; every decision comes from its own generator."""

    def __init__(self, number: int, publisher: Publisher, tracker: Tracker, seed: int) -> None:
        self.number = number
        self.publisher = publisher
        self.tracker = tracker
        self.rng = random.Random(seed * 100 + number)
        self.ids: list[str] = []
        self.seen: dict[str, int] = {}

    async def write(self, rounds: int) -> None:
        actions = [self.whole, self.whole, self.gap, self.duplicate, self.expecting, self.cut_off, self.abandoned]
        for number in range(rounds):
            action = self.rng.choice(actions)
            batch = self.new_batch(f"w{self.number}-{number}-{action.__name__}")
            self.seen[action.__name__] = self.seen.get(action.__name__, 0) + 1
            await self.outcome(batch, action)

    def new_batch(self, name: str) -> AtomicBatch:
        batch = self.publisher.atomic("S", batch_id=name, eob=self.rng.random() < 0.3)
        self.tracker.sizes[name] = self.rng.choice([1, 2, 3, 10, 50, self.rng.randint(2, 300)])
        return batch

    async def fill(
        self, batch: AtomicBatch, message_id: str | None = None, expected_last_sequence: int | None = None
    ) -> None:
        size = self.tracker.sizes[batch.batch_id]
        for number in range(size):
            data = json.dumps({"batch": batch.batch_id, "member": number}).encode()
            own = message_id if number == size - 1 else None
            expected = expected_last_sequence if number == 0 else None
            subject = self.rng.choice(SUBJECTS)
            await batch.add(subject, data, message_id=own, expected_last_sequence=expected)

    async def outcome(self, batch: AtomicBatch, action: Callable[[AtomicBatch], object]) -> None:
        """Do it, and write down what we were told. A server that is down is met with another try."""
        name = batch.batch_id
        try:
            self.tracker.acks[name] = await action(batch)  # type: ignore[misc] # every action returns an ack
        except (Gap, DuplicateId, WrongSequence, Abandoned) as exc:
            self.tracker.absent[name] = repr(exc)
        except BatchOutcomeUnknown:
            if found := await up(batch.resolve):
                self.tracker.acks[name] = found
            else:
                self.tracker.absent[name] = "resolve said that it is not stored"
        except errors.Unavailable as exc:
            self.tracker.absent[name] = f"its commit was never sent: {exc}"
            await up(self.publisher.connection.reconnect)

    # -- what a writer does ----------------------------------------------------------------------------------------

    async def whole(self, batch: AtomicBatch) -> BatchAck:
        self.ids.append(f"id-{batch.batch_id}")
        await self.fill(batch, self.ids[-1])
        if self.rng.random() < 0.3:
            await batch.flush()
        return await batch.commit()

    async def duplicate(self, batch: AtomicBatch) -> BatchAck:
        await self.fill(batch, self.rng.choice(self.ids) if self.ids else None)
        return await batch.commit()

    async def expecting(self, batch: AtomicBatch) -> BatchAck:
        last = (await self.publisher.jetstream.stream_info("S")).state.last_seq
        await self.fill(batch, expected_last_sequence=last - self.rng.randint(0, 1) if last else 0)
        return await batch.commit()

    async def abandoned(self, batch: AtomicBatch) -> BatchAck:
        async with batch:
            await self.fill(batch)
            if self.rng.random() < 0.5:
                await batch.flush()
            raise Abandoned

    async def gap(self, batch: AtomicBatch) -> BatchAck:
        """One member in the middle never reaches the server."""
        self.tracker.sizes[batch.batch_id] += 3
        await self.fill(batch)
        content = batch.content
        hole = self.rng.randrange(1, len(content) - 1)
        whole = Batch._plain

        def with_a_hole(start: int, stop: int) -> list[bytes]:
            parts = whole(content, start, stop)
            if start <= hole < stop:
                parts[hole - start] = b""
            return parts

        content._plain = with_a_hole  # type: ignore[method-assign] # nothing else can lose a message
        return await batch.commit()

    async def cut_off(self, batch: AtomicBatch) -> BatchAck:
        """The connection dies while the batch is being sent, or before its answer is read."""
        await self.fill(batch)
        connection = self.publisher.connection
        send = connection.send
        keep = self.rng.random()

        async def cut(data: bytes | bytearray | memoryview) -> None:
            if bytes(data[:4]) != b"HPUB":
                return await send(data)
            connection.send = send  # type: ignore[method-assign] # once
            await send(data[: int(len(data) * keep * 1.5)])
            assert connection._link
            connection._link.abort()
            return None

        connection.send = cut  # type: ignore[method-assign] # the cable is pulled here
        return await batch.commit()


class Abandoned(Exception):
    """The writer changed its mind."""


async def up(call: Callable[[], object]) -> BatchAck | None:
    """Call until the server is there."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()  # type: ignore[misc, no-any-return] # a coroutine function
            except errors.Unavailable:
                await asyncio.sleep(0.02)


async def read_all(jetstream: JetStream) -> list[StoredMessage]:
    last = (await jetstream.stream_info("S")).state.last_seq
    return [await jetstream.get_message("S", sequence) for sequence in range(1, last + 1)]


async def kill_now_and_then(server: EmbeddedServer, kills: int, rng: random.Random) -> None:
    for _ in range(kills):
        await asyncio.sleep(rng.uniform(0.2, 0.6))  # a moment that nobody chose
        server.kill()
        await asyncio.to_thread(server.start)


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize(
    ("writers", "rounds", "kills", "seed"),
    [
        (4, 20, 2, SEED),
        *(pytest.param(6, 150, 10, SEED + n, marks=[pytest.mark.soak, pytest.mark.timeout(900)]) for n in range(1, 4)),
    ],
)
async def test_the_stream_is_always_a_whole_number_of_committed_batches(
    nats_server: EmbeddedServer, writers: int, rounds: int, kills: int, seed: int
) -> None:
    tracker = Tracker()
    publishers = [await Publisher.connect(nats_server.settings) for _ in range(writers)]
    await make_stream(publishers[0].jetstream, allow_atomic=True)
    crowd = [Writer(number, publisher, tracker, seed) for number, publisher in enumerate(publishers)]
    killer = asyncio.create_task(kill_now_and_then(nats_server, kills, random.Random(seed)))
    await asyncio.gather(*(writer.write(rounds) for writer in crowd))
    await killer
    for publisher in publishers:
        await publisher.close()
    async with await aio.connect(nats_server.settings) as connection:
        messages = await read_all(JetStream(connection.requester()))
    violations = tracker.violations(messages)
    assert not violations, f"seed {seed}: {violations}"
    assert tracker.acks.keys() | tracker.absent.keys() == tracker.sizes.keys()
    print(f"seed {seed}: {len(tracker.acks)} stored, {len(tracker.absent)} not, {len(messages)} messages")
    assert len(tracker.acks) > 5
    assert len(tracker.absent) > 5


async def test_the_check_fails_for_messages_that_are_published_one_by_one(nats_server: EmbeddedServer) -> None:
    """The same check over writers that do without batches finds mixed and cut-off groups."""
    tracker = Tracker()

    async def careless(number: int) -> None:
        async with await aio.connect(nats_server.settings) as connection:
            for name in (f"w{number}-{one}" for one in range(5)):
                tracker.sizes[name] = 10
                for member in range(10 if name != "w0-4" else 7):
                    await connection.request("s.a", json.dumps({"batch": name, "member": member}).encode())

    async with await aio.connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        await make_stream(jetstream)
        await asyncio.gather(*(careless(number) for number in range(3)))
        violations = tracker.violations(await read_all(jetstream))
    assert any("not whole, or not in order" in one for one in violations)


def test_the_check_notices_each_kind_of_violation() -> None:
    def message(sequence: int, batch: str, member: int) -> StoredMessage:
        data = json.dumps({"batch": batch, "member": member}).encode()
        return StoredMessage("S", "s.a", sequence, None, data, {})

    def tracker() -> Tracker:
        return Tracker({"x": 2, "y": 1}, {"x": BatchAck("S", 2, "x", 2)})

    whole = [message(1, "x", 0), message(2, "x", 1)]
    assert tracker().violations(whole) == []
    assert "not whole" in tracker().violations(whole[:1])[0]
    assert "not whole" in tracker().violations(whole[::-1])[0]
    assert "twice" in tracker().violations([*whole, message(3, "x", 0), message(4, "x", 1)])[0]
    assert "acknowledged and is not there" in tracker().violations([])[0]
    assert "nobody was told" in tracker().violations([*whole, message(3, "y", 0)])[0]
    moved = [message(5, "x", 0), message(6, "x", 1)]
    assert "was acknowledged as" in tracker().violations(moved)[0]
    dropped = tracker()
    dropped.absent["y"] = "it was rejected"
    assert "it was rejected" in dropped.violations([*whole, message(3, "y", 0)])[0]
