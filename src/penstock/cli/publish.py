"""`penstock publish`: JSON lines from a file or standard input into streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from penstock.app.client import connect as connect_client
from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    RESOURCE_NAME,
    Context,
    err,
    json_option,
    out,
    print_json,
    progress,
    sync,
    table,
)
from penstock.cli.input import LineReader, open_lines
from penstock.errors import ConfigError, OutcomeUnknown, PenstockError, UsageError
from penstock.jetstream import connect
from penstock.packs import MAX_ROWS
from penstock.publish.atomic import Publisher
from penstock.publish.lines import BadLine, LineFormat, Numbered
from penstock.publish.loading import AtomicLoad, FastLoad, Load, LoadReport, PackedLoad, PlainLoad, stream_of
from penstock.publish.options import IngestOptions
from penstock.publish.rows import headers_of
from penstock.settings import Settings

SHOWN_BAD_LINES = 10


@dataclass(slots=True)
class PublishPlan:
    """What the command was asked to do."""

    settings: Settings
    format: LineFormat
    reader: LineReader
    mode: str
    stream: str | None
    batch_size: int | None
    skip_bad: bool
    bad: list[BadLine] = field(default_factory=list)
    """The first bad lines that were skipped."""
    skipped: int = 0
    report: LoadReport | None = None
    pack: int | None = None
    """Rows of a pack, where lines are packed."""

    def parsed(self, lines: list[tuple[int, bytes]]) -> tuple[list[Numbered], BadLine | None]:
        """The messages of the lines, up to the first bad one that ends the load."""
        made: list[Numbered] = []
        for number, line in lines:
            try:
                made.append(self.format.message(number, line))
            except BadLine as exc:
                if not self._skip(exc):
                    return made, exc
        return made, None

    def fitting(self, messages: list[Numbered], max_payload: int) -> tuple[list[Numbered], BadLine | None]:
        """The messages that the server takes, up to the first that is too large and ends the load."""
        made: list[Numbered] = []
        for message in messages:
            size = len(message.data) + len(headers_of(message.headers, message.message_id))
            if size <= max_payload:
                made.append(message)
                continue
            words = f"its message has {size} bytes, and this server takes {max_payload}; raise the server's max_payload"
            if not self._skip(bad := BadLine(message.line, words)):
                return made, bad
        return made, None

    def _skip(self, bad: BadLine) -> bool:
        if self.skip_bad:
            self.skipped += 1
            if len(self.bad) < SHOWN_BAD_LINES:
                self.bad.append(bad)
        return self.skip_bad


@click.command(
    epilog="Exit code 2 says that bad lines were skipped; 1 that it ended early, after telling what is stored."
)
@click.argument("subject", required=False)
@click.option("--file", "file", default="-", metavar="FILE", help="JSON lines.  [default: standard input]")
@click.option("--atomic", is_flag=True, help="All or nothing: see --batch-size.")
@click.option("--fast", is_flag=True, help="Fast ingest: in order, nothing lost, not atomic.")
@click.option(
    "--stream",
    type=RESOURCE_NAME,
    metavar="NAME",
    help="The stream, with --atomic and --fast.  [default: found by the subject]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Messages per batch, with --atomic.  [default: all in one batch, or chunks of 1000 when there are more]",
)
@click.option(
    "--pack",
    type=click.IntRange(1, MAX_ROWS),
    metavar="N",
    help="N lines of a subject in one message, as a pack of rows: less work for the server, and for Spark.",
)
@click.option("--subject-field", metavar="FIELD", help="The field that holds the subject.")
@click.option("--header", "headers", multiple=True, metavar="NAME=FIELD", help="A header from a field. Repeatable.")
@click.option("--headers-field", metavar="FIELD", help="A field that holds an object of headers.")
@click.option(
    "--message-id",
    metavar="FIELD",
    help="The field that holds the message id: a message that is sent twice is stored once.",
)
@click.option("--data-field", metavar="FIELD", help="The field that holds the data.  [default: the whole line]")
@click.option("--raw", is_flag=True, help="Publish lines as they are, JSON or not.")
@click.option("--skip-bad", is_flag=True, help="Leave out bad lines and go on; not with --atomic.")
@json_option
@click.pass_obj
@sync
async def publish(
    context: Context,
    /,
    subject: str | None,
    file: str,
    atomic: bool,
    fast: bool,
    stream: str | None,
    batch_size: int | None,
    pack: int | None,
    headers: tuple[str, ...],
    skip_bad: bool,
    as_json: bool,
    **fields: Any,
) -> int:
    """Publish every line of a file, or of standard input, as a message.

    In SUBJECT, `{field}` stands for a field of the line; fields inside others are written with dots, as in
    `{payload.project_id}`. By default every message is published by itself and acknowledged. With --atomic a batch is
    stored as a whole or not at all; more than 1000 messages go in chunks, and **each chunk is atomic by itself**. A bad
    line ends the load: what came before it is stored, but nothing of its own atomic batch.

    \b
    Example:
      penstock publish 'orders.{region}.placed' --file orders.jsonl --message-id order_id
      penstock publish billing.adjust --file corrections.jsonl --atomic
      generate | penstock publish 'sensors.{device}' --fast --header Trace=trace_id
      penstock publish telemetry.raw --file readings.jsonl --pack 500
    """
    mode = _mode(atomic, fast, pack)
    if file == "-" and sys.stdin.isatty():
        err.print("one message per line; Ctrl-D ends", markup=False)
    plan = _plan(context, subject, file, mode, stream, batch_size, headers, skip_bad, fields)
    plan.pack = pack
    failure: PenstockError | None = None
    try:
        await _load(plan)
    except PenstockError as exc:
        failure = exc
    except asyncio.CancelledError:  # Ctrl-C
        _tell(plan, Stopped(), as_json)
        raise
    _tell(plan, failure, as_json)
    if failure:
        raise failure
    return EXIT_ATTENTION if plan.skipped or (plan.report and plan.report.maybe_twice) else EXIT_OK


class Stopped(OutcomeUnknown):
    """The load was interrupted: what was on its way at that moment may be stored too."""

    def __str__(self) -> str:
        return "interrupted: what was on its way may be stored too"


def _mode(atomic: bool, fast: bool, pack: int | None) -> str:
    if atomic and fast:
        raise UsageError("--atomic and --fast do not go together: all or nothing, or at the server's speed")
    if pack and (atomic or fast):
        raise UsageError("--pack goes with neither --atomic nor --fast: a pack is one message already")
    return "atomic" if atomic else "fast" if fast else "packed" if pack else "plain"


def _plan(
    context: Context,
    subject: str | None,
    file: str,
    mode: str,
    stream: str | None,
    batch_size: int | None,
    headers: tuple[str, ...],
    skip_bad: bool,
    fields: dict[str, Any],
) -> PublishPlan:
    if batch_size is not None and mode != "atomic":
        raise UsageError("--batch-size goes with --atomic")
    if stream is not None and mode in ("plain", "packed"):
        raise UsageError("--stream goes with --atomic and --fast: other messages go where their subject belongs")
    if mode == "packed" and fields.get("message_id"):
        raise UsageError("--message-id does not go with --pack: the server compares ids of messages, not of rows")
    if skip_bad and mode == "atomic":
        raise UsageError("--skip-bad does not go with --atomic: a batch is stored as a whole or not at all")
    try:
        made = LineFormat(subject=subject, headers=_pairs(headers), **fields)
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    return PublishPlan(context.settings(), made, open_lines(file), mode, stream, batch_size, skip_bad)


def _pairs(headers: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for header in headers:
        name, equals, path = header.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--header takes NAME=FIELD, such as Trace=trace_id, not {header!r}")
        pairs[name] = path
    return pairs


async def _load(plan: PublishPlan) -> None:
    async with AsyncExitStack() as stack:
        advance = stack.enter_context(_progress(plan.reader))
        load: Load | None = None
        async for lines in plan.reader.chunks():
            messages, bad = plan.parsed(lines)
            if load is None and messages:
                load = await stack.enter_async_context(await _opened(plan, messages[0].subject, stack))
                plan.report = load.report
            if load and messages:
                messages, too_large = plan.fitting(messages, load.max_payload)
                bad = too_large or bad  # it comes before any line that could not be read
                await load.add(messages)
            advance()
            if bad:
                if load:
                    await load.stop()
                raise bad
        if load:
            await load.finish()


async def _opened(plan: PublishPlan, subject: str, stack: AsyncExitStack) -> Load:
    if plan.mode == "plain":
        return PlainLoad(plan.settings)
    if plan.pack:
        return PackedLoad(await stack.enter_async_context(connect_client(plan.settings)), plan.pack)
    broker = await stack.enter_async_context(connect(plan.settings))
    stream = plan.stream or await stream_of(broker.jetstream, subject)
    if plan.mode == "fast":
        return FastLoad(plan.settings, stream, broker.jetstream, IngestOptions(on_gap="resend"))
    return AtomicLoad(await Publisher.connect(plan.settings, name="penstock-publish"), stream, plan.batch_size)


@contextmanager
def _progress(reader: LineReader) -> Iterator[Callable[[], None]]:
    """A bar of lines; how many there are is estimated from how far the file is read."""
    with progress() as bar:
        task = bar.add_task("lines", total=None)

        def advance() -> None:
            total = reader.size and int(reader.lines * max(1.0, reader.size / max(1, reader.bytes_read)))
            bar.update(task, completed=reader.lines, total=total)

        yield advance


def _range(first: int | None, last: int, count: int) -> tuple[int | str, int | str]:
    """The sequences of what was stored: none when all of it was there before."""
    return ("?" if first is None else first, last) if count else ("", "")


def _tell(plan: PublishPlan, failure: PenstockError | None, as_json: bool) -> None:
    """What is stored where: also, and above all, when it ended early."""
    report = plan.report or LoadReport(plan.mode)
    if as_json:
        print_json(_document(plan, report, failure))
        return
    if report.count or not failure:
        rows = [
            (one.stream, *_range(one.first, one.last, one.count), one.count, one.duplicates or "")
            for one in report.ranges.values()
        ]
        right = [(name, "right") for name in ("first", "last", "messages", "duplicates")]
        out.print(table("stored", ["stream", *right], rows) if rows else "nothing stored: the input has no lines")
    else:
        err.print("nothing is known to be stored" if report.in_doubt else "nothing is stored")
    for note in _notes(plan, report):
        err.print(note, soft_wrap=True, markup=False)


def _notes(plan: PublishPlan, report: LoadReport) -> Iterator[str]:
    if plan.pack and report.rows:
        yield f"{report.rows} rows in {report.count} packs"
    if report.batches > 1:
        yield f"{report.batches} batches: each is atomic by itself, the whole is not"
    if report.maybe_twice:
        yield (
            f"the server forgot a batch while {report.maybe_twice} messages of it were in doubt; they were sent again "
            "and may be stored twice (with --message-id they are not)"
        )
    if report.in_doubt:
        lines = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in report.in_doubt)
        yield f"in doubt: lines {lines} were sent and may be stored; no answer came"
    if plan.skipped:
        yield f"{plan.skipped} bad lines were left out:"
        yield from (f"  {bad}" for bad in plan.bad)
        if plan.skipped > len(plan.bad):
            yield f"  … and {plan.skipped - len(plan.bad)} more"


def _document(plan: PublishPlan, report: LoadReport, failure: PenstockError | None) -> dict[str, Any]:
    return {
        "mode": report.mode,
        "lines": plan.reader.lines,
        "stored": [asdict(one) for one in report.ranges.values()],
        "messages": report.count,
        "rows": report.rows if plan.pack else None,
        "batches": report.batches,
        "maybe_twice": report.maybe_twice,
        "in_doubt": [{"first_line": first, "last_line": last} for first, last in report.in_doubt],
        "skipped": plan.skipped,
        "bad_lines": [{"line": bad.number, "reason": bad.reason} for bad in plan.bad],
        "error": None if failure is None else str(failure),
    }
