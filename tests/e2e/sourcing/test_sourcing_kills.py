"""Sources and mirrors over a leaf link that is cut while either side is killed: every retention, mode and kind.

All of them share one hub and one leaf, so that each blow hits all: origins live on the leaf, copies on the hub.
nats-server 2.15 can lose messages here (DESIGN.md, "Non-obvious (sourcing)"): then `penstock verify` must tell it.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import yaml
from tests.support.streams import make_stream

from penstock.errors import OutcomeUnknown, Unavailable
from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StreamInfo
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.sourcing import holes, links, modes
from penstock.testing import LossyProxy, eventually, eventually_async
from penstock.topology import actual, lint, plan
from penstock.topology.apply import apply
from penstock.topology.load import load
from penstock.topology.resource import Desired
from penstock.wire import blocking

SEED = 20261116
BATCH = 250
BLOWS = ("cut", "origin", "copy")
RETENTIONS = ("limits", "workqueue", "interest")
MODES = ("ephemeral", "managed", "own")


class Case(NamedTuple):
    """One stream that reads another."""

    retention: str
    mode: str
    kind: str

    @property
    def name(self) -> str:
        return "_".join(self)

    @property
    def origin(self) -> str:
        return f"O_{self.name}"

    @property
    def copy(self) -> str:
        return f"C_{self.name}"

    def source(self) -> Json:
        base: Json = {"name": self.origin, "domain": "leaf"}
        if self.mode == "managed":
            return {**base, "consumer": {"name": "reader", "server_managed": True}}
        if self.mode == "own":
            return {**base, "consumer": {"name": "mine", "deliver_subject": f"to.{self.name}"}}
        return base

    def declared(self) -> Json:
        return {"mirror": self.source()} if self.kind == "mirror" else {"sources": [self.source()]}


EVERY = [Case(*parts) for parts in product(RETENTIONS, MODES, ("source", "mirror"))]
SOME = [
    Case("limits", "managed", "source"),
    Case("workqueue", "managed", "mirror"),
    Case("workqueue", "own", "source"),
    Case("interest", "managed", "source"),
    Case("interest", "own", "mirror"),
]


class Published(Protocol):
    """An origin to publish to: on `o.` and its name."""

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str: ...


class Rig:
    """A leaf with the origins, a hub with the copies, and a link that can be cut."""

    def __init__(self, hub: EmbeddedServer, leaf: EmbeddedServer, link: LossyProxy) -> None:
        self.hub = hub
        self.leaf = leaf
        self.link = link

    def strike(self, blow: str, away: float) -> None:
        """Cut the link, or SIGKILL one side; both come back after `away` seconds."""
        victim = {"origin": self.leaf, "copy": self.hub}.get(blow)
        if victim:
            victim.kill()
        else:
            self.link.cut(refuse=True)
        threading.Event().wait(away)
        if victim:
            victim.start()
        else:
            self.link.allow()

    def copied(self, cases: list[Case]) -> dict[str, int]:
        """How far each copy is; nothing while the hub does not answer."""
        with suppress(Unavailable), connected(self.hub.settings) as js:
            found = {case.name: blocking.run(js.stream_info(case.copy)) for case in cases}
            return {name: reached(info) for name, info in found.items()}
        return {}


@contextmanager
def connected(settings: Settings) -> Iterator[JetStream]:
    with blocking.connect(settings) as connection:
        yield JetStream(connection.requester(), settings.domain, settings.timeout)


@contextmanager
def rig(tmp_path: Path) -> Iterator[Rig]:
    with (
        EmbeddedServer(tmp_path / "hub", domain="hub") as hub,
        LossyProxy(hub.config.leaf_port, whole=True) as link,
        EmbeddedServer(tmp_path / "leaf", domain="leaf", leaf_of=link.url) as leaf,
    ):
        eventually(lambda: leaf.reaches("hub") and hub.reaches("leaf"), 60, "the link")
        yield Rig(hub, leaf, link)


async def set_up(made: Rig, cases: list[Case], path: Path) -> None:
    """Origins, their own consumers, the copies as declared; returns when every copy hears its origin."""
    async with connect(made.leaf.settings) as leaf, connect(made.hub.settings) as hub:
        for case in cases:
            subjects = [f"o.{case.name}"]
            await make_stream(
                leaf.jetstream, case.origin, subjects=subjects, allow_atomic=True, retention=case.retention
            )
            if case.mode == "own":
                await leaf.jetstream.create_consumer(case.origin, modes.required("mine", f"to.{case.name}"))
        desired = Desired.of(load(path))
        await apply(hub.jetstream, plan.plan(desired, await actual.read(hub.jetstream, desired)))

        async def heard() -> bool:
            found = {one.name: one for one in await hub.jetstream.streams()}
            return all(active(found[case.copy]) for case in cases)

        await eventually_async(heard, 120, "every copy to hear its origin")


def active(info: StreamInfo) -> bool:
    return all(one is not None and one.active is not None for one in ([info.mirror] if info.mirror else info.sources))


class Publishing(threading.Thread):
    """Numbers to every origin in turn, each exactly once although the leaf is killed in between."""

    def __init__(self, settings: Settings, cases: Sequence[Published], count: int, pace: float) -> None:
        """`pace`: seconds between two rounds, so that publishing goes on while blows fall."""
        super().__init__(daemon=True)
        self.settings = settings
        self.pace = pace
        self.todo = [(start, case) for start in range(0, count, BATCH) for case in cases]
        self.count = count
        self.reached = 0

    def run(self) -> None:
        publisher: BlockingPublisher | None = None
        for start, case in self.todo:
            while True:
                try:
                    publisher = publisher or BlockingPublisher.connect(self.settings)
                    self._publish(publisher, case, start)
                    break
                except (Unavailable, OutcomeUnknown):
                    if publisher:
                        publisher.close()
                    publisher = None
            if start > self.reached:
                self.reached = start
                threading.Event().wait(self.pace)
        self.reached = self.count
        if publisher:
            publisher.close()

    def wait_for(self, count: int, within: float) -> None:
        eventually(lambda: self.reached >= count, within, f"{count} of each to be published")

    def _publish(self, publisher: BlockingPublisher, case: Published, start: int) -> None:
        last = blocking.run(publisher.jetstream.stream_info(case.origin)).state.last_seq
        data = [b"%d" % number for number in range(last, min(start + BATCH, self.count))]
        if data:
            publisher.publish_batch(case.origin, f"o.{case.name}", data)


def reached(copy: StreamInfo) -> int:
    """The last sequence of its origin that a copy has; of several origins the lowest."""
    return copy.state.last_seq if copy.mirror else min(int(source.raw.get("seq", 0)) for source in copy.sources)


def wrong(numbers: list[int]) -> str | None:
    """What is repeated or out of order; None when nothing is."""
    at = next((at for at, (before, after) in enumerate(pairwise(numbers)) if after <= before), None)
    return None if at is None else f"out of line at {at}: {numbers[at : at + 3]}"


def stored(settings: Settings, stream: str) -> list[bytes]:
    with connected(settings) as js:
        last = blocking.run(js.stream_info(stream)).state.last_seq
    wanted = Range(stream=stream, first=1, last=last)
    return [one for batch in read_range(settings, wanted) for one in batch["data"].to_pylist()]


def test_the_check_tells_repeated_and_swapped_messages() -> None:
    assert wrong([0, 1, 3]) is None
    assert wrong([0, 1, 1, 2]) == "out of line at 1: [1, 1, 2]"
    assert wrong([0, 2, 1]) == "out of line at 1: [2, 1]"


def through_blows(
    tmp_path: Path, cases: list[Case], count: int, blows: list[str], within: float, pace: float = 0.0
) -> None:
    chance = random.Random(SEED)
    path = tmp_path / "penstock.yaml"
    path.write_text(yaml.safe_dump({"streams": {case.copy: case.declared() for case in cases}}))
    with rig(tmp_path) as made:
        asyncio.run(set_up(made, cases, path))
        warned_of_ephemeral(path)
        publishing = Publishing(made.leaf.settings, cases, count, pace)
        publishing.start()
        for step, blow in enumerate(blows):
            target = (step + 1) * count // (len(blows) + 2)
            publishing.wait_for(target, within)
            made.strike(blow, chance.uniform(0.1, 1.0))
        publishing.join(within)
        eventually(
            lambda: min(made.copied(cases).values(), default=0) >= count,
            within,
            "everything to be copied",
            lambda: asyncio.run(told(made, cases, count)),
        )
        numbers = {case.name: [int(one) for one in stored(made.hub.settings, case.copy)] for case in cases}
        assert {name: wrong(found) for name, found in numbers.items() if wrong(found)} == {}, f"seed {SEED}, {blows}"
        lost = {name: count - len(found) for name, found in numbers.items()}
        assert asyncio.run(told_missing(made.hub, {case.name: case.copy for case in cases})) == lost, (
            f"seed {SEED}, {blows}"
        )
        print(f"lost by the server, and told: {lost}")
        for case in cases:
            asyncio.run(acknowledged(made, case, count))


async def told_missing(hub: EmbeddedServer, copies: dict[str, str]) -> dict[str, int]:
    """What `penstock verify` says is missing in each copy."""
    async with connect(hub.settings) as broker:
        js = broker.jetstream
        found = {name: await js.stream_info(copy) for name, copy in copies.items()}
        return {name: await holes.missing(js, hub.settings, copy) for name, copy in found.items()}


async def told(made: Rig, cases: list[Case], count: int) -> list[object]:
    """What both sides know of every copy that is not complete."""
    copied = made.copied(cases)
    async with connect(made.leaf.settings) as leaf, connect(made.hub.settings) as hub:
        return [
            (
                (await hub.jetstream.stream_info(case.copy)).raw,
                (await leaf.jetstream.stream_info(case.origin)).raw,
                [one.raw for one in await leaf.jetstream.consumers(case.origin)],
            )
            for case in cases
            if copied.get(case.name, 0) < count
        ]


async def acknowledged(made: Rig, case: Case, count: int) -> None:
    """The origin knows that all is stored, and keeps nothing that only the copy had to read."""
    if case.retention == "limits" and case.mode == "ephemeral":
        return  # nobody acknowledges there
    async with connect(made.leaf.settings) as leaf:
        if case.mode == "ephemeral":
            upgraded = await links.automatic(leaf.jetstream, case.origin, case.copy)
            assert upgraded is not None, "the server makes a durable of its own for such an origin"
            assert upgraded.config["ack_policy"] == "flow_control"
            assert upgraded.config["durable_name"].startswith(modes.AUTOMATIC)

        async def settled() -> bool:
            state = (await leaf.jetstream.stream_info(case.origin)).state
            floors = [one.ack_floor_stream_seq for one in await leaf.jetstream.consumers(case.origin)]
            return floors == [count] and state.messages == (count if case.retention == "limits" else 0)

        async def state() -> object:
            return [one.raw for one in await leaf.jetstream.consumers(case.origin)]

        await eventually_async(settled, 120, f"{case.origin} to be acknowledged", state)


def warned_of_ephemeral(path: Path) -> None:
    """Lint has warned of every source that reads without a durable, and of no other."""
    platform = load(path)
    hits = {finding.path.split(".")[1] for finding in lint.lint(platform) if finding.code == "O08"}
    assert hits == {name for name, stream in platform.streams.items() if not stream.origins[0].consumer}


@pytest.mark.kills
@pytest.mark.short
def test_messages_are_copied_once_and_in_order_or_told_missing_through_a_cut_link_and_kills_of_both_sides(
    tmp_path: Path,
) -> None:
    through_blows(tmp_path, SOME, count=5_000, blows=["copy", "cut", "origin"], within=240, pace=0.2)


def test_an_ephemeral_reader_of_what_deletes_is_upgraded_by_the_server_and_lint_has_warned(tmp_path: Path) -> None:
    cases = [case for case in EVERY if case.mode == "ephemeral" and case.retention != "limits"]
    through_blows(tmp_path, cases, count=500, blows=[], within=240)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_hundred_thousand_messages_of_every_mode_and_kind_through_twelve_blows(
    tmp_path: Path, retention: str
) -> None:
    blows = [*BLOWS, *random.Random(SEED).choices(BLOWS, k=9)]
    cases = [case for case in EVERY if case.retention == retention]
    through_blows(tmp_path, cases, count=100_000, blows=blows, within=1200)
