"""`penstock consumer ls --unused`, `prune` and `restore`: consumers that nobody reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    RESOURCE_NAME,
    Column,
    Context,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    sync,
    table,
    usage,
)
from penstock.facts.governance import Governance, PrunedPosition, described
from penstock.jetstream import ConsumerInfo, metadata
from penstock.jetstream.connection import Broker
from penstock.settings import Settings
from penstock.units import approximate_duration, counted, parse_duration

COLUMNS: list[Column] = [
    "CONSUMER",
    ("IDLE FOR", "right"),
    ("ACK FLOOR", "right"),
    ("UNREAD", "right"),
    "DECLARED",
    "SERVICE",
    "OWNER",
    "PURPOSE",
]
RESTORE_COLUMNS: list[Column] = [
    "STREAM", ("CONSUMER", "name"), ("ACK FLOOR", "right"), ("UNREAD", "right"), "PRUNED AT",
]  # fmt: skip

Idle = tuple[ConsumerInfo, timedelta]


async def unused(settings: Settings, streams: Iterable[str], longer_than: timedelta) -> list[Idle]:
    """The durable consumers that have been idle for that long, the longest first."""
    link = Broker(settings, "penstock consumer")
    try:
        names = list(streams) or await link.jetstream.stream_names()
        found = [one for name in names for one in await link.jetstream.consumers(name)]
        durable = [one for one in found if one.config.get("durable_name")]
        idle = await Governance(link).idle(durable, datetime.now(UTC))
    finally:
        await link.close()
    return sorted((one for one in idle if one[1] >= longer_than), key=lambda one: one[1], reverse=True)


def duration_flag(text: str) -> timedelta:
    with flag_values():
        return parse_duration(text)


def unused_table(found: Iterable[Idle]) -> Any:
    """Unused consumers for people."""
    return table(None, COLUMNS, (_row(*one) for one in found))


def _row(info: ConsumerInfo, idle: timedelta) -> tuple[Any, ...]:
    told = described(info, idle)
    name = f"{info.stream} / {info.name}"
    declared = f"in {told['platform']}" if told["declared"] else "no"
    numbers = approximate_duration(idle), info.ack_floor_stream_seq, info.unprocessed
    return name, *numbers, declared, told["service"], told["owner"], told["purpose"]


@click.command(epilog="Exit code 2: some of NAMES are not there, or in use.")
@click.argument("stream", type=RESOURCE_NAME, required=False)
@click.argument("names", type=RESOURCE_NAME, nargs=-1)
@click.option("--unused", "longer_than", required=True, metavar="DURATION", help="Only those idle for so long, as 7d.")
@click.option("--declared", is_flag=True, help="Also those that a platform file declares; `apply` makes them again.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@sync
async def prune(
    context: Context,
    stream: str | None,
    names: tuple[str, ...],
    longer_than: str,
    declared: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove durable consumers that nobody reads, of all streams, of STREAM, or those NAMES of it.

    Where each of them was is recorded first: `penstock consumer restore` brings it back. On an Interest stream,
    messages that only the removed consumer still needed are deleted by the server.

    \b
    Example:
      penstock consumer prune --unused 30d
      penstock consumer prune BILLING old_worker --unused 7d --yes
    """
    limit, settings = duration_flag(longer_than), context.settings()
    if not yes and not sys.stdin.isatty():
        usage("pruning removes consumers and asks first, but there is no terminal: add --yes")
    idle = await unused(settings, [stream] if stream else [], limit)
    found = [one for one in idle if not names or one[0].name in names]
    unknown = set(names) - {one[0].name for one in found}
    for name in sorted(unknown):
        err.print(f"{stream} has no consumer {name!r} that nobody has read through for {longer_than}", markup=False)
    chosen = [one for one in found if declared or not _platform(one[0])]
    kept = len(found) - len(chosen)
    if kept:
        err.print(f"{counted(kept, 'consumer')} stay: a platform file declares them (--declared removes them too)")
    if chosen and not yes:
        err.print(unused_table(chosen))
        click.confirm(f"Remove {counted(len(chosen), 'consumer')}?", abort=True, err=True)
    removed = await _remove(settings, chosen, limit)
    if as_json:
        print_json([_removed(one) for one in removed])
    else:
        for one in removed:
            out.print(f"removed {one.stream} / {one.name}, which had acknowledged up to sequence {one.ack_floor}")
        out.print(f"{counted(len(removed), 'consumer')} removed")
    return EXIT_ATTENTION if unknown else EXIT_OK


async def _remove(settings: Settings, chosen: Iterable[Idle], limit: timedelta) -> list[PrunedPosition]:
    """Remove each, unless somebody began to read through it since it was listed."""
    link = Broker(settings, "penstock consumer")
    try:
        governance, removed = Governance(link), []
        for listed, _ in chosen:
            now = datetime.now(UTC)
            info = await link.jetstream.consumer_info(listed.stream, listed.name)
            ((_, idle),) = await governance.idle([info], now)
            if idle >= limit:
                removed.append(await governance.prune(info, idle, now))
        return removed
    finally:
        await link.close()


@click.command()
@click.argument("stream", type=RESOURCE_NAME, required=False)
@click.argument("name", type=RESOURCE_NAME, required=False)
@json_option
@click.pass_obj
@sync
async def restore(context: Context, stream: str | None, name: str | None, as_json: bool) -> int:
    """Bring the pruned consumer NAME of STREAM back to where it was, or list what can be brought back.

    It continues right after its ack floor: what it had acknowledged beyond that comes again.

    \b
    Example:
      penstock consumer restore
      penstock consumer restore BILLING old_worker
    """
    if (stream is None) != (name is None):
        usage("name the stream and the consumer, or neither to list what can be restored")
    link = Broker(context.settings(), "penstock consumer")
    try:
        governance = Governance(link)
        if stream and name:
            info = await governance.restore(stream, name)
        else:
            return _list(await governance.pruned(), as_json)
    finally:
        await link.close()
    if as_json:
        print_json({"stream": stream, "name": name, "ack_floor": info.ack_floor_stream_seq, "pending": info.pending})
    else:
        waiting = counted(info.pending, "message")
        out.print(f"{stream} / {name} is restored after sequence {info.ack_floor_stream_seq}; {waiting} pending")
    return EXIT_OK


def _list(found: list[PrunedPosition], as_json: bool) -> int:
    if as_json:
        print_json([_removed(one) for one in found])
    elif found:
        rows = ((one.stream, one.name, one.ack_floor, one.pending, one.pruned_at) for one in found)
        out.print(table(None, RESTORE_COLUMNS, rows))
    else:
        out.print("nothing was pruned")
    return EXIT_OK


def _removed(one: PrunedPosition) -> dict[str, Any]:
    return {
        "stream": one.stream,
        "name": one.name,
        "ack_floor": one.ack_floor,
        "delivered": one.delivered,
        "unread": one.pending,
        "pruned_at": one.pruned_at,
        "idle_since": one.idle_since,
    }


def _platform(info: ConsumerInfo) -> str | None:
    return (info.config.get("metadata") or {}).get(metadata.PLATFORM)
