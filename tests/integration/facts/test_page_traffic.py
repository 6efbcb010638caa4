"""How pages travel: acknowledgements that get lost on the way, and pages that are pulled before they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.facts import Facts, NewFact, Page
from penstock.facts import ahead as pulled_ahead
from penstock.jetstream.model import ConsumerInfo
from penstock.server.embedded import EmbeddedServer
from penstock.testing import LossyProxy, eventually_async

MINUTE = 60_000_000_000  # nanoseconds


async def prepare(facts: Facts, count: int, **more: Any) -> None:
    await make_stream(facts.link.jetstream, "FACTS")
    await facts.append_facts([NewFact("facts.n", str(n), b"%d" % n) for n in range(1, count + 1)])
    config = {"durable_name": "reader", "ack_policy": "explicit", "ack_wait": 2 * MINUTE}
    await facts.link.jetstream.create_consumer("FACTS", {**config, **more})


async def progress(facts: Facts) -> ConsumerInfo:
    return await facts.link.jetstream.consumer_info("FACTS", "reader")


def sequences(page: Page) -> list[int]:
    return [fact.sequence for fact in page.facts]


async def next_page(facts: Facts, limit: int = 10) -> list[int]:
    """Fetch a page and confirm it."""
    page = await facts.fetch_facts("reader", limit, wait=30)
    await facts.confirm_receipt("reader", page.receipt)
    return sequences(page)


# -- acknowledgements --------------------------------------------------------------------------------------------------


async def test_acknowledgements_that_another_server_loses_are_sent_again(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path, domain="hub") as server, LossyProxy(server.port) as proxy:
        settings = dataclasses.replace(server.settings.with_servers(proxy.url), domain="hub")
        async with Facts(settings) as facts:
            await prepare(facts, 20)
            lost = iter([False, True, True])
            proxy.drop_up = lambda line: line.startswith(b"PUB $JS.ACK.") and next(lost, False)
            assert await next_page(facts, 20) == [*range(1, 21)]
            now = await progress(facts)
    assert (now.ack_floor_stream_seq, now.ack_pending) == (20, 0)


async def test_a_dedicated_reader_whose_acknowledgements_stand_for_all_before_sends_one_a_page(
    nats_server: EmbeddedServer,
) -> None:
    acknowledged: list[bytes] = []

    def note(line: bytes) -> bool:
        acknowledged.extend([line] if line.startswith(b"PUB $JS.ACK.") else [])
        return False

    with LossyProxy(nats_server.port) as proxy:
        proxy.drop_up = note
        async with Facts(nats_server.settings.with_servers(proxy.url)) as facts:
            await prepare(facts, 25, ack_policy="all", metadata={"penstock.reader": "dedicated"})
            assert [await next_page(facts) for _ in range(3)] == [[*range(1, 11)], [*range(11, 21)], [*range(21, 26)]]
            now = await progress(facts)
    assert (now.ack_floor_stream_seq, now.ack_pending) == (25, 0)
    assert [line.split(b".")[5] for line in acknowledged] == [b"10", b"20", b"25"]


# -- pages that are pulled ahead ---------------------------------------------------------------------------------------


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, a test makes no pause between pages."""
    monkeypatch.setattr(pulled_ahead, "NO_PAUSE", 60.0)
    monkeypatch.setattr(pulled_ahead, "KEPT_FOR", 10.0)


@pytest.fixture
async def facts(nats_server: EmbeddedServer) -> AsyncIterator[Facts]:
    async with Facts(nats_server.settings) as made:
        await prepare(made, 50)
        yield made


async def running(facts: Facts) -> None:
    """Read two pages, after which the third is on its way."""
    assert [await next_page(facts), await next_page(facts)] == [[*range(1, 11)], [*range(11, 21)]]

    async def pulled() -> bool:
        return (await progress(facts)).ack_pending == 10

    await eventually_async(pulled, what="the next page to be pulled ahead")


@pytest.mark.usefixtures("unhurried")
async def test_a_reader_that_makes_no_pause_gets_every_fact_once_and_in_order(facts: Facts) -> None:
    await running(facts)
    assert [await next_page(facts) for _ in range(3)] == [[*range(n, n + 10)] for n in (21, 31, 41)]
    page = await facts.fetch_facts("reader")
    assert (page.facts, page.pending) == ((), 0)


@pytest.mark.usefixtures("unhurried")
async def test_what_was_pulled_ahead_of_a_reset_is_not_handed_out(facts: Facts) -> None:
    await running(facts)
    await facts.link.jetstream.reset_consumer("FACTS", "reader", 1)
    assert [await next_page(facts), await next_page(facts)] == [[*range(1, 11)], [*range(11, 21)]]


@pytest.mark.usefixtures("unhurried")
async def test_what_was_pulled_ahead_goes_back_when_the_reader_closes(
    nats_server: EmbeddedServer, facts: Facts
) -> None:
    async with Facts(nats_server.settings) as other:
        await running(other)
    page = await facts.fetch_facts("reader", 10, wait=30)
    assert sequences(page) == [*range(21, 31)]


async def test_what_was_pulled_ahead_goes_back_when_the_reader_pauses(
    nats_server: EmbeddedServer, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulled_ahead, "NO_PAUSE", 60.0)
    await next_page(facts)
    await next_page(facts)
    async with Facts(nats_server.settings) as other:
        seen: set[int] = set()
        while len(seen) < 30:
            seen |= set(await next_page(other))
    assert seen == {*range(21, 51)}


@pytest.mark.usefixtures("unhurried")
async def test_nothing_is_pulled_ahead_of_which_the_server_counts_deliveries(nats_server: EmbeddedServer) -> None:
    """What is given back was delivered: with `max_deliver: 1` nobody would ever get it."""
    async with Facts(nats_server.settings) as facts:
        await prepare(facts, 50, max_deliver=1)
        assert [await next_page(facts), await next_page(facts)] == [[*range(1, 11)], [*range(11, 21)]]
    async with Facts(nats_server.settings) as other:
        assert [await next_page(other) for _ in range(3)] == [[*range(n, n + 10)] for n in (21, 31, 41)]
