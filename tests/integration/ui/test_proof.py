"""The proof pages: what a sink announced and what a bridge copied, counted again on the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
import pytest
from tests.support.commands import ended
from tests.support.pages_served import Served, served
from tests.support.streams import Streams

from penstock import packs
from penstock.server.embedded import EmbeddedServer
from penstock.spark.chunks import ChunkRows
from penstock.spark.delivery import delivery
from penstock.spark.history import LedgerPlace, Series
from penstock.spark.ledger import Ledger
from penstock.spark.link import Link
from penstock.spark.packing import Packing
from penstock.spark.progress import BUCKET, BUCKET_CONFIG, RUNNING, InputRange, MicroBatch, PipelineProgress
from penstock.spark.task import write_partition
from penstock.wire.blocking import run

CREATED = "2026-11-17T12:00:00Z"
SINK = "/proof/sinks/OUT/20261117120000/query/0"


@pytest.fixture
def bare(nats_server: EmbeddedServer, streams: Streams) -> Iterator[Served]:
    """Pages without a platform."""
    with served(nats_server.settings) as made:
        yield made


@pytest.fixture
def written(nats_server: EmbeddedServer, streams: Streams) -> None:
    write_batch(nats_server, streams)


def write_batch(server: EmbeddedServer, streams: Streams) -> None:
    """A closed micro-batch of 2,500 rows."""
    streams.make("OUT", subjects=["o.>"], allow_atomic=True)
    with Link(server.settings) as link:
        Ledger(link).create_bucket(1)
        for partition, count in enumerate((1500, 1000)):
            numbers = range(count)
            rows = ChunkRows(
                pa.array([f"o.{n % 3}" for n in numbers]),
                pa.array([b"%d" % n for n in numbers]),
                pa.array([b"Own: %d\r\n" % n for n in numbers], pa.binary()),
            )
            place = LedgerPlace("OUT", "query", 0, partition, CREATED)
            write_partition(link, place, iter([rows]), partial(delivery, "atomic", link, "OUT"))
        Ledger(link).close(Series("OUT", "query", CREATED), 0, 2500)


def test_a_batch_of_a_sink_is_counted_again(bare: Served, written: None) -> None:
    assert f'href="{SINK}"' in bare.get("/proof").text
    page = bare.get(SINK).text
    assert "2,500 in 3 chunks" in page
    assert "They agree" not in page, "nobody has counted"
    assert "They agree</b>: 2,500 rows announced, 2,500 found" in bare.get(f"{SINK}?recount=now").text


@pytest.mark.parametrize("query", ["query", "5a-3"])
def test_a_batch_of_a_pipeline_names_what_it_read(
    bare: Served, written: None, nats_server: EmbeddedServer, streams: Streams, query: str
) -> None:
    """A pipeline with several sinks writes each as a series of its own, `<query>-<number>`."""
    with Link(nats_server.settings) as link:
        Ledger(link).close(Series("OUT", "5a-3-1", CREATED), 0, 0)
    run(streams.api.create_stream(BUCKET_CONFIG))
    now = datetime(2026, 11, 17, tzinfo=UTC)
    read = MicroBatch(0, now, 2.0, 2_500, inputs=(InputRange("IN", 11, 2_510),))
    record = PipelineProgress(
        pipeline="rollup", state=RUNNING, streams=("IN",), consumer="c", host="h", pid=1, started=now, heard=now,
        query=query, recent=(read,),
    )  # fmt: skip
    streams.connection.request(f"$KV.{BUCKET}.rollup", json.dumps(record.json()).encode())
    assert bare.get("/proof").text.count('href="/pipelines/rollup"') == 1
    page = bare.get(SINK if query == "query" else SINK.replace("query", "5a-3-1")).text
    assert "2,500: " in page
    assert '<a href="/streams/IN/messages?first=11&amp;last=2510">IN 11 to 2,510</a>' in page


def test_packs_of_a_sink_are_counted_by_their_rows(bare: Served, nats_server: EmbeddedServer, streams: Streams) -> None:
    streams.make("OUT", subjects=["o.>"], allow_atomic=True)
    with Link(nats_server.settings) as link:
        Ledger(link).create_bucket(1)
        rows = ChunkRows(pa.array(["o.a", "o.b"] * 500), pa.array([b"%d" % n for n in range(1000)]))
        place = LedgerPlace("OUT", "query", 0, 0, CREATED)
        deliver = partial(delivery, "atomic", link, "OUT", packing=Packing(packs.ROWS, rows=90))
        write_partition(link, place, iter([rows]), deliver)
        assert link.last_sequence("OUT") == 12
        Ledger(link).close(Series("OUT", "query", CREATED), 0, 1000)
    assert "They agree</b>: 1,000 rows announced, 1,000 found" in bare.get(f"{SINK}?recount=now").text


def test_a_row_that_was_lost_or_changed_is_found_by_the_recount(bare: Served, written: None, streams: Streams) -> None:
    streams.connection.request("$JS.API.STREAM.MSG.DELETE.OUT", b'{"seq": 1200}')
    page = bare.get(f"{SINK}?recount=now").text
    assert "They do not agree" in page
    assert "chunk 1 of partition 0: 1 of 500 rows" in page


def test_rows_that_have_left_the_stream_are_no_disagreement(bare: Served, written: None, streams: Streams) -> None:
    run(streams.api.purge_stream("OUT"))
    page = bare.get(f"{SINK}?recount=now").text
    assert "What could be compared agrees" in page
    assert "have left the stream" in page


def test_a_batch_with_other_rows_than_came_in_does_not_agree(
    bare: Served, written: None, nats_server: EmbeddedServer
) -> None:
    with Link(nats_server.settings) as link:
        Ledger(link).close(Series("OUT", "query", CREATED), 0, 2600, "write")
    assert (
        "2,600 rows came in when the batch was closed, and 2,500 were announced" in bare.get(f"{SINK}?recount=now").text
    )


def test_what_the_ledger_does_not_know_is_not_there(bare: Served) -> None:
    assert "No Spark sink has written" in bare.get("/proof").text
    assert bare.get(SINK).status == 404
    assert bare.get("/proof/bridges/NOSUCH").status == 404
    assert bare.get(f"{SINK}x").status == 404


@pytest.fixture
def bridged(nats_server: EmbeddedServer, streams: Streams) -> None:
    bridge_all(nats_server, streams)


def bridge_all(server: EmbeddedServer, streams: Streams) -> None:
    """Everything of one stream, carried into another of the same server."""
    streams.make("HERE", subjects=["here.>"])
    streams.make("THERE", subjects=["there.>"], allow_atomic=True)
    streams.number("here.a", 1, 300)
    ended(
        "bridge", "over", "HERE", "THERE", "--from-servers", server.url, "--to-servers", server.url,
        "--map", "here.>=there.>", "--until-caught-up",
    )  # fmt: skip


def test_a_bridge_is_counted_again_on_both_sides(bare: Served, bridged: None) -> None:
    assert "/proof/bridges/THERE" in bare.get("/proof").text
    page = bare.get("/proof/bridges/THERE?recount=now").text
    assert "They agree</b>: 300 messages in, 300 copies" in page
    assert "1 to 300" in page


def test_a_copy_that_is_lost_or_not_the_bridges_own_is_found(bare: Served, bridged: None, streams: Streams) -> None:
    streams.connection.request("$JS.API.STREAM.MSG.DELETE.THERE", b'{"seq": 17}')
    streams.publish("there.a", [b"changed"], **{"Penstock-Origin": "over HERE 18 x"})
    page = bare.get("/proof/bridges/THERE?recount=now").text
    assert "They do not agree" in page
    assert "1 have no copy: 17" in page
    assert "1 copied more than once: 18" in page
    assert "1 have a copy with another body: 18" in page
