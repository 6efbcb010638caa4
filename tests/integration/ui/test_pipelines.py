"""The page of a pipeline: what its driver wrote down, where it stands, and Spark's own pages."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.commands import ended
from tests.support.pages_served import served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.spark.progress import (
    BUCKET,
    BUCKET_CONFIG,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    InputRange,
    MicroBatch,
    PipelineProgress,
)
from penstock.topology.load import load
from penstock.wire.blocking import run

NOW = datetime(2026, 11, 17, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ui", "is_link"), [("http://driver:4040", True), ("javascript:alert(1)", False), ("data:text/html,x", False)]
)
def test_the_link_to_sparks_pages_is_one_that_can_be_followed(
    nats_server: EmbeddedServer, streams: Streams, ui: str, is_link: bool
) -> None:
    run(streams.api.create_stream(BUCKET_CONFIG))
    record = PipelineProgress(
        pipeline="p", state=FAILED, streams=("S",), consumer="c", host="<b>h", pid=1, started=NOW, heard=NOW,
        error="<script>boom</script>", ui=ui,
    )  # fmt: skip
    streams.connection.request(f"$KV.{BUCKET}.p", json.dumps(record.json()).encode())
    with served(nats_server.settings) as pages:
        page = pages.get("/pipelines/p").text
    assert (f'href="{ui}"' in page) == is_link
    assert "&lt;script&gt;boom" in page
    assert "<script>boom" not in page
    assert "<b>h" not in page


def test_the_page_lists_the_last_micro_batches_with_what_they_read(
    nats_server: EmbeddedServer, streams: Streams
) -> None:
    run(streams.api.create_stream(BUCKET_CONFIG))
    batches = (
        MicroBatch(7, NOW, 2.0, 10, inputs=(InputRange("S", None, 10),)),
        MicroBatch(8, NOW, 1.0, 1_990, state_rows=33, inputs=(InputRange("S", 11, 2_000), InputRange("T", 1, 5))),
    )
    record = PipelineProgress(
        pipeline="p", state=FAILED, streams=("S", "T"), consumer="c", host="h", pid=1, started=NOW, heard=NOW,
        batch=8, batch_ended=NOW, batches=2, recent=batches,
    )  # fmt: skip
    streams.connection.request(f"$KV.{BUCKET}.p", json.dumps(record.json()).encode())
    with served(nats_server.settings) as pages:
        page = pages.get("/pipelines/p").text
    assert "S up to 10<" in page
    assert '<a href="/streams/S/messages?first=11&amp;last=2000">S 11 to 2,000</a>, ' in page
    assert "T 1 to 5<" in page
    assert page.index(">8<") < page.index(">7<")
    places = page[page.index('id="places"') :]
    assert [places.count(f'data-label="Checkpoint" class="num">{number}<') for number in ("2,000", "5")] == [1, 1]


def test_an_error_and_micro_batches_that_come_while_the_page_is_open_have_a_place_to_appear(
    nats_server: EmbeddedServer, streams: Streams
) -> None:
    run(streams.api.create_stream(BUCKET_CONFIG))
    record = PipelineProgress(
        pipeline="p", state=RUNNING, streams=("S",), consumer="c", host="h", pid=1, started=NOW, heard=NOW
    )
    streams.connection.request(f"$KV.{BUCKET}.p", json.dumps(record.json()).encode())
    with served(nats_server.settings) as pages:
        page = pages.get("/pipelines/p").text
    assert '<div id="error" data-live></div>' in page
    assert '<div id="batches" data-live>' in page
    assert "Last" not in page


@pytest.mark.parametrize("value", ["not JSON", "{}", "[1]", "null", "7"])
def test_what_is_no_record_of_a_pipeline_hides_nothing_else(
    nats_server: EmbeddedServer, streams: Streams, value: str
) -> None:
    streams.make("S", subjects=["s.>"])
    run(streams.api.create_stream(BUCKET_CONFIG))
    record = PipelineProgress(
        pipeline="p", state=FAILED, streams=("S",), consumer="c", host="h", pid=1, started=NOW, heard=NOW
    )
    naive = {**record.json(), "state": RUNNING, "heard": "2026-11-18T10:00:00"}
    for key, text in {"bad": value, "naive": json.dumps(naive), "p": json.dumps(record.json())}.items():
        streams.connection.request(f"$KV.{BUCKET}.{key}", text.encode())
    with served(nats_server.settings) as pages:
        page = pages.get("/pipelines")
        assert page.status == 200, page.text
        assert 'href="/pipelines/p"' in page.text
        assert "/pipelines/bad" not in page.text
        assert "/streams/S" in pages.get("/").text
    assert "S" in ended("--servers", nats_server.url, "status").stdout


FILE = """
name: shop
environments: {dev: {servers: ["%s"]}}
streams: {S: {subjects: [s.>], max_age: 1d}}
pipelines: {p: {from: {stream: S, consumer: c}, to: [{format: console}]}}
"""


@pytest.mark.parametrize(
    ("state", "shown"), [(FINISHED, "waiting for its next run"), (STOPPED, "waiting for its next run"), (RUNNING, "ok"),
                         (FAILED, "nobody reads")],
)  # fmt: skip
def test_every_page_and_the_command_line_say_the_same_about_the_durable_of_a_pipeline(
    nats_server: EmbeddedServer, streams: Streams, tmp_path: Path, state: str, shown: str
) -> None:
    (tmp_path / "penstock.yaml").write_text(FILE % nats_server.url)
    streams.make("S", subjects=["s.>"])
    for durable in ("c", "stranger"):
        run(streams.api.create_consumer("S", {"durable_name": durable, "ack_policy": "explicit"}))
    run(streams.api.create_stream(BUCKET_CONFIG))
    record = PipelineProgress(
        pipeline="p", state=state, streams=("S",), consumer="c", host="h", pid=1, started=NOW, heard=datetime.now(UTC)
    )
    streams.connection.request(f"$KV.{BUCKET}.p", json.dumps(record.json()).encode())
    streams.publish("s.a", [b"1", b"2"])
    with served(nats_server.settings, load(tmp_path / "penstock.yaml", "dev")) as pages:
        for path in ("/streams/S", "/consumers"):
            rows = {name: _row(pages.get(path).text, name) for name in ("c", "stranger")}
            assert f">{shown}<" in rows["c"], path
            assert 'href="/pipelines/p"' in rows["c"]
            assert "not declared" not in rows["c"], path
            assert ">nobody reads<" in rows["stranger"]
            assert "not declared" in rows["stranger"]
        flow, page = pages.get("/").text, pages.get("/consumers/S/c").text
    assert f"pipeline p: {'failed' if state == FAILED else shown}" in flow
    assert "consumer c:" not in flow
    assert (">nobody reads<" in page) == (state == FAILED)
    told = ended("--servers", nats_server.url, "status").stdout
    assert f"nobody reads {'2 consumers' if state == FAILED else '1 consumer'};" in told


def _row(page: str, consumer: str) -> str:
    return next(one for one in page.split("<tr") if f'href="/consumers/S/{consumer}"' in one)
