"""What an operator does and waits for in a real browser: a replay to its end, and lag that appears in time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator

import pytest
from playwright.async_api import async_playwright
from playwright.sync_api import Page, expect, sync_playwright
from tests.integration.ui.conftest import platform
from tests.integration.ui.test_pages import bury
from tests.support.pages_served import chromium, served
from tests.support.streams import Streams

import penstock
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async, stream_messages
from penstock.topology.model import Platform
from penstock.ui.access import Access
from penstock.wire.blocking import run

__all__ = ["platform"]

LAG_WITHIN = 2.0
"""Seconds in which lag must be seen."""
UNTIL_LOOKED_AGAIN = """(seen) => new Promise((done) => {
  const look = () => document.getElementById('taken').innerText !== seen ? done() : setTimeout(look, 10);
  look();
})"""
UNTIL_LAG_IS = """(lag) => new Promise((done) => {
  const shown = () => [...document.querySelectorAll('[data-label=Lag]')].some((one) => one.innerText === lag);
  const look = () => shown() ? done() : setTimeout(look, 10);
  look();
})"""


@pytest.fixture
def tab(nats_server: EmbeddedServer, platform: Platform, streams: Streams) -> Iterator[Page]:
    for number in (1, 2):
        streams.publish("orders.paid", [b'{"event_id": "e%d", "price": -1}' % number])
    bury(nats_server)
    with served(nats_server.settings, platform, Access(actions=True)) as pages, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser.new_page(base_url=pages.url)
        browser.close()


def test_a_letter_is_replayed_from_its_page_to_the_end(
    tab: Page, nats_server: EmbeddedServer, streams: Streams
) -> None:
    tab.goto("/letters")
    tab.locator("tbody a").first.click()
    tab.locator("tbody a").first.click()
    expect(tab.locator("main")).to_contain_text("bad <price>")
    tab.get_by_label("JSON merge patch").fill('{"price": 1}')
    tab.get_by_role("button", name="Replay").click()
    expect(tab.locator(".effect")).to_contain_text("1 dead letters: replay")
    assert len(stream_messages(nats_server.settings, "DLQ")) == 2, "nothing is done before somebody is sure"
    tab.get_by_label("Reason").fill("the price is known")
    tab.get_by_role("button", name="Yes, replay").click()
    expect(tab).to_have_url(re.compile("/letters/runs/"))
    expect(tab.locator("#run")).to_contain_text("1 replayed", timeout=30_000)
    expect(tab.locator("#run")).not_to_contain_text("so far", timeout=30_000)
    assert len(stream_messages(nats_server.settings, "DLQ")) == 1
    sent = run(streams.api.get_message("ORDERS", last_of="orders.paid"))
    assert json.loads(sent.data)["price"] == 1
    tab.get_by_role("link", name="What was done").click()
    expect(tab.locator("tbody")).to_contain_text("the price is known")
    tab.goto("/letters")
    expect(tab.locator("main")).to_contain_text("1 dead letters")


async def test_lag_appears_within_two_seconds_of_a_stopped_consumer(
    nats_server: EmbeddedServer, platform: Platform, streams: Streams
) -> None:
    app, stop, handled = penstock.App(settings=nats_server.settings), asyncio.Event(), list[int]()

    @app.consumer("bill", stream="ORDERS", dlq="dlq.orders.paid")
    async def handle(message: penstock.Message) -> None:
        handled.append(message.sequence)

    serving = asyncio.create_task(app.serve(stop))
    streams.number("orders.paid", 1, 3)
    await eventually_async(lambda: len(handled) == 3, 30, "the consumer to work")
    with served(nats_server.settings, platform) as pages:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            tab = await browser.new_page()
            await tab.goto(f"{pages.url}/consumers")
            stop.set()
            await serving
            for waiting in (10, 20, 30):
                # Right after a look it takes longest until the next.
                seen = await tab.locator("#taken").inner_text()
                await tab.evaluate(UNTIL_LOOKED_AGAIN, seen)
                began = time.monotonic()
                streams.number("orders.paid", waiting, waiting + 9)
                await tab.evaluate(UNTIL_LAG_IS, str(waiting))
                took = time.monotonic() - began
                assert took <= LAG_WITHIN, f"{waiting} waiting were seen after {took:.2f} s"
                print(f"{waiting} waiting: seen after {took:.2f} s")
            await browser.close()
