"""The pages over HTTP: what they show is what the command line says, and nobody acts who may not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.binary_events import AVRO, avro_datum
from tests.support.commands import ended, here
from tests.support.pages_served import Answer, Served, served
from tests.support.streams import Streams

import penstock
from penstock.observe import record
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, eventually_async, stream_messages
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.ui.access import Access
from penstock.wire.blocking import run

TOKEN = re.compile(r'name="token" value="([0-9a-f]{64})"')
PATHS = [
    "/", "/streams", "/streams/ORDERS", "/streams/ORDERS/messages", "/consumers", "/consumers/ORDERS/bill", "/groups",
    "/pipelines", "/letters", "/letters/audit",
]  # fmt: skip


def status(server: EmbeddedServer) -> Any:
    return json.loads(ended("--servers", server.url, "status", "--json").stdout)


LEFT_OUT = ("Messages over time", "<h2>Subjects</h2>")


def token(page: Answer) -> str:
    found = TOKEN.search(page.text)
    assert found, page.text
    return found[1]


def test_every_page_is_there_and_lets_nothing_in_from_elsewhere(pages: Served) -> None:
    for path in PATHS:
        answer = pages.get(path)
        assert answer.status == 200, (path, answer.text)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?! src=\"/static/)| style=| on\w+=|https?://", answer.text), path
    assert pages.get("/nosuch").status == 404
    assert pages.get("/streams/NOSUCH").status == 404
    assert pages.get("/groups/nosuch").status == 404
    assert pages.get("/", Host="evil.example").status == 421


def test_the_figures_are_those_of_the_command_line(
    pages: Served, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.number("orders.paid", 1, 1234)
    (consumer,) = [one for one in status(nats_server)["consumers"] if one["name"] == "bill"]
    assert consumer["lag_messages"] == 1234
    assert "1,234" in pages.get("/consumers").text
    assert "nobody reads" in pages.get("/").text
    assert "1,234 messages" in pages.get("/consumers/ORDERS/bill").text
    stream = next(one for one in status(nats_server)["streams"] if one["name"] == "ORDERS")
    assert f"{stream['messages']:,}" in pages.get("/streams").text
    assert "% of 1.0 MiB" in pages.get("/streams").text


def test_messages_of_a_work_queue_are_found_and_no_consumer_is_left(pages: Served, streams: Streams) -> None:
    streams.publish("orders.paid", [b'{"payload": {"id": %d}}' % n for n in range(1, 301)])
    streams.publish("orders.sent", [b"<script>alert(1)</script>"], Kind="odd")
    shown = pages.get("/streams/ORDERS/messages").text
    assert "#301" in shown
    assert "#251" not in shown
    assert "<script>alert" not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert "#17 " in (found := pages.get("/streams/ORDERS/messages?field=payload.id%3D17").text)
    assert "1 of 301 messages" in found
    assert "1 of 301 messages" in pages.get("/streams/ORDERS/messages?header=kind%3Dodd").text
    assert "1 of 301 messages" in pages.get("/streams/ORDERS/messages?subject=orders.sent").text
    assert "3 of 301 messages" in pages.get("/streams/ORDERS/messages?first=5&last=7").text
    assert pages.get("/streams/ORDERS/messages?since=yesterday").status == 400
    assert pages.get("/streams/ORDERS/messages?since=2026-01-01T00:00:00").status == 400
    assert "301 messages" in pages.get("/streams/ORDERS/messages?since=2026-01-01T00:00:00Z").text
    assert pages.get("/streams/ORDERS/messages?first=x").status == 400
    assert pages.get("/streams/ORDERS/messages?subject=a..b").status == 400
    assert streams.info("ORDERS").state.messages == 301
    assert streams.info("ORDERS").state.consumers == 1


def test_a_stream_that_was_changed_by_hand_differs_from_the_file(pages: Served, streams: Streams) -> None:
    assert "Differs from the file" not in pages.get("/streams/ORDERS").text
    streams.connection.request(
        "$JS.API.STREAM.UPDATE.ORDERS", json.dumps({**streams.info("ORDERS").config, "max_bytes": 2**21}).encode()
    )
    assert "max_bytes" in pages.get("/streams/ORDERS").text


def test_a_refresh_makes_what_is_live_and_nothing_else(pages: Served, streams: Streams) -> None:
    """A histogram and a plan are dozens of requests to the server, and a page fetches itself every other second."""
    streams.number("orders.paid", 1, 20)
    whole = pages.get("/streams/ORDERS").text
    part = pages.get("/streams/ORDERS", **{"x-live": "1"}).text
    assert [name in whole for name in LEFT_OUT] == [True, True]
    assert [name in part for name in LEFT_OUT] == [False, False]
    live = re.compile(r'<(dl|div) id="(\w+)" data-live.*?</\1>', re.DOTALL)
    assert [found[2] for found in live.finditer(part)] == [found[2] for found in live.finditer(whole)]


def test_only_pages_with_live_parts_say_that_they_are_looked_at_again(pages: Served) -> None:
    for path in PATHS:
        page = pages.get(path).text
        main = page[page.index("<main") : page.index("</main>")]
        assert ("looked at again" in page) == ("data-live" in main), path


# -- acting ------------------------------------------------------------------------------------------------------------


def test_without_actions_nothing_can_be_changed(pages: Served, streams: Streams) -> None:
    assert "Pause" not in pages.get("/consumers/ORDERS/bill").text
    assert pages.post("/consumers/ORDERS/bill/pause", sure="yes", token="0" * 64).status == 403
    assert not streams.consumer("ORDERS", "bill").paused


@pytest.mark.parametrize("how", ["no token", "another token", "another site", "another origin", "another port"])
def test_a_form_of_another_site_is_refused(acting: Served, streams: Streams, how: str) -> None:
    own = token(acting.get("/consumers/ORDERS/bill"))
    fields = {} if how == "no token" else {"token": "0" * 64 if how == "another token" else own}
    headers = {
        "another site": {"Sec-Fetch-Site": "cross-site"},
        "another origin": {"Origin": "https://evil.example"},
        "another port": {"Origin": "http://127.0.0.1:1"},
    }.get(how, {})
    assert acting.post("/consumers/ORDERS/bill/pause", headers, sure="yes", **fields).status == 403
    assert not streams.consumer("ORDERS", "bill").paused


def test_a_form_of_these_pages_may_name_its_origin(acting: Served, streams: Streams) -> None:
    own = token(acting.get("/consumers/ORDERS/bill"))
    for origin in (acting.url, "null"):
        answer = acting.post("/consumers/ORDERS/bill/pause", {"Origin": origin}, token=own, length="5m")
        assert answer.status == 200, origin


def test_durations_of_a_consumer_are_written_as_people_write_them(pages: Served, streams: Streams) -> None:
    config = {"durable_name": "slow", "ack_policy": "explicit", "filter_subject": "orders.slow", "max_deliver": 4}
    run(streams.api.create_consumer("ORDERS", {**config, "backoff": [1_500_000_000, 45_000_000_000, 120_000_000_000]}))
    shown = pages.get("/consumers/ORDERS/bill").text
    assert '<th scope="row">ack_wait</th><td>30s</td>' in shown
    assert '<th scope="row">backoff</th><td>1s500ms, 45s, 2m</td>' in pages.get("/consumers/ORDERS/slow").text


def test_pause_resume_and_reset_ask_first_and_are_in_the_audit(acting: Served, streams: Streams) -> None:
    streams.number("orders.paid", 1, 10)
    own = token(acting.get("/consumers/ORDERS/bill"))
    asked = acting.post("/consumers/ORDERS/bill/pause", token=own, length="5m")
    assert (asked.status, streams.consumer("ORDERS", "bill").paused) == (200, False)
    assert "for 5m; messages wait, nothing is lost" in asked.text
    done = acting.post("/consumers/ORDERS/bill/pause", token=own, sure="yes", reason="lunch", length="5m")
    assert (done.status, done.headers["location"]) == (303, "/consumers/ORDERS/bill")
    assert streams.consumer("ORDERS", "bill").paused
    assert acting.post("/consumers/ORDERS/bill/resume", token=own, sure="yes").status == 303
    assert not streams.consumer("ORDERS", "bill").paused
    asked = acting.post("/consumers/ORDERS/bill/reset", token=own, to="5")
    assert "skips up to 4 messages" in asked.text
    assert acting.post("/consumers/ORDERS/bill/reset", token=own, to="99").status == 400
    assert acting.post("/consumers/ORDERS/bill/reset", token=own, to="5", sure="yes").status == 303
    assert streams.consumer("ORDERS", "bill").ack_floor_stream_seq == 4
    audit = acting.get("/letters/audit").text
    assert all(words in audit for words in ("consumer.pause", "consumer.resume", "consumer.reset", "lunch"))


def test_letters_are_replayed_and_discarded_from_their_page(
    acting: Served, nats_server: EmbeddedServer, streams: Streams
) -> None:
    for number in (1, 2):
        streams.publish("orders.paid", [b'{"event_id": "e%d", "price": -1}' % number])
    bury(nats_server)
    page = acting.get("/letters")
    assert "bad &lt;price&gt;" in page.text
    link = re.search(r'href="(/letters/of\?[^"]+)"', page.text)
    assert link
    listed = acting.get(link[1].replace("&amp;", "&"))
    ids = re.findall(r'name="id" value="([^"]+)"', listed.text)
    assert len(ids) == 2
    own = token(listed)
    assert "price" in acting.get(f"/letters/{ids[0]}").text
    asked = acting.post("/letters/replay", token=own, id=ids[0])
    assert "1 dead letters: replay" in asked.text
    assert len(stream_messages(nats_server.settings, "DLQ")) == 2, "nothing is done before somebody is sure"
    done = acting.post("/letters/replay", token=own, id=ids[0], sure="yes", patch='{"price": 1}', reason="fixed")
    assert "<b>1 replayed</b>" in over(acting, done)
    assert "1 of 1 messages" in acting.get("/streams/ORDERS/messages?field=price%3D1").text
    assert acting.post("/letters/discard", token=own, id=ids[1], sure="yes").status == 400, "a reason is needed"
    done = acting.post("/letters/discard", token=own, id=ids[1], sure="yes", reason="nobody misses it")
    assert "<b>1 discarded</b>" in over(acting, done)
    assert stream_messages(nats_server.settings, "DLQ") == []
    assert acting.post("/letters/replay", token=own, sure="yes").status == 400, "that would be all of them"
    assert "nobody misses it" in acting.get("/letters/audit").text


def test_a_message_is_decoded_by_the_schema_of_its_pipeline(
    nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    (tmp_path / "usage.avsc").write_text(json.dumps(AVRO))
    file = tmp_path / "penstock.yaml"
    event = "event: {format: avro, schema: usage.avsc}, to: [{format: console}]"
    file.write_text(
        f"environments: {{dev: {{servers: ['{nats_server.url}']}}}}\nstreams: {{S: {{subjects: [s.>]}}}}\n"
        f"pipelines: {{usage: {{from: {{stream: S}}, {event}}}}}"
    )
    streams.make("S", subjects=["s.>"])
    streams.publish("s.avro", [avro_datum(), b'{"id": "b"}'])
    with served(nats_server.settings, load(file)) as pages:
        page = pages.get("/streams/S/messages?field=price%3D12.34").text
    assert "1 of 2 messages" in page
    assert "decoded by the schema" in page
    assert "&#34;kind&#34;: &#34;GPU&#34;" in page


def test_a_replay_shows_how_far_it_is_and_goes_on_behind_its_page(
    acting: Served, nats_server: EmbeddedServer, streams: Streams
) -> None:
    streams.publish("orders.paid", [b'{"event_id": "e%d", "price": -1}' % number for number in range(600)])
    bury(nats_server, 600)
    page = acting.get("/letters")
    link = re.search(r'href="/letters/of\?reader=([^"&]+)', page.text)
    assert link
    own = token(acting.get(f"/letters/of?reader={link[1]}"))
    began = acting.post("/letters/replay", token=own, sure="yes", reader=link[1], rate="300")
    shown = acting.get(began.headers["location"]).text
    assert "so far" in shown
    assert '<progress max="600"' in shown
    assert "at most 300/s" in shown
    assert "<b>600 replayed</b>" in over(acting, began)
    assert stream_messages(nats_server.settings, "DLQ") == []


def over(pages: Served, answer: Answer) -> str:
    """The page of a replay or a discard, once it is over."""
    assert answer.status == 303, answer.text
    page = ""

    def is_over() -> bool:
        nonlocal page
        page = pages.get(answer.headers["location"]).text
        assert "It failed" not in page
        return "so far" not in page

    eventually(is_over, 30, "the run to end")
    return page


def bury(server: EmbeddedServer, count: int = 2) -> None:
    """Have an app give up on everything that waits."""

    async def until_done() -> None:
        app, stop = penstock.App(settings=server.settings), asyncio.Event()

        @app.consumer("bill", stream="ORDERS", dlq="dlq.orders.paid")
        async def handle(message: penstock.Message) -> None:
            raise penstock.Reject("bad <price>")

        serving = asyncio.create_task(app.serve(stop))
        await eventually_async(lambda: len(stream_messages(server.settings, "DLQ")) == count, 30, "the letters")
        stop.set()
        await serving

    asyncio.run(until_done())


# -- logging in --------------------------------------------------------------------------------------------------------


def test_with_tokens_nobody_sees_anything_before_they_log_in(nats_server: EmbeddedServer, platform: Platform) -> None:
    digest = hashlib.sha256(b"open sesame").hexdigest()
    with served(nats_server.settings, platform, Access(actions=True, tokens={digest: ("ann", "viewer")})) as pages:
        for path in PATHS:
            assert (answer := pages.get(path)).status == 303
            assert answer.headers["location"] == "/login"
        assert pages.get("/events").status == 401
        assert pages.post("/login", token="wrong").status == 401
        entered = pages.post("/login", token="open sesame")
        cookie = entered.headers["set-cookie"]
        assert all(word in cookie.lower() for word in ("httponly", "samesite=strict"))
        page = pages.get("/consumers/ORDERS/bill", Cookie=cookie.partition(";")[0])
        assert page.status == 200
        assert "Pause" not in page.text, "a viewer does not act"


def test_a_server_that_does_not_answer_is_told_and_waited_for(nats_server: EmbeddedServer, pages: Served) -> None:
    assert "does not answer" not in pages.get("/").text
    nats_server.kill()
    eventually(lambda: "The server does not answer" in pages.get("/").text, 20, "the page to say so")
    nats_server.start()
    eventually(lambda: "The server does not answer" not in pages.get("/").text, 20, "the page to come back")


def test_with_history_a_server_that_does_not_answer_leaves_the_last_picture(
    nats_server: EmbeddedServer, platform: Platform, streams: Streams
) -> None:
    streams.number("orders.paid", 1, 77)
    paths = ("/", "/streams", "/consumers", "/groups", "/pipelines")
    with served(nats_server.settings, replace(platform, history=timedelta(hours=1))) as pages:
        eventually(lambda: "Time machine" in pages.get("/").text, 20, "something to be kept")
        nats_server.kill()
        eventually(lambda: "The server does not answer" in pages.get("/").text, 20, "the page to say so")
        for path in paths:
            shown = pages.get(path)
            assert shown.status == 200, (path, shown.text)
            assert "Shown is what was last seen" in shown.text
        assert "77 waiting" in pages.get("/").text
        nats_server.start()
        eventually(lambda: "The server does not answer" not in pages.get("/").text, 20, "the page to come back")


def test_the_time_machine_shows_what_was_seen_then(
    nats_server: EmbeddedServer, platform: Platform, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ui.watch.RECORD_EVERY", 0.1)
    monkeypatch.setattr("penstock.ui.watch.EVERY", 0.2)
    with served(nats_server.settings, replace(platform, history=timedelta(hours=1))) as pages:
        eventually(lambda: "PENSTOCK_HISTORY" in pages.get("/streams").text, 20, "something to be kept")
        first = run(streams.api.get_message(record.STREAM, 1)).time
        assert first
        streams.number("orders.paid", 1, 77)
        eventually(lambda: "77 waiting" in pages.get("/").text, 20, "the present to move on")
        past = pages.get(f"/?at={first.timestamp()}").text
        assert "77 waiting" not in past
        assert "Back to now" in past
        assert pages.get("/?at=yesterday").status == 400
        assert pages.get("/?at=99999999999").status == 404, "nobody has seen that yet"
    assert streams.info(record.STREAM).config["max_age"] == 3600 * 10**9


def test_an_environment_needs_a_platform_file(tmp_path: Path) -> None:
    """It was passed over without a word where no file was named."""
    refused = here("ui", "--env", "prod", "--listen", "127.0.0.1:0", cwd=tmp_path)
    assert refused.returncode != 0
    assert "penstock.yaml" in refused.stderr
    (tmp_path / "penstock.yaml").write_text("environments: {dev: {servers: [nats://127.0.0.1:1]}}\n")
    refused = here("ui", "--env", "prod", "--listen", "127.0.0.1:0", cwd=tmp_path)
    assert refused.returncode != 0
    assert "'prod'" in refused.stderr
