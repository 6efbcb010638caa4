"""A dedicated reader, whatever happens to its pages: facts come in order, none is lost, none confirmed comes again."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from tests.support.streams import make_stream

from penstock.errors import PenstockError
from penstock.facts import Facts, Page, StaleReceipt
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async

CONSUMER = "reader"
RETENTIONS = ("limits", "interest", "workqueue")
ACK_WAIT = 0.3  # seconds
LONG_ENOUGH = 30.0  # seconds for a fetch that must bring something


@dataclass
class Model:
    """A stream of which every third message is another reader's, what was confirmed, and what is wrong."""

    server: EmbeddedServer
    rng: random.Random
    facts: Facts
    other: Facts
    sequences: list[int] = field(default_factory=list)
    """Of the reader's facts, in order."""
    stored: int = 0
    confirmed: int = 0
    """As many of the first are confirmed."""
    pages: list[Page] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    server_was_killed: bool = False
    a_fetch_was_cut_off: bool = False
    """Then the last page may be stale."""

    async def append(self, count: int) -> None:
        for _ in range(count):
            self.stored += 1
            subject = "facts.other" if self.stored % 3 == 0 else "facts.mine"
            done = await self.facts.append_fact(subject, f"{self.stored}", b"")
            assert done.sequence == self.stored
            if subject == "facts.mine":
                self.sequences.append(done.sequence)

    def check(self, page: Page) -> None:
        found, expected = [one.sequence for one in page.facts], self.sequences[self.confirmed :][: len(page)]
        assert found == expected, f"{found} came, not {expected}: {self.told()}"
        left = len(self.sequences) - self.confirmed - len(page)
        exact = page.pending == left or (not page and self.server_was_killed and page.pending > left)
        assert exact, f"pending is {page.pending}, not {left}: {self.told()}"
        if page:
            self.pages.append(page)
            self.server_was_killed = self.a_fetch_was_cut_off = False

    def told(self) -> str:
        return "; ".join(self.story[-12:])

    # -- what may happen -------------------------------------------------------------------------------------------

    async def fetch(self) -> None:
        limit, wait = self.rng.randint(1, 6), self.rng.choice([0.0, 0.0, 0.1, 3 * ACK_WAIT])
        facts = self.rng.choice([self.facts, self.other])
        self.story.append(f"fetch {limit} for {wait}")
        self.check(await facts.fetch_facts(CONSUMER, limit, wait=wait))

    async def fetch_twice_at_once(self) -> None:
        self.story.append("fetch twice at once")
        asked = (one.fetch_facts(CONSUMER, 3, wait=0.05) for one in (self.facts, self.other))
        found = await asyncio.gather(*asked)
        for page in found:
            self.story.append(f"{[fact.sequence for fact in page.facts]}")
        if all(found):  # only where the first one's ack wait ended before the second was done
            found = [max(found, key=lambda page: page.facts[0].attempt)]
        for page in filter(None, found):
            self.check(page)

    async def confirm(self) -> None:
        if not self.pages:
            return
        page = self.rng.choice([self.pages[-1], self.rng.choice(self.pages)])
        first, last = page.facts[0].sequence, page.facts[-1].sequence
        self.story.append(f"confirm {first} to {last}")
        try:
            done = await self.rng.choice([self.facts, self.other]).confirm_receipt(CONSUMER, page.receipt)
        except StaleReceipt:
            assert page is not self.pages[-1] or self.a_fetch_was_cut_off, f"the last page is stale: {self.told()}"
            return
        if self.sequences.index(last) >= self.confirmed:
            assert page is self.pages[-1], f"a page that was handed out again is confirmed: {self.told()}"
            assert not done.already
            self.confirmed = self.sequences.index(last) + 1
        else:
            assert done.already

    async def wait(self) -> None:
        self.story.append("wait")
        await asyncio.sleep(ACK_WAIT * self.rng.choice([0.5, 1.1]))  # what happens next depends on it, in any case

    async def cut_off_a_fetch(self) -> None:
        """As if the reader had been killed in the middle of it."""
        self.story.append("cut off a fetch")
        self.a_fetch_was_cut_off = True
        reader = Facts(self.server.settings)
        fetch = asyncio.create_task(reader.fetch_facts(CONSUMER, self.rng.randint(1, 6)))
        await asyncio.wait([fetch], timeout=self.rng.uniform(0, 0.01))
        fetch.cancel()
        with suppress(asyncio.CancelledError, PenstockError):
            self.check(await fetch)  # it was done before
        await reader.close()

    async def kill_the_server(self) -> None:
        self.story.append("kill the server")
        self.server_was_killed = True
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)
        for one in (self.facts, self.other):
            await eventually_async(lambda one=one: answers(one), what="the server to answer")  # type: ignore[misc]

    async def append_some(self) -> None:
        self.story.append("append")
        await self.append(self.rng.randint(1, 5))


async def answers(facts: Facts) -> bool:
    try:
        await facts.link.jetstream.consumer_info("FACTS", CONSUMER)
    except PenstockError:
        return False
    return True


STEPS = {
    Model.fetch: 8,
    Model.confirm: 5,
    Model.wait: 4,
    Model.append_some: 2,
    Model.fetch_twice_at_once: 1,
    Model.cut_off_a_fetch: 2,
    Model.kill_the_server: 1,
}


@pytest.mark.kills
@pytest.mark.parametrize(
    ("seed", "steps", "policy"),
    [
        pytest.param(1, 40, "explicit", marks=pytest.mark.short),
        pytest.param(15, 40, "all", marks=pytest.mark.short),
        *((seed, 120, "explicit") for seed in range(2, 13)),
        *((seed, 120, "all") for seed in (13, 16, 18, 19) if RETENTIONS[seed % len(RETENTIONS)] != "workqueue"),
    ],
)
async def test_facts_come_in_order_and_none_is_lost_or_repeated_whatever_happens(
    nats_server: EmbeddedServer, seed: int, steps: int, policy: str
) -> None:
    print(f"seed {seed}, {RETENTIONS[seed % len(RETENTIONS)]}")
    rng = random.Random(seed)
    async with Facts(nats_server.settings) as facts, Facts(nats_server.settings) as other:
        model = Model(nats_server, rng, facts, other)
        js = facts.link.jetstream
        await make_stream(js, "FACTS", retention=RETENTIONS[seed % len(RETENTIONS)])
        config = {"durable_name": CONSUMER, "ack_policy": policy, "ack_wait": int(ACK_WAIT * 1e9)}
        about = {"metadata": {"penstock.reader": "dedicated"}, "filter_subject": "facts.mine.*"}
        await js.create_consumer("FACTS", {**config, **about})
        await model.append(30)
        for step in rng.choices(list(STEPS), weights=list(STEPS.values()), k=steps):
            await step(model)
        while model.confirmed < len(model.sequences):
            page = await facts.fetch_facts(CONSUMER, rng.randint(1, 6), wait=LONG_ENOUGH)
            model.check(page)
            assert page, f"nothing comes any more: {model.told()}"
            if rng.random() < 0.7:
                await facts.confirm_receipt(CONSUMER, page.receipt)
                model.confirmed += len(page)
        assert (await facts.fetch_facts(CONSUMER)).pending == 0
