"""Named readers and writers on a replicated stream while its leaders are killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest
from tests.support.streams import make_stream

from penstock.errors import PenstockError
from penstock.facts import Facts, StaleReceipt
from penstock.facts.fact import ID_HEADER
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async, stream_messages

COUNT = 400
LIMIT = 10


async def pause(error: PenstockError) -> None:
    """Before another try; an error for which that makes no sense ends the test."""
    if not error.retryable:
        raise error
    await asyncio.sleep(0.05)


class Reading:
    """What two instances of a reader fetched and confirmed, in order."""

    def __init__(self, dedicated: bool) -> None:
        self.dedicated = dedicated
        self.fetched: Counter[int] = Counter()
        self.confirmed: set[int] = set()
        self.wrong: list[str] = []

    def has_confirmed(self, share: float) -> bool:
        """Whether this share of all facts is confirmed."""
        return len(self.confirmed) >= share * COUNT

    async def read(self, facts: Facts) -> None:
        while len(self.confirmed) < COUNT:
            try:
                page = await facts.fetch_facts("reader", LIMIT, wait=0.5)
                if not page.receipt:
                    continue
                sequences = [fact.sequence for fact in page.facts]
                if self.dedicated and sequences != list(range(sequences[0], sequences[-1] + 1)):
                    self.wrong.append(f"a page that leaves something out: {sequences}")
                if self.dedicated and sequences[0] > len(self.fetched) + 1:
                    self.wrong.append(f"out of order: {sequences} after {len(self.fetched)} facts")
                if again := self.confirmed & set(sequences):
                    self.wrong.append(f"fetched again though confirmed: {sorted(again)}")
                self.fetched.update(sequences)
                await self.confirm(facts, page.receipt, sequences)
            except PenstockError as exc:
                await pause(exc)

    async def confirm(self, facts: Facts, receipt: str, sequences: list[int]) -> None:
        while True:
            try:
                await facts.confirm_receipt("reader", receipt)
            except StaleReceipt:
                return
            except PenstockError as exc:
                await pause(exc)
                continue
            self.confirmed |= set(sequences)
            return


async def append(facts: Facts) -> None:
    """Both writers append everything, again and again until it is answered."""
    for number in range(COUNT):
        while True:
            try:
                await facts.append_fact("facts.n", str(number), b"%d" % number)
                break
            except PenstockError as exc:
                await pause(exc)


Ask = Callable[[], Awaitable[ConsumerInfo | StreamInfo]]


async def leader(cluster: EmbeddedCluster, ask: Ask) -> EmbeddedServer | None:
    """The node that leads what is asked about, if one does right now."""
    try:
        name = (await ask()).leader
    except PenstockError as exc:
        await pause(exc)
        return None
    return next((one for one in cluster.nodes if one.config.name == name), None)


async def kill_leaders(cluster: EmbeddedCluster, facts: Facts, reading: Reading) -> None:
    """The leader of the stream, then that of the consumer, then that of the books; each comes back."""
    js = facts.link.jetstream
    steps: tuple[tuple[float, Ask], ...] = (
        (0.1, lambda: js.stream_info("FACTS")),
        (0.4, lambda: js.consumer_info("FACTS", "reader")),
        (0.7, lambda: js.stream_info("KV_penstock_facts")),
    )
    for share, ask in steps:
        await eventually_async(partial(reading.has_confirmed, share), 240, "progress")
        node = await eventually_async(partial(leader, cluster, ask), 60, "a leader")
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.start)


@pytest.mark.kills
@pytest.mark.parametrize("reader", ["shared", "dedicated"])
async def test_leaders_killed_while_facts_are_appended_and_read_lose_and_repeat_nothing(
    nats_cluster: EmbeddedCluster, reader: str
) -> None:
    settings = replace(nats_cluster.settings, timeout=10.0)
    async with Facts(settings) as one, Facts(settings) as other, Facts(settings) as third:
        js = one.link.jetstream
        await make_stream(js, "FACTS", num_replicas=3)
        config = {"durable_name": "reader", "ack_policy": "explicit", "ack_wait": 2_000_000_000}
        await js.create_consumer("FACTS", {**config, "metadata": {"penstock.reader": reader}})
        reading = Reading(dedicated=reader == "dedicated")
        async with asyncio.timeout(500), asyncio.TaskGroup() as tasks:
            for facts in (one, other):
                tasks.create_task(append(facts))
                tasks.create_task(reading.read(facts))
            tasks.create_task(kill_leaders(nats_cluster, third, reading))
    assert not reading.wrong
    assert set(reading.fetched) == reading.confirmed == set(range(1, COUNT + 1))
    ids = Counter(one.header_values()[ID_HEADER][0] for one in stream_messages(settings, "FACTS"))
    assert ids == {str(number): 1 for number in range(COUNT)}
