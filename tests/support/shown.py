"""What a page of `penstock ui` shows in a browser, beside a document that a command prints with `--json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from string import Formatter
from typing import Any

from playwright.sync_api import Page

from penstock.units import approximate_size, parse_duration

CELLS = """(selector) => [...document.querySelectorAll(selector)].map((row) => Object.fromEntries(
  [...row.querySelectorAll('[data-label], :scope > div > dt')].map((one) => {
    const cell = (one.dataset.label ? one : one.nextElementSibling).cloneNode(true);
    cell.querySelectorAll('.undeclared, .purpose, svg').forEach((part) => part.remove());
    return [one.dataset.label || one.textContent, cell.textContent.replace(/\\s+/g, ' ').trim()];
  })))"""
"""Rows of a table, or lists of facts: the text of each cell by its label."""
TEXTS = """(selector) => [...document.querySelectorAll(selector)]
  .map((one) => one.textContent.replace(/\\s+/g, ' ').trim())"""
SEEN = re.compile(r"Seen at ([\d: -]{19}) UTC")
ROUNDED = timedelta(seconds=2.5)
"""Ages and times on a page are whole seconds."""

Row = Mapping[str, Any]
Figure = str | Callable[[Any], object]
"""What a column shows of a document: a format of its fields, or a function that finds a text, an `Age` or a pattern."""
ANYTHING = re.compile(".*")


@dataclass(frozen=True, slots=True)
class Age:
    """How old something was when the page was made, by when it began."""

    since: datetime

    @classmethod
    def of(cls, document: Mapping[str, Any], seconds: float) -> Age:
        """What was so many seconds old when the document was made."""
        return cls(datetime.fromisoformat(document["taken_at"]) - timedelta(seconds=seconds))


def rows(tab: Page, selector: str) -> list[Row]:
    """Every row of a table, or every list of facts."""
    found: list[Row] = tab.evaluate(CELLS, selector)
    return [one for one in found if one]


def texts(tab: Page, selector: str) -> list[str]:
    """The text of every element that matches."""
    found: list[str] = tab.evaluate(TEXTS, selector)
    return found


def seen_at(tab: Page) -> datetime:
    """When the server was looked at for this page."""
    found = SEEN.search(tab.locator("footer").inner_text())
    assert found, "the page does not say when it was made"
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC)


def differences(
    shown: Sequence[Row], documents: Iterable[Any], columns: Mapping[str, Figure], taken_at: datetime, key: str = ""
) -> list[str]:
    """Where rows of a page differ from documents. Every cell is compared: one that `columns` does not name differs.

    Rows are found by the columns that `key` names, and stand in the order of the documents where it names none.
    """
    names = key.split(", ") if key else []
    wanted = [{name: _figure(figure, one) for name, figure in columns.items()} for one in documents]
    if names:
        shown = sorted(shown, key=lambda row: [row.get(name, "") for name in names])
        wanted.sort(key=lambda row: [str(row[name]) for name in names])
    if len(shown) != len(wanted):
        return [f"{len(shown)} rows are shown, and {len(wanted)} are told: {shown} {wanted}"]
    return [
        f"{name} of {next(iter(row.values()))}: the page shows {row.get(name)!r}, and {told.get(name)!r} is told"
        for row, told in zip(shown, wanted, strict=True)
        for name in {**row, **told}
        if not _same(row.get(name), told.get(name), taken_at)
    ]


def _figure(figure: Figure, document: Any) -> object:
    return figure(document) if callable(figure) else written(figure, document)


def _same(text: Any, figure: object, taken_at: datetime) -> bool:
    if isinstance(figure, re.Pattern):
        return text is not None and figure.fullmatch(text) is not None
    if isinstance(figure, Age):
        return bool(text) and abs(taken_at - parse_duration(text) - figure.since) <= ROUNDED
    return bool(text == figure)


class _Written(Formatter):
    """Fields of a document as pages write them; what is not there is left out."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        document = args[0]
        return document[key] if isinstance(document, Mapping) else getattr(document, str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        match format_spec:
            case "moment":
                return f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
            case "size":
                return approximate_size(value)
            case "list":
                return ", ".join(map(str, value))
            case "line":
                return " ".join(value.split())
        return format(value, format_spec)


def written(text: str, document: Any) -> str:
    """The text with the fields of a document that it names: `{messages:,}`, `{last_time:moment}`, `{bytes:size}`."""
    return _Written().vformat(text, [document], {})


def shortened(text: str, most: int) -> str:
    """A text as pages cut it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
