"""`penstock view`: messages of any stream, as they lie there."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import click

from penstock.app.browse import StoredRow, unpacked
from penstock.app.client import Stream, connect
from penstock.cli.common import PLATFORM_FILE, RESOURCE_NAME, Context, err, flag_values, json_option, out, sync, table
from penstock.cli.terminal import echo, echo_data
from penstock.errors import PenstockError, UsageError
from penstock.events.documents import MISSING, Documents, FieldFilter, field_of, field_text
from penstock.jetstream.model import Json, StoredMessage
from penstock.printable import json_text
from penstock.units import parse_since

LIMIT = 20
SHOWN = 60
"""Characters of a message's data in the table."""


@click.command()
@click.argument("stream", type=RESOURCE_NAME)
@click.option("--subject", "subjects", multiple=True, metavar="FILTER", help="Only these subjects. Repeatable.")
@click.option("--since", metavar="TIME", help="Stored since then: `15m`, `2h`, or a time such as 2026-11-16T12:00:00Z.")
@click.option("--first", type=click.IntRange(min=1), metavar="SEQ", help="Begin with this sequence.")
@click.option("--last", type=click.IntRange(min=1), metavar="SEQ", help="End with this sequence.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help=f"So many at most.  [default: the last {LIMIT}]")
@click.option(
    "--json-path", "paths", multiple=True, metavar="PATH",
    help="Show this field of the data, such as payload.project_id; PATH=VALUE: only messages that have it. Repeatable.",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="The data and nothing else, one message a line.")
@click.option("--packed", is_flag=True, help="Show packs as they lie there, not the rows in them.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@json_option
@click.pass_obj
@sync
async def view(
    context: Context, /, stream: str, subjects: tuple[str, ...], since: str | None, first: int | None, last: int | None,
    limit: int | None, paths: tuple[str, ...], raw: bool, packed: bool, follow: bool, as_json: bool,
) -> None:  # fmt: skip
    """Look at the messages of STREAM, whatever its retention. No consumer is made, and nothing is acknowledged.

    Without --first or --since the last ones are shown. --json prints one object a line. Avro and Protobuf are decoded
    by the schemas of the pipelines in the platform file: the one named by --file, or penstock.yaml in this folder.
    Of a message that is a pack its rows are shown, all with its sequence.

    \b
    Example:
      penstock view BILLING --subject 'platform.billing.usage.>' --since 1h --json-path payload.project_id=proj-001
      penstock view ORDERS -f --raw
    """
    if raw and as_json:
        raise UsageError("--raw and --json do not go together")
    filters = [FieldFilter.parse(path) for path in paths]
    for wish in filters:
        if "" in wish.path.split("."):
            raise UsageError(f"--json-path: {wish.path!r} has an empty part; write names with single dots: items.0.id")
    fields, wanted = [one.path for one in filters], [one for one in filters if one.value is not None]
    documents = _documents(context)
    show = Lines(raw, fields, documents) if raw or as_json or follow else ViewRows(fields, documents)
    with flag_values("--since"):
        moment = None if since is None else parse_since(since)
    async with connect(context.settings()) as client:
        if first is None and since is None and not subjects and not wanted:  # the last ones can be computed
            first = await _first_of_last(client.stream(stream), last, limit or LIMIT)
        options: Any = {"since": moment, "first": first, "last": last, "follow": follow}
        found = (
            one
            async for message in client.stream(stream).messages(subjects, **options)
            for one in ((message,) if packed else unpacked(message))
            if _has(one, wanted, documents)
        )
        newest = first is None and since is None and not follow
        async for one in _last(found, limit or LIMIT) if newest else _at_most(found, limit):
            show.add(one, as_json)
    show.end(stream)


def _documents(context: Context) -> Documents:
    """With the schemas of the platform file. One that nobody named, and that cannot be loaded, is told and not used."""
    try:
        return Documents.of(context.platform())
    except PenstockError as exc:
        if context.file or context.env:
            raise
        err.print(f"{PLATFORM_FILE} is not used to decode messages: {exc}", markup=False, soft_wrap=True)
        return Documents()


class Lines:
    """One message a line, as it comes."""

    def __init__(self, raw: bool, fields: list[str], documents: Documents) -> None:
        self._raw = raw
        self._fields = fields
        self._documents = documents

    def add(self, message: StoredMessage, as_json: bool) -> None:
        if self._raw:
            echo_data(message.data)
        elif as_json:
            echo(_json_line(message, self._documents))
        else:
            out.print(*map(str, _cells(message, self._fields, self._documents)), markup=False, soft_wrap=True)
        sys.stdout.flush()

    def end(self, stream: str) -> None: ...


class ViewRows:
    """A table."""

    def __init__(self, fields: list[str], documents: Documents) -> None:
        self._fields = fields
        self._documents = documents
        self._rows: list[tuple[Any, ...]] = []

    def add(self, message: StoredMessage, as_json: bool) -> None:
        self._rows.append(_cells(message, self._fields, self._documents))

    def end(self, stream: str) -> None:
        if not self._rows:
            err.print(f"no messages in {stream} match", markup=False)
            return
        out.print(
            table(None, [("seq", "right"), "stored", ("subject", "name"), *(self._fields or ["data"])], self._rows)
        )


def _cells(message: StoredMessage, fields: list[str], documents: Documents) -> tuple[Any, ...]:
    stored = f"{message.time:%Y-%m-%d %H:%M:%S}" if message.time else ""
    if fields:
        document = _document(message, documents)
        shown = [field_text(field_of(document, field)) for field in fields]
    else:
        text = _text(message, documents)
        shown = [text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"]
    place = f"{message.sequence}.{message.row}" if isinstance(message, StoredRow) else message.sequence
    return (place, stored, message.subject, *shown)


def _text(message: StoredMessage, documents: Documents) -> str:
    """The data as it is if it is text, else as its schema reads it."""
    try:
        return message.data.decode()
    except UnicodeDecodeError:
        document = _document(message, documents)
        return message.data.decode(errors="backslashreplace") if document is MISSING else json.dumps(document)


def _json_line(message: StoredMessage, documents: Documents) -> str:
    try:
        return json_text(_json(message, _document(message, documents)), allow_nan=False)
    except (ValueError, RecursionError):  # no JSON for others: NaN, or nested too deeply
        return json_text(_json(message, MISSING))


def _json(message: StoredMessage, document: Any) -> Json:
    try:
        text = message.data.decode()
    except UnicodeDecodeError:
        text = None
    body = (
        {"json": document}
        if document is not MISSING
        else {"text": text}
        if text is not None
        else {"hex": message.data.hex()}
    )
    return {
        "stream": message.stream,
        "sequence": message.sequence,
        **({"row": message.row} if isinstance(message, StoredRow) else {}),
        "time": message.time.isoformat() if message.time else None,
        "subject": message.subject,
        "headers": message.headers,
        **body,
    }


def _document(message: StoredMessage, documents: Documents) -> Any:
    return documents.read(message.stream, message.subject, message.data)


def _has(message: StoredMessage, wanted: list[FieldFilter], documents: Documents) -> bool:
    if not wanted:
        return True
    document = _document(message, documents)
    return all(one.matches(document) for one in wanted)


async def _first_of_last(stream: Stream, last: int | None, count: int) -> int:
    """The sequence of the first of the last `count` messages that are there: many sequences may hold none."""
    state = (await stream.info()).state
    end, span = last or state.last_seq, count
    while True:
        first = max(end - span + 1, state.first_seq, 1)
        there = [one.sequence async for one in stream.messages(first=first, last=end)]
        if len(there) >= count or first <= max(state.first_seq, 1):
            return there[-count:][0] if there else first
        span *= 8


async def _at_most(found: AsyncIterator[StoredMessage], limit: int | None) -> AsyncIterator[StoredMessage]:
    count = 0
    async for one in found:
        yield one
        count += 1
        if count == limit:
            return


async def _last(found: AsyncIterator[StoredMessage], limit: int) -> AsyncIterator[StoredMessage]:
    kept: deque[StoredMessage] = deque(maxlen=limit)
    async for one in found:
        kept.append(one)
    for one in kept:
        yield one
