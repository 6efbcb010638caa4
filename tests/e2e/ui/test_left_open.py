"""A page that is left open: memory stays flat, there is one connection, and the browser has nothing to complain of."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from tests.support.pages_served import chromium
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.wire import blocking

WARM = 0.25
"""Part of the time after which memory no longer grows: trends are full, and every page was rendered."""
GROWTH = 1.10
"""What it may grow by after that; Python's allocator keeps some of what a restart of the broker needed."""


@contextmanager
def pages(server: EmbeddedServer) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "penstock", "--servers", server.url, "ui", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


def resident(pid: int) -> int:
    """Kilobytes in memory."""
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1])


def connections(server: EmbeddedServer, pid: int) -> int:
    """Connections of a process to the server, by their ports."""
    ports = {one["port"] for one in server.monitor("/connz?limit=1000")["connections"]}
    inodes = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = {int(row[1].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in inodes}
    return len(own & ports)


@contextmanager
def traffic(server: EmbeddedServer) -> Iterator[None]:
    """Messages and acknowledgements, so that every look finds something that has moved."""
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.5):
            try:
                with blocking.connect(server.settings) as connection:
                    Streams(connection).publish("orders.paid", [b'{"n": 1}'] * 20)
            except Exception:  # noqa: BLE001 -- the broker is being restarted
                continue

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


@pytest.mark.kills
@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=[pytest.mark.soak, pytest.mark.timeout(4200)])])
def test_a_page_that_is_left_open_costs_no_more_with_time(
    nats_server: EmbeddedServer, streams: Streams, seconds: int
) -> None:
    streams.make("ORDERS", max_msgs=100_000)
    blocking.run(streams.api.create_consumer("ORDERS", {"durable_name": "bill", "ack_policy": "explicit"}))
    said: list[str] = []
    used: list[tuple[float, int]] = []
    with traffic(nats_server), pages(nats_server) as (process, url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(url)
        began, restarted = time.monotonic(), False
        while (gone := time.monotonic() - began) < seconds:
            tab.wait_for_timeout(1000 * min(10.0, seconds / 10))
            used.append((gone / seconds, resident(process.pid)))
            if gone > seconds / 2 and not restarted:
                restarted = _restarted(nats_server, tab)
            assert connections(nats_server, process.pid) == 1
        expect(tab.locator("#attention")).to_contain_text("waiting")
        browser.close()
    assert [one for one in said if "ERR_" not in one] == []
    before = max(kilobytes for part, kilobytes in used if part <= WARM)
    after = used[-1][1]
    print(f"{before} KiB in the first quarter, {after} KiB at the end, {len(used)} looks")
    if seconds > 60:  # a shorter time is the warm-up
        assert after <= before * GROWTH


def _restarted(server: EmbeddedServer, tab: Page) -> bool:
    """The broker goes and comes back; so does the page, by itself."""
    server.kill()
    expect(tab.locator("#trouble")).to_contain_text("does not answer", timeout=60_000)
    server.start()
    expect(tab.locator("#trouble")).not_to_contain_text("does not answer", timeout=60_000)
    return True
