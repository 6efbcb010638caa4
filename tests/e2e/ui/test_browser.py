"""The pages in a real browser: they move by themselves, keep to their width, and run no stranger's script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.support.pages_served import Served, chromium, served
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.topology.load import load
from penstock.ui.access import Access
from penstock.wire.blocking import run

FILE = """
name: shop
environments: {dev: {servers: ["%s"]}}
streams:
  ORDERS: {subjects: [orders.>], max_age: 1d, max_bytes: 1MiB, allow_direct: true}
consumers:
  bill: {stream: ORDERS, filter: orders.>, service: billing, ack_wait: 30s, max_deliver: 3, deliver: all,
         purpose: writes bills, may_miss: true}
"""
PATHS = ["/", "/streams", "/streams/ORDERS", "/streams/ORDERS/messages", "/consumers", "/consumers/ORDERS/bill"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def shop(
    nats_server: EmbeddedServer, streams: Streams, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """The pages of a shop. A test may give further lines of the platform file as the fixture's parameter."""
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE % nats_server.url + getattr(request, "param", ""))
    streams.make("ORDERS")
    billing = {"metadata": {"penstock.service": "billing"}, "ack_policy": "explicit", "filter_subject": "orders.>"}
    run(streams.api.create_consumer("ORDERS", {"durable_name": "bill", **billing}))
    with served(nats_server.settings, load(file, "dev"), Access(actions=True)) as pages:
        yield pages


@pytest.fixture
def tab(browser: Browser, shop: Served) -> Iterator[Page]:
    """A tab that fails the test when anything is written to its console."""
    page = browser.new_page(base_url=shop.url, viewport={"width": 1280, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    page.close()
    assert [one for one in said if "ERR_" not in one] == [], "the browser complains"


def test_what_nobody_reads_appears_by_itself_and_goes_again(tab: Page, streams: Streams) -> None:
    tab.goto("/")
    expect(tab.locator("#attention")).to_contain_text("Nothing is behind")
    streams.number("orders.paid", 1, 5)
    expect(tab.locator("#attention")).to_contain_text("nobody reads", timeout=30_000)
    expect(tab.locator("#attention")).to_contain_text("5 waiting")
    expect(tab.locator("svg.flow")).to_contain_text("5 waiting")
    run(streams.api.purge_stream("ORDERS"))
    expect(tab.locator("#attention")).to_contain_text("Nothing is behind", timeout=30_000)


@pytest.mark.parametrize("shop", ["", "history: 1d\n"], ids=["without history", "with history"], indirect=True)
def test_a_broker_that_is_away_is_told_and_the_page_comes_back_by_itself(
    shop: Served, tab: Page, nats_server: EmbeddedServer
) -> None:
    tab.goto("/streams")
    nats_server.kill()
    expect(tab.locator("#trouble")).to_contain_text("does not answer", timeout=60_000)
    expect(tab.locator("#streams")).to_contain_text("ORDERS")
    tab.reload()
    expect(tab.locator("h1")).to_have_text("Streams")
    expect(tab.locator("#streams")).to_contain_text("ORDERS")
    nats_server.start()
    expect(tab.locator("#trouble")).not_to_contain_text("does not answer", timeout=60_000)


def test_a_page_that_was_opened_before_its_broker_goes_on_by_itself(
    browser: Browser, nats_server: EmbeddedServer
) -> None:
    nats_server.kill()
    with served(nats_server.settings) as pages:
        tab = browser.new_page(base_url=pages.url)
        tab.goto("/streams")
        expect(tab.locator("main")).to_contain_text("no NATS server answers")
        assert tab.locator(".alert:visible").count() == 1, "it is said once, and nothing was seen before"
        nats_server.start()
        expect(tab.locator("h1")).to_have_text("Streams", timeout=30_000)
        tab.close()


def test_many_tabs_share_one_stream_of_events_and_go_on_when_one_is_closed(
    browser: Browser, shop: Served, streams: Streams
) -> None:
    """A browser makes six connections to a server: with one for each tab, the seventh tab stayed empty."""
    context = browser.new_context(base_url=shop.url)
    tabs = [context.new_page() for _ in range(8)]
    for tab in tabs:
        tab.goto("/consumers", timeout=20_000)
    for waiting in ("1", "2"):
        streams.publish("orders.paid", [b"x"])
        for tab in tabs:
            expect(tab.locator("[data-label=Lag]")).to_have_text(waiting, timeout=20_000)
        tabs.pop(0).close()  # the one that listens
    context.close()


def test_a_body_with_a_script_is_text(tab: Page, streams: Streams) -> None:
    streams.publish("orders.paid", [b"<script>document.title='taken'</script><img src=x onerror=alert(1)>"])
    tab.goto("/streams/ORDERS/messages")
    expect(tab.locator("pre").first).to_contain_text("<script>document.title=")
    assert "taken" not in tab.title()
    assert tab.locator("img[src=x]").count() == 0


def test_nothing_is_cut_off_on_a_phone(tab: Page, streams: Streams) -> None:
    streams.publish("orders." + "long" * 40, [b'{"payload": "' + b"x" * 3000 + b'"}'], **{"X-" + "h" * 100: "v" * 300})
    tab.set_viewport_size({"width": 390, "height": 800})
    for path in PATHS:
        tab.goto(path)
        wide = tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} is {wide} pixels wide"
    tab.goto("/")
    expect(tab.locator(".flow-list")).to_be_visible()
    expect(tab.locator(".picture")).not_to_be_visible()


OUT_OF_ITS_BOX = """() => [...document.querySelectorAll('svg.flow .node')].flatMap((node) => {
  const box = node.querySelector('rect').getBoundingClientRect();
  return [...node.querySelectorAll('text')].filter((text) => {
    const own = text.getBoundingClientRect();
    return own.right > box.right || own.left < box.left;
  }).map((text) => text.textContent);
})"""
ON_ANOTHER = """() => {
  const boxes = [...document.querySelectorAll('svg.flow .labels text')].map((one) => [one, one.getBBox()]);
  return boxes.flatMap(([one, a], at) => boxes.slice(at + 1).filter(([, b]) => a.x < b.x + b.width
    && b.x < a.x + a.width && a.y < b.y + b.height - 2 && b.y < a.y + a.height - 2)
    .map(([other]) => `${one.textContent} / ${other.textContent}`));
}"""
THROUGH_ITS_OWN_END = """() => {
  const sides = Object.fromEntries([...document.querySelectorAll('svg.flow .node')].map((node) => {
    const [x] = node.getAttribute('transform').match(/[\\d.]+/g).map(Number);
    const [, kind, name] = node.querySelector('title').textContent
      .match(/^(dead letters|\\w+) (.*?): /);
    return [`${kind}:${name}`, [x, x + Number(node.querySelector('rect').getAttribute('width'))]];
  }));
  return [...document.querySelectorAll('svg.flow .edge')].filter((edge) => {
    const [from, to] = edge.querySelector('title').textContent.split(' → ');
    const begin = edge.getPointAtLength(0).x, near = edge.getPointAtLength(20).x;
    const [left, right] = sides[from];
    return (begin !== left && begin !== right) || (near > left && near < right) || !sides[to];
  }).map((edge) => edge.textContent);
}"""


def test_the_picture_can_be_read_at_1280_pixels(tab: Page, streams: Streams) -> None:
    streams.make("DLQ", subjects=["dlq.>"])
    described = {"metadata": {"penstock.service": "billing", "penstock.dlq": "dlq.orders"}, "ack_policy": "explicit"}
    for number in range(5):
        name = f"WAREHOUSE_MOVEMENTS_OF_REGION_{number}"
        streams.make(name, subjects=[f"moved.{number}.>"])
        streams.number(f"moved.{number}.a", 1, 3_000 + number)
        run(streams.api.create_consumer(name, {"durable_name": "bill_what_has_moved", **described}))
    run(streams.api.create_consumer("DLQ", {"durable_name": "triage", "ack_policy": "explicit"}))
    tab.goto("/")
    expect(tab.locator("svg.flow .labels")).to_contain_text("3,004 waiting", timeout=30_000)
    assert tab.evaluate(OUT_OF_ITS_BOX) == []
    assert tab.evaluate(ON_ANOTHER) == []
    assert tab.evaluate(THROUGH_ITS_OWN_END) == []
    titles = tab.locator("svg.flow .edge title").all_text_contents()
    assert "service:billing → dead letters:DLQ" in titles
    assert "dead letters:DLQ → consumer:triage" in titles


def test_a_page_of_large_messages_is_short_on_a_phone_and_opens_what_is_folded(tab: Page, streams: Streams) -> None:
    body = b'{"payload": {%s}}' % b", ".join(b'"field%d": %d' % (n, n) for n in range(40))
    streams.publish("orders.paid", [body] * 50, **{f"X-Header-{n}": "value" for n in range(6)})
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto("/streams/ORDERS/messages")
    expect(tab.locator("article")).to_have_count(50)
    assert tab.evaluate("document.documentElement.scrollHeight") < 15_000
    message = tab.locator("article").first
    expect(message.get_by_text('"field39": 39')).not_to_be_visible()
    message.locator("details.folded summary", has_text="payload").click()
    expect(message.get_by_text('"field39": 39')).to_be_visible()


@pytest.mark.parametrize("shop", ["history: 1d\n"], indirect=True)
def test_the_thumb_of_the_time_machine_is_at_the_end_now(shop: Served, tab: Page) -> None:
    eventually(lambda: 'id="at"' in shop.get("/streams").text, 20, "the first snapshot to be recorded")
    tab.goto("/streams")
    assert tab.locator(".past output").inner_text() == "now"
    assert tab.evaluate(
        "(() => { const at = document.getElementById('at'); return +at.value === +at.max && +at.min < +at.max; })()"
    )
    assert tab.evaluate("getComputedStyle(document.getElementById('at')).paddingRight") == "0px"


def test_an_action_is_asked_about_and_done_with_the_keyboard(tab: Page, streams: Streams) -> None:
    tab.goto("/consumers/ORDERS/bill")
    tab.get_by_role("button", name="Pause").focus()
    tab.keyboard.press("Enter")
    expect(tab.locator(".effect")).to_contain_text("nothing is lost")
    assert not streams.consumer("ORDERS", "bill").paused
    tab.get_by_role("button", name="Yes, pause").press("Enter")
    expect(tab).to_have_url(re.compile("/consumers/ORDERS/bill$"))
    expect(tab.locator("#facts")).to_contain_text("Paused for")
    assert streams.consumer("ORDERS", "bill").paused


def test_a_range_is_chosen_by_drawing_over_the_bars(tab: Page, streams: Streams) -> None:
    streams.number("orders.paid", 1, 400)
    streams.number("orders.paid", 401, 500)
    tab.goto("/streams/ORDERS")
    bars = tab.locator("svg.histogram")
    box = bars.bounding_box()
    assert box
    middle = box["y"] + box["height"] - 3
    tab.mouse.move(box["x"] + 2, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] / 2, middle, steps=5)
    tab.mouse.up()
    expect(tab).to_have_url(re.compile(r"messages\?first=1&last=\d+"))
    expect(tab.locator("article").first).to_contain_text("#1 ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser: Browser, shop: Served, scheme: str) -> None:
    page = browser.new_page(base_url=shop.url, color_scheme=scheme)  # type: ignore[arg-type]  # one of its words
    page.goto("/")
    colours = page.evaluate(
        """() => { const of = (one, what) => getComputedStyle(document.querySelector(one))[what];
        return [of('h1', 'color'), of('body', 'backgroundColor')]; }"""
    )
    page.close()
    (ink, ground) = (sum(int(part) for part in re.findall(r"\d+", colour)[:3]) for colour in colours)
    assert abs(ink - ground) > 400, colours
