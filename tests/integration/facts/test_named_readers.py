"""Named readers against a real server: pages, receipts, redelivery, and who may confirm what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.streams import make_stream

from penstock.errors import ConfigError, ConsumerNotFound, ServerBusy
from penstock.facts import BlockingFacts, Facts, ForeignReceipt, ForgedReceipt, Page, StaleReceipt
from penstock.facts.receipt import Receipt
from penstock.facts.store import KEY_BYTES
from penstock.jetstream.api import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async

BUCKET = "KV_penstock_facts"
KEY_SUBJECT = "$KV.penstock_facts.signing-key"
MS = 1_000_000
ACK_WAIT = 60_000 * MS
SOON = 4_000 * MS
"""The ack wait where facts are to come again: long enough for all that has to happen before it is over."""


@dataclass
class Zone:
    """A stream with numbered facts, and instances that read it."""

    server: EmbeddedServer
    facts: Facts
    other: Facts

    @property
    def js(self) -> JetStream:
        return self.facts.link.jetstream

    async def consumer(self, name: str = "reader", **config: Any) -> None:
        base = {"durable_name": name, "ack_policy": "explicit", "ack_wait": ACK_WAIT}
        await self.js.create_consumer("FACTS", {**base, **config})

    async def append(self, count: int, subject: str = "facts.n") -> None:
        await asyncio.gather(*(self.facts.append_fact(subject, f"{n}", b"%d" % n) for n in range(1, count + 1)))

    async def floor(self, name: str = "reader") -> int:
        return (await self.js.consumer_info("FACTS", name)).ack_floor_stream_seq


@pytest.fixture
async def zone(nats_server: EmbeddedServer) -> AsyncIterator[Zone]:
    async with Facts(nats_server.settings) as facts, Facts(nats_server.settings) as other:
        made = Zone(nats_server, facts, other)
        await make_stream(made.js, "FACTS")
        yield made


async def soon_is_over(zone: Zone) -> None:
    """Wait until the ack wait of everything delivered is over: while it ends, facts come again one by one."""
    last = (await zone.js.consumer_info("FACTS", "reader")).last_delivered
    assert last
    over = last + timedelta(milliseconds=SOON // MS + 500)
    await eventually_async(lambda: datetime.now(UTC) > over, what="the ack wait to be over")


def sequences(page: Page) -> list[int]:
    return [fact.sequence for fact in page.facts]


def receipt(page: Page) -> str:
    assert page.receipt
    return page.receipt


async def test_pages_come_in_order_and_a_confirmed_one_never_again(zone: Zone) -> None:
    await zone.append(25)
    await zone.consumer()
    seen: list[int] = []
    while page := await zone.facts.fetch_facts("reader", 10):
        seen += sequences(page)
        done = await zone.facts.confirm_receipt("reader", receipt(page))
        assert (done.first, done.last, done.already) == (page.facts[0].sequence, page.facts[-1].sequence, False)
        assert await zone.floor() == seen[-1]
    assert seen == list(range(1, 26))
    info = await zone.js.consumer_info("FACTS", "reader")
    assert (info.ack_pending, info.redelivered) == (0, 0)


async def test_a_page_without_facts_has_no_receipt(zone: Zone) -> None:
    await zone.consumer()
    page = await zone.facts.fetch_facts("reader", 10)
    assert (page.facts, page.receipt) == ((), None)


async def test_a_fetch_waits_for_the_first_fact(zone: Zone) -> None:
    await zone.consumer()
    fetch = asyncio.create_task(zone.facts.fetch_facts("reader", 10, wait=20))
    await eventually_async(lambda: _waiting(zone), what="the pull to wait")
    await zone.append(1)
    assert sequences(await fetch) == [1]


async def _waiting(zone: Zone) -> bool:
    return (await zone.js.consumer_info("FACTS", "reader")).waiting > 0


async def test_a_page_that_is_not_confirmed_comes_again_in_order_and_its_receipt_is_stale(zone: Zone) -> None:
    await zone.append(20)
    await zone.consumer(ack_wait=SOON)
    first = await zone.facts.fetch_facts("reader", 20)
    await soon_is_over(zone)
    again = await zone.other.fetch_facts("reader", 20, wait=20)
    assert sequences(first) == sequences(again) == list(range(1, 21))
    assert {fact.attempt for fact in again.facts} == {2}
    with pytest.raises(StaleReceipt, match="delivered again"):
        await zone.facts.confirm_receipt("reader", receipt(first))
    assert await zone.floor() == 0
    assert not (await zone.other.confirm_receipt("reader", receipt(again))).already
    assert await zone.floor() == 20
    with pytest.raises(StaleReceipt):
        await zone.facts.confirm_receipt("reader", receipt(first))


async def test_confirming_twice_is_harmless_also_from_another_instance(zone: Zone) -> None:
    await zone.append(4)
    await zone.consumer()
    page, behind = await zone.facts.fetch_facts("reader", 2), await zone.facts.fetch_facts("reader", 2)
    await zone.facts.confirm_receipt("reader", receipt(page))
    for instance in (zone.facts, zone.other):
        assert (await instance.confirm_receipt("reader", receipt(page))).already
    assert (await zone.js.consumer_info("FACTS", "reader")).ack_pending == 2
    assert not (await zone.other.confirm_receipt("reader", receipt(behind))).already


async def test_instances_of_a_shared_identity_never_confirm_each_others_pages(zone: Zone) -> None:
    await zone.append(30)
    await zone.consumer(ack_wait=30_000 * MS)
    first, second, third = [await one.fetch_facts("reader", 10) for one in (zone.facts, zone.other, zone.facts)]
    await zone.facts.confirm_receipt("reader", receipt(third))
    info = await zone.js.consumer_info("FACTS", "reader")
    assert (info.ack_floor_stream_seq, info.ack_pending) == (0, 20)
    await zone.other.confirm_receipt("reader", receipt(first))
    assert await zone.floor() == 10
    await zone.facts.confirm_receipt("reader", receipt(second))
    assert await zone.floor() == 30


async def test_a_dedicated_reader_has_one_page_at_a_time_and_so_never_sees_facts_out_of_order(zone: Zone) -> None:
    await zone.append(6)
    await zone.consumer(ack_wait=SOON, metadata={"penstock.reader": "dedicated"})
    first = await zone.facts.fetch_facts("reader", 4)
    held = await zone.other.fetch_facts("reader", 4)
    assert not held
    assert held.retry_after is not None
    again = await zone.other.fetch_facts("reader", 5, wait=20)
    assert sequences(first) == [1, 2, 3, 4]
    assert sequences(again) == [1, 2, 3, 4, 5]
    await zone.other.confirm_receipt("reader", receipt(again))
    assert sequences(await zone.other.fetch_facts("reader", 5)) == [6]


async def test_facts_of_a_dedicated_reader_come_in_order_whatever_was_left_unconfirmed(zone: Zone) -> None:
    await zone.append(4)
    await zone.consumer(ack_wait=500 * MS, metadata={"penstock.reader": "dedicated"})
    pages = [await zone.facts.fetch_facts("reader", limit, wait=20) for limit in (3, 1, 2)]
    assert [sequences(page) for page in pages] == [[1, 2, 3], [1], [1, 2]]
    assert [page.pending for page in pages] == [1, 3, 2]
    assert [[fact.attempt for fact in page.facts] for page in pages] == [[1, 1, 1], [2], [3, 2]]
    for stale in pages[:2]:
        with pytest.raises(StaleReceipt):
            await zone.other.confirm_receipt("reader", receipt(stale))
    await zone.facts.confirm_receipt("reader", receipt(pages[2]))
    rest = await zone.other.fetch_facts("reader", 5)
    assert (sequences(rest), [fact.attempt for fact in rest.facts], rest.pending) == ([3, 4], [2, 1], 0)


async def test_instances_of_a_dedicated_reader_that_fetch_at_once_get_one_page(zone: Zone) -> None:
    await zone.append(40)
    await zone.consumer(metadata={"penstock.reader": "dedicated"})
    confirmed: list[int] = []
    while len(confirmed) < 40:
        found = await asyncio.gather(*(one.fetch_facts("reader", 4, wait=0.1) for one in (zone.facts, zone.other)))
        (page,) = filter(None, found)
        confirmed += sequences(page)
        await zone.facts.confirm_receipt("reader", receipt(page))
    assert confirmed == list(range(1, 41))


async def test_a_dedicated_reader_goes_back_with_its_consumer(zone: Zone) -> None:
    await zone.append(5)
    await zone.consumer(metadata={"penstock.reader": "dedicated"})
    page = await zone.facts.fetch_facts("reader", 3)
    await zone.facts.confirm_receipt("reader", receipt(page))
    await zone.js.reset_consumer("FACTS", "reader", 2)
    assert sequences(await zone.other.fetch_facts("reader", 10)) == [2, 3, 4, 5]


async def test_an_empty_page_says_how_many_facts_are_held_and_for_how_long(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer()
    assert (await zone.facts.fetch_facts("reader", 3)).held == 0
    empty = await zone.other.fetch_facts("reader", 3)
    assert (empty.facts, empty.held, empty.pending) == ((), 3, 3)
    assert empty.retry_after is not None
    assert timedelta(seconds=50) < empty.retry_after <= timedelta(seconds=60)


async def test_receipts_survive_a_restart_of_everything(zone: Zone) -> None:
    await zone.append(5)
    await zone.consumer(ack_wait=60_000 * MS)
    page = await zone.facts.fetch_facts("reader", 5)
    zone.server.kill()
    zone.server.start()
    async with Facts(zone.server.settings) as later:
        assert not (await later.confirm_receipt("reader", receipt(page))).already
        assert not await later.fetch_facts("reader", 5)


async def test_a_receipt_of_another_consumer_or_a_forged_one_confirms_nothing(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer()
    await zone.consumer("other")
    page, foreign = await zone.facts.fetch_facts("reader", 3), await zone.facts.fetch_facts("other", 3)
    with pytest.raises(ForeignReceipt, match="'other'"):
        await zone.facts.confirm_receipt("reader", receipt(foreign))
    text = receipt(page)
    with pytest.raises(ForgedReceipt):
        await zone.facts.confirm_receipt("reader", text[:-1] + ("A" if text[-1] != "A" else "B"))
    assert (await zone.js.consumer_info("FACTS", "reader")).ack_pending == 3


async def test_a_receipt_is_stale_after_the_consumer_was_made_anew(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer()
    page = await zone.facts.fetch_facts("reader", 3)
    await zone.js.delete_consumer("FACTS", "reader")
    await zone.consumer()
    with pytest.raises(StaleReceipt, match="recreated"):
        await zone.facts.confirm_receipt("reader", receipt(page))
    assert sequences(await zone.other.fetch_facts("reader", 3)) == [1, 2, 3]


async def test_after_a_reset_the_facts_come_again_though_they_were_confirmed(zone: Zone) -> None:
    await zone.append(5)
    await zone.consumer()
    page = await zone.facts.fetch_facts("reader", 3)
    await zone.facts.confirm_receipt("reader", receipt(page))
    held = await zone.facts.fetch_facts("reader", 2)
    await zone.js.reset_consumer("FACTS", "reader", 1)
    again = await zone.other.fetch_facts("reader", 10)
    assert sequences(again) == [1, 2, 3, 4, 5]
    with pytest.raises(StaleReceipt):
        await zone.facts.confirm_receipt("reader", receipt(held))


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_confirmed_facts_leave_a_stream_that_keeps_only_the_unread(zone: Zone, retention: str) -> None:
    await make_stream(zone.js, "Q", retention=retention)
    await zone.js.create_consumer("Q", {"durable_name": "worker", "ack_policy": "explicit"})
    for n in range(6):
        await zone.facts.append_fact("q.n", f"{n}", b"")
    page = await zone.facts.fetch_facts("worker", 4)
    await zone.facts.confirm_receipt("worker", receipt(page))
    assert (await zone.js.stream_info("Q")).state.messages == 2


async def test_a_filtered_reader_gets_its_own_facts_only(zone: Zone) -> None:
    for n in range(6):
        await zone.facts.append_fact("facts.even" if n % 2 == 0 else "facts.odd", f"{n}", b"%d" % n)
    await zone.consumer(filter_subject="facts.odd.*")
    page = await zone.facts.fetch_facts("reader", 10)
    assert [(fact.subject, fact.id, fact.data) for fact in page.facts] == [
        ("facts.odd", "1", b"1"), ("facts.odd", "3", b"3"), ("facts.odd", "5", b"5"),
    ]  # fmt: skip
    await zone.facts.confirm_receipt("reader", receipt(page))
    assert (await zone.js.consumer_info("FACTS", "reader")).ack_pending == 0


async def test_a_page_ends_before_its_bytes_do_and_a_large_fact_comes_alone(zone: Zone) -> None:
    for n, size in enumerate((100, 100, 50_000, 100)):
        await zone.facts.append_fact("facts.n", f"{n}", b"x" * size)
    await zone.consumer()
    pages = []
    while page := await zone.facts.fetch_facts("reader", 10, max_bytes=1_000):
        await zone.facts.confirm_receipt("reader", receipt(page))
        pages.append(sequences(page))
    assert [3] in pages
    assert [sequence for page in pages for sequence in page] == [1, 2, 3, 4]


async def test_consumers_that_pages_cannot_come_from_are_refused_with_the_reason(zone: Zone) -> None:
    await zone.consumer("all", ack_policy="all")
    await zone.js.create_consumer("FACTS", {"durable_name": "push", "deliver_subject": "x", "ack_policy": "explicit"})
    with pytest.raises(ConfigError, match="ack_policy 'all'"):
        await zone.facts.fetch_facts("all", 1)
    with pytest.raises(ConfigError, match="push consumer"):
        await zone.facts.fetch_facts("push", 1)
    with pytest.raises(ConsumerNotFound):
        await zone.facts.fetch_facts("nobody", 1)
    with pytest.raises(ConfigError, match="1 to 5000"):
        await zone.facts.fetch_facts("all", 0)


async def test_threads_can_do_the_same(zone: Zone) -> None:
    def work() -> tuple[int, bool, bool]:
        with BlockingFacts(zone.server.settings) as facts:
            stored = facts.append_fact("facts.n", "one", b"1")
            page = facts.fetch_facts("reader", 5, wait=20)
            first = facts.confirm_receipt("reader", receipt(page))
            return stored.sequence, first.already, facts.confirm_receipt("reader", receipt(page)).already

    await zone.consumer()
    assert await asyncio.to_thread(work) == (1, False, True)


async def test_a_consumer_that_moved_to_another_stream_is_found_again(zone: Zone) -> None:
    await zone.consumer()
    await zone.facts.fetch_facts("reader")
    await zone.js.delete_consumer("FACTS", "reader")
    await make_stream(zone.js, "MORE")
    await zone.js.create_consumer("MORE", {"durable_name": "reader", "ack_policy": "explicit"})
    with pytest.raises(ConsumerNotFound):
        await zone.facts.fetch_facts("reader")
    assert (await zone.facts.fetch_facts("reader")).stream == "MORE"


# -- a server that refuses ---------------------------------------------------------------------------------------------


async def test_a_full_store_ends_a_fetch_and_a_confirmation_with_the_servers_reason(tmp_path: Path) -> None:
    small = f'jetstream {{ store_dir: "{tmp_path}", max_file_store: 1MB }}'
    with EmbeddedServer(tmp_path, extra=small) as server:
        async with Facts(replace(server.settings, timeout=1.0)) as facts:
            zone = Zone(server, facts, facts)
            await make_stream(zone.js, "FACTS")
            await zone.append(4)
            await zone.consumer(ack_wait=500 * MS)
            await make_stream(zone.js, "BALLAST")
            page = await facts.fetch_facts("reader", 2)
            for size in (100_000, 1_000, 1):
                await _fill(facts, size)
            async with asyncio.timeout(20):
                with pytest.raises(ServerBusy, match="insufficient"):
                    await facts.confirm_receipt("reader", receipt(page))
                before = zone.js.requests
                with pytest.raises(ServerBusy, match="insufficient"):
                    await facts.fetch_facts("reader", 2)
            assert zone.js.requests - before < 200, "it waits longer from time to time"
            await zone.js.purge_stream("BALLAST")
            again = await facts.fetch_facts("reader", 2, wait=20)
            assert not (await facts.confirm_receipt("reader", receipt(again))).already


async def _fill(facts: Facts, size: int) -> None:
    """Store messages of a size until the server refuses one."""
    with suppress(ServerBusy):
        while True:
            await facts.link.publish("ballast.x", b"x" * size)


# -- how many are behind -----------------------------------------------------------------------------------------------


async def test_what_is_behind_a_page_of_redelivered_facts_is_counted_without_them(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer(ack_wait=SOON)
    first = await zone.facts.fetch_facts("reader", 2)
    assert (sequences(first), first.pending) == ([1, 2], 1)
    await soon_is_over(zone)
    again = await zone.facts.fetch_facts("reader", 2, wait=20)
    assert (sequences(again), again.pending) == ([1, 2], 1)


async def test_facts_that_are_to_be_delivered_again_are_behind_a_page_too(zone: Zone) -> None:
    await zone.append(5)
    await zone.consumer(ack_wait=SOON)
    assert (await zone.facts.fetch_facts("reader", 5)).pending == 0
    await soon_is_over(zone)
    seen, page = [], await zone.facts.fetch_facts("reader", 2, wait=20)
    while page:
        seen += sequences(page)
        await zone.facts.confirm_receipt("reader", receipt(page))
        if not page.pending:
            break
        page = await zone.facts.fetch_facts("reader", 2)
    assert seen == [1, 2, 3, 4, 5]


# -- the key that signs receipts ---------------------------------------------------------------------------------------


async def test_a_deleted_signing_key_is_missing_and_not_empty(zone: Zone) -> None:
    await zone.append(1)
    await zone.consumer()
    page = await zone.facts.fetch_facts("reader")
    await zone.facts.link.publish(KEY_SUBJECT, b"", {"KV-Operation": "DEL"})
    with pytest.raises(ForgedReceipt):
        await zone.other.confirm_receipt("reader", Receipt("FACTS", "reader", 0, "AAAAAAAAAAAA", 1, 1).signed(b""))
    key = await zone.js.get_message(BUCKET, last_of=KEY_SUBJECT)
    assert len(key.data) == KEY_BYTES
    assert page.receipt


async def test_receipts_stay_valid_when_another_process_had_to_create_a_new_key(
    zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    await zone.append(2)
    await zone.consumer()
    old = await zone.facts.fetch_facts("reader", 1)
    await zone.facts.link.publish(KEY_SUBJECT, b"", {"KV-Operation": "DEL"})
    new = await zone.other.fetch_facts("reader", 1)  # which finds no key, and creates one
    assert (await zone.facts.confirm_receipt("reader", receipt(new))).first == 2, "a second look finds the new key"
    assert (await zone.other.confirm_receipt("reader", receipt(old))).first == 1, "the old key is known as the previous"


async def test_a_deleted_bucket_leaves_no_two_processes_that_call_each_others_receipts_forged(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer()
    await zone.facts.fetch_facts("reader", 1)
    await zone.js.delete_stream(BUCKET)
    for one, another in ((zone.other, zone.facts), (zone.facts, zone.other)):
        page = await one.fetch_facts("reader", 1)
        assert not (await another.confirm_receipt("reader", receipt(page))).already


async def test_a_rotated_key_signs_and_the_one_before_is_accepted_until_the_next_rotation(zone: Zone) -> None:
    await zone.append(3)
    await zone.consumer()
    first, second = await zone.facts.fetch_facts("reader", 1), await zone.other.fetch_facts("reader", 1)
    key, previous = await zone.other.rotate_signing_key()
    assert receipt(first).split(".")[1] == previous != key
    assert (await zone.facts.confirm_receipt("reader", receipt(first))).first == 1
    third = await zone.other.fetch_facts("reader", 1)
    assert receipt(third).split(".")[1] == key
    assert (await zone.facts.confirm_receipt("reader", receipt(third))).first == 3
    await zone.other.rotate_signing_key()
    with pytest.raises(ForgedReceipt, match="names key"):
        await zone.other.confirm_receipt("reader", receipt(second))
