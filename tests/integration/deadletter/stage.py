"""What tests of dead letters share: streams, events, a worker that crashes, and counting what is where."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tests.support.pulls import Pull
from tests.support.streams import make_stream

from penstock.deadletter import inventory, streams
from penstock.deadletter.capture import capture
from penstock.deadletter.capturer import CONSUMER, ensure_consumer
from penstock.deadletter.headers import LETTER
from penstock.deadletter.letters import FailedDelivery, Failure, FiledLetter
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StreamInfo
from penstock.publish.plain import PlainPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import eventually_async, stream_messages
from penstock.wire import aio
from penstock.wire.frames import Message

DLQ = "dlq.orders.placed"
SUBJECT = "orders.placed"
MILLISECOND = 1_000_000
ACK_WAIT_MS = 1_000
"""So long a test waits for each delivery of a message that is to die."""
WORKER = Path(__file__).parent / "crashing_worker.py"


class Stage:
    """A stream `ORDERS` with a consumer `billing`, dead letters, and somewhere for a handler's output."""

    def __init__(self, settings: Settings, connection: aio.Connection) -> None:
        self.settings = settings
        self.connection = connection
        self.js = JetStream(connection.requester())

    async def build(
        self,
        retention: str = "limits",
        max_deliver: int = 2,
        window_ms: int = 120_000,
        replicas: int = 1,
        ack_wait_ms: int = ACK_WAIT_MS,
    ) -> None:
        await make_stream(
            self.js,
            "ORDERS",
            retention=retention,
            duplicate_window=window_ms * MILLISECOND,
            allow_direct=True,
            num_replicas=replicas,
        )
        await make_stream(self.js, "DLQ", num_replicas=replicas)
        await make_stream(self.js, "OUT")
        await self.js.create_stream(streams.advisories_config())
        await self.js.create_stream(streams.audit_config())
        await self.consumer("billing", max_deliver, ack_wait_ms)

    async def consumer(self, name: str, max_deliver: int = 2, ack_wait_ms: int = ACK_WAIT_MS) -> None:
        config = {
            "durable_name": name,
            "ack_policy": "explicit",
            "ack_wait": ack_wait_ms * MILLISECOND,
            "max_deliver": max_deliver,
            "filter_subject": "orders.>",
            "metadata": {"penstock.dlq": DLQ},
        }
        await self.js.create_consumer("ORDERS", config)

    async def publish(self, events: Iterable[Json], subject: str = SUBJECT) -> None:
        async with PlainPublisher(self.settings) as publisher:
            outcomes = []
            for event in events:
                outcomes += await publisher.add(subject, json.dumps(event).encode(), None, event["event_id"])
            outcomes += await publisher.finish()
        assert not [one for one in outcomes if isinstance(one, Exception)]

    async def fetch(self, consumer: str) -> Message:
        """One message of the consumer, not answered."""
        (message,) = await Pull(self.connection, "ORDERS", consumer, None, 1).fetch(30)
        return message

    async def answered(self, consumer: str) -> Message:
        """One message of the consumer, acknowledged."""
        message = await self.fetch(consumer)
        await self.connection.request(message.reply, b"+ACK")
        return message

    async def redeliver_soon(self) -> None:
        """A capturer's durable whose advisories come again soon after it was killed, not after a minute."""
        await ensure_consumer(self.js, streams.ADVISORIES)
        await self.js.update_consumer(streams.ADVISORIES, CONSUMER, {"ack_wait": 2_000 * MILLISECOND})

    async def terminate(self, consumer: str, answer: bytes) -> None:
        """Take the consumer's next message, give it up, and wait until the advisory of that is kept."""
        before = await self.messages(streams.ADVISORIES)
        message = await self.fetch(consumer)
        await self.connection.request(message.reply, answer)

        async def is_kept() -> bool:
            return await self.messages(streams.ADVISORIES) > before

        await eventually_async(is_kept, what="the advisory")

    def letters(self) -> list[FiledLetter]:
        """Every dead letter; blocking."""
        return list(inventory.letters(self.settings, asyncio.run(self._letter_streams())))

    async def _letter_streams(self) -> list[StreamInfo]:
        async with await aio.connect(self.settings) as connection:
            return await inventory.letter_streams(JetStream(connection.requester()))

    async def filed(self) -> list[FiledLetter]:
        """Every dead letter."""
        return await asyncio.to_thread(self.letters)

    async def dead_events(self) -> Counter[str | None]:
        """How many letters there are for each event."""
        return Counter(filed.letter.event_id for filed in await asyncio.to_thread(self.letters))

    async def messages(self, stream: str) -> int:
        return (await self.js.stream_info(stream)).state.messages

    def output(self) -> Counter[str]:
        """How often each event is in the handler's output; blocking."""
        return Counter(json.loads(message.data)["event_id"] for message in stream_messages(self.settings, "OUT"))


def events(count: int, poison: Iterable[int] = ()) -> list[Json]:
    """Events with ids of their own; a worker that meets a poisoned one does not survive it."""
    bad = set(poison)
    return [{"event_id": f"e{number}", "poison": number in bad} for number in range(count)]


async def run_worker(server: EmbeddedServer, consumer: str, mode: str = "crash") -> int:
    """Run the worker until it ends; its exit code, which is negative when it was killed."""
    process = await asyncio.create_subprocess_exec(sys.executable, str(WORKER), server.url, consumer, mode)
    try:
        async with asyncio.timeout(300):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


async def work_until_done(server: EmbeddedServer, consumer: str, mode: str = "crash") -> int:
    """Start the worker again and again, as a supervisor does, until it finds nothing more; how often it was killed."""
    kills = 0
    while (code := await run_worker(server, consumer, mode)) != 0:
        assert code == -9, f"the worker ended with {code}"
        kills += 1
    return kills


async def bury(stage: Stage, count: int, error: str = "no price") -> None:
    """Let the consumer give up on that many messages, each with its letter, as a worker would; few of them in order."""
    beside = 1 if count <= 100 else 32
    pull = Pull(stage.connection, "ORDERS", "billing", None, min(count, 500))
    buried: set[int] = set()
    while len(buried) < count:
        came = await pull.fetch(30)
        assert came, f"only {len(buried)} of {count} messages came"
        for at in range(0, len(came), beside):
            await asyncio.gather(*(_bury(stage, message, error) for message in came[at : at + beside]))
        buried |= {
            FailedDelivery.parse(message.reply).sequence for message in came
        }  # on a busy machine some come twice
    await pull.close()


async def _bury(stage: Stage, message: Message, error: str) -> None:
    letter = FailedDelivery.parse(message.reply).letter(
        subject=message.subject,
        body=message.data,
        headers=message.header_values(),
        failure=Failure("ValueError", error),
        failed_at=datetime.now(UTC),
    )
    await capture(stage.connection, letter, DLQ)
    await stage.connection.request(message.reply, b"+ACK")


def replay_problems(stage: Stage, expected: set[str]) -> list[str]:
    """What is wrong after a replay of exactly these events: messages missing or doubled, letters or audit that do not
    agree with them. Blocking."""
    replayed = [message for message in stream_messages(stage.settings, "ORDERS") if LETTER in message.header_values()]
    found = Counter(json.loads(message.data)["event_id"] for message in replayed)
    at = {FailedDelivery.parse(message.reply).sequence: json.loads(message.data)["event_id"] for message in replayed}
    problems = [f"{one} is stored {found[one]} times" for one in sorted(expected) if found[one] != 1]
    problems += [f"{one} was not to be replayed" for one in sorted(set(found) - expected)]
    problems += [f"letter of {filed.letter.event_id} is still there" for filed in stage.letters()]
    records = [json.loads(message.data) for message in stream_messages(stage.settings, streams.AUDIT)]
    told = [record for record in records if record.get("action") == "replayed"]
    noted = Counter(record["event_id"] for record in told)
    problems += [f"the audit tells {noted[one]} times of {one}" for one in sorted(expected) if noted[one] != 1]
    wrong = [record for record in told if at.get(record["replay"]["sequence"]) != record["event_id"]]
    return problems + [f"the audit points {record['event_id']} to another message" for record in wrong]
