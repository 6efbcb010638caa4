"""How dead letters look in a terminal and as JSON."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from penstock.cli.common import Column, table
from penstock.cli.terminal import Text
from penstock.deadletter.letters import FiledLetter
from penstock.deadletter.reconcile import Reconciled
from penstock.deadletter.selection import Group
from penstock.jetstream.model import Json, StoredMessage
from penstock.units import approximate_duration, counted

GROUPS: list[Column] = ["gave up, error", ("letters", "right"), ("oldest", "right"), ("newest", "right"), "fingerprint"]
LETTERS: list[Column] = ["id", ("sequence", "right"), ("age", "right"), ("tries", "right"), "event", "error"]
MESSAGE_WIDTH = 60


def groups_table(groups: Sequence[Group]) -> Table:
    """Consumers, each with its kinds of errors below it."""
    total = sum(group.count for group in groups)
    return table(f"Dead letters ({total:,})", GROUPS, _group_rows(groups))


def _group_rows(groups: Sequence[Group]) -> Iterator[list[Any]]:
    for (stream, reader), some in groupby(groups, key=lambda group: (group.stream, group.reader)):
        of_reader = list(some)
        yield [Text(f"{stream or '?'}/{reader}", style="bold"), f"{sum(group.count for group in of_reader):,}"]
        for group in of_reader:
            words = f"{group.error}: {group.template}" if group.template else group.error
            again = f" (replayed {group.most_replays}×)" if group.most_replays else ""
            yield [f"  {_cut(words)}{again}", f"{group.count:,}", _age(group.oldest), _age(group.newest),
                   group.fingerprint]  # fmt: skip


def shown(letters: Sequence[FiledLetter]) -> Table:
    """A line a letter."""
    rows = (
        (filed.short_id, filed.letter.sequence or "", _age(filed.letter.last_failure or filed.time),
         filed.letter.deliveries or "", filed.letter.event_id or "", _cut(_error(filed)))
        for filed in letters
    )  # fmt: skip
    return table(None, LETTERS, rows)


def plan_table(groups: Sequence[Group], skipped: Counter[str]) -> RenderableType:
    """What would be done, and what would be left."""
    head = groups_table(groups) if groups else Text("no dead letters match")
    left = [Text(f"{counted(count, 'letter')} would be left: {why}") for why, count in skipped.most_common()]
    return Lines(head, *left, Text("nothing was changed"))


def told(filed: FiledLetter) -> str:
    """Everything about one letter, for eyes."""
    letter = filed.letter
    facts: dict[str, Any] = {
        "letter": filed.id,
        "filed": f"{filed.stream} {filed.sequence}, on {filed.subject}",
        "gave up": letter.reader,
        "worker": letter.worker,
        "message": f"{letter.stream} {letter.sequence}, on {letter.subject}",
        "stored": letter.stored,
        "event_id": letter.event_id,
        "deliveries": letter.deliveries or "not known",
        "first failure": letter.first_failure or "not known",
        "last failure": letter.last_failure,
        "replays": letter.replays,
        "captured by": letter.captured_by,
        "error": _error(filed),
        "fingerprint": letter.fingerprint,
    }
    lines = [f"{name + ':':<15}{value}" for name, value in facts.items() if value not in (None, "")]
    lines += ["headers:", *(f"  {name}: {value}" for name, values in letter.headers.items() for value in values)]
    if letter.failure.stack:
        lines += ["stack:", *(f"  {line}" for line in letter.failure.stack.splitlines())]
    body = "(gone)" if letter.body_gone else _text(letter.body) or f"({len(letter.body)} bytes, not text)"
    return "\n".join([*lines, "body:", f"  {body}"])


def letter_json(filed: FiledLetter, body: bool) -> Json:
    """A letter for machines; these names stay."""
    letter = filed.letter
    made: Json = {
        "id": filed.id,
        "filed": {"stream": filed.stream, "subject": filed.subject, "sequence": filed.sequence, "time": filed.time},
        "stream": letter.stream,
        "subject": letter.subject,
        "sequence": letter.sequence,
        "stored": letter.stored,
        "consumer": letter.consumer,
        "worker": letter.worker,
        "pipeline": letter.pipeline,
        "event_id": letter.event_id,
        "deliveries": letter.deliveries,
        "error": {
            "type": letter.failure.type,
            "message": letter.failure.message,
            "stack": letter.failure.stack,
            "fingerprint": letter.fingerprint,
        },
        "first_failure": letter.first_failure,
        "last_failure": letter.last_failure,
        "replays": letter.replays,
        "captured_by": letter.captured_by,
        "body_gone": letter.body_gone,
    }
    if body:
        made["headers"] = {name: list(values) for name, values in letter.headers.items()}
        made["body"] = _text(letter.body)
        made["body_base64"] = base64.b64encode(letter.body).decode()
    return made


def reconciled_table(found: Sequence[Reconciled]) -> Table:
    columns: list[Column] = ["consumer", ("marked dead", "right"), ("stored now", "right"), ("known", "right"), ""]
    rows = ((f"{one.stream}/{one.consumer}", one.marked, one.stored, one.known, one.undecided or "") for one in found)
    return table(None, columns, rows)


def audit_table(found: Sequence[tuple[StoredMessage, Json]]) -> Table:
    columns: list[Column] = ["when", "action", "letter", "gave up", "who", "reason"]
    return table(None, columns, (_audit_row(message, raw) for message, raw in found))


def _audit_row(message: StoredMessage, raw: Mapping[str, Any]) -> list[Any]:
    origin = raw["origin"]
    when = f"{message.time:%Y-%m-%d %H:%M:%S}" if message.time else ""
    gave_up = f"{origin['stream']}/{origin['consumer'] or origin['pipeline'] or '?'}"
    return [when, raw["action"], raw["letter"].partition(".")[0], gave_up, raw["actor"], raw["reason"]]


def _error(filed: FiledLetter) -> str:
    failure = filed.letter.failure
    return f"{failure.type}: {failure.message}" if failure.message else failure.type


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_WIDTH else f"{text[: MESSAGE_WIDTH - 1]}…"


def _age(moment: datetime | None) -> str:
    return approximate_duration(max(datetime.now(UTC) - moment, timedelta())) if moment else ""


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
