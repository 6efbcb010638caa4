"""`penstock consumer`: look at durable consumers, pause them, and move them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import click

from penstock.cli import governance
from penstock.cli.common import (
    EXIT_OK,
    RESOURCE_NAME,
    Column,
    Context,
    err,
    flag_values,
    json_option,
    out,
    print_json,
    show_result,
    sync,
    table,
    usage,
)
from penstock.cli.terminal import Text
from penstock.errors import MessageNotFound
from penstock.facts.governance import described
from penstock.jetstream import ConsumerInfo, JetStream, StreamInfo, connect
from penstock.jetstream.api import refuse_beyond_end, refuse_unmovable
from penstock.jetstream.resets import FATES, ResetEffect, foresee, reset_words
from penstock.sourcing import resets as sourcing
from penstock.units import counted, format_duration, from_nanoseconds, parse_duration, parse_moment

COLUMNS: list[Column] = [
    "CONSUMER, FILTERS",
    ("PENDING", "right"),
    ("UNACKED", "right"),
    ("REDELIVERED", "right"),
    ("PULLS", "right"),
    "PAUSED",
]


@click.group()
def consumer() -> None:
    """Look at consumers, pause, resume and reset them, and prune what nobody reads.

    \b
    Example:
      penstock consumer ls BILLING
      penstock consumer reset BILLING billing_worker --to-start
    """


consumer.add_command(governance.prune)
consumer.add_command(governance.restore)


@consumer.command()
@click.argument("stream", type=RESOURCE_NAME, required=False)
@click.option("--unused", metavar="DURATION", help="Only durable ones that nobody has read through for so long, as 7d.")
@json_option
@click.pass_obj
@sync
async def ls(context: Context, stream: str | None, unused: str | None, as_json: bool) -> int:
    """List the consumers of a STREAM, or of all streams.

    With --unused: what nobody reads, with owner and purpose. The server forgets when a consumer was last active when it
    is restarted; then the first look writes down where it is, and a later one can tell.

    \b
    Example:
      penstock consumer ls
      penstock consumer ls --unused 7d
    """
    if unused is not None:
        return await _unused(context, stream, unused, as_json)
    async with connect(context.settings()) as broker:
        streams = [stream] if stream else await broker.jetstream.stream_names()
        found = [one for name in streams for one in await broker.jetstream.consumers(name)]
    show_result(
        as_json, [_facts(one) for one in found], table(None, COLUMNS, _rows(found)) if found else "no consumers"
    )
    return EXIT_OK


async def _unused(context: Context, stream: str | None, longer_than: str, as_json: bool) -> int:
    streams, limit = [stream] if stream else [], governance.duration_flag(longer_than)
    found = await governance.unused(context.settings(), streams, limit)
    show_result(
        as_json,
        [{**_facts(info), **described(info, idle)} for info, idle in found],
        governance.unused_table(found)
        if found
        else f"every durable consumer was read within {longer_than}, as far as is known",
    )
    return EXIT_OK


@consumer.command()
@click.argument("stream", type=RESOURCE_NAME)
@click.argument("name", type=RESOURCE_NAME)
@json_option
@click.pass_obj
@sync
async def show(context: Context, stream: str, name: str, as_json: bool) -> int:
    """Show the consumer NAME of STREAM: how far it has come, and how it is configured.

    \b
    Example:
      penstock consumer show BILLING billing_worker
    """
    async with connect(context.settings()) as broker:
        info = await broker.jetstream.consumer_info(stream, name)
    show_result(
        as_json,
        {**_facts(info), "config": info.config},
        table(f"{stream} / {name}", ["", ""], [*_progress(info), *_configuration(info.config)]),
    )
    return EXIT_OK


@consumer.command()
@click.argument("stream", type=RESOURCE_NAME)
@click.argument("name", type=RESOURCE_NAME)
@click.option("--for", "length", metavar="DURATION", help="So long from now, such as 90s or 1h30m.")
@click.option("--until", metavar="TIME", help="RFC 3339, such as 2030-01-31T08:00:00Z.")
@json_option
@click.pass_obj
@sync
async def pause(context: Context, stream: str, name: str, length: str | None, until: str | None, as_json: bool) -> int:
    """Stop deliveries to the consumer NAME of STREAM for a while. Messages wait; nothing is lost.

    A stream that reads through this consumer copies nothing meanwhile.

    \b
    Example:
      penstock consumer pause BILLING billing_worker --for 1h
    """
    if (length is None) == (until is None):
        usage("say how long: --for DURATION or --until TIME")
    when = _after(length) if length is not None else _time(str(until), "--until")
    if when <= datetime.now(UTC):
        usage(f"a pause ends in the future, not at {when.isoformat()}")
    async with connect(context.settings()) as broker:
        js = broker.jetstream
        ends = await js.pause_consumer(stream, name, when)
        info = await js.consumer_info(stream, name)
        retention = (await js.stream_info(stream)).config.get("retention", "limits")
    show_result(
        as_json,
        {"stream": stream, "consumer": name, "paused_until": ends},
        f"{stream} / {name} is paused until {ends:%Y-%m-%d %H:%M:%S %Z}",
        lambda: _say(sourcing.pause_words(info, retention), info),
    )
    return EXIT_OK


@consumer.command()
@click.argument("stream", type=RESOURCE_NAME)
@click.argument("name", type=RESOURCE_NAME)
@json_option
@click.pass_obj
@sync
async def resume(context: Context, stream: str, name: str, as_json: bool) -> int:
    """Deliver to the paused consumer NAME of STREAM again.

    \b
    Example:
      penstock consumer resume BILLING billing_worker
    """
    async with connect(context.settings()) as broker:
        await broker.jetstream.resume_consumer(stream, name)
        info = await broker.jetstream.consumer_info(stream, name)
    show_result(
        as_json,
        {"stream": stream, "consumer": name, "paused_until": None},
        f"{stream} / {name} delivers again",
        lambda: _say(sourcing.resume_words(info), info),
    )
    return EXIT_OK


def _say(words: str, info: ConsumerInfo) -> None:
    """What a command means to the stream that reads through the consumer, if one does."""
    if words and sourcing.is_sourcing(info):
        err.print(words, markup=False, soft_wrap=True)


@consumer.command()
@click.argument("stream", type=RESOURCE_NAME)
@click.argument("name", type=RESOURCE_NAME)
@click.option("--to", "seq", type=click.IntRange(1), metavar="SEQ", help="Continue with this stream sequence.")
@click.option("--to-time", metavar="TIME", help="Continue with the first message stored at or after it (RFC 3339).")
@click.option("--to-start", is_flag=True, help="Continue with the first message of the stream.")
@click.option("--remove-skipped", is_flag=True, help="WorkQueue: remove what is skipped from the stream.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@sync
async def reset(
    context: Context,
    stream: str,
    name: str,
    seq: int | None,
    to_time: str | None,
    to_start: bool,
    remove_skipped: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Move the consumer NAME of STREAM, after telling what that repeats or skips.

    Without --to, --to-time or --to-start it stays where it is, right behind the last message that it acknowledged with
    all before it, and what is in flight is delivered again. A consumer that a stream reads through is paused for the
    moment of its reset.

    \b
    Example:
      penstock consumer reset BILLING billing_worker --to-time 2030-01-31T08:00:00Z
    """
    if (seq is not None) + (to_time is not None) + to_start > 1:
        usage("--to, --to-time and --to-start exclude each other")
    if not yes and not sys.stdin.isatty():
        usage("a reset repeats or skips messages and asks first, but there is no terminal: add --yes")
    async with connect(context.settings()) as broker:
        js = broker.jetstream
        found, info = await js.stream_info(stream), await js.consumer_info(stream, name)
        target = await _target(js, found, info, seq, to_time, to_start)
        if seq is not None or to_time is not None or to_start:
            refuse_unmovable(info, target)
        foreseen = await foresee(js, found, info, target)
        if remove_skipped and foreseen.fate != "left behind":
            usage(f"--remove-skipped is for WorkQueue streams; with {stream}, {FATES[foreseen.fate]}")
        err.print(_told(foreseen, info), soft_wrap=True)
        _say(sourcing.reset_words(info, foreseen), info)
        if not yes:
            click.confirm(f"Reset {stream} / {name} to sequence {target}?", abort=True, err=True)
        # Without a target the server itself stays at the floor, which it allows to every kind of consumer.
        moved = seq is not None or to_time is not None or to_start
        done = await sourcing.moved(context.settings(), js, info, target if moved else None)
        removed = await sourcing.remove_skipped(js, info, target) if remove_skipped and foreseen.skipped else 0
    if as_json:
        facts = {**_effect(foreseen), "reset_seq": done.reset_seq, "removed": removed}
        print_json({**facts, "consumer": _facts(done.consumer)})
    else:
        out.print(
            f"{stream} / {name} continues at sequence {done.reset_seq}, {_messages(done.consumer.pending)} before it"
        )
        if remove_skipped:
            out.print(f"removed {_messages(removed)} that were skipped")
    return EXIT_OK


async def _target(
    js: JetStream, stream: StreamInfo, info: ConsumerInfo, seq: int | None, to_time: str | None, to_start: bool
) -> int:
    if seq is not None:
        refuse_beyond_end(stream, seq)
        return seq
    if to_start:
        return max(stream.state.first_seq, 1)
    if to_time is None:
        return info.ack_floor_stream_seq + 1
    try:
        return (await js.get_message(stream.name, since=_time(to_time, "--to-time"))).sequence
    except MessageNotFound:
        return stream.state.last_seq + 1


def _told(foreseen: ResetEffect, info: ConsumerInfo) -> Text:
    """What the reset does, in words."""
    told = Text(reset_words(foreseen, info))
    told.highlight_regex(r"(?<=; )(?:repeats|skips)\b", "bold")
    return told


def _messages(count: int) -> str:
    return counted(count, "message")


def _effect(foreseen: ResetEffect) -> dict[str, Any]:
    return {
        "target": foreseen.target,
        "repeated": foreseen.repeated,
        "repeated_acknowledged": foreseen.repeated_acked,
        "skipped": foreseen.skipped,
        "exact": foreseen.exact,
        "skipped_are": foreseen.fate,
    }


def _time(text: str, flag: str) -> datetime:
    with flag_values(flag):
        return parse_moment(text)


def _after(length: str) -> datetime:
    with flag_values():
        try:
            return datetime.now(UTC) + parse_duration(length)
        except OverflowError:
            usage(f"--for {length} is longer than there will be time")


def _filters(config: dict[str, Any]) -> list[str]:
    return list(config.get("filter_subjects") or [config.get("filter_subject") or ">"])


def _facts(info: ConsumerInfo) -> dict[str, Any]:
    """A consumer for machines; these names stay."""
    return {
        "stream": info.stream,
        "name": info.name,
        "filters": _filters(info.config),
        "ack_policy": info.config.get("ack_policy"),
        "ack_floor": info.ack_floor_stream_seq,
        "delivered": info.delivered_stream_seq,
        "pending": info.pending,
        "ack_pending": info.ack_pending,
        "redelivered": info.redelivered,
        "waiting_pulls": info.waiting,
        "paused": info.paused,
        "paused_seconds": info.paused_for.total_seconds() if info.paused_for else None,
        "leader": info.leader,
    }


def _rows(found: Iterable[ConsumerInfo]) -> Iterator[list[Any]]:
    """Consumers below the name of their stream, filters below the name of their consumer."""
    for stream, group in groupby(found, key=lambda one: one.stream):
        yield [Text(stream, style="bold")]
        yield from (_row(one) for one in group)


def _row(info: ConsumerInfo) -> list[Any]:
    return [
        Text(f"  {info.name}").append("".join(f"\n    {one}" for one in _filters(info.config)), style="dim"),
        info.pending,
        info.ack_pending,
        info.redelivered,
        info.waiting,
        _paused(info),
    ]


def _paused(info: ConsumerInfo) -> str | None:
    if info.paused_for is None:
        return None
    return f"for {format_duration(timedelta(seconds=max(1, round(info.paused_for.total_seconds()))))}"


def _progress(info: ConsumerInfo) -> list[tuple[str, Any]]:
    limit = info.config.get("max_ack_pending", 0)
    return [
        ("acknowledged up to", info.ack_floor_stream_seq),
        ("delivered up to", info.delivered_stream_seq),
        ("pending", _messages(info.pending)),
        ("not acknowledged", f"{info.ack_pending} of at most {limit}" if limit > 0 else info.ack_pending),
        ("redelivered", info.redelivered),
        ("waiting pulls", info.waiting),
        ("paused", _paused(info) or "no"),
        ("leader", info.leader),
        ("created", info.created and f"{info.created:%Y-%m-%d %H:%M:%S %Z}"),
    ]


DURATIONS = {"ack_wait", "inactive_threshold", "idle_heartbeat", "max_expires"}


def _configuration(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every configured field, also those that a newer server added."""
    rows = []
    for name, value in sorted(config.items()):
        shown = format_duration(from_nanoseconds(value)) if name in DURATIONS else value
        if name == "backoff":
            shown = ", ".join(format_duration(from_nanoseconds(one)) for one in value)
        elif isinstance(value, dict):
            shown = "\n".join(f"{key}={one}" for key, one in sorted(value.items()))
        elif isinstance(value, list):
            shown = "\n".join(map(str, value))
        rows.append((name, shown))
    return rows
