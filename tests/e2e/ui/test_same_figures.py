"""Every page in a real browser beside what the commands print with `--json`: each figure is the same.

Every cell and fact of a page is compared, by its label. No command prints the lag of a partition, what can be counted
again, rates, and the subjects of a stream: these are compared with what `observe/` and the server say.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page
from tests.e2e.ui.busy_shop import Shop, busy_shop
from tests.integration.ui.test_proof import SINK
from tests.support.shown import ANYTHING, Age, Figure, differences, seen_at, shortened, texts, written
from tests.support.streams import Streams

from penstock.cli.group import summary_json
from penstock.cli.pipeline_view import to_json
from penstock.cli.status import status_json
from penstock.jetstream import JetStream
from penstock.observe import proof, record
from penstock.observe.flow import INTERNAL, per_second
from penstock.observe.snapshot import Rates, rates
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.wire import blocking
from penstock.wire.blocking import run

Json = Any
Columns = Mapping[str, Figure]
STIRRING = ("KV_penstock_g", record.STREAM)
"""Streams that are written to all the time: two looks at them seldom find the same."""


@pytest.fixture(scope="module")
def shop(shared_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with busy_shop(shared_server, tmp_path_factory.mktemp("shop")) as made:
        yield made


def unless(same: bool, complaint: str) -> list[str]:
    return [] if same else [complaint]


# -- streams and messages ----------------------------------------------------------------------------------------------


def stream_columns(moving: Rates) -> Columns:
    """Of a stream in `penstock status --json`."""
    limit = "{percent:.0f} % of {max_bytes:size}"
    return {
        "Stream": "{name}",
        "Retention": "{retention}",
        "Messages": "{messages:,}",
        "Rate": lambda one: per_second(moving.stored.get(one["name"], 0.0)),
        "Last": "{last_seq:,}",
        "Size": "{bytes:size}",
        "Of its limit": lambda one: (
            written(limit, {**one, "percent": 100 * one["bytes"] / one["max_bytes"]})
            if one["max_bytes"]
            else "no limit"
        ),
        "Full in": lambda one: ANYTHING if moving.grown.get(one["name"]) else "",
        "Consumers": "{consumers}",
        "Replicas": "{healthy_replicas}/{replicas}",
        "Subjects": lambda one: shortened(", ".join(one["subjects"]), 60),
    }


def test_streams_are_those_of_penstock_status(shop: Shop) -> None:
    def compared() -> list[str]:
        told = [one for one in shop.told("status")["streams"] if one["name"] not in STIRRING]
        shown = [one for one in shop.rows("#streams tbody tr") if one["Stream"] not in STIRRING]
        return differences(shown, told, stream_columns(Rates()), seen_at(shop.tab), "Stream")

    shop.same("/streams", compared)


def test_a_stream_is_that_of_penstock_status(shop: Shop) -> None:
    facts: Columns = {
        "Messages": "{messages:,}",
        "Rate": "0/s",
        "Sequences": "{first_seq:,} to {last_seq:,}",
        "Size": "{bytes:size} of {max_bytes:size}",
        "Retention": "{retention}",
        "Replicas": "{healthy_replicas} of {replicas} well",
        "Last message": "{last_time:moment}",
    }

    def compared() -> list[str]:
        status = shop.told("status")
        (stream,) = (one for one in status["streams"] if one["name"] == "ORDERS")
        theirs = [one for one in status["consumers"] if one["stream"] == "ORDERS"]
        columns = {name: figure for name, figure in consumer_columns(status, Rates()).items() if name != "Stream"}
        subjects = shop.asked(lambda js: js.stream_info("ORDERS", subjects_filter=">")).state.subjects
        bars = [int(text.rpartition(": ")[2].replace(",", "")) for text in texts(shop.tab, ".histogram title")]
        return [
            *shop.differs("#facts", [stream], facts),
            *shop.differs("#consumers tbody tr", theirs, columns, "Consumer"),
            *shop.differs(
                "main > .scroll tbody tr", [{"subject": name, "messages": count} for name, count in subjects.items()],
                {"Subject": "{subject}", "Messages": "{messages:,}"}, "Subject",
            ),
            *unless(sum(bars) == stream["last_seq"] - stream["first_seq"] + 1, f"the bars are {bars}"),
        ]  # fmt: skip

    shop.same("/streams/ORDERS", compared)


ARTICLES = """() => [...document.querySelectorAll('article')].map((one) => ({
  head: one.querySelector('.head').textContent.replace(/\\s+/g, ' ').trim(),
  headers: [...one.querySelectorAll('.headers div')].map((pair) => [...pair.children].map((it) => it.textContent)),
  body: (one.querySelector('details.folded pre') || one.querySelector('pre')).textContent}))"""


def body_of(one: Json) -> bytes:
    """The body of a message that `penstock view --json` prints."""
    if "hex" in one:
        return bytes.fromhex(one["hex"])
    text: str = json.dumps(one["json"], ensure_ascii=False) if "json" in one else one["text"]
    return text.encode()


def readable(one: Json) -> str:
    """A body as the page writes it."""
    if "json" in one:
        return json.dumps(one["json"], indent=2, ensure_ascii=False)
    return body_of(one).hex(" ") if "hex" in one else str(one["text"])


def test_messages_are_those_of_the_command_that_the_page_offers(shop: Shop) -> None:
    columns: Columns = {
        "head": lambda one: written("#{sequence} {subject} {time:moment}, ", one) + f"{len(body_of(one)):,} bytes",
        "headers": lambda one: [[name, value] for name, values in one["headers"].items() for value in values],
        "body": readable,
    }

    def compared() -> list[str]:
        told = [json.loads(line) for line in shop.offered().splitlines()]
        assert told
        return differences(shop.tab.evaluate(ARTICLES), told, columns, seen_at(shop.tab))

    for query, count in {"": 50, "?last=30": 30, "?subject=events.b": 3, "?field=deep.list.1%3D2.5": 1}.items():
        shop.same(f"/streams/EVENTS/messages{query}", compared)
        assert len(texts(shop.tab, "article")) == count


# -- consumers ---------------------------------------------------------------------------------------------------------


def consumer_columns(status: Json, moving: Rates) -> dict[str, Figure]:
    """Of a consumer in `penstock status --json`."""
    return {
        "Consumer": "{name}",
        "Stream": "{stream}",
        "For": lambda one: one["pipeline"] or one["service"] or one["group"] or "",
        "State": "{state}",
        "Lag": "{lag_messages:,}",
        "Oldest": lambda one: Age.of(status, one["lag_seconds"]) if one["lag_messages"] else "",
        "Trend": "",
        "Rate": lambda one: per_second(moving.settled.get((one["stream"], one["name"]), 0.0)),
        "In flight": "{ack_pending:,}",
        "Again": "{redelivered:,}",
        "Floor": "{ack_floor:,}",
        "Dead": dead,
    }


def dead(one: Json) -> str:
    return written("{dead_letters:,} +{given_up:,}" if one["given_up"] else "{dead_letters:,}", one)


def test_consumers_are_those_of_penstock_status(shop: Shop) -> None:
    def compared() -> list[str]:
        status = shop.told("status")
        assert {one["state"] for one in status["consumers"]} >= {"ok", "paused", "nobody reads"}
        assert any(one["redelivered"] for one in status["consumers"])
        columns = consumer_columns(status, Rates())
        return shop.differs("#consumers tbody tr", status["consumers"], columns, "Stream, Consumer")

    shop.same("/consumers", compared)


@pytest.mark.parametrize(("stream", "name"), [("EVENTS", "clean"), ("EVENTS", "lost"), ("ORDERS", "pack")])
def test_a_consumer_is_that_of_penstock_status_and_consumer_show(shop: Shop, stream: str, name: str) -> None:
    facts: dict[str, Figure] = {
        "State": "{state}",
        "Lag": lambda one: re.compile(
            written("{lag_messages:,} messages", one) + (" the oldest \\w+" if one["lag_messages"] else "")
        ),
        "Not delivered": "{pending:,}",
        "In flight": "{ack_pending:,} of {max_ack_pending:,}",
        "Delivered again": "{redelivered:,}",
        "Ack floor": "{ack_floor:,}",
        "Last delivered": lambda one: re.compile(rf"{one['delivered']:,}( [\d: -]+)?"),
        "Acknowledges": "0/s",
        "Requests waiting": "{waiting_pulls}",
        "Oldest, last minutes": lambda _: ANYTHING,
        "Lag, last minutes": lambda _: ANYTHING,
    }

    def compared() -> list[str]:
        (one,) = (one for one in shop.told("status")["consumers"] if (one["stream"], one["name"]) == (stream, name))
        told = {**one, **shop.told("consumer", "show", stream, name)}
        paused: dict[str, Figure] = {"Paused for": lambda _: ANYTHING} if told["paused"] else {}
        letters: dict[str, Figure] = {"Dead letters": dead} if told["dlq"] else {}
        return shop.differs("#facts", [told], {**facts, **paused, **letters})

    shop.same(f"/consumers/{stream}/{name}", compared)


# -- groups ------------------------------------------------------------------------------------------------------------

GROUP: Columns = {
    "Group": "{group}",
    "Stream": "{stream}",
    "State": "{state}",
    "Workers": "{workers:,}",
    "Partitions": "{partitions:,}",
    "Moving": "{moving:,}",
    "Lag": "{lag:,}",
    "Leader": lambda one: one["leader"] or "nobody",
}
WORKERS = """() => [...document.querySelectorAll('section.worker')].map((one) => ({
  name: one.getAttribute('aria-label'), head: one.querySelector('h3').textContent,
  line: one.querySelector('p:not(.alert)')?.textContent || '',
  troubles: [...one.querySelectorAll('.alert')].map((it) => it.textContent),
  cells: [...one.querySelectorAll('.cells li')].map((it) => it.textContent),
  titles: [...one.querySelectorAll('.cells abbr')].map((it) => it.title)}))"""


def test_groups_are_those_of_group_ls(shop: Shop) -> None:
    shop.same("/groups", lambda: shop.differs("#groups tbody tr", shop.told("group", "ls")["groups"], GROUP, "Group"))


def test_a_group_is_that_of_group_show(shop: Shop) -> None:
    """With the lag of its partitions as `observe/` measures it."""

    def compared() -> list[str]:
        told, lags = shop.told("group", "show", "g"), shop.lags("g")
        assert any(one["move"] for one in told["partitions"])
        workers = {one["id"]: one for one in told["workers"]}
        shares: dict[str, list[Json]] = {**{name: [] for name in workers}, "Without a worker": []}
        for one in told["partitions"]:
            shares[one["owner"] if one["owner"] in workers else "Without a worker"].append(one)
        moves = [one for one in told["partitions"] if one["move"]]
        columns: Columns = {
            "name": lambda name: name,
            "head": lambda name: _head(workers[name]) if name in workers else name,
            "line": lambda name: _line(workers[name]) if name in workers else "",
            "troubles": lambda name: workers[name]["troubles"] if name in workers else [],
            "cells": lambda name: [_cell(one, lags[one["id"]]) for one in shares[name]],
            "titles": lambda name: [_title(one, lags[one["id"]], name in workers) for one in shares[name]],
        }
        wanted = [name for name, some in shares.items() if name in workers or some]
        line = written("Reads {stream}, assignment {version}, led by {leader}: at work", told)
        return [
            *differences(shop.tab.evaluate(WORKERS), wanted, columns, seen_at(shop.tab)),
            *differences(
                [{"move": text} for text in texts(shop.tab, "#moves li")], moves,
                {"move": lambda one: f"{one['id']}: {one['owner'] or 'nobody'} → {one['assigned']}, {one['move']}"},
                seen_at(shop.tab),
            ),
            *unless(texts(shop.tab, "#line") == [line], f"{texts(shop.tab, '#line')} is not {line!r}"),
        ]  # fmt: skip

    shop.same("/groups/g", compared)


def _head(worker: Json) -> str:
    mode = f" {worker['mode']}" if worker["mode"] != "working" else ""
    return f"{worker['id']}{' leads' if worker['leads'] else ''} {worker['state']}{mode}"


def _line(worker: Json) -> str:
    lag = "no consumer" if worker["lag"] is None else written("{lag:,} waiting", worker)
    return written(f"{{partitions:,}} partitions, {lag}, {{redelivered:,}} again · {{host}} {{pid}}", worker)


def _cell(partition: Json, lag: int) -> str:
    return f"{partition['id']}{f' {lag:,}' if lag else ''}{' →' if partition['move'] else ''}"


def _title(partition: Json, lag: int, has_worker: bool) -> str:
    gone = "" if has_worker or not partition["owner"] else f"of {partition['owner']}, which is gone, "
    move = f", {partition['move']}" if partition["move"] else ""
    return (
        f"{partition['id']}: {gone}token {partition['token']}, done up to {partition['handoff']}{move}; {lag:,} waiting"
    )


# -- pipelines ---------------------------------------------------------------------------------------------------------


def pipeline_columns(taken_at: datetime) -> Columns:
    """Of a pipeline in `penstock pipeline status --json`; one that never ran has nothing to show of a run."""

    def last(text: str) -> Figure:
        return lambda one: written(text, one["progress"]) if one["progress"] else None

    return {
        "Pipeline": "{name}",
        "State": "{state}",
        "Reads": "{streams:list}",
        "Rows behind": "{rows_behind:,}",
        "Behind": lambda one: Age(taken_at - timedelta(seconds=one["seconds_behind"])) if one["rows_behind"] else "",
        "Batch": last("{batch:,}"),
        "Rows": last("{batch_rows:,}"),
        "Took": last("{batch_seconds:.1f} s"),
        "Rows/s": last("{rows_per_second:,.0f}"),
        "State rows": last("{state_rows:,}"),
        "Bad": last("{bad_records:,}"),
        "Error": last("{error:line}"),
    }


def test_pipelines_are_those_of_pipeline_status(shop: Shop) -> None:
    def compared() -> list[str]:
        told = shop.pipelines()
        return shop.differs("#pipelines tbody tr", told, pipeline_columns(datetime.now(UTC)), "Pipeline")

    shop.same("/pipelines", compared)


def test_a_pipeline_is_that_of_pipeline_status(shop: Shop) -> None:
    facts: Columns = {
        "State": "{state}",
        "Behind": lambda one: re.compile(written("{rows_behind:,} messages, \\w+", one)),
        "Micro-batch": "{progress[batch]:,} ended {progress[batch_ended]:moment}",
        "Rows of it": "{progress[batch_rows]:,} in {progress[batch_seconds]:.1f} s",
        "In this run": "{progress[rows_read]:,} read, {progress[rows_written]:,} written, "
        "{progress[bad_records]:,} bad, {progress[late_rows]:,} late",
        "State kept": "{progress[state_rows]:,} rows, {progress[state_bytes]:size}",
        "Driver": "{progress[host]} {progress[pid]} started {progress[started]:moment}, heard {progress[heard]:moment}",
        "Spark's own pages": "{progress[ui]}",
    }
    batches: Columns = {
        "Batch": "{number}",
        "Ended": "{ended:moment}",
        "Rows read": "{rows:,}",
        "Seconds": "{seconds:.1f}",
        "Rows/s": lambda one: f"{one['rows'] / one['seconds']:,.0f}",
        "State rows": "{state_rows:,}",
        "Late": "{late_rows:,}",
        "Sequences": lambda one: ", ".join(
            written("{stream} up to {last:,}" if it["first"] is None else "{stream} {first:,} to {last:,}", it)
            for it in one["inputs"]
        ),
    }
    places: Columns = {
        "Stream": "{name}",
        "End of the stream": "{last_seq:,}",
        "Checkpoint": "{checkpoint:,}",
        "Floor of rollup": "{durable[ack_floor]:,}",
        "Not committed": "{durable[lag_messages]:,}",
    }

    def compared() -> list[str]:
        (told,) = (one for one in shop.pipelines() if one["name"] == "rollup")
        status, recent = shop.told("status"), told["progress"]["recent"]
        (stream,) = (one for one in status["streams"] if one["name"] == "EVENTS")
        (durable,) = (one for one in status["consumers"] if one["name"] == "rollup")
        place = {**stream, "durable": durable, "checkpoint": recent[-1]["inputs"][0]["last"]}
        return [
            *shop.differs("#facts", [told], facts),
            *shop.differs("#batches tbody tr", recent[::-1], batches),
            *shop.differs("#places tbody tr", [place], places),
        ]

    shop.same("/pipelines/rollup", compared)


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_dead_letters_are_those_of_dlq_ls(shop: Shop) -> None:
    columns: Columns = {
        "Gave up": "{reader}",
        "Stream": "{stream}",
        "Error": lambda one: f"{one['error']} {shortened(one['template'], 120)}",
        "Letters": "{count:,}",
        "First": "{oldest:moment}",
        "Last": "{newest:moment}",
        "Trend": "",
        "Replays": "{most_replays}",
    }

    def compared() -> list[str]:
        told = shop.told("dlq", "ls")
        assert len(told["groups"]) > 1
        assert told["given_up"]
        words = written("{letters_total:,} dead letters, by who gave up and why.", told)
        lost = written("{given_up} given up, not captured", told)
        main = shop.tab.locator("main").inner_text()
        return [
            *shop.differs("tbody tr", told["groups"], columns, "Gave up, Error"),
            *unless(words in main and lost in main, f"{words!r} and {lost!r} are not in {main}"),
        ]

    shop.same("/letters", compared)


def test_letters_of_a_cause_are_those_of_dlq_ls_letters(shop: Shop) -> None:
    columns: Columns = {
        "Letter": lambda one: one["id"].partition(".")[0],
        "Message": "{stream} #{sequence}",
        "Subject": "{subject}",
        "Error": lambda one: f"{one['error']['type']}: {shortened(one['error']['message'], 100)}",
        "Failed": "{last_failure:moment}",
        "Deliveries": "{deliveries}",
    }

    def compared() -> list[str]:
        told = shop.told("dlq", "ls", "--consumer", "bill", "--letters")
        words = written("{letters_total:,} of bill.", told)
        return [
            *shop.differs("tbody tr", told["letters"], columns),
            *unless(words in texts(shop.tab, "main p"), f"{words!r} is missing"),
        ]

    shop.same("/letters/of?reader=bill", compared)


def test_a_letter_is_that_of_dlq_show(shop: Shop) -> None:
    facts: Columns = {
        "Gave up": "{consumer}",
        "Message": "{stream} #{sequence}",
        "Subject": "{subject}",
        "Deliveries": "{deliveries}",
        "First failure": "{first_failure:moment}",
        "Last failure": "{last_failure:moment}",
        "Replays": "{replays}",
        "Event": "{event_id}",
    }
    pairs = "[...document.querySelectorAll('dl.headers div')].map((one) => [...one.children].map((it) => it.innerText))"
    id_ = shop.told("dlq", "ls", "--consumer", "ship", "--letters")["letters"][0]["id"]

    def compared() -> list[str]:
        told = shop.told("dlq", "show", id_)
        assert told["replays"] == 1
        error, body = told["error"], json.dumps(json.loads(told["body"]), indent=2)
        headers = [[name, value] for name, values in told["headers"].items() for value in values]
        bodies = shop.tab.locator("pre").all_text_contents()
        return [
            *shop.differs("main dl.facts", [told], facts),
            *unless(shop.tab.evaluate(pairs) == headers, f"the headers are not {headers}"),
            *unless(error["type"] in texts(shop.tab, "h2"), f"{error['type']} is missing"),
            *unless(error["message"] in texts(shop.tab, "p"), f"{error['message']} is missing"),
            *unless(bodies == [*filter(None, [error["stack"]]), body], f"stack and body are {bodies}"),
        ]

    shop.same(f"/letters/{id_}", compared)


def test_the_audit_is_that_of_dlq_audit(shop: Shop) -> None:
    columns: Columns = {
        "When": "{at:moment}",
        "Who": "{actor}",
        "What": "{action}",
        "Of": "{origin[stream]} #{origin[sequence]} of {origin[consumer]}",
        "Why": "{reason}",
    }

    def compared() -> list[str]:
        records = shop.told("dlq", "audit")["records"]
        assert {one["action"] for one in records} == {"replayed", "discarded"}
        return shop.differs("tbody tr", records[::-1], columns)

    shop.same("/letters/audit", compared)


# -- proof -------------------------------------------------------------------------------------------------------------


def test_what_can_be_counted_again_is_what_observe_lists(shop: Shop) -> None:
    sinks: Columns = {
        "Into": "{stream}",
        "Query or write": "{name}",
        "Pipeline": "rollup",
        "Last batch closed": "{closed:,}",
        "Rows of it": "{rows:,}",
        "Batches that can be counted again": "{batches:list}",
    }
    bridges: Columns = {
        "Bridge": "{bridge}",
        "From": "{origin}",
        "Into": "{destination}",
        "Messages there": "{copies:,}",
        "Copied up to": "{copied_up_to:,}",
    }
    shop.same(
        "/proof",
        lambda: [
            *shop.differs("h2:nth-of-type(1) + .scroll tbody tr", shop.asked(proof.sinks), sinks),
            *shop.differs("h2:nth-of-type(2) + .scroll tbody tr", shop.asked(proof.bridges), bridges),
        ],
    )


def test_a_recount_of_a_sink_is_that_of_observe(shop: Shop) -> None:
    async def counted(js: JetStream) -> tuple[proof.SinkBatch, proof.Recount]:
        batch = await proof.sink_batch(js, (await proof.sinks(js))[0], 0)
        return batch, await proof.recount_sink(js, shop.server.settings, batch)

    facts: Columns = {
        "Output": "{series.stream}",
        "Query or write": "{series.name}",
        "State": lambda one: "closed" if one.is_closed else "open",
        "Rows in, when it was closed": "{series.rows:,}",
        "Rows announced": lambda one: f"{one.rows:,} in {len(one.chunks):,} chunks",
        "Pipeline": "rollup",
    }
    chunks: Columns = {
        "Partition": "{partition}",
        "Chunk": "{intent.number}",
        "Rows": "{intent.rows:,}",
        "Digest": "{intent.digest}",
        "Messages": "{first:,} to {last:,}",
    }
    batch, result = shop.asked(counted)
    words = written("They agree: {expected:,} rows announced, {found:,} found.", result)
    shop.same(
        f"{SINK}?recount=now",
        lambda: [
            *shop.differs("main dl.facts", [batch], facts),
            *shop.differs("tbody tr", batch.chunks, chunks),
            *unless(texts(shop.tab, "#recount p") == [words], f"{texts(shop.tab, '#recount p')} is not {words!r}"),
        ],
    )


def test_a_recount_of_a_bridge_is_that_of_observe(shop: Shop) -> None:
    async def counted(js: JetStream) -> tuple[proof.BridgeProof, proof.BridgeRecount]:
        (bridge,) = await proof.bridges(js)
        return bridge, await proof.recount_bridge(js, shop.server.settings, bridge)

    bridge, result = shop.asked(counted)
    facts: Columns = {
        "From": "{origin}",
        "Into": "{destination}",
        "Messages there": "{copies:,}",
        "Copied up to": "{copied_up_to:,}",
        "Sequences compared": f"{result.first:,} to {result.last:,}",
        "Digest in": result.digest_in,
        "Digest out": result.digest_out,
    }
    words = written("They agree: {expected:,} messages in, {found:,} copies.", result.count)
    shop.same(
        "/proof/bridges/THERE?recount=now",
        lambda: [
            *shop.differs("main dl.facts", [bridge], facts),
            *unless(texts(shop.tab, "#recount p") == [words], f"{texts(shop.tab, '#recount p')} is not {words!r}"),
        ],
    )


# -- flow --------------------------------------------------------------------------------------------------------------

LISTED = """() => [...document.querySelectorAll('#list details')].flatMap((one) => [...one.querySelectorAll('li')]
  .map((line) => [one.querySelector('a').textContent, line.querySelector('a').textContent, line.textContent]))"""
ATTENTION = """() => [...document.querySelectorAll('.attention li')].map((one) => [one.querySelector('a').textContent,
  [...one.querySelectorAll('.why > span > b:first-child')].map((part) => part.textContent)])"""
BOXES = """() => [...document.querySelectorAll('svg.flow .node.stream, svg.flow .node.dead-letters')]
  .map((one) => [one.querySelector('.name').textContent, one.querySelector('.detail').textContent])"""
COUNT = re.compile(r"([\d,]+) (?:waiting|messages)")


def count_in(text: str) -> int:
    found = COUNT.search(text)
    return int(found[1].replace(",", "")) if found else 0


def flow_differences(tab: Page, status: Json, groups: Json, pipelines: Json) -> list[str]:
    """The picture of the flow, its list, its totals and what needs attention, beside what commands tell."""
    shown = {one["name"]: one["messages"] for one in status["streams"] if not one["name"].startswith(INTERNAL)}
    readers, letters = defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
    for one in status["consumers"]:
        if one["stream"] in shown and not one["carries"]:
            name = one["group"] or one["pipeline"] or one["service"] or one["name"]
            letters[name] += one["dead_letters"] + one["given_up"] if one["dlq"] else 0
            readers[one["stream"], name] += one["lag_messages"]
    readers |= {(one["stream"], one["group"]): one["lag"] for one in groups}
    readers |= {(stream, one["name"]): one["rows_behind"] or 0 for one in pipelines for stream in one["streams"]}
    totals = {
        "stream": len(shown), "message": sum(shown.values()), "consumer": len(status["consumers"]),
        "group": len(groups), "pipeline": len(pipelines),
    }  # fmt: skip
    bad = {name: sum(int(one.replace(",", "")) for one in counts) for name, counts in tab.evaluate(ATTENTION)}
    behind = Counter({name: lag for (_, name), lag in readers.items() if name in bad}) + Counter(
        {"DLQ": sum(letters.values())}
    )
    compared: dict[str, tuple[object, object]] = {
        "streams": ({text.split()[1]: count_in(text) for text in texts(tab, "#list summary")}, shown),
        "readers": ({(stream, name): count_in(text) for stream, name, text in tab.evaluate(LISTED)}, dict(readers)),
        "lines of the picture": (
            sorted(map(count_in, texts(tab, "svg.flow .labels text:has(tspan)"))),
            sorted(filter(None, (*readers.values(), *letters.values()))),
        ),
        "boxes of the picture": ({name: count_in(text) for name, text in tab.evaluate(BOXES)}, shown),
        "totals": (
            texts(tab, ".totals span")[:5],
            [f"{count:,} {name if count == 1 else f'{name}s'}" for name, count in totals.items()],
        ),
        "what needs attention": ({name: count for name, count in bad.items() if count}, dict(behind)),
        "who needs attention": (
            {one["service"] for one in status["consumers"] if one["state"] == "nobody reads" and one["service"]}
            - {*bad},
            set(),
        ),
    }
    return [f"{what}: the page shows {a}, and {b} is told" for what, (a, b) in compared.items() if a != b]


def test_the_flow_is_that_of_status_groups_and_pipelines(shop: Shop) -> None:
    def compared() -> list[str]:
        groups = shop.told("group", "ls")["groups"]
        return flow_differences(shop.tab, shop.told("status"), groups, shop.pipelines())

    shop.same("/", compared)


# -- the time machine --------------------------------------------------------------------------------------------------


def test_the_time_machine_shows_what_commands_would_have_told_then(shop: Shop) -> None:
    """A record is taken for what a command printed then; rates are those between it and the one before."""
    with blocking.connect(shop.server.settings) as connection:
        streams = Streams(connection)
        streams.number("events.a", 1, 50)
        kept = streams.info(record.STREAM).state.last_seq
        eventually(lambda: streams.info(record.STREAM).state.last_seq > kept, 30, "what was seen to be kept")
        at = run(streams.api.get_message(record.STREAM, kept + 1)).time
        streams.number("events.a", 51, 60)
    assert at
    before, then = shop.asked(lambda js: record.at(js, at))
    moving, query = rates(before, then), f"?at={at.timestamp()}"
    assert moving.stored["EVENTS"]
    status = json.loads(json.dumps(status_json(then.status)))
    groups, pipelines = [summary_json(one) for one in then.groups], [to_json(one) for one in then.pipelines]
    tables: dict[str, tuple[Json, Columns, str]] = {
        "streams": (status["streams"], stream_columns(moving), "Stream"),
        "consumers": (status["consumers"], consumer_columns(status, moving), "Stream, Consumer"),
        "groups": (groups, GROUP, "Group"),
        "pipelines": (pipelines, pipeline_columns(then.taken_at), "Pipeline"),
    }
    shop.same(f"/{query}", lambda: flow_differences(shop.tab, status, groups, pipelines))
    for name, (told, columns, key) in tables.items():
        shop.same(f"/{name}{query}", partial(shop.differs, f"#{name} tbody tr", told, columns, key))
    (count,) = (one["messages"] for one in status["streams"] if one["name"] == "EVENTS")
    for path, words in {"/streams/EVENTS": f"{count:,}", "/consumers/EVENTS/rollup": f"{count:,} messages"}.items():
        shop.tab.goto(path + query)
        facts = shop.rows("#facts")[0]
        assert (facts.get("Messages") or facts["Lag"]).startswith(words), path
