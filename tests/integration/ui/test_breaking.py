"""Publishers, strangers and careless people try to break the pages."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

import pytest
from tests.integration.ui.test_pages import token
from tests.support.pages_served import Served, served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.topology.model import Platform
from penstock.ui.access import Access
from penstock.ui.page import readable
from penstock.wire import frames
from penstock.wire.blocking import run

XSS = "<img/src=x/onerror=alert(1)>\"'"


def test_what_publishers_write_is_shown_as_text_everywhere(pages: Served, streams: Streams) -> None:
    streams.make(
        "EVIL",
        subjects=["evil.>"],
        description=XSS,
        metadata={"penstock.platform": XSS},
    )
    streams.publish(f"evil.{XSS}", [XSS.encode()], **{"X-Evil": XSS})
    described = {"penstock.service": XSS, "penstock.owner": XSS, "penstock.purpose": XSS, "penstock.group": XSS}
    config = {"durable_name": "evil", "ack_policy": "explicit", "description": XSS, "metadata": described}
    run(streams.api.create_consumer("EVIL", config))
    evil = urllib.parse.quote(XSS)
    for path in (
        "/", "/streams", "/streams/EVIL", "/streams/EVIL/messages", "/consumers", "/consumers/EVIL/evil",
        f"/consumers?service={evil}", f"/consumers?q={evil}", f"/streams/EVIL/messages?header={evil}",
        f"/streams/{evil}", f"/groups/{evil}", f"/pipelines/{evil}", f"/letters/of?reader={evil}&error={evil}",
        f"/letters?done={evil}", f"/letters/runs/{evil}",
        f"/streams/EVIL/messages?since={evil}", f"/nosuch/{evil}", f"/?at={evil}",
    ):  # fmt: skip
        shown = pages.get(path)
        assert shown.status < 500, (path, shown.text)
        assert "<img/src" not in shown.text, path


def test_bytes_that_are_no_text_do_not_break_a_page(pages: Served, streams: Streams) -> None:
    head = b"NATS/1.0\r\nX-Odd: \xff\xfe\r\n\r\n"
    streams.connection.send(frames.publish("orders.odd", rb'"half \ud800 a pair"', headers=head))
    streams.publish("orders.paid", [b"\x00\xff"])
    shown = pages.get("/streams/ORDERS/messages")
    assert shown.status == 200, shown.text
    assert "half" in shown.text
    assert "00 ff" in shown.text


def test_a_body_that_grows_when_it_is_indented_is_cut_while_it_grows() -> None:
    deep = b"[" * 400 + b",".join([b"0"] * 100_000) + b"]" * 400
    assert len(readable(deep, 4000)) == 4001
    assert len(readable(b"\xff" * 10_000_000, 4000)) <= 4001


@pytest.mark.parametrize("done", ["All your base", "3 replayed"])
def test_a_link_cannot_make_the_page_say_something(pages: Served, done: str) -> None:
    words = urllib.parse.quote(done)
    for path in (f"/letters?done={words}&signed={'0' * 64}", f"/letters/runs/{words}"):
        assert done not in pages.get(path).text


def test_a_message_is_published_again_by_the_command_that_is_shown(pages: Served, streams: Streams) -> None:
    body = '{"price": 1.10,  "who": "O\'Neill \\"x\\" $HOME `id` ü"}\nsecond\tline\\n'.encode()
    streams.publish("orders.paid", [body], Kind="it's $odd", **{"Nats-Msg-Id": "7"})
    streams.publish("orders.paid", [b"\xff"])
    found = re.findall(r'<pre id="publish-\d+">(.*?)</pre>', pages.get("/streams/ORDERS/messages").text, re.DOTALL)
    (command,) = (unescape(one) for one in found)
    here = Path(sys.executable).with_name("penstock")
    subprocess.run(["bash", "-c", command.replace("| penstock", f"| {here}")], check=True, timeout=60)
    again = run(streams.api.get_message("ORDERS", 3))
    assert (again.subject, again.data) == ("orders.paid", body)
    assert again.headers["Kind"] == ["it's $odd"]
    assert "Nats-Msg-Id" not in again.headers, "the server would have passed it over"


def test_a_search_that_finds_nothing_goes_on_from_where_it_stopped(
    pages: Served, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ui.pages.SEARCHED", 100)
    streams.publish("orders.paid", [b'{"id": %d}' % n for n in range(1, 251)])
    shown = pages.get("/streams/ORDERS/messages?field=id%3D250&first=1")
    assert "No message matches" in shown.text
    link = re.search(r'href="(\?[^"]*first=101[^"]*)"', shown.text)
    assert link
    shown = pages.get("/streams/ORDERS/messages" + unescape(link[1]))
    link = re.search(r'href="(\?[^"]*first=201[^"]*)"', shown.text)
    assert link
    assert "#250" in pages.get("/streams/ORDERS/messages" + unescape(link[1])).text
    shown = pages.get("/streams/ORDERS/messages?field=id%3D60")  # without a place to begin: backwards from the newest
    assert "No message matches" in shown.text
    assert "“Earlier” goes on" in shown.text
    link = re.search(r'href="(\?[^"]*last=(?:\d+))"', shown.text)
    assert link
    assert "#60 " in pages.get("/streams/ORDERS/messages" + unescape(link[1])).text


def test_the_newest_messages_are_shown_where_most_sequences_hold_none(pages: Served, streams: Streams) -> None:
    """As on a work queue, from which messages go in any order, and beside subjects that nobody asked for."""
    streams.publish("orders.paid", [b"%d" % n for n in range(1, 401)])
    streams.publish("orders.sent", [b"sent"] * 60)
    run(streams.api.purge_stream("ORDERS", subject="orders.sent", keep=3))
    shown = pages.get("/streams/ORDERS/messages").text
    assert "50 of 403 messages" in shown
    assert all(f"#{sequence} " in shown for sequence in (354, 400, 458, 460))
    assert "#353 " not in shown
    shown = pages.get("/streams/ORDERS/messages?subject=orders.paid").text
    assert "#400 " in shown
    assert "#351 " in shown
    link = re.search(r'href="(\?[^"]*last=350)"', shown)
    assert link
    assert "#301 " in pages.get("/streams/ORDERS/messages" + unescape(link[1])).text


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_every_answer_forbids_frames_and_sniffing(pages: Served) -> None:
    for answer in (pages.get("/"), pages.get("/nosuch"), pages.get("/", Host="evil.example"), pages.get("/login")):
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/consumers/ORDERS/bill/pause", "/consumers/ORDERS/bill/resume", "/consumers/ORDERS/bill/reset",
             "/letters/replay", "/letters/discard"],
)  # fmt: skip
def test_every_action_needs_its_token_and_its_own_site(acting: Served, path: str) -> None:
    own = token(acting.get("/consumers/ORDERS/bill"))
    assert acting.post(path, sure="yes").status == 403
    assert acting.post(path, sure="yes", token="ä" * 64).status == 403
    assert acting.post(path, {"Sec-Fetch-Site": "same-site"}, sure="yes", token=own).status == 403
    assert acting.get(path).status in (404, 405)


def test_a_form_that_is_too_large_or_has_too_many_fields_is_refused(acting: Served) -> None:
    own = token(acting.get("/consumers/ORDERS/bill"))
    assert acting.post("/letters/replay", token=own, patch="x" * 300_000).status == 413
    many = {f"f{n}": "1" for n in range(6000)}
    assert acting.post("/letters/replay", None, token=own, **many).status == 400


def test_a_form_that_does_not_arrive_is_not_waited_for(acting: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ui.app.FORM_WITHIN", 0.2)
    host, _, port = acting.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 20) as slow:
        head = "POST /letters/replay HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\ntok"
        slow.sendall(head.encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_tokens_are_guessed_one_at_a_time_and_the_right_one_does_not_wait(
    nats_server: EmbeddedServer, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ui.app.GUESS_EVERY", 0.2)
    monkeypatch.setattr("penstock.ui.app.MAX_GUESSES", 3)
    digest = hashlib.sha256(b"right").hexdigest()
    with (
        served(nats_server.settings, platform, Access(tokens={digest: ("ann", "viewer")})) as pages,
        ThreadPoolExecutor(8) as several,
    ):
        began = time.monotonic()
        wrong = list(several.map(lambda n: pages.get("/", Authorization=f"Bearer {n}").status, range(8)))
        assert wrong.count(429) >= 3, "so many do not wait"
        assert time.monotonic() - began >= 0.2 * wrong.count(303)
        several.submit(lambda: pages.post("/login", token="wrong"))
        assert pages.get("/streams", Authorization="Bearer right").status == 200
        assert pages.post("/login", {"Sec-Fetch-Site": "cross-site"}, token="right").status == 403
