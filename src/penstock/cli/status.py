"""`penstock status`: streams, consumers, lag in messages and in seconds, redeliveries, dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

import click
from rich.console import Group, RenderableType

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    SECONDS,
    Column,
    Context,
    json_option,
    out,
    show_result,
    sync,
    table,
)
from penstock.cli.terminal import Text
from penstock.errors import ServerBusy, Unavailable
from penstock.jetstream import connect
from penstock.observe.collecting import collect
from penstock.observe.flow import word_for
from penstock.observe.status import ConsumerStatus, Status, StreamStatus
from penstock.units import approximate_duration, approximate_size

STREAM_COLUMNS: list[Column] = [
    "stream", "retention", ("messages", "right"), ("last seq", "right"), ("size", "right"), ("full", "right"),
    ("cons.", "right"), ("repl.", "right"),
]  # fmt: skip
CONSUMER_COLUMNS: list[Column] = [
    "consumer", ("floor", "right"), ("lag", "right"), ("oldest", "right"), ("in flight", "right"), ("again", "right"),
    ("dead", "right"),
]  # fmt: skip


@click.command(epilog="Exit code 2: consumers gave up on messages, and nobody has captured them.")
@click.option("--watch", is_flag=True, help="Redraw until interrupted.")
@click.option(
    "--every", type=SECONDS, default=2.0, show_default=True, metavar="SECONDS", help="How often --watch redraws."
)
@click.option("--platform", metavar="NAME", help="Show only what this declared platform owns.")
@json_option
@click.pass_obj
@sync
async def status(context: Context, watch: bool, every: float, platform: str | None, as_json: bool) -> int:
    """Show streams and consumers, and how far behind they are.

    Lag is counted in messages that are not acknowledged, and in the age of the oldest of them. The floor is the
    sequence up to which all are acknowledged. Dead are the letters of what it gave up on, with `+N` for messages that
    it gave up on and nobody has captured.

    \b
    Example:
      penstock status --watch
      penstock status --json | jq '.consumers[] | select(.lag_seconds > 60) | .name'
    """
    if watch and as_json:
        raise click.UsageError("--watch draws tables: leave out --json")
    async with connect(context.settings()) as broker:

        async def look() -> Status:
            found = await collect(broker.jetstream)
            return found.of_platform(platform) if platform else found

        if watch:
            await _watch(look, every)
            return EXIT_OK
        seen = await look()
        show_result(as_json, status_json(seen), render(seen))
        return EXIT_ATTENTION if seen.given_up else EXIT_OK


async def _watch(look: Callable[[], Awaitable[Status]], every: float) -> None:
    """Print everything again and again, each time on an empty screen; what is longer can be scrolled back to.

    An outage is shown in its place, until it is over.
    """
    with suppress(asyncio.CancelledError):  # Ctrl-C
        while True:
            try:
                shown = render(await look())
            except (Unavailable, ServerBusy) as exc:
                shown = Text(f"{exc}; trying again", style="bold red")
            with out:  # one write, no flicker
                out.clear()
                out.print(shown)
                out.print(f"{datetime.now():%H:%M:%S}, every {every:g} s until Ctrl-C", style="dim")
            await asyncio.sleep(every)


def render(status: Status) -> RenderableType:
    """The tables a person looks at."""
    parts: list[RenderableType] = [
        table(f"Streams ({len(status.streams)})", STREAM_COLUMNS, map(_stream_row, status.streams)),
        Text(),
        table(f"Consumers ({len(status.consumers)})", CONSUMER_COLUMNS, _consumer_rows(status.consumers)),
    ]
    if sources := [(stream.name, source) for stream in status.streams for source in stream.sources]:
        rows = ((name, s.name, s.lag, _age(s.heard_ago), s.error) for name, s in sources)
        columns: list[Column] = ["stream", ("from", "name"), ("lag", "right"), ("heard ago", "right"), "error"]
        parts += [Text(), table(f"Sources ({len(sources)})", columns, rows)]
    return Group(*parts, Text(), Text(_summary(status)))


def _stream_row(stream: StreamStatus) -> tuple[Any, ...]:
    full = f"{100 * stream.bytes / stream.max_bytes:.0f}%" if stream.max_bytes else ""
    replicas = f"{stream.healthy_replicas}/{stream.replicas}"
    return (stream.name, stream.retention, f"{stream.messages:,}", f"{stream.last_seq:,}",
            approximate_size(stream.bytes), full, stream.consumers, replicas)  # fmt: skip


def _consumer_rows(consumers: Sequence[ConsumerStatus]) -> Iterator[tuple[Any, ...]]:
    """Consumers below the name of their stream."""
    for stream, group in groupby(consumers, key=lambda consumer: consumer.stream):
        yield (Text(stream, style="bold"),)
        yield from (_consumer_row(consumer) for consumer in group)


def _consumer_row(consumer: ConsumerStatus) -> tuple[Any, ...]:
    limit = f"/{consumer.max_ack_pending:,}" if consumer.max_ack_pending else ""
    state = " (paused)" if consumer.paused_for is not None else " (nobody reads)" if consumer.is_unattended else ""
    name = Text(f"  {consumer.name}{state}", style="red" if consumer.is_unattended else "")
    age = _age(consumer.lag) if consumer.lag_messages else ""
    return (name, f"{consumer.ack_floor:,}", f"{consumer.lag_messages:,}", age, f"{consumer.ack_pending:,}{limit}",
            f"{consumer.redelivered:,}", _dead(consumer))  # fmt: skip


def _dead(consumer: ConsumerStatus) -> str:
    """Letters, and what should be some: `3 +2` are three letters and two messages without one."""
    letters = "?" if consumer.dead_letters is None else f"{consumer.dead_letters:,}"
    return f"{letters} +{consumer.given_up:,}" if consumer.given_up else letters


def _age(age: timedelta | None) -> str:
    return "never" if age is None else approximate_duration(age)


def _summary(status: Status) -> str:
    lag = sum(consumer.lag_messages for consumer in status.consumers)
    oldest = max((consumer.lag for consumer in status.consumers), default=timedelta())
    waiting = f"{lag:,} unacknowledged, the oldest {_age(oldest)} old" if lag else "nothing unacknowledged"
    abandoned, batches = status.abandoned_batches, ""
    if abandoned is not None:
        batches = f"; {_number(sum(abandoned.values()), 'atomic batch', 'es')} abandoned"
    elif any(stream.takes_batches for stream in status.streams):
        batches = "; abandoned batches are not kept (`penstock batches --keep`)"
    lost = f"; {status.given_up}" if status.given_up else ""
    unattended = sum(consumer.is_unattended for consumer in status.consumers)
    waiting += f", nobody reads {_number(unattended, 'consumer', 's')}" if unattended else ""
    return f"{waiting}; {_number(status.dead_letters, 'dead letter', 's')}{lost}{batches}"


def _number(count: int, noun: str, ending: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def status_json(status: Status) -> dict[str, Any]:
    """The snapshot for machines: durations are seconds, times RFC 3339."""
    raw = asdict(status)
    raw["version"] = 1
    raw["dead_letters"] = status.dead_letters
    raw["given_up"] = status.given_up.total
    for consumer, seen in zip(raw["consumers"], status.consumers, strict=True):
        consumer["state"] = word_for(seen)
        consumer["lag_seconds"] = consumer.pop("lag").total_seconds()
        consumer["paused_for_seconds"] = _seconds(consumer.pop("paused_for"))
    for stream in raw["streams"]:
        for source in stream["sources"]:
            source["heard_ago_seconds"] = _seconds(source.pop("heard_ago"))
    return {key: _plain(value) for key, value in raw.items()}


def _seconds(age: timedelta | None) -> float | None:
    return None if age is None else age.total_seconds()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else value
