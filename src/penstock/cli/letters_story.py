"""The quickstart's chapter on dead letters: a handler fails on some events, its cause is fixed, they are replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import ModuleType

from penstock.cli.common import out
from penstock.cli.dlq_view import groups_table
from penstock.cli.services_story import run_services
from penstock.deadletter import inventory
from penstock.deadletter.letters import FiledLetter
from penstock.deadletter.replay import ReplayOptions, replay
from penstock.deadletter.selection import Selection, grouped
from penstock.jetstream import JetStream
from penstock.settings import Settings
from penstock.units import counted
from penstock.wire import aio

CONSUMER = "billing_worker_balance_credited"
FAILED = Selection(readers=(f"PAYMENTS/{CONSUMER}",))
RIGHT_LIMIT = 400.0

Say = Callable[[str, str], None]


async def show_failures(settings: Settings, services: ModuleType, say: Say) -> None:
    """What became of top-ups above a limit that somebody has set too low."""
    letters = await _letters(settings)
    top_ups = counted(len(services.books.paid), "top-up")
    say("failures", f"{len(letters)} of {top_ups} failed in {CONSUMER}, again and again: kept as dead letters")
    if letters:
        out.print()
        out.print(groups_table(grouped(letters)))


async def repair(settings: Settings, services: ModuleType, names: Collection[str], say: Say) -> None:
    """Set the limit right, replay what failed, and have the services book it, with whatever else has come since."""
    books = services.books
    books.limit = RIGHT_LIMIT
    reason = f"the limit is {RIGHT_LIMIT:g} now"
    replayed = await replay(settings, FAILED, ReplayOptions(only_failed=True), actor="quickstart", reason=reason)
    await run_services(services.app, names)
    booked, paid = sum(books.booked.values()), sum(books.paid.values())
    fits = "as much as was paid" if books.booked == books.paid else f"NOT the {paid:,.2f} paid"
    say(
        "replay",
        f"limit corrected, {counted(replayed.done, 'letter')} replayed and booked; "
        f"{len(books.booked)} top-ups worth {booked:,.2f} in the books, {fits}",
    )


async def _letters(settings: Settings) -> list[FiledLetter]:
    async with await aio.connect(settings) as connection:
        streams = await inventory.letter_streams(JetStream(connection.requester()))
    return await asyncio.to_thread(lambda: list(inventory.letters(settings, streams, FAILED)))
