"""Dead letters: by cause, one by one, and what can be done with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from penstock.deadletter import addresses, audit, inventory, replay, streams
from penstock.deadletter.editing import edited, merge_patch
from penstock.deadletter.letters import FiledLetter
from penstock.deadletter.selection import Group, Selection, grouped
from penstock.deadletter.tally import Tally
from penstock.deadletter.targets import captured_subjects, nowhere_to_go
from penstock.errors import ConfigError, NotFound
from penstock.jetstream.model import StreamInfo
from penstock.ui import charts
from penstock.ui.actions import actor, sure
from penstock.ui.page import Page
from penstock.ui.runs import Run

MOST = 20_000
"""Letters that are read for a page."""
RECORDS = 200
"""Records of the audit on its page."""
PARTS = 24


@dataclass(frozen=True, slots=True)
class Cause:
    """Letters of one consumer and one cause, with when they came."""

    group: Group
    trend: str


async def causes(page: Page) -> Response:
    found, all_read = await _letters(page)
    given_up = (await page.snapshot()).status.given_up
    shown = [Cause(group, _trend(group, found)) for group in grouped(found)]
    shown.sort(key=lambda cause: -cause.group.count)
    values: dict[str, Any] = {"causes": shown, "count": len(found), "all_read": all_read, "given_up": given_up}
    return page.show("letters.html", "/letters", "Dead letters", **values)


def _trend(group: Group, found: Sequence[FiledLetter]) -> str:
    """When the letters of a group came, from the first to now."""
    times = [filed.letter.last_failure or filed.time for filed in found if _belongs(filed, group)]
    first, now = min(times), datetime.now(UTC)
    step = max((now - first) / PARTS, timedelta(seconds=1))
    counts = [0] * PARTS
    for at in times:
        counts[min(PARTS - 1, int((at - first) / step))] += 1
    return charts.trend(counts, 120, 24)


def _belongs(filed: FiledLetter, group: Group) -> bool:
    letter = filed.letter
    return (letter.stream, letter.reader, letter.fingerprint) == (group.stream, group.reader, group.fingerprint)


async def _letters(page: Page, wanted: Selection | None = None) -> tuple[list[FiledLetter], bool]:
    """The letters that match, and whether these are all."""
    js = (await page.watch.control()).jetstream
    infos = await inventory.letter_streams(js)
    known = await addresses.declared(js)
    return await asyncio.to_thread(_read, page, infos, known, wanted)


def _read(
    page: Page, infos: list[StreamInfo], known: addresses.Addresses, wanted: Selection | None
) -> tuple[list[FiledLetter], bool]:
    read = islice(inventory.letters(page.watch.settings, infos), MOST + 1)
    known_to = (addresses.addressed(one, known, None) if addresses.is_foreign(one) else one for one in read)
    found = [one for one in known_to if wanted is None or wanted.matches(one)]
    return found[:MOST], len(found) <= MOST


async def letter(page: Page) -> Response:
    """One letter, or those of a cause when the query names one."""
    if page.at("id") == "of":
        reader, error = page.asked("reader"), page.asked("error")
        wanted = Selection(readers=(reader,) if reader else (), errors=(error,) if error else ())
        found, all_read = await _letters(page, wanted)
        return page.show(
            "letters_of.html", "/letters", "Dead letters", letters=found[:500], count=len(found), all_read=all_read,
            reader=reader, error=error,
        )  # fmt: skip
    found, _ = await _letters(page, Selection(ids=(page.at("id"),)))
    if not found:
        raise HTTPException(404, "there is no such dead letter: it was replayed or discarded")
    return page.show("letter.html", "/letters", f"Letter {found[0].short_id}", filed=found[0], letter=found[0].letter)


async def audited(page: Page) -> Response:
    """What was done to letters and consumers, and by whom."""
    js = (await page.watch.control()).jetstream
    try:
        info = await js.stream_info(streams.AUDIT)
    except NotFound:
        return page.show("audit.html", "/letters", "Audit", records=[])
    since = max(info.state.first_seq, info.state.last_seq - 2_000)
    read = await asyncio.to_thread(lambda: list(audit.records(page.watch.settings, info, ">", since)))
    told = [(message.time, raw) for message, raw in read if "actor" in raw and raw.get("action")]
    return page.show("audit.html", "/letters", "Audit", records=list(reversed(told[-RECORDS:])))


# -- actions -----------------------------------------------------------------------------------------------------------


async def act(page: Page) -> Response:
    """Show what a replay or a discard would do; with the field `sure`, do it."""
    action = page.at("action")
    if action not in ("replay", "discard"):
        raise HTTPException(404)
    wanted = _wanted(page)
    options = _options(page)
    if page.field("sure") != "yes":
        return await _preview(page, action, wanted, options)
    who, reason = actor(page), page.field("reason").strip()
    if action == "discard" and not reason:
        raise ConfigError("say why these dead letters may go: the audit keeps it")
    found, _ = await _letters(page, wanted)

    def work(on_progress: replay.OnProgress) -> Awaitable[Tally]:
        settings = page.watch.settings
        if action == "replay":
            return replay.replay(settings, wanted, options, actor=who, reason=reason, on_progress=on_progress)
        return replay.discard(settings, wanted, actor=who, reason=reason, on_progress=on_progress)

    run = Run(action, who, len(found), options.rate)
    page.runs.start(run, work)
    return RedirectResponse(f"/letters/runs/{run.id}", 303)


async def run(page: Page) -> Response:
    """How far a replay or a discard is."""
    found = page.runs.get(page.at("id"))
    if found is None:
        raise HTTPException(404, "there is no such run: `penstock ui` was started again since, or it is long over")
    await page.watch.snapshot()
    title = f"{found.action.capitalize()} of dead letters"
    return page.show("letters_run.html", "/letters", title, run=found, told=_told(found.action, found.tally))


def _wanted(page: Page) -> Selection:
    ids = tuple(one for one in page.fields("id") if one.strip())
    reader, error = page.field("reader").strip(), page.field("error").strip()
    wanted = Selection(ids=ids, readers=(reader,) if reader else (), errors=(error,) if error else ())
    if wanted.is_everything:
        raise ConfigError("say which letters: choose some, or a cause")
    return wanted


def _options(page: Page) -> replay.ReplayOptions:
    rate, patch = page.field("rate").strip(), page.field("patch").strip()
    if rate and not rate.isdecimal():
        raise ConfigError(f"{rate!r} is not a number of messages a second")
    return replay.ReplayOptions(
        only_failed=page.field("only_failed") == "yes",
        rate=float(rate) if rate else None,
        edit=merge_patch(patch) if patch else None,
    )


async def _preview(page: Page, action: str, wanted: Selection, options: replay.ReplayOptions) -> Response:
    found, all_read = await _letters(page, wanted)
    lines = [f"{len(found):,}{'' if all_read else ' or more'} dead letters: {action}"]
    if action == "replay":
        known = await captured_subjects((await page.watch.control()).jetstream)
        held = Tally()
        for filed in found:
            why = replay.obstacle(filed, options) or nowhere_to_go(filed.letter, known)
            if why:
                held.skipped[why] += 1
            else:
                edited(filed.letter, options.edit)
        lines += [f"{count:,} stay where they are: {why}" for why, count in held.skipped.items()]
    return sure(page, "/letters", action, f"{action.capitalize()}?", lines, needs_reason=action == "discard")


def _told(action: str, tally: Tally) -> str:
    done = f"{tally.done + tally.found_done:,} {'replayed' if action == 'replay' else 'discarded'}"
    return f"{done}, {tally.left:,} left" if tally.left else done
