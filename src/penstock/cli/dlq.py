"""`penstock dlq`: look at dead letters, bring them back, take them away, and catch those that nobody caught."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from functools import reduce
from typing import Any, TypeVar

import click

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    Context,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    progress,
    run_async,
    show_result,
    sync,
    usage,
)
from penstock.cli.dlq_capture import capture, reconcile
from penstock.cli.dlq_view import (
    audit_table,
    groups_table,
    letter_json,
    plan_table,
    shown,
    told,
)
from penstock.cli.errors_json import reported
from penstock.deadletter import addresses, audit, inventory, streams
from penstock.deadletter.addresses import Address, Addresses
from penstock.deadletter.editing import Edit, NotEditable, edited, merge_patch
from penstock.deadletter.letters import DeadLetter, FiledLetter
from penstock.deadletter.replay import MAX_REPLAYS, ReplayOptions, obstacle
from penstock.deadletter.replay import discard as discarding
from penstock.deadletter.replay import replay as replaying
from penstock.deadletter.selection import Selection, grouped
from penstock.deadletter.tally import Tally
from penstock.deadletter.targets import Subjects, captured_subjects, nowhere_to_go
from penstock.deadletter.waiting import GivenUp, given_up
from penstock.errors import ConfigError, NotFound
from penstock.jetstream import StreamInfo, connect
from penstock.jetstream.model import Json, StoredMessage
from penstock.settings import Settings
from penstock.subjects import is_dead_letter, is_literal, problem
from penstock.units import counted, parse_since

F = TypeVar("F", bound=Callable[..., Any])

REFUSALS_SHOWN = 10

SELECTING = [
    click.argument("ids", nargs=-1, metavar="[ID]..."),
    click.option("--consumer", "readers", multiple=True, metavar="NAME",
                 help="Given up by this consumer or pipeline, also as STREAM/NAME; repeatable."),
    click.option("--error", "errors", multiple=True, metavar="TEXT",
                 help="A fingerprint, a type, or a part of the error's message; repeatable."),
    click.option("--since", metavar="WHEN", help="Failed since: a time, or so long ago, such as 2h."),
    click.option("--until", metavar="WHEN", help="Failed before: a time, or so long ago."),
]  # fmt: skip


def selecting(command: F) -> F:
    """The flags that say which letters are meant."""
    return reduce(lambda made, option: option(made), reversed(SELECTING), command)


def _selection(
    ids: tuple[str, ...], readers: tuple[str, ...], errors: tuple[str, ...], since: str | None, until: str | None
) -> Selection:
    if not all(text.strip() for text in (*ids, *readers, *errors)):
        usage("an id, --consumer or --error is empty, which every letter would match")
    return Selection(
        readers=readers, errors=errors, since=_when(since, "--since"), until=_when(until, "--until"), ids=ids
    )


def _when(text: str | None, flag: str) -> datetime | None:
    with flag_values(flag):
        return None if text is None else parse_since(text)


@click.group()
def dlq() -> None:
    """Dead letters: what consumers gave up on.

    \b
    Example:
      penstock dlq ls
      penstock dlq replay --consumer billing_worker --dry-run
    """


@dlq.command(epilog="Exit code 2: there are dead letters, or messages that nobody has made letters of.")
@selecting
@click.option("--letters", is_flag=True, help="Every letter, not only groups.")
@json_option
@click.pass_obj
@reported
def ls(context: Context, /, letters: bool, as_json: bool, **which: Any) -> int:
    """List dead letters, grouped by who gave up and why.

    \b
    Example:
      penstock dlq ls
      penstock dlq ls --consumer billing_worker --since 1d --letters
    """
    settings, wanted = context.settings(), _selection(**which)
    found, lost = _letters(settings, wanted), run_async(_lost(settings, wanted))
    overlooked = run_async(_overlooked(settings)) if found else {}
    if as_json:
        print_json({**_listing(found, letters), "given_up": lost.total, "overlooked": overlooked})
    elif not found and not lost:
        out.print("no dead letters" + ("" if wanted.is_everything else " that match"))
    elif found:
        out.print(groups_table(grouped(found)))
        if letters:
            out.print()
            out.print(shown(found))
    if lost and not as_json:
        for (stream, name), count in lost.by_consumer.items():
            out.print(f"{stream}/{name}: gave up on {counted(count, 'message')}", markup=False)
        out.print(str(lost), markup=False, soft_wrap=True)
    for name, count in overlooked.items() if not as_json else ():
        words = f"{name} does not deliver letters again that were fetched and not confirmed (up to {count})"
        err.print(f"{words}; they are listed here, and replayed from here", markup=False, soft_wrap=True)
    return EXIT_ATTENTION if found or lost else EXIT_OK


async def _lost(settings: Settings, wanted: Selection) -> GivenUp:
    """What has no letter yet. Its error and time are not known: a selection by these does not find it."""
    if wanted.ids or wanted.errors or wanted.since or wanted.until:
        return GivenUp()
    async with connect(settings) as broker:
        return (await given_up(broker.jetstream)).only(wanted.readers)


def _listing(found: list[FiledLetter], letters: bool) -> dict[str, Any]:
    listing: dict[str, Any] = {
        "version": 1,
        "letters_total": len(found),
        "groups": [asdict(group) for group in grouped(found)],
    }
    if letters:
        listing["letters"] = [letter_json(filed, body=False) for filed in found]
    return listing


@dlq.command()
@click.argument("id_", metavar="ID")
@json_option
@click.pass_obj
@reported
def show(context: Context, id_: str, as_json: bool) -> int:
    """Show everything about the dead letter ID; the beginning of the id is enough.

    \b
    Example:
      penstock dlq show 9f2c51
    """
    found = _letters(context.settings(), Selection(ids=(id_,)))
    if not found:
        raise ConfigError(f"there is no dead letter {id_!r}; `penstock dlq ls --letters` lists them")
    if len({filed.id for filed in found}) > 1:
        raise ConfigError(f"{len(found)} dead letters begin with {id_!r}; give more of the id")
    show_result(as_json, letter_json(found[-1], body=True), told(found[-1]))
    return EXIT_OK


@dlq.command(epilog="Exit code 2: letters were left where they are. 1: there are none of these ids.")
@selecting
@click.option("--all", "everything", is_flag=True, help="All letters that can be replayed.")
@click.option("--dry-run", is_flag=True, help="Say what would be replayed, and change nothing.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Messages a second, at most.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most so many letters.")
@click.option("--only-failed", is_flag=True, help="Reach only the consumer that gave up, not the others of its stream.")
@click.option("--max-replays", type=click.IntRange(min=1), default=MAX_REPLAYS, show_default=True, metavar="N",
              help="Leave alone what failed again after so many replays.")  # fmt: skip
@click.option("--edit", "patch", metavar="JSON", help="Change each event by a JSON merge patch (RFC 7396).")
@click.option("--editor", is_flag=True, help="Open each event in $EDITOR.")
@click.option("--to", metavar="SUBJECT", help="For letters whose subject nobody knows: where they go.")
@click.option("--spark", "in_bulk", is_flag=True, help="With the tasks of a Spark job, for very many letters.")
@click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Where Spark runs.")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the audit.")
@click.option("--actor", metavar="NAME", help="Who, for the audit.  [default: you, here]")
@json_option
@click.pass_obj
@reported
@sync
async def replay(
    context: Context,
    /,
    everything: bool,
    dry_run: bool,
    rate: float | None,
    limit: int | None,
    only_failed: bool,
    max_replays: int,
    patch: str | None,
    editor: bool,
    to: str | None,
    in_bulk: bool,
    master: str,
    reason: str,
    actor: str | None,
    as_json: bool,
    **which: Any,
) -> int:
    """Publish dead letters again, to their original subjects, and take them away.

    A letter goes only after its message is stored. Killed in between, run it again: nothing is published twice. Each
    message keeps its body and event_id, and has a message id of its own, so that no duplicate window swallows it.

    A letter that a service has written itself goes to the subject of the consumer that has the letter's subject as its
    `dlq:`. Where that is not one literal subject, --to says where it goes.

    \b
    Example:
      penstock dlq replay --consumer billing_worker --error ValueError --dry-run
      penstock dlq replay --all --rate 200 --only-failed --reason "fixed in 1.4.2"
    """
    settings, wanted = context.settings(), _selection(**which)
    _check_chosen(wanted, everything)
    if patch and editor:
        usage("--edit and --editor both change events: give one of them")
    with flag_values():
        edit: Edit | None = merge_patch(patch) if patch else _in_editor if editor else None
    if to and (not is_literal(to) or problem(to) or is_dead_letter(to)):
        usage(f"--to takes a subject that messages can be published to, not {to!r}")
    options = ReplayOptions(only_failed=only_failed, rate=rate, max_replays=max_replays, edit=edit, limit=limit, to=to)
    if dry_run:
        return await asyncio.to_thread(_dry_run, settings, wanted, options, as_json)
    who = actor or audit.this_user()
    if in_bulk:
        if editor or limit:
            usage("--spark replays all that match, without anybody at a terminal: leave out --editor and --limit")
        tally = await asyncio.to_thread(_in_bulk, master, settings, wanted, options, who, reason)
    else:
        with _counting("replaying") as count:
            tally = await replaying(settings, wanted, options, actor=who, reason=reason, on_progress=count)
    return _report(tally, "replayed", as_json, wanted)


def _in_bulk(
    master: str, settings: Settings, wanted: Selection, options: ReplayOptions, actor: str, reason: str
) -> Tally:
    """Replay with Spark, which takes a second to import."""
    from penstock.spark.deadletters import replay_letters
    from penstock.spark.session import running

    with running("penstock dlq", master, short_lived=True) as spark:
        return replay_letters(spark, settings, wanted, options, actor=actor, reason=reason)


def _dry_run(settings: Settings, wanted: Selection, options: ReplayOptions, as_json: bool) -> int:
    """What a replay would do, by group."""
    found = _letters(settings, wanted, options.to)[: options.limit]
    _require_found(wanted, len(found))
    # Nobody is asked to edit what nobody publishes; a patch is tried.
    tried = replace(options, edit=None) if options.edit is _in_editor else options
    streams = run_async(_captured(settings)) if found else {}
    held = [
        (filed, obstacle(filed, options) or _not_editable(filed, tried) or nowhere_to_go(filed.letter, streams))
        for filed in found
    ]
    able = [filed for filed, why in held if why is None]
    reasons = Tally()
    reasons.skipped.update(why for _, why in held if why)
    show_result(
        as_json,
        {**_listing(able, letters=False), "dry_run": True, "skipped": dict(reasons.skipped)},
        plan_table(grouped(able), reasons.skipped),
    )
    return EXIT_ATTENTION if reasons.skipped else EXIT_OK


def _not_editable(filed: FiledLetter, options: ReplayOptions) -> str | None:
    try:
        edited(filed.letter, options.edit)
    except NotEditable as exc:
        return str(exc)
    return None


@dlq.command()
@selecting
@click.option("--all", "everything", is_flag=True, help="All dead letters there are.")
@click.option("--reason", required=True, metavar="TEXT", help="Why they may go, for the audit.")
@click.option("--actor", metavar="NAME", help="Who, for the audit.  [default: you, here]")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@reported
@sync
async def discard(
    context: Context,
    /,
    everything: bool,
    reason: str,
    actor: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **which: Any,
) -> int:
    """Take dead letters away for good. The audit keeps what they were, who did it, and why.

    \b
    Example:
      penstock dlq discard --consumer billing_worker --until 20d --reason "billed by hand"
    """
    settings, wanted = context.settings(), _selection(**which)
    _check_chosen(wanted, everything)
    found = await asyncio.to_thread(_letters, settings, wanted)
    _require_found(wanted, len(found))
    if dry_run:
        show_result(
            as_json, {**_listing(found, letters=False), "dry_run": True}, plan_table(grouped(found), Tally().skipped)
        )
        return EXIT_OK
    if found and not yes:
        click.confirm(f"Take {len(found)} dead letters away for good?", abort=True, err=True)
    with _counting("discarding") as count:
        who = actor or audit.this_user()
        tally = await discarding(settings, wanted, actor=who, reason=reason, seen=found, on_progress=count)
    return _report(tally, "discarded", as_json, wanted)


dlq.add_command(capture)
dlq.add_command(reconcile)


@dlq.command("audit")
@click.option("--since", metavar="WHEN", help="Only since: a time, or so long ago, such as 2h.")
@json_option
@click.pass_obj
@reported
@sync
async def audit_(context: Context, since: str | None, as_json: bool) -> int:
    """List what was done to dead letters, by whom and why.

    \b
    Example:
      penstock dlq audit --since 1d
    """
    settings, moment = context.settings(), _when(since, "--since")
    async with connect(settings) as broker:
        try:
            info = await broker.jetstream.stream_info(streams.AUDIT)
        except NotFound:
            info = None
    found = await asyncio.to_thread(_records, settings, info, moment) if info else []
    show_result(
        as_json,
        {"version": 1, "records": [{**raw, "at": message.time} for message, raw in found]},
        audit_table(found) if found else "nothing was done to dead letters",
    )
    return EXIT_OK


def _records(settings: Settings, info: StreamInfo, since: datetime | None) -> list[tuple[StoredMessage, Json]]:
    told = audit.records(settings, info, streams.settled_subject(">"))
    return [one for one in told if since is None or (one[0].time and one[0].time >= since)]


# -- shared ----------------------------------------------------------------------------------------------------------


def _letters(settings: Settings, wanted: Selection, to: str | None = None) -> list[FiledLetter]:
    """The letters that match, with a bar while they are read; `to` is for those whose subject nobody knows."""
    infos = run_async(_streams(settings))
    total = sum(info.state.messages for info in infos)
    found = []
    known: tuple[Addresses, Address | None] | None = None
    with progress() as bar:
        task = bar.add_task("reading dead letters", total=total)
        for filed in inventory.letters(settings, infos):
            bar.advance(task)
            if addresses.is_foreign(filed):
                known = known or run_async(_addresses(settings, to))
                filed = addresses.addressed(filed, *known)
            if wanted.matches(filed):
                found.append(filed)
    return found


async def _streams(settings: Settings) -> list[StreamInfo]:
    async with connect(settings) as broker:
        return await inventory.letter_streams(broker.jetstream)


async def _addresses(settings: Settings, to: str | None) -> tuple[Addresses, Address | None]:
    async with connect(settings) as broker:
        otherwise = await addresses.named(broker.jetstream, to) if to else None
        return await addresses.declared(broker.jetstream), otherwise


async def _overlooked(settings: Settings) -> dict[str, int]:
    async with connect(settings) as broker:
        infos = await inventory.letter_streams(broker.jetstream)
        readers = [one for info in infos for one in await broker.jetstream.consumers(info.name)]
        return addresses.overlooked(readers)


async def _captured(settings: Settings) -> Subjects:
    async with connect(settings) as broker:
        return await captured_subjects(broker.jetstream)


def _check_chosen(wanted: Selection, everything: bool) -> None:
    if wanted.is_everything and not everything:
        usage("say which letters: ids, --consumer, --error, --since or --until; or --all")
    if everything and not wanted.is_everything:
        usage("--all is all of them: leave out ids, --consumer, --error, --since and --until, or leave out --all")


def _in_editor(letter: DeadLetter) -> bytes:
    """The event as a person has changed it; unchanged when the editor was left without saving."""
    try:
        text = letter.body.decode()
    except UnicodeDecodeError:
        return letter.body
    return (click.edit(text, extension=".json") or text).encode()


@contextmanager
def _counting(what: str) -> Iterator[Callable[[Tally], None]]:
    with progress() as bar:
        task = bar.add_task(what, total=None)
        yield lambda tally: bar.update(task, completed=tally.done + tally.found_done)


def _require_found(wanted: Selection, count: int) -> None:
    """Raise when letters were named by their ids and there is none of them: what is not there is an error."""
    if wanted.ids and not count:
        names = ", ".join(map(repr, wanted.ids))
        raise ConfigError(f"no dead letters match {names}; `penstock dlq ls --letters` lists them")


def _report(tally: Tally, done: str, as_json: bool, wanted: Selection) -> int:
    left = tally.left
    _require_found(wanted, left + tally.done + tally.found_done)
    if as_json:
        print_json({
            "version": 1, done: tally.done, "removed_after_interruption": tally.found_done,
            "skipped": dict(tally.skipped), "refused_total": tally.refused_total,
            "refused": [{"letter": id_, "error": why} for id_, why in tally.refused],
        })  # fmt: skip
        return EXIT_ATTENTION if left else EXIT_OK
    out.print(f"{tally.done} {done}")
    if tally.found_done:
        out.print(f"{tally.found_done} that an interrupted run had replayed were taken away")
    for why, count in tally.skipped.most_common():
        err.print(f"{count} left: {why}", markup=False, soft_wrap=True)
    for id_, why in tally.refused[:REFUSALS_SHOWN]:
        err.print(f"{id_} refused: {why}", markup=False, soft_wrap=True)
    if tally.refused_total > REFUSALS_SHOWN:
        err.print(f"{tally.refused_total:,} refused in all")
    return EXIT_ATTENTION if left else EXIT_OK
