"""The pages that show: flow, streams, messages, consumers, groups, pipelines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from shlex import quote
from typing import Any

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.app.browse import Browser
from penstock.consume.metrics import Lag
from penstock.errors import ConfigError, MessageNotFound
from penstock.events.documents import MISSING, Documents, FieldFilter
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StoredMessage, StreamInfo
from penstock.observe import flow as flows
from penstock.observe.collecting import described, status_of, stream_status
from penstock.observe.snapshot import Rates, Snapshot
from penstock.observe.status import StreamStatus
from penstock.settings import without_login
from penstock.topology import actual
from penstock.topology.plan import Change, plan
from penstock.topology.resource import Desired
from penstock.ui import charts
from penstock.ui.page import Page, moment
from penstock.ui.watch import DrawnFlow
from penstock.units import format_duration, from_nanoseconds
from penstock.workers.group.overview import PartitionOverview

SHOWN = 50
"""Messages of a page."""
ROWS = 200
"""Streams or consumers of a page; the rest is found by its name."""
SEARCHED = 20_000
"""Messages that are looked through for a page of those that match."""
PARTS = 48
"""Bars of a histogram."""
MAX_COMMAND = 32_768
"""Characters of a command that is offered for copying."""
CELLS = 1_000
"""Fields of a heat map."""
BATCH_ID = "Nats-Batch-Id"
DURATIONS = frozenset(
    {"ack_wait", "backoff", "idle_heartbeat", "inactive_threshold", "max_expires", "priority_timeout"}
)
"""Settings of a consumer that the server counts in nanoseconds."""


async def flow(page: Page) -> Response:
    """What flows from where to where. What is drawn is drawn once for all who look at the same."""
    snapshot = await page.snapshot()
    graph = flows.flow(snapshot, page.rates, page.watch.platform) if page.past else page.watch.flow()
    drawn = page.watch.drawn
    if drawn is None or drawn.graph is not graph:
        picture = Markup(page.site.text("flow_picture.html", **_picture(graph)))
        drawn = DrawnFlow(graph, list(flows.needs_attention(graph)), picture)
        if not page.past:
            page.watch.drawn = drawn
    return page.show(
        "flow.html",
        "/",
        "Flow",
        graph=graph,
        attention=drawn.attention,
        totals=_totals(snapshot, page.rates),
        picture=drawn.html,
    )


def _picture(graph: flows.FlowPicture) -> dict[str, Any]:
    """What the picture and the same as a list are made of."""
    placed = flows.layout(graph)
    outgoing: dict[str, list[flows.Edge]] = {}
    for edge in graph.edges.values():
        if edge.source in placed.placed:
            outgoing.setdefault(edge.source, []).append(edge)
    picture = charts.picture(placed)
    return {"graph": graph, "picture": picture, "left_out": placed.left_out, "outgoing": outgoing}


def _totals(snapshot: Snapshot, rates: Rates) -> list[tuple[str, str]]:
    """How much there is of everything, with its name."""
    shown = [one for one in snapshot.status.streams if not one.name.startswith(flows.INTERNAL)]
    counts = [
        (len(shown), "stream"),
        (sum(one.messages for one in shown), "message"),
        (len(snapshot.status.consumers), "consumer"),
        (len(snapshot.groups), "group"),
        (len(snapshot.pipelines), "pipeline"),
    ]
    stored = sum(rates.stored.get(one.name, 0.0) for one in shown)
    settled = sum(rates.settled.values())
    found = [(f"{count:,}", name if count == 1 else f"{name}s") for count, name in counts]
    return [*found, (flows.per_second(stored), "stored"), (flows.per_second(settled), "acknowledged")]


# -- streams -----------------------------------------------------------------------------------------------------------


async def streams(page: Page) -> Response:
    snapshot, part = await page.snapshot(), page.asked("q").lower()
    found = [one for one in snapshot.status.streams if part in one.name.lower()]
    found.sort(key=lambda one: one.name.startswith(flows.INTERNAL))
    return page.show(
        "streams.html",
        "/streams",
        "Streams",
        streams=[(one, _full_in(one, page), _declared(one.name, page)) for one in found[:ROWS]],
        found=len(found),
        q=part,
    )


def _declared(stream: str, page: Page) -> bool:
    return page.watch.platform is None or stream in page.watch.platform.streams or stream.startswith(flows.INTERNAL)


def _full_in(stream: StreamStatus, page: Page) -> timedelta | None:
    """How long until the stream is full, if it goes on growing like now."""
    grows = page.rates.grown.get(stream.name, 0.0)
    if stream.max_bytes is None or grows <= 0:
        return None
    return timedelta(seconds=max(0, stream.max_bytes - stream.bytes) / grows)


async def stream(page: Page) -> Response:
    """A stream now. Of what it was, there is what was seen: neither its messages nor how it differed from the file."""
    name = page.at("stream")
    snapshot = await page.snapshot()
    values: dict[str, Any] = {}
    if page.past:
        found = snapshot.stream(name)
        if found is None:
            raise HTTPException(404, f"there was no stream {name!r} then")
    else:
        js = (await page.watch.control()).jetstream
        few = not page.is_refresh and await _few_subjects(js, name)
        info = await js.stream_info(name, subjects_filter=">" if few else None)
        found = stream_status(info)
        values["subjects"] = sorted(info.state.subjects.items(), key=lambda item: -item[1])[:200]
        if not page.is_refresh:
            values |= {"drift": await drift(page, name), "bars": charts.bars(await histogram(js, info)), "info": info}
    return page.show(
        "stream.html",
        "/streams",
        name,
        stream=found,
        full_in=_full_in(found, page),
        known=_declared(name, page),
        consumers=snapshot.status.consumers_of(name),
        **values,
    )


async def drift(page: Page, stream: str) -> list[str]:
    """How the server differs from the file, about this stream and its consumers, as `penstock plan` has it."""
    if page.watch.platform is None:
        return []
    js = (await page.watch.control()).jetstream
    desired = Desired.of(page.watch.platform)
    found = plan(desired, await actual.read(js, desired))
    return [_difference(one) for one in found.changes if one.resource.stream == stream]


def _difference(change: Change) -> str:
    names = ", ".join(field.name for field in change.fields)
    why = change.reason or f"differs in {names}"
    return f"{change.resource}: {change.kind} ({why})"


async def _few_subjects(js: JetStream, stream: str) -> bool:
    return await js.subject_count(stream, ">") <= 2_000


async def histogram(js: JetStream, info: StreamInfo) -> list[tuple[str, int, int, int]]:
    """Sequences given out in each part of the time that the stream spans: label, count, first and last sequence."""
    first, last = info.state.first_time, info.state.last_time
    if not info.state.messages or first is None or last is None or last <= first:
        return []
    step = (last - first) / PARTS
    ends = [info.state.first_seq]
    for part in range(1, PARTS):
        try:
            found = (await js.get_message(info.name, since=first + step * part)).sequence
        except MessageNotFound:
            found = info.state.last_seq + 1
        ends.append(max(found, ends[-1]))
    ends.append(info.state.last_seq + 1)
    return [
        (moment(first + step * part), ends[part + 1] - ends[part], ends[part], ends[part + 1] - 1)
        for part in range(PARTS)
    ]


# -- messages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person looks for among messages."""

    subject: str = ""
    header: str = ""
    """`Name` or `Name=value`."""
    field: str = ""
    """A path into JSON, `payload.id` or `payload.id=7`."""
    since: str = ""
    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, page: Page) -> Wanted:
        def sequence(name: str) -> int | None:
            text = page.asked(name)
            if text and not text.isdecimal():
                raise ConfigError(f"{name}: {text!r} is not a sequence")
            return int(text) if text else None

        texts = {name: page.asked(name) for name in ("subject", "header", "field", "since")}
        return cls(**texts, first=sequence("first"), last=sequence("last"))

    @property
    def filters(self) -> list[str]:
        return [self.subject] if self.subject else []

    @property
    def newest(self) -> bool:
        """Whether it does not say where to begin: then the last that match are shown, as `penstock view` does."""
        return self.first is None and not self.since

    def matches(self, message: StoredMessage, documents: Documents) -> bool:
        return self._has_header(message) and self._has_field(message, documents)

    def _has_field(self, message: StoredMessage, documents: Documents) -> bool:
        if not self.field:
            return True
        return FieldFilter.parse(self.field).matches(documents.read(message.stream, message.subject, message.data))

    def _has_header(self, message: StoredMessage) -> bool:
        if not self.header:
            return True
        name, _, value = self.header.partition("=")
        values = next((found for key, found in message.headers.items() if key.lower() == name.strip().lower()), None)
        return values is not None and (not value or value.strip() in values)


async def messages(page: Page) -> Response:
    """Messages as they lie there; no consumer is made for it."""
    name, wanted = page.at("stream"), Wanted.of(page)
    control = await page.watch.control()
    info = await control.jetstream.stream_info(name)
    await control.ready()
    browser = Browser(control.connection, name)
    search = _newest if wanted.newest else _onward
    found, before, after = await search(browser, info, wanted, page.watch.documents)
    servers = ",".join(map(without_login, page.watch.settings.servers))
    return page.show(
        "messages.html",
        "/streams",
        f"Messages of {name}",
        stream=name,
        info=info,
        wanted=wanted,
        rows=[
            (one, sign, publish_command(one, servers), decoded(one, page.watch.documents))
            for one, sign in zip(found, _brackets(found), strict=True)
        ],
        before=before,
        after=after,
        searched=SEARCHED if len(found) < SHOWN and (before or after) else None,
        view=view_command(name, found, wanted, servers) if found else "",
        servers=servers,
    )


Search = tuple[list[StoredMessage], int | None, int | None]
"""What was found; the last sequence of what comes before it, and the first of what comes after it, if there is any."""


async def _newest(browser: Browser, info: StreamInfo, wanted: Wanted, documents: Documents) -> Search:
    """The last messages that match, looked for backwards in longer and longer steps."""
    found: list[StoredMessage] = []
    end = min(wanted.last or info.state.last_seq, info.state.last_seq)
    begin, step = end + 1, SHOWN
    lowest = max(info.state.first_seq, end + 1 - SEARCHED)
    while len(found) < SHOWN and begin > lowest:
        last, begin = begin - 1, max(lowest, begin - step)
        part = browser.messages(wanted.filters, first=begin, last=last)
        found = [one async for one in part if wanted.matches(one, documents)] + found
        step *= 4
    shown = found[-SHOWN:]
    reached = shown[0].sequence if len(shown) == SHOWN else begin
    return shown, reached - 1 if reached > info.state.first_seq else None, None


async def _onward(browser: Browser, info: StreamInfo, wanted: Wanted, documents: Documents) -> Search:
    """The first messages that match, from where the person wants to begin."""
    found: list[StoredMessage] = []
    looked = reached = 0
    options: dict[str, Any] = {"since": wanted.since or None, "first": wanted.first, "last": wanted.last}
    async for one in browser.messages(wanted.filters, **options):
        looked, reached = looked + 1, one.sequence
        if wanted.matches(one, documents):
            found.append(one)
        if len(found) >= SHOWN or looked >= SEARCHED:
            break
    more = 0 < reached < min(info.state.last_seq, wanted.last or info.state.last_seq)
    return found, None, reached + 1 if more else None


def decoded(message: StoredMessage, documents: Documents) -> bytes:
    """The body as text: where a schema reads what is no text, its document."""
    try:
        message.data.decode()
    except UnicodeDecodeError:
        document = documents.read(message.stream, message.subject, message.data)
        return message.data if document is MISSING else json.dumps(document).encode()
    return message.data


def view_command(stream: str, found: Sequence[StoredMessage], wanted: Wanted, servers: str) -> str:
    """A command line that shows the same messages. Headers are no option of it."""
    words = ["penstock", "--servers", servers, "view", stream]
    words += ["--subject", wanted.subject] if wanted.subject else []
    words += ["--json-path", wanted.field] if "=" in wanted.field else []
    words += ["--first", str(found[0].sequence), "--last", str(found[-1].sequence), "--json"]
    return " ".join(map(quote, words))


def publish_command(message: StoredMessage, servers: str) -> str:
    """A command line that publishes the message once more; empty when a line of text cannot hold it.

    Headers that told the server how to store it are left out: it would act on them again.
    """
    kept = {name: values for name, values in message.headers.items() if not name.lower().startswith("nats-")}
    try:
        body = message.data.decode()
        line = json.dumps({"subject": message.subject, "headers": kept, "data": body}, ensure_ascii=False)
        line.encode()
    except UnicodeError:
        return ""
    if len(line) > MAX_COMMAND or "\0" in line:
        return ""
    fields = "--subject-field subject --headers-field headers --data-field data"
    return f"printf '%s\\n' {quote(line)} | penstock --servers {quote(servers)} publish {fields}"


def _brackets(found: Sequence[StoredMessage]) -> list[str]:
    """Signs that hold together the messages of one atomic batch."""
    ids = [next(iter(one.headers.get(BATCH_ID, ())), None) for one in found]
    signs = []
    for place, id_ in enumerate(ids):
        before = place > 0 and ids[place - 1] == id_
        after = place + 1 < len(ids) and ids[place + 1] == id_
        signs.append("" if id_ is None else "│" if before and after else "└" if before else "┌" if after else "·")
    return signs


# -- consumers ---------------------------------------------------------------------------------------------------------


async def consumers(page: Page) -> Response:
    """Those that need attention first."""
    snapshot = await page.snapshot()
    service, name, part = page.asked("service"), page.asked("name"), page.asked("q").lower()
    found = [
        one
        for one in snapshot.status.consumers
        if (not service or one.service == service)
        and (not name or one.name == name)
        and part in f"{one.name} {one.stream} {one.service}".lower()
    ]
    found.sort(key=lambda one: -flows.BADNESS[flows.state_of(one)])
    title = f"Consumers of {service}" if service else "Consumers"
    return page.show("consumers.html", "/consumers", title, consumers=found[:ROWS], found=len(found), q=part)


async def consumer(page: Page) -> Response:
    """A consumer now, which an action may just have changed, or as it was seen."""
    stream, name = page.at("stream"), page.at("name")
    found = (await page.snapshot()).consumer(stream, name)
    info = None
    if not page.past:
        js = (await page.watch.control()).jetstream
        info = await js.consumer_info(stream, name)
        now = await status_of(js, info)
        found = described(now, found) if found else now
    elif found is None:
        raise HTTPException(404, f"there was no consumer {name!r} of {stream!r} then")
    return page.show(
        "consumer.html",
        "/consumers",
        name,
        consumer=found,
        info=info,
        settings=_settings(info) if info else (),
        points=list(page.watch.trends.get((stream, name), ())),
        rate=page.rates.settled.get((stream, name), 0.0),
    )


def _settings(info: ConsumerInfo) -> list[tuple[str, str]]:
    """The configuration as the server has it, in the words of the server; durations as people write them."""
    metadata = {f"metadata.{key}": value for key, value in (info.config.get("metadata") or {}).items()}
    own = {key: value for key, value in info.config.items() if key not in ("metadata", "name")}
    return [(key, _setting(key, value)) for key, value in (*sorted(own.items()), *sorted(metadata.items()))]


def _setting(key: str, value: Any) -> str:
    if key in DURATIONS:
        parts = value if isinstance(value, list) else [value]
        return ", ".join(format_duration(from_nanoseconds(part)) for part in parts)
    return value if isinstance(value, str) else json.dumps(value)


# -- groups and pipelines ----------------------------------------------------------------------------------------------


async def groups(page: Page) -> Response:
    return page.show("groups.html", "/groups", "Groups", groups=(await page.snapshot()).groups)


@dataclass(frozen=True, slots=True)
class Cell:
    """A field of the heat map: one partition, or several of a worker in a large group."""

    partitions: tuple[PartitionOverview, ...]
    lag: int | None
    """Of the one that is most behind; None while that is not known."""
    uncounted: bool = False
    """Whether some wait that the stream cannot count: it has no `allow_direct`."""

    @property
    def name(self) -> str:
        return self.partitions[0].id

    @property
    def moving(self) -> str | None:
        return next((one.move for one in self.partitions if one.move), None)


async def group(page: Page) -> Response:
    found = (await page.snapshot()).group(page.at("name"))
    if found is None:
        raise HTTPException(404, f"there is no group {page.at('name')!r} on this server")
    lags = {} if page.past else await page.watch.lags(found)
    owners = {worker.id: list[PartitionOverview]() for worker in found.workers}
    nobody: list[PartitionOverview] = []
    for one in found.partitions:
        owners.get(one.owner or "", nobody).append(one)
    size = max(1, -(-len(found.partitions) // CELLS))
    values: dict[str, Any] = {
        "group": found,
        "cells": {worker: _cells(some, size, lags) for worker, some in owners.items()},
        "nobody": _cells(nobody, size, lags),
        "most": max((known.messages for known in lags.values()), default=0),
        "size": size,
        "measured": len(lags),
        "happened": () if page.past else page.watch.happened.get(found.group, ()),
    }
    return page.show("group.html", "/groups", found.group, **values)


def _cells(partitions: Sequence[PartitionOverview], size: int, lags: Mapping[str, Lag]) -> list[Cell]:
    """Partitions, so many to a field."""
    cells = []
    for start in range(0, len(partitions), size):
        some = tuple(partitions[start : start + size])
        known = [lags[one.id].messages for one in some if one.id in lags]
        cells.append(Cell(some, max(known) if known and min(known) >= 0 else None, min(known, default=0) < 0))
    return cells


async def pipelines(page: Page) -> Response:
    snapshot = await page.snapshot()
    return page.show("pipelines.html", "/pipelines", "Pipelines", pipelines=snapshot.pipelines)


async def pipeline(page: Page) -> Response:
    snapshot = await page.snapshot()
    found = snapshot.pipeline(page.at("name"))
    if found is None:
        raise HTTPException(404, f"there is no pipeline {page.at('name')!r}, declared or on this server")
    spec = page.watch.platform.pipelines.get(found.name) if page.watch.platform else None
    places = [(name, snapshot.stream(name), snapshot.consumer(name, found.consumer)) for name in found.streams]
    return page.show("pipeline.html", "/pipelines", found.name, pipeline=found, spec=spec, places=places)
