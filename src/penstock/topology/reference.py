"""The reference pages, written from the same tables that the code reads: `make docs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.topology import fields, gateway
from penstock.topology.effects import CHANGE_WORDS
from penstock.topology.kinds import Duration, Field, ListOf, RecordKind, Size, WordOr
from penstock.topology.rules import RULES, Severity
from penstock.topology.schema import schema
from penstock.units import DURATION_UNITS, SIZE_UNITS, format_duration, format_size, from_nanoseconds

SECTIONS: tuple[tuple[str, str, Sequence[Field]], ...] = (
    (
        "Environments",
        "`environments.<name>`: one place where the platform lives. `--env` chooses; the only one, or `dev`, is the "
        "default. What stands under `streams`, `consumers`, `groups` and `pipelines` of an environment is laid over "
        "the rest.",
        fields.ENVIRONMENT_FIELDS,
    ),
    ("Streams", "`streams.<name>`: the name is the stream's name on the server.", fields.STREAM_FIELDS),
    (
        "Consumers",
        "`consumers.<name>`: a durable consumer; the name is its position. Pull, explicit ack, unless it says `why`.",
        fields.CONSUMER_FIELDS,
    ),
    (
        "Groups",
        "`groups.<name>`: a [group of workers](groups.md) that share the partitions of a stream. Its workers make its "
        "consumers when they run; `penstock work --group NAME` and `@app.workers` take from here what they are not "
        "told.",
        fields.GROUP_FIELDS,
    ),
    ("Pipelines", "`pipelines.<name>`: a Spark pipeline from a stream to files or streams.", fields.PIPELINE_FIELDS),
    (
        "Services",
        "`services.<name>`: what a program writes, for `penstock permissions`. What it reads is said by the consumers "
        "whose `service` it is.",
        fields.SERVICE_FIELDS,
    ),
    ("Gateway", "`gateway`: who may call `penstock gateway`; see [the gateway](gateway.md).", gateway.GATEWAY_FIELDS),
    (
        "Gateway identities",
        "`gateway.identities.<name>`: a caller, proven by a client certificate or a bearer token.",
        gateway.GATEWAY_IDENTITY_FIELDS,
    ),
)

INTRODUCTION = """\
# The platform file

<!-- Written by `make docs` from the tables in src/penstock/topology/fields.py. Edit those. -->

`penstock.yaml` declares streams, durable consumers, groups of workers and pipelines. Its top-level keys are
`environments`, `streams`, `consumers`, `groups`, `pipelines`, `services` and `gateway`; `asyncapi`, the path of the
AsyncAPI document that describes the events; `history`, how long `penstock ui` keeps what it sees (`1d`, without it
nothing); and `name`, which marks what this platform owns where several share a server. A platform does not change what
another one owns (`--take-over` does), and only a platform with a name can `--prune`; what it has declared once, made or
found, is its own. A line taken out of the file brings the server's default back.
Unknown keys are errors that name the nearest known key; every error says file, line and column.
`penstock import` writes such a file from a running server. Editors complete and check it by
[penstock.schema.json](penstock.schema.json); the first line `# yaml-language-server: $schema=PATH` says where that is.

- **Durations** are a number and a unit: {durations}; several may follow each other, as in `1h30m`. `0` needs no unit.
- **Sizes** are a number and a unit: {sizes}; a plain number is bytes. `k`, `M` and `G` alone are refused, since they
  could mean 1000s or 1024s.
- **`unlimited`** is a word for every limit that can be absent.
- **`${{NAME}}`** is replaced by the environment's variable of that name, or else by an exported one. `$${{` is a plain
  `${{`.
- **YAML anchors** and `<<` work. A key that is written twice is an error.

"""


def platform_page() -> str:
    """The reference of the platform file, as Markdown."""
    units = {"durations": _code(DURATION_UNITS), "sizes": _code(SIZE_UNITS)}
    parts = [INTRODUCTION.format(**units)]
    for title, about, table in SECTIONS:
        living = table in (fields.STREAM_FIELDS, fields.CONSUMER_FIELDS)
        parts.append(f"## {title}\n\n{about}\n\n{_table(table, with_change=living)}")
    parts.append("## Parts\n")
    parts += [f"### {record.what.capitalize()}\n\n{_table(record.fields)}" for record in _records()]
    words = {**CHANGE_WORDS, "ours": "the server does not see it"}
    changes = "\n".join(f"- **{word}**: {meaning}" for word, meaning in words.items())
    parts.append(f"## What a change costs\n\n{changes}\n")
    return "\n".join(parts)


def _code(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(table: Sequence[Field], with_change: bool = False) -> str:
    """The fields as a Markdown table; what a change costs only where the server has something to say about it."""
    heads = ["key", "value", "default", *(["change"] if with_change else []), "since", ""]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for field in table:
        key = f"`{field.key}`" + (" (required)" if field.required else "")
        change = [field.change if field.sent else "ours"] if with_change else []
        lines.append(_row([key, field.kind.describe(), _default(field), *change, field.since or "", field.doc]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: Field) -> str:
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(field.kind, Duration):
        return f"`{format_duration(from_nanoseconds(value))}`" if value else "unlimited"
    if value == -1:
        return "unlimited"
    return f"`{format_size(value) if isinstance(field.kind, Size) else value}`"


def _records() -> list[RecordKind]:
    """Every nested record, in the order in which it is met."""
    found: dict[str, RecordKind] = {}

    def visit(table: Sequence[Field]) -> None:
        for field in table:
            kind: Any = field.kind.item if isinstance(field.kind, ListOf) else field.kind
            kind = kind.record if isinstance(kind, WordOr) else kind
            if isinstance(kind, RecordKind) and kind.anchor not in found:
                found[kind.anchor] = kind
                visit(kind.fields)

    for _, _, table in SECTIONS:
        visit(table)
    return list(found.values())


LINT_INTRODUCTION = """\
# What lint says

<!-- Written by `make docs` from the rules in src/penstock/topology/rules/. Edit those. -->

`penstock lint FILE` exits 2 when it finds an error, with `--strict` also for a warning, and 0 otherwise. A finding that
does not apply is switched off where it is found, with the reason: `ignore: {{S03: "the archive keeps a copy"}}`.
A code never changes its meaning.

{severities}

"""


def lint_page() -> str:
    """Every lint rule, as Markdown."""
    severities = "\n".join(f"- **{severity.value}**: {_MEANING[severity]}" for severity in Severity)
    lines = ["| code | severity | what | why it matters |", "|---|---|---|---|"]
    lines += [f"| {r.code} | {r.severity.value} | {r.title} | {r.why} |" for _, r in sorted(RULES.items())]
    return LINT_INTRODUCTION.format(severities=severities) + "\n".join(lines) + "\n"


_MEANING = {
    Severity.ERROR: "the server refuses it, or messages are lost or repeated",
    Severity.WARNING: "it works until something else goes wrong",
    Severity.INFO: "worth knowing",
}


def pages() -> Iterator[tuple[str, str]]:
    """The pages by file name."""
    yield "platform-file.md", platform_page()
    yield "lint.md", lint_page()
    yield "penstock.schema.json", json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")
