"""The quickstart's chapter on dead letters: a handler fails on some events, its cause is fixed, they are replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

from penstock.broker import JetStream
from penstock.cli.common import out
from penstock.cli.dlq_view import groups_table
from penstock.deadletter import inventory
from penstock.deadletter.capture import capture
from penstock.deadletter.letters import Delivery, Failure, FiledLetter
from penstock.deadletter.pulling import Pull
from penstock.deadletter.replay import ReplayOptions, replay
from penstock.deadletter.selection import Selection, grouped
from penstock.settings import Settings
from penstock.units import counted
from penstock.wire import aio
from penstock.wire.frames import Message

STREAM, CONSUMER, DLQ = "PAYMENTS", "billing_worker_balance_credited", "dlq.payments.balance_credited"
WRONG_LIMIT, RIGHT_LIMIT = 40.0, 400.0
BATCH = 500
AT_ONCE = 32

Say = Callable[[str, str], None]


@dataclass(slots=True)
class Handled:
    """What became of a consumer's messages."""

    events: int = 0
    dead: int = 0
    expected: float = 0.0
    """The amount that all events together are worth, booked or not."""


class LettersStory:
    """Two scenes: top-ups are booked until the handler fails; then its cause is fixed and what failed comes back."""

    def __init__(self, settings: Settings, handlers: ModuleType, say: Say) -> None:
        self._settings = settings
        self._credits = handlers.Credits(limit=WRONG_LIMIT)
        self._say = say
        self._first = Handled()

    async def fail(self) -> None:
        """Book the top-ups that are waiting, with a limit that somebody has set too low."""
        self._first = done = await self._work()
        failed = f"{done.dead} of {counted(done.events, 'top-up')} failed in {CONSUMER}"
        self._say("failures", f"{failed}: kept as dead letters")
        letters = await self._letters()
        if letters:
            out.print()
            out.print(groups_table(grouped(letters)))

    async def repair(self) -> None:
        """Set the limit right, replay what failed, and book it."""
        self._credits.limit = RIGHT_LIMIT
        wanted = Selection(readers=(f"{STREAM}/{CONSUMER}",))
        replayed = await replay(
            self._settings,
            wanted,
            ReplayOptions(only_failed=True),
            actor="quickstart",
            reason=f"the limit is {RIGHT_LIMIT:g} now",
        )
        again = await self._work()
        booked, expected = self._credits.total, self._first.expected
        fits = "as much as was paid" if booked == expected and not again.dead else f"NOT the {expected:,.2f} paid"
        self._say(
            "replay",
            f"limit corrected, {counted(replayed.done, 'letter')} replayed and booked; "
            f"{len(self._credits.seen)} top-ups worth {booked:,.2f} in the books, {fits}",
        )

    async def _letters(self) -> list[FiledLetter]:
        async with await aio.connect(self._settings) as connection:
            streams = await inventory.letter_streams(JetStream(connection.requester()))
        wanted = Selection(readers=(f"{STREAM}/{CONSUMER}",))
        return await asyncio.to_thread(lambda: list(inventory.letters(self._settings, streams, wanted)))

    async def _work(self) -> Handled:
        """Handle what the consumer has, until there is nothing left."""
        done = Handled()
        async with await aio.connect(self._settings) as connection:
            jetstream = JetStream(connection.requester())
            pull = Pull(connection, STREAM, CONSUMER, None, BATCH)
            while (await jetstream.consumer_info(STREAM, CONSUMER)).unprocessed:
                messages = await pull.fetch(1.0)
                for at in range(0, len(messages), AT_ONCE):
                    await asyncio.gather(*(self._one(connection, one, done) for one in messages[at : at + AT_ONCE]))
            await pull.close()
        return done

    async def _one(self, connection: aio.Connection, message: Message, done: Handled) -> None:
        event: dict[str, Any] = json.loads(message.data)
        done.events += 1
        done.expected += event["payload"]["amount"]
        try:
            self._credits.handle(event)
        except ValueError as exc:  # no retry would help: the letter comes first, then the message is let go
            done.dead += 1
            await self._bury(connection, message, exc)
        await connection.request(message.reply, b"+ACK")

    async def _bury(self, connection: aio.Connection, message: Message, error: ValueError) -> None:
        letter = Delivery.parse(message.reply).letter(
            subject=message.subject,
            body=message.data,
            headers=message.header_values(),
            failure=Failure.of(error),
            failed_at=datetime.now(UTC),
        )
        await capture(connection, letter, DLQ)
