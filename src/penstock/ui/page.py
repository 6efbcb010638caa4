"""What every page has: the person, the snapshot, the form, and how figures are written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.errors import ConfigError
from penstock.jetstream.model import StreamInfo
from penstock.observe import record
from penstock.observe.flow import FlowNode, NodeKind, is_declared, per_second, word_for
from penstock.observe.snapshot import Rates, Snapshot, rates
from penstock.ui import charts
from penstock.ui.access import Access, Person
from penstock.ui.runs import Runs
from penstock.ui.watch import Watch
from penstock.units import approximate_duration, approximate_size

SECTIONS = [
    ("Flow", "/"), ("Streams", "/streams"), ("Consumers", "/consumers"), ("Groups", "/groups"),
    ("Pipelines", "/pipelines"), ("Dead letters", "/letters"), ("Proof", "/proof"),
]  # fmt: skip
PATHS = {
    NodeKind.STREAM: "/streams/{}", NodeKind.OUTPUT: "/streams/{}", NodeKind.LETTERS: "/letters",
    NodeKind.GROUP: "/groups/{}", NodeKind.PIPELINE: "/pipelines/{}",
    NodeKind.SERVICE: "/consumers?service={}", NodeKind.CONSUMER: "/consumers?name={}",
}  # fmt: skip

MAX_SHOWN = 65_536
"""Characters of a body on a page."""
MAX_PARSED = 4 * 2**20
"""Bytes of a body that is looked at as JSON."""


def link(node: FlowNode) -> str | None:
    """The page of a node; None where there is nothing to look at."""
    path = PATHS.get(node.kind)
    return path.format(quote(node.name, safe="", errors="surrogatepass")) if path else None


def own_headers(headers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Headers without those of an atomic batch, which stand beside the subject."""
    batch = ("Nats-Batch-Id", "Nats-Batch-Sequence") if "Nats-Batch-Id" in headers else ()
    return {name: values for name, values in headers.items() if name not in batch}


def age(value: timedelta | float | None) -> str:
    if value is None:
        return "never"
    return approximate_duration(value if isinstance(value, timedelta) else timedelta(seconds=value))


def span(value: timedelta) -> str:
    """A length of time that may be short."""
    seconds = value.total_seconds()
    return age(value) if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def moment(value: datetime | None) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if value else ""


def number(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}"


def breakable(text: object) -> Markup:
    """A name that may go on in the next line behind each of its parts, rather than in the middle of a word."""
    return Markup(re.sub(r"([._/-])(?=[^._/-])", r"\1<wbr>", str(escape(str(text)))))


def readable(data: bytes, most: int = MAX_SHOWN) -> str:
    """A body as people can read it, cut at `most` characters: JSON with indents, text, or hexadecimal."""
    shown = _readable(data, most)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _readable(data: bytes, most: int) -> str:
    if len(data) <= MAX_PARSED:
        try:
            return _indented(json.loads(data), most)
        except (ValueError, RecursionError):
            pass
    try:
        return data.decode()[: most + 1]
    except UnicodeDecodeError:
        return data[: most // 3 + 1].hex(" ")


def _indented(value: Any, most: int) -> str:
    """JSON with indents, or its beginning: nested values with indents can be very much larger than without."""
    parts, size = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return "".join(parts)


class Site:
    """The templates, and what all pages say about where they look."""

    def __init__(self, title: str, place: str) -> None:
        """`title`: the platform, `place`: its environment and servers."""
        self.title = title
        self.place = place
        self._live: dict[str, bool] = {}
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("penstock.ui"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        self._templates.filters |= {
            "age": age, "span": span, "moment": moment, "number": number, "size": approximate_size, "rate": per_second,
            "readable": readable, "word_for": word_for, "is_declared": is_declared,
            "trend": charts.trend, "breakable": breakable, "own_headers": own_headers,
            "path": lambda text: quote(str(text), safe="", errors="surrogatepass"),
            "query": lambda text: quote(str(text), safe="", errors="surrogatepass"),
        }  # fmt: skip
        self._templates.globals |= {"sections": SECTIONS, "link": link, "heat": charts.heat, "site": self}

    def is_live(self, template: str) -> bool:
        """Whether a page has parts that are exchanged while it is open."""
        if template not in self._live:
            assert self._templates.loader
            self._live[template] = "data-live" in self._templates.loader.get_source(self._templates, template)[0]
        return self._live[template]

    def text(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def rendered(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page. What publishers wrote may not be UTF-8, and is shown all the same."""
        return HTMLResponse(self.text(template, **values).encode("utf-8", "backslashreplace"), status)


@dataclass(slots=True)
class Page:
    """One request of one person."""

    request: Request
    watch: Watch
    access: Access
    site: Site
    person: Person
    runs: Runs = field(default_factory=Runs)
    """Replays and discards of all people."""
    form: Mapping[str, list[str]] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    history: StreamInfo | None = None
    """The stream of what was seen before, where that is kept."""
    past: Snapshot | None = None
    """What is shown, where that is not what is seen now."""

    async def snapshot(self) -> Snapshot:
        """What is seen now, or was seen at the time that the query asks for."""
        text = self.asked("at")
        if not text or self.watch.history is None:
            now = await self.watch.snapshot()
            self.rates, self.history = self.watch.rates, self.watch.history
            return now
        self.history = self.watch.history
        try:
            moment = datetime.fromtimestamp(float(text), UTC)
        except (ValueError, OverflowError, OSError) as exc:
            raise ConfigError(f"at: {text!r} is not a time in seconds since 1970") from exc
        before, self.past = await record.at((await self.watch.control()).jetstream, moment)
        self.rates = rates(before, self.past)
        return self.past

    @property
    def is_refresh(self) -> bool:
        """Whether the page is there, and its live parts are exchanged: the others need not be made."""
        return "x-live" in self.request.headers

    def at(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    def asked(self, name: str, otherwise: str = "") -> str:
        """A value of the query."""
        return self.request.query_params.get(name, otherwise).strip()

    def field(self, name: str, otherwise: str = "") -> str:
        """A value of the form."""
        return (self.form.get(name) or [otherwise])[0]

    def fields(self, name: str) -> list[str]:
        return list(self.form.get(name) or ())

    def show(self, template: str, section: str, title: str, status: int = 200, **values: Any) -> Response:
        shown = self.past or self.watch.latest
        return self.site.rendered(
            template,
            status,
            person=self.person,
            form_token=self.access.form_token(self.person),
            section=section,
            title=title,
            trouble=self.watch.error,
            watch=self.watch,
            live=self.site.is_live(template),
            rates=self.rates,
            trends={} if self.past else self.watch.trends,
            past=self.past,
            history=self.history,
            at=self.past.taken_at.timestamp() if self.past else None,
            taken_at=shown.taken_at if shown else None,
            **values,
        )

    def failed(self, problem: str, status: int) -> Response:
        waits = self.watch.error is not None and self.request.method == "GET"
        return self.show("problem.html", "", "It did not work", status, problem=problem, waits=waits)
