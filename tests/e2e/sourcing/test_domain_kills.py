"""Two linked domains with equal names, every retention, while links are cut and servers are killed: nothing twice.

What nats-server 2.15 loses here (DESIGN.md, "Non-obvious (sourcing)") must be told by `penstock verify`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.e2e.sourcing.test_sourcing_kills import RETENTIONS, Publishing, connected, reached, told_missing, wrong
from tests.support.commands import here
from tests.support.streams import make_stream

from penstock.errors import Unavailable
from penstock.server.embedded import EmbeddedServer
from penstock.testing import LossyProxy, eventually, stream_messages
from penstock.wire import blocking

SITES = ("site1", "site3")
BLOWS = ("hub", *SITES, *(f"cut {site}" for site in SITES))
REPAIR = 300.0
"""Seconds. A server that could not reach an origin several times asks it again after two minutes only."""
Copies = dict[str, dict[str, list[bytes]]]
"""By retention and by site."""


class Origin(NamedTuple):
    """A stream of a site; the other site has one of the same name."""

    site: str
    retention: str

    @property
    def name(self) -> str:
        return f"{self.site}.{self.retention}"

    @property
    def origin(self) -> str:
        return f"TELE_{self.retention}"


class Domains:
    """A hub, and a leaf for each site behind a link of its own."""

    def __init__(self, hub: EmbeddedServer, sites: dict[str, EmbeddedServer], links: dict[str, LossyProxy]) -> None:
        self.hub = hub
        self.sites = sites
        self.links = links

    def strike(self, blow: str, away: float) -> None:
        """Cut a link, or SIGKILL a server; it comes back after `away` seconds."""
        victim = {"hub": self.hub, **self.sites}.get(blow)
        link = self.links.get(blow.removeprefix("cut "))
        if victim:
            victim.kill()
        elif link:
            link.cut(refuse=True)
        threading.Event().wait(away)
        if victim:
            victim.start()
        elif link:
            link.allow()

    def copies(self) -> Copies:
        found: Copies = defaultdict(lambda: defaultdict(list))
        for retention in RETENTIONS:
            for message in stream_messages(self.hub.settings, f"ALL_{retention}"):
                found[retention][message.subject.split(".")[1]].append(message.data)
        return found

    def copied(self) -> list[int]:
        with suppress(Unavailable), connected(self.hub.settings) as js:
            return [reached(blocking.run(js.stream_info(f"ALL_{one}"))) for one in RETENTIONS]
        return [0]

    def left(self) -> list[int]:
        """What the origins hold that delete what was read."""
        found = []
        for server in self.sites.values():
            with connected(server.settings) as js:
                found += [blocking.run(js.stream_info(f"TELE_{one}")).state.messages for one in RETENTIONS[1:]]
        return found


@contextmanager
def domains(folder: Path) -> Iterator[Domains]:
    with ExitStack() as stack:
        hub = stack.enter_context(EmbeddedServer(folder / "hub", domain="hub"))
        links = {site: stack.enter_context(LossyProxy(hub.config.leaf_port, whole=True)) for site in SITES}
        sites = {
            site: stack.enter_context(EmbeddedServer(folder / site, domain=site, leaf_of=links[site].url))
            for site in SITES
        }
        eventually(lambda: all(map(hub.reaches, SITES)), 60, "the links")
        yield Domains(hub, sites, links)


def platform(hub: EmbeddedServer) -> str:
    lines = ["name: hub", f'environments: {{dev: {{servers: ["{hub.url}"]}}}}', "streams:"]
    for retention in RETENTIONS:
        lines += [f"  ALL_{retention}:", "    sources:"]
        lines += [
            f"      - {{name: TELE_{retention}, domain: {site}, consumer: {{name: hub, server_managed: true}}}}"
            for site in SITES
        ]
    return "\n".join(lines) + "\n"


def through_blows(folder: Path, count: int, blows: list[str], seed: int, pace: float) -> None:
    print(f"seed {seed}, blows {blows}")
    chance = random.Random(seed)
    with domains(folder) as made:
        origins = {site: [Origin(site, one) for one in RETENTIONS] for site in SITES}
        for site, server in made.sites.items():
            with connected(server.settings) as js:
                for one in RETENTIONS:
                    config = {"subjects": [f"o.{site}.{one}"], "retention": one, "allow_atomic": True}
                    blocking.run(make_stream(js, f"TELE_{one}", **config))
        file = folder / "penstock.yaml"
        file.write_text(platform(made.hub))
        assert here("apply", file).returncode == 0
        publishing = [Publishing(made.sites[site].settings, origins[site], count, pace) for site in SITES]
        for thread in publishing:
            thread.start()
        for step, blow in enumerate(blows):
            for thread in publishing:
                thread.wait_for((step + 1) * count // (len(blows) + 2), 240)
            made.strike(blow, chance.uniform(0.1, 1.0))
        for thread in publishing:
            thread.join(240)
        eventually(lambda: min(made.copied()) >= count, 240, "everything to be copied", made.copied)
        eventually(lambda: not any(made.left()), REPAIR, "the origins to be emptied", made.left)
        copies = made.copies()
        numbers = {(one, site): list(map(int, copies[one][site])) for one in RETENTIONS for site in SITES}
        assert {at: wrong(found) for at, found in numbers.items() if wrong(found)} == {}, f"seed {seed}, blows {blows}"
        lost = {one: sum(count - len(numbers[one, site]) for site in SITES) for one in RETENTIONS}
        told = asyncio.run(told_missing(made.hub, {one: f"ALL_{one}" for one in RETENTIONS}))
        assert told == lost, f"seed {seed}, blows {blows}"


@pytest.mark.kills
@pytest.mark.short
def test_equal_names_in_two_domains_lose_and_repeat_nothing_through_a_cut_and_a_kill(tmp_path: Path) -> None:
    through_blows(tmp_path, 1_000, ["cut site1", "hub"], seed=0, pace=0.1)


@pytest.mark.kills
@pytest.mark.parametrize("seed", range(1, 6))
def test_equal_names_in_two_domains_lose_and_repeat_nothing_through_every_blow(tmp_path: Path, seed: int) -> None:
    blows = random.Random(seed).sample(BLOWS, k=len(BLOWS))
    through_blows(tmp_path, 6_000, blows, seed, pace=0.2)
