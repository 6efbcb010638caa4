"""`penstock sources`: listing, the consumers of sources, and migrations of living ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from penstock.broker import connect
from penstock.broker.connection import Broker
from penstock.broker.jetstream import JetStream
from penstock.broker.model import Json
from penstock.cli.main import penstock
from penstock.cli.sources import migrations
from penstock.sourcing import migrate
from penstock.sourcing.links import links
from penstock.sourcing.migrate import Migration, MigrationRefused
from penstock.sourcing.modes import required
from penstock.testing import LeafPair, eventually_async, leaf_pair, stream_data
from penstock.topology import actual, plan
from penstock.topology.apply import apply as carry_out
from penstock.topology.load import load
from penstock.topology.resource import Desired

EPHEMERAL: Json = {"name": "ORIGIN", "domain": "leaf"}
MANAGED: Json = {**EPHEMERAL, "consumer": {"name": "reader", "server_managed": True}}
OWN: Json = {**EPHEMERAL, "consumer": {"name": "mine", "deliver_subject": "to.the.hub"}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeafPair]:
    with leaf_pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@asynccontextmanager
async def both(pair: LeafPair) -> AsyncIterator[tuple[Broker, Broker]]:
    async with connect(pair.hub.settings) as hub, connect(pair.leaf.settings) as leaf:
        try:
            yield hub, leaf
        finally:
            for broker in (hub, leaf):
                for name in await broker.jetstream.stream_names():
                    await broker.jetstream.delete_stream(name)


def platform_file(tmp_path: Path, source: Json, kind: str = "sources") -> Path:
    path = tmp_path / "penstock.yaml"
    path.write_text(yaml.safe_dump({"streams": {"COPY": {kind: [source] if kind == "sources" else source}}}))
    return path


async def apply(hub: Broker, path: Path) -> None:
    desired = Desired.of(load(path))
    await carry_out(hub.jetstream, plan.plan(desired, await actual.read(hub.jetstream, desired)))


async def migrated(js: JetStream, hub: Broker, path: Path) -> list[int]:
    platform = load(path)
    desired = Desired.of(platform)
    found = await actual.read(hub.jetstream, desired)
    return [await migrate.run(js, one) for one in migrations(platform, desired, found)]


async def publish(leaf: Broker, first: int, count: int) -> None:
    for number in range(first, first + count):
        await leaf.request("o.x", b"%d" % number, 5)


async def arrived(pair: LeafPair, hub: Broker, count: int) -> None:
    async def there() -> bool:
        return (await hub.jetstream.stream_info("COPY")).state.messages >= count

    async def state() -> Json:
        return (await hub.jetstream.stream_info("COPY")).raw

    await eventually_async(there, 60, f"{count} messages", state)
    data = await asyncio.to_thread(stream_data, pair.hub.settings, "COPY")
    assert data == [b"%d" % number for number in range(count)]


async def origin(leaf: Broker, retention: str) -> None:
    await leaf.jetstream.create_stream({"name": "ORIGIN", "subjects": ["o.>"], "retention": retention})


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_living_source_migrates_from_ephemeral_to_managed_to_the_users_own(
    pair: LeafPair, tmp_path: Path, retention: str
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, retention)
        await apply(hub, platform_file(tmp_path, EPHEMERAL))

        async def heard() -> bool:  # only then does an interest stream keep anything
            return (await hub.jetstream.stream_info("COPY")).sources[0].active is not None

        await eventually_async(heard, 20)
        publishing = asyncio.create_task(publish(leaf, 0, 600))
        await eventually_async(lambda: reached(hub, 50), 20)
        await migrated(hub.jetstream, hub, path := platform_file(tmp_path, MANAGED))
        await publishing
        await arrived(pair, hub, 600)
        desired = Desired.of(load(path))
        assert not plan.plan(desired, await actual.read(hub.jetstream, desired)).with_risk(plan.Risk.LOSES_POSITION)
        assert await leaf.jetstream.consumer_names("ORIGIN") == ["reader"]
        if retention != "workqueue":
            await leaf.jetstream.create_consumer("ORIGIN", {**required("mine", "to.the.hub"), "deliver_policy": "all"})
            publishing = asyncio.create_task(publish(leaf, 600, 100))
            await migrated(hub.jetstream, hub, platform_file(tmp_path, OWN))
            await publishing
            await arrived(pair, hub, 700)


async def reached(hub: Broker, count: int) -> bool:
    return (await hub.jetstream.stream_info("COPY")).state.messages >= count


class Dead(Exception):
    """What stands for the end of the process that migrates."""


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_migration_killed_after_any_of_its_requests_is_finished_by_the_next(
    pair: LeafPair, tmp_path: Path, retention: str
) -> None:
    requests = 1
    while True:
        async with both(pair) as (hub, leaf):
            await origin(leaf, retention)
            await apply(hub, platform_file(tmp_path, EPHEMERAL))
            await eventually_async(lambda hub=hub: active(hub), 20)
            await publish(leaf, 0, 30)
            await eventually_async(lambda hub=hub: reached(hub, 10), 20)
            left = requests

            async def dying(subject: str, payload: bytes, timeout: float, hub: Broker = hub) -> bytes:
                nonlocal left
                if left == 0:
                    raise Dead
                left -= 1
                return await hub.request(subject, payload, timeout)

            path = platform_file(tmp_path, MANAGED)
            survived = True
            try:
                await migrated(JetStream(dying), hub, path)
            except Dead:
                survived = False
            await publish(leaf, 30, 10)
            await migrated(hub.jetstream, hub, path)
            await arrived(pair, hub, 40)
            assert Migration.noted(await hub.jetstream.stream_info("COPY")) is None
        if survived:
            return
        requests += 3


async def active(hub: Broker) -> bool:
    return (await hub.jetstream.stream_info("COPY")).sources[0].active is not None


async def test_back_to_ephemeral_is_refused_for_it_would_copy_again(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await apply(hub, platform_file(tmp_path, MANAGED))
        with pytest.raises(MigrationRefused, match="would copy again"):
            await migrated(hub.jetstream, hub, platform_file(tmp_path, EPHEMERAL))


def run(pair: LeafPair, *arguments: str) -> tuple[int, str]:
    """A command of ours in this process: its exit code and what it printed."""
    done = CliRunner().invoke(penstock, ["--servers", pair.hub.url, *arguments], standalone_mode=False)
    if done.exception:
        raise done.exception
    return int(done.return_value or 0), done.output


async def test_ls_shows_mode_lag_pause_and_what_is_wrong(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await apply(hub, platform_file(tmp_path, MANAGED))
        await publish(leaf, 0, 5)
        await arrived(pair, hub, 5)

        async def acknowledged() -> bool:
            found = (await links(hub.jetstream))[0]
            return (found.acknowledged, found.arrived, found.state) == (5, 5, "active")

        await eventually_async(acknowledged, 10)
        code, text = await asyncio.to_thread(run, pair, "sources", "ls", "--json")
        facts = json.loads(text)[0]
        assert code == 0
        assert (facts["mode"], facts["consumer"], facts["lag_messages"]) == ("server-managed", "reader", 0)
        code, text = await asyncio.to_thread(run, pair, "sources", "ls")
        assert "server-managed" in text
        await leaf.jetstream.pause_consumer(
            "ORIGIN", "reader", (await hub.jetstream.stream_info("COPY")).created.replace(year=2099)
        )  # type: ignore[union-attr]
        await publish(leaf, 5, 3)
        paused = (await links(hub.jetstream, "COPY"))[0]
        assert (paused.state, paused.lag) == ("paused", 3)
        assert paused.lag_time is not None


async def test_create_consumer_makes_it_where_it_can_and_prints_it_where_it_cannot(
    pair: LeafPair, tmp_path: Path
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await publish(leaf, 0, 5)
        path = platform_file(tmp_path, OWN)
        await apply(hub, path)
        make = ("sources", "create-consumer", str(path), "COPY")
        code, text = await asyncio.to_thread(run, pair, *make)
        assert code == 0, text
        await arrived(pair, hub, 5)
        elsewhere = platform_file(tmp_path, {**OWN, "domain": "nowhere"})
        code, text = await asyncio.to_thread(run, pair, *make[:2], str(elsewhere), "COPY", "--last-per-subject")
        assert code == 2
        body = json.loads(text[text.index("\n{") :])
        assert body["config"]["deliver_policy"] == "last_per_subject"
        assert body["config"]["ack_policy"] == "flow_control"
        await leaf.jetstream.delete_consumer("ORIGIN", "mine")
        await leaf.jetstream.create_consumer("ORIGIN", body["config"])  # the printed form is one that a server takes
