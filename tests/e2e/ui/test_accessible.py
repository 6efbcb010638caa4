"""Every page with a keyboard, with a reader of screens, and on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, sync_playwright
from tests.integration.ui.conftest import platform
from tests.integration.ui.test_pages import bury
from tests.support.pages_served import chromium, served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.topology.model import Platform
from penstock.ui.access import Access
from penstock.wire.blocking import run

__all__ = ["platform"]

PATHS = [
    "/", "/streams", "/streams/ORDERS", "/streams/SUBSCRIPTION_RENEWALS", "/streams/ORDERS/messages", "/consumers",
    "/consumers/ORDERS/bill", "/groups", "/pipelines", "/letters", "/letters/of?reader=bill", "/letters/audit",
    "/proof", "/nosuch",
]  # fmt: skip
UNNAMED = """() => [...document.querySelectorAll('a, button, input:not([type=hidden]), textarea, svg[role=img], meter')]
    .filter((one) => {
      const labels = one.labels ? [...one.labels].map((label) => label.textContent).join('') : '';
      const row = one.tagName === 'METER' ? one.parentElement.textContent : '';
      return !(one.textContent + labels + row + (one.getAttribute('aria-label') || '')).trim();
    }).map((one) => one.outerHTML)"""
CUT_OFF = """() => [...document.querySelectorAll('main *')].filter((one) => !one.closest('svg, pre, thead, .skip-text')
    && one.getClientRects().length && (one.getBoundingClientRect().right > innerWidth + 1
      || (one.matches('.scroll, .picture, td, dd, th, li, p') && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).display !== 'inline'))).map((one) => one.outerHTML.slice(0, 200))"""
"""What leaves the window, and boxes and cells whose content is wider than they are."""


@pytest.fixture
def tab(nats_server: EmbeddedServer, platform: Platform, streams: Streams) -> Iterator[Page]:
    """Every page has something to show: messages, lag, dead letters with long words."""
    streams.publish("orders.paid", [b'{"event_id": "e1"}', b'{"event_id": "e2"}'])
    bury(nats_server)
    streams.make("SUBSCRIPTION_RENEWALS", subjects=["renewals.>"])
    described = {"penstock.service": "subscription_renewals", "penstock.purpose": "starts what was asked for, " * 5}
    for name in ("app_runtime_worker_instance_requested", "app_runtime_worker_instance_was_stopped_by_its_owner"):
        config = {"durable_name": name, "ack_policy": "explicit", "metadata": described}
        run(streams.api.create_consumer("SUBSCRIPTION_RENEWALS", {**config, "filter_subject": "renewals.>"}))
    streams.number("renewals.due", 1, 12_345)
    streams.publish("orders." + "long" * 30, [b"x" * 2000], **{"X-" + "h" * 60: "v" * 300})
    with served(nats_server.settings, platform, Access(actions=True)) as pages, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser.new_page(base_url=pages.url, viewport={"width": 390, "height": 800})
        browser.close()


def test_every_page_fits_its_window_names_what_can_be_used_and_has_one_heading(tab: Page) -> None:
    letter = None
    for path in [*PATHS, "letter"]:
        if path == "/letters/of?reader=bill":
            tab.goto(path)
            letter = tab.locator("tbody a").first.get_attribute("href")
        tab.goto(letter or "" if path == "letter" else path, wait_until="domcontentloaded")
        for width in (390, 1000, 1110, 1280):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
            assert tab.evaluate(CUT_OFF) == [], (path, width)
            assert tab.evaluate(UNNAMED) == [], (path, width)
        assert tab.locator("h1").count() == 1, path
        assert tab.evaluate("document.documentElement.lang") == "en"
        assert tab.evaluate("[...document.querySelectorAll('[tabindex]')].every((one) => one.tabIndex <= 0)"), path


def test_the_keyboard_skips_to_the_content_and_what_has_the_focus_is_seen(tab: Page) -> None:
    tab.goto("/consumers/ORDERS/bill")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.closest('main') !== null")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
