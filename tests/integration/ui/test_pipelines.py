"""The page of a pipeline: what its driver wrote down, where it stands, and Spark's own pages."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from tests.support.pages_served import served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.spark.progress import BUCKET, BUCKET_CONFIG, FAILED, InputRange, MicroBatch, PipelineProgress
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
