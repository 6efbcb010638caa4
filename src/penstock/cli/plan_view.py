"""How a plan and the findings of a verification look to a person: one block a resource, values in human units."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from penstock.cli.terminal import Text
from penstock.jetstream.metadata import PLATFORM
from penstock.topology import ownership
from penstock.topology.compare import FieldChange
from penstock.topology.fields import CONSUMER_BY_WIRE, CONSUMER_LIMITS, STREAM_BY_WIRE
from penstock.topology.kinds import Duration, Kind, ListOf, Size
from penstock.topology.lint import Concerns
from penstock.topology.plan import Change, ChangeKind, Plan
from penstock.topology.resource import Resource
from penstock.topology.risk import Risk
from penstock.topology.verify import Check, Deviation
from penstock.units import counted, format_duration, format_size, from_nanoseconds

SYMBOLS = {
    ChangeKind.CREATE: ("+", "green"),
    ChangeKind.UPDATE: ("~", "yellow"),
    ChangeKind.RECREATE: ("!", "red"),
    ChangeKind.DELETE: ("-", "red"),
}
STYLES = {
    Risk.CREATE: "green",
    Risk.SAFE: "green",
    Risk.LOSES_POSITION: "bold red",
    Risk.LOSES_DATA: "bold red",
    Risk.IMPOSSIBLE: "bold magenta",
}
WORDS = {
    Risk.CREATE: "to create",
    Risk.SAFE: "safe",
    Risk.LOSES_POSITION: "losing a position",
    Risk.LOSES_DATA: "losing data",
    Risk.IMPOSSIBLE: "impossible",
}
UNLIMITED = -1


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_lines(plan: Plan) -> Iterator[Text]:
    """The whole plan: a block for each change, what is left alone, and a summary."""
    for change in plan.changes:
        yield from change_block(change)
    for one in plan.unreached:
        yield Text.assemble(("? ", "bold yellow"), (str(one.resource), "bold"), f"  not looked at: {one.reason}")
    if plan.orphans:
        names = ", ".join(str(orphan) for orphan in plan.orphans)
        yield Text(f"  no longer declared, left alone without --prune: {names}", style="dim")
    yield summary(plan)


def concern_lines(concerns: Concerns, allow_destroy: bool) -> Iterator[Text]:
    """What a plan has to say about the file itself."""
    verdict = "allowed by --allow-destroy" if allow_destroy else "refused without --allow-destroy"
    for one in concerns.renames:
        fix = "" if allow_destroy else f"; {one.fix}"
        yield Text(f"{verdict}: {one.code}: {one.message}{fix}", style="yellow")
    if concerns.warnings:
        yield Text(f"{counted(concerns.warnings, 'lint warning')}; see `penstock lint`", style="dim")


def change_block(change: Change) -> Iterator[Text]:
    symbol, colour = SYMBOLS[change.kind]
    if change.destroys or change.risk is Risk.IMPOSSIBLE:
        colour = "red"
    yield Text.assemble(
        (f"{symbol} ", f"bold {colour}"), (str(change.resource), "bold"), "  ", (_label(change), STYLES[change.risk])
    )
    fields = [field for field in change.fields if not ownership.is_mark(field.name)]
    if change.kind is ChangeKind.CREATE:
        yield Text("    " + ", ".join(f"{f.name} {human(f, f.after, change.resource)}" for f in fields), style="dim")
    else:
        yield from (_field_line(field, change.resource) for field in fields)
    if change.owner and change.risk is not Risk.IMPOSSIBLE:
        yield Text(f"    taken over from platform {change.owner!r}", style="yellow")
    elif change.only_marks:
        yield Text(f"    metadata: {_marks(change)}", style="dim")
    if change.reason:
        yield Text(f"    {change.reason}", style=STYLES[change.risk])


def _marks(change: Change) -> str:
    if any(field.name == f"metadata.{PLATFORM}" for field in change.fields):
        return "marked as owned by this platform"
    return "remembers which fields are declared now"


def _label(change: Change) -> str:
    if change.risk is Risk.IMPOSSIBLE:
        return str(change.risk)
    return f"{change.kind}, {change.risk}" if change.destroys else str(change.kind)


def _field_line(field: FieldChange, resource: Resource) -> Text:
    before, after = human(field, field.before, resource), human(field, field.after, resource)
    return Text.assemble(f"    {field.name}: ", (before, "red"), " → ", (after, "green"))


def summary(plan: Plan) -> Text:
    if not plan:
        style = "yellow" if plan.unreached else "green"
        return Text(f"Nothing to do: {counted(len(plan.unchanged), 'resource')} as declared.", style=style)
    counts = plan.counts()
    parts = [f"{counts[risk]} {WORDS[risk]}" for risk in Risk if counts[risk]]
    return Text(
        f"{counted(len(plan.changes), 'change')}: {', '.join(parts)}; {len(plan.unchanged)} unchanged.", style="bold"
    )


# -- findings ----------------------------------------------------------------------------------------------------------


def finding_lines(findings: Sequence[Deviation], counts: dict[Check, int]) -> Iterator[Text]:
    """Each check with its result, and below it what is wrong."""
    for check in Check:
        found = [finding for finding in findings if finding.check is check]
        mark = ("✗", "bold red") if found else ("✓", "bold green")
        yield Text.assemble(mark, f" {check} ", (f"({counts[check]})", "dim"))
        for finding in found:
            yield from _finding_block(finding)


def _finding_block(finding: Deviation) -> Iterator[Text]:
    yield Text.assemble("    ", (str(finding.resource), "bold"), f": {finding.problem}")
    for field in finding.fields:
        declared, actual = (human(field, value, finding.resource) for value in (field.after, field.before))
        yield Text.assemble(f"      {field.name}: declared ", (declared, "green"), ", found ", (actual, "red"))


# -- values ------------------------------------------------------------------------------------------------------------


def human(field: FieldChange, value: Any, resource: Resource) -> str:
    """A value of the field as a person would write it in the platform file."""
    if value is None:
        return "(default)" if value is field.after else "(not set)"
    return _human(_kind(field.name, resource), value)


def _kind(name: str, resource: Resource) -> Kind | None:
    table = STREAM_BY_WIRE if resource.consumer is None else CONSUMER_BY_WIRE
    limits = {f"consumer_limits.{field.name}": field for field in CONSUMER_LIMITS.fields}
    row = {**table, **limits}.get(name)
    return row.kind if row else None


def _human(kind: Kind | None, value: Any) -> str:
    if isinstance(value, list):
        inner = kind.item if isinstance(kind, ListOf) else None
        return f"[{', '.join(_human(inner, item) for item in value)}]"
    if isinstance(value, bool | dict):
        return json.dumps(value, sort_keys=True)
    if value == UNLIMITED and not isinstance(value, str):
        return "unlimited"
    if isinstance(kind, Duration):
        return "unlimited" if value == 0 and kind.unlimited == 0 else format_duration(from_nanoseconds(value))
    return format_size(value) if isinstance(kind, Size) else str(value)


def shown(lines: Iterable[Text]) -> RenderableType:
    """Lines as one text, so that they are printed in one go."""
    return Text("\n").join(lines)
