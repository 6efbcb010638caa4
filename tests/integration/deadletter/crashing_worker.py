"""A worker that does not survive poisoned events: `crashing_worker.py URL CONSUMER MODE`.

It handles the events of ORDERS one by one and writes each to OUT, under its event id. MODE says how it dies: `crash` at
once; `capture` on the last delivery after the letter is stored and before the message is let go; `fixed` not at all. It
ends by itself when its consumer has nothing left.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import UTC, datetime

from penstock.deadletter.capture import capture
from penstock.deadletter.letters import FailedDelivery, Failure
from penstock.jetstream import connect
from penstock.jetstream.fetch import fetch
from penstock.settings import Settings
from penstock.wire import aio
from penstock.wire.frames import Message

STREAM, DLQ = "ORDERS", "dlq.orders.placed"


async def main(url: str, consumer: str, mode: str) -> None:
    async with connect(Settings(servers=(url,))) as broker:
        js = broker.jetstream
        limit = (await js.consumer_info(STREAM, consumer)).config["max_deliver"]
        while True:
            messages = await fetch(broker, STREAM, consumer, 1, wait=0.3)
            for message in messages:
                await handle(broker.connection, message, consumer, mode, limit)
            if not messages and not (await js.consumer_info(STREAM, consumer)).unprocessed:
                return


async def handle(connection: aio.Connection, message: Message, consumer: str, mode: str, limit: int) -> None:
    event = json.loads(message.data)
    if event["poison"] and mode != "fixed":
        delivery = FailedDelivery.parse(message.reply)
        if mode == "capture" and delivery.deliveries >= limit:
            await keep_letter(connection, message, delivery)
        os.kill(os.getpid(), signal.SIGKILL)
    await connection.request(f"out.{consumer}", message.data, {"Nats-Msg-Id": f"{consumer}.{event['event_id']}"})
    await connection.request(message.reply, b"+ACK")


async def keep_letter(connection: aio.Connection, message: Message, delivery: FailedDelivery) -> None:
    letter = delivery.letter(
        subject=message.subject,
        body=message.data,
        headers=message.header_values(),
        failure=Failure("Poison", "this event cannot be digested"),
        failed_at=datetime.now(UTC),
    )
    await capture(connection, letter, DLQ)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
