"""A real group behind its page, in a real browser: a handoff is seen moving."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import async_playwright, expect
from tests.integration.workers.test_watching import Held
from tests.support.pages_served import chromium, served

from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer


async def test_a_handoff_is_seen_moving_and_lag_by_partition(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ui.watch.EVERY", 0.2)
    control = await Control.connect(nats_server.settings)
    held = Held(nats_server, control)
    await held.prepare()
    await held.join()
    await held.join()
    await held.shared(3, 3)
    with served(nats_server.settings) as pages:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            tab = await browser.new_page(base_url=pages.url, viewport={"width": 390, "height": 800})
            await tab.goto("/groups/g")
            await expect(tab.locator("#map")).to_contain_text("3 partitions, 0 waiting")
            for number in range(6):
                await held.publish(f"p{number}", number + 1)
            await expect(tab.locator("#map")).to_contain_text("p5 6", timeout=20_000)
            await held.join()
            await expect(tab.locator("#moves")).to_contain_text("hands over to worker-2", timeout=20_000)
            await expect(tab.locator("#map")).to_contain_text("→")
            assert await tab.evaluate("document.documentElement.scrollWidth") <= 390
            held.free.set()
            await expect(tab.locator("#moves")).not_to_contain_text("hands over", timeout=20_000)
            await held.shared(2, 2, 2)
            await expect(tab.locator("section[aria-label=worker-2]")).to_contain_text("2 partitions", timeout=20_000)
            happened = tab.locator("#happened")
            await expect(happened).to_contain_text("worker-2 has it, token")
            await expect(happened).to_contain_text("came, is")
            await browser.close()
    await held.all_done()
    await asyncio.gather(*(group.stop() for group in held.groups))
    await control.close()
