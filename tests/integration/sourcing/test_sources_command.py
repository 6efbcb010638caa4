"""`penstock sources`: listing, the consumers of sources, and migrations of living ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.support.commands import here, invoked
from tests.support.dying import Dead, dying
from tests.support.servers import both
from tests.support.streams import make_stream

from penstock.cli.sources import migrations
from penstock.errors import StreamNotFound
from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.jetstream.connection import Broker
from penstock.jetstream.model import Json, StreamInfo
from penstock.sourcing import migrate, mirrors
from penstock.sourcing.links import links
from penstock.sourcing.migrate import NOTE, MigrationRefused, SourceMigration
from penstock.testing import LeafPair, eventually_async, stream_data
from penstock.topology import actual, plan
from penstock.topology.apply import apply as carry_out
from penstock.topology.load import load
from penstock.topology.resource import Desired

EPHEMERAL: Json = {"name": "ORIGIN", "domain": "leaf"}
MANAGED: Json = {**EPHEMERAL, "consumer": {"name": "reader", "server_managed": True}}
EMPTY: Json = {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0, "consumer_count": 0}
OWN: Json = {**EPHEMERAL, "consumer": {"name": "mine", "deliver_subject": "to.the.hub"}}


def platform_file(tmp_path: Path, source: Json, kind: str = "sources") -> Path:
    path = tmp_path / "penstock.yaml"
    path.write_text(yaml.safe_dump({"streams": {"COPY": {kind: [source] if kind == "sources" else source}}}))
    return path


async def apply(hub: Broker, path: Path) -> None:
    desired = Desired.of(load(path))
    await carry_out(hub.jetstream, plan.plan(desired, await actual.read(hub.jetstream, desired)))


async def migrated(js: JetStream, pair: LeafPair, path: Path) -> list[int]:
    """What `penstock sources migrate --yes` does, over any connection."""
    platform = load(path)
    desired = Desired.of(platform)
    folder = path.parent / "backup"
    async with connect(pair.hub.settings) as hub:
        found = await actual.read(hub.jetstream, desired)
    wanted = migrations(platform, desired, found, mirrors.interrupted(folder))
    return [
        await (mirrors.run(js, pair.hub.settings, one, folder) if one.mirror else migrate.run(js, one))
        for one in wanted
    ]


async def publish(leaf: Broker, first: int, count: int) -> None:
    for number in range(first, first + count):
        await leaf.request("o.x", b"%d" % number, 20)


async def arrived(pair: LeafPair, hub: Broker, count: int) -> None:
    async def there() -> bool:
        return (await hub.jetstream.stream_info("COPY")).state.messages >= count

    async def state() -> Json:
        return (await hub.jetstream.stream_info("COPY")).raw

    # A server whose source or mirror failed once waits half a minute before it tries again.
    await eventually_async(there, 120, f"{count} messages", state)
    data = await asyncio.to_thread(stream_data, pair.hub.settings, "COPY")
    assert data == [b"%d" % number for number in range(count)]


async def origin(leaf: Broker, retention: str) -> None:
    await make_stream(leaf.jetstream, "ORIGIN", subjects=["o.>"], retention=retention)


SOME = [("sources", "limits"), ("sources", "workqueue"), ("sources", "interest"), ("mirror", "interest")]
REST = [pytest.param("mirror", one, marks=pytest.mark.kills) for one in ("limits", "workqueue")]


@pytest.mark.parametrize(("kind", "retention"), [*SOME, *REST])
async def test_a_living_stream_migrates_through_all_modes_and_back_without_loss_or_repetition(
    pair: LeafPair, tmp_path: Path, kind: str, retention: str
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, retention)
        await apply(hub, platform_file(tmp_path, EPHEMERAL, kind))
        await eventually_async(lambda: active(hub), 120)  # only then does an interest stream keep anything
        count = 0
        for source, left in ((MANAGED, "reader"), (OWN, "mine"), (MANAGED, "reader"), (EPHEMERAL, "JS_")):
            publishing = asyncio.create_task(publish(leaf, count, 150))
            await eventually_async(partial(reached, hub, count + 20), 60, "messages to flow")
            await migrated(hub.jetstream, pair, path := platform_file(tmp_path, source, kind))
            await publishing
            count += 150
            await arrived(pair, hub, count)
            await in_step(hub, path)
            names = await leaf.jetstream.consumer_names("ORIGIN")
            assert all(name.startswith((left, "mine")) for name in names), names
            if left == "reader" and "mine" in names:
                await leaf.jetstream.delete_consumer("ORIGIN", "mine")  # the user's own stays until the user removes it


async def in_step(hub: Broker, path: Path) -> None:
    """The plan sees nothing to do, but for the marks of ownership."""
    desired = Desired.of(load(path))
    made = plan.plan(desired, await actual.read(hub.jetstream, desired))
    assert [change for change in made.changes if not change.only_marks] == []


async def test_a_source_goes_back_to_ephemeral_as_often_as_one_likes(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await apply(hub, platform_file(tmp_path, {**EPHEMERAL, "filter_subject": "o.*"}))
        for count, source in enumerate((MANAGED, EPHEMERAL) * 2, 1):
            await publish(leaf, 10 * count - 10, 10)
            await arrived(pair, hub, 10 * count)
            await migrated(hub.jetstream, pair, path := platform_file(tmp_path, {**source, "filter_subject": "o.*"}))
            await in_step(hub, path)
        await publish(leaf, 40, 10)
        await arrived(pair, hub, 50)


async def reached(hub: Broker, count: int) -> bool:
    return (await hub.jetstream.stream_info("COPY")).state.messages >= count


@pytest.mark.kills
@pytest.mark.parametrize(
    ("kind", "retention", "before", "after", "step"),
    [
        pytest.param("sources", "interest", MANAGED, EPHEMERAL, 4, marks=pytest.mark.short),
        pytest.param("mirror", "interest", EPHEMERAL, MANAGED, 3, marks=pytest.mark.short),
        ("sources", "limits", EPHEMERAL, MANAGED, 1),
        pytest.param("sources", "workqueue", EPHEMERAL, MANAGED, 1),
        pytest.param("sources", "interest", EPHEMERAL, OWN, 1),
        pytest.param("sources", "limits", MANAGED, EPHEMERAL, 1),
        pytest.param("mirror", "workqueue", MANAGED, EPHEMERAL, 1),
        pytest.param("mirror", "limits", EPHEMERAL, MANAGED, 1),
    ],
)
async def test_a_migration_killed_after_any_of_its_requests_is_finished_by_the_next(
    pair: LeafPair, tmp_path: Path, kind: str, retention: str, before: Json, after: Json, step: int
) -> None:
    requests, survived = 1, False
    while not survived:
        async with both(pair) as (hub, leaf):
            await origin(leaf, retention)
            await apply(hub, platform_file(tmp_path, before, kind))
            await eventually_async(partial(active, hub), 120)
            await publish(leaf, 0, 30)
            await eventually_async(partial(reached, hub, 10), 60)
            path = platform_file(tmp_path, after, kind)
            survived = await lived(JetStream(dying(hub.request, requests)), pair, path)
            await publish(leaf, 30, 10)
            await migrated(hub.jetstream, pair, path)
            await arrived(pair, hub, 40)
            assert SourceMigration.noted(await hub.jetstream.stream_info("COPY")) is None
            assert not list((tmp_path / "backup").glob("*"))
        requests += step


@pytest.mark.kills
@pytest.mark.parametrize("step", [1, pytest.param(6, marks=pytest.mark.short)])
@pytest.mark.parametrize("back", [False, True], ids=["to managed", "to ephemeral"])
async def test_a_migration_leaves_the_messages_of_others_in_a_workqueue_wherever_it_is_killed(
    pair: LeafPair, tmp_path: Path, back: bool, step: int
) -> None:
    requests, survived = 1, False
    before, after = [
        {**one, "filter_subject": "o.x"} for one in ((MANAGED, EPHEMERAL) if back else (EPHEMERAL, MANAGED))
    ]
    while not survived:
        async with both(pair) as (hub, leaf):
            await origin(leaf, "workqueue")
            for _ in range(5):
                await leaf.request("o.others", b"theirs", 20)
            await apply(hub, platform_file(tmp_path, before))
            await eventually_async(partial(active, hub), 120)
            await publish(leaf, 0, 20)
            await eventually_async(partial(reached, hub, 20), 60)
            path = platform_file(tmp_path, after)
            survived = await lived(JetStream(dying(hub.request, requests)), pair, path)
            await migrated(hub.jetstream, pair, path)
            await publish(leaf, 20, 5)
            await arrived(pair, hub, 25)
            kept = (await leaf.jetstream.stream_info("ORIGIN", subjects_filter="o.others")).state.subjects
            assert kept == {"o.others": 5}, f"killed after {requests} requests"
        requests += step


async def lived(js: JetStream, pair: LeafPair, path: Path) -> bool:
    try:
        await migrated(js, pair, path)
    except Dead:
        return False
    return True


async def active(hub: Broker) -> bool:
    info = await hub.jetstream.stream_info("COPY")
    return all(one is not None and one.active is not None for one in (info.sources or (info.mirror,)))


def test_a_source_with_transforms_of_everything_cannot_go_back(tmp_path: Path) -> None:
    old = {"name": "ORIGIN", "consumer": {"name": "reader", "deliver_subject": "d"}}
    new = {"name": "ORIGIN", "subject_transforms": [{"src": ">", "dest": "x.>"}]}
    info = StreamInfo.parse({"config": {"name": "COPY", "sources": [old]}, "state": EMPTY})
    with pytest.raises(MigrationRefused, match="would copy again"):
        migrate.check(SourceMigration("COPY", old, new, {}), info)


def run(pair: LeafPair, *arguments: str) -> tuple[int, str]:
    """A command of ours in this process: its exit code and what it printed."""
    return invoked("--servers", pair.hub.url, *arguments)


async def test_ls_shows_mode_lag_pause_and_what_is_wrong(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await apply(hub, platform_file(tmp_path, MANAGED))
        await publish(leaf, 0, 5)
        await arrived(pair, hub, 5)

        async def acknowledged() -> bool:
            found = (await links(hub.jetstream))[0]
            return (found.acknowledged, found.arrived, found.state) == (5, 5, "active")

        await eventually_async(acknowledged, 60)
        code, text = await asyncio.to_thread(run, pair, "sources", "ls", "--json")
        facts = json.loads(text)[0]
        assert code == 0
        assert (facts["mode"], facts["consumer"], facts["lag_messages"]) == ("server-managed", "reader", 0)
        code, text = await asyncio.to_thread(run, pair, "sources", "ls")
        assert "server-managed" in text
        created = (await hub.jetstream.stream_info("COPY")).created
        assert created
        await leaf.jetstream.pause_consumer("ORIGIN", "reader", created.replace(year=2099))
        await publish(leaf, 5, 3)

        async def waiting() -> bool:  # the origin counts for its consumers a moment after it has stored
            paused = (await links(hub.jetstream, "COPY"))[0]
            return (paused.state, paused.lag) == ("paused", 3) and paused.lag_time is not None

        await eventually_async(waiting, state=lambda: links(hub.jetstream, "COPY"))
        code, text = await asyncio.to_thread(run, pair, "sources", "ls", "--json")
        assert (code, json.loads(text)[0]["paused_until"][:4]) == (0, "2099")
        await leaf.jetstream.delete_consumer("ORIGIN", "reader")
        code, text = await asyncio.to_thread(run, pair, "sources", "ls")
        assert code == 2
        assert "does not exist" in text
        assert "server-managed" in text  # it still is, although the consumer that says so is gone


async def test_ls_shows_how_far_a_mirror_has_come(pair: LeafPair, tmp_path: Path) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "workqueue")
        await apply(hub, platform_file(tmp_path, MANAGED, "mirror"))
        await publish(leaf, 0, 5)
        await arrived(pair, hub, 5)
        assert [link.arrived for link in await links(hub.jetstream, "COPY")] == [5]


@pytest.mark.parametrize("kind", ["sources", "mirror"])
async def test_the_command_shows_the_plan_first_and_then_does_it(pair: LeafPair, tmp_path: Path, kind: str) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "limits")
        await apply(hub, platform_file(tmp_path, EPHEMERAL, kind))
        await publish(leaf, 0, 20)
        await arrived(pair, hub, 20)
        command = ("sources", "migrate", str(platform_file(tmp_path, MANAGED, kind)))
        code, text = await asyncio.to_thread(run, pair, *command)
        assert code == 2
        assert "COPY from ORIGIN: ephemeral -> through reader" in text
        assert await leaf.jetstream.consumer_names("ORIGIN") == []
        code, text = await asyncio.to_thread(run, pair, *command, "--yes")
        assert code == 0
        assert text.index("ephemeral -> through reader") < text.index("COPY goes on behind sequence 20 of its origin")
        code, text = await asyncio.to_thread(run, pair, *command)
        assert (code, text) == (0, "every source reads as declared\n")
        await publish(leaf, 20, 10)
        await arrived(pair, hub, 30)


@pytest.mark.kills
@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("sources", NOTE),
        ("mirror", NOTE),
        pytest.param("mirror", "gone", marks=pytest.mark.short),
    ],
)
async def test_the_command_killed_in_the_middle_is_finished_by_the_next(
    pair: LeafPair, tmp_path: Path, kind: str, sign: str
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "interest")
        await apply(hub, platform_file(tmp_path, EPHEMERAL, kind))
        await eventually_async(lambda: active(hub), 120)
        await publish(leaf, 0, 50)
        path = platform_file(tmp_path, MANAGED, kind)
        command = ("sources", "migrate", str(path), "--yes")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "--servers", pair.hub.url, *command, stdout=subprocess.DEVNULL
        )
        while process.returncode is None and not await seen(hub, sign):
            pass  # as soon as the sign is there
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await publish(leaf, 50, 10)
        code, text = await asyncio.to_thread(run, pair, *command)
        assert code == 0, text
        await arrived(pair, hub, 60)
        assert SourceMigration.noted(await hub.jetstream.stream_info("COPY")) is None
        assert not list((tmp_path / ".penstock" / "migrations").glob("*"))


async def test_a_mirror_that_is_in_a_file_alone_is_not_given_up_for_one_that_was_made_anew(
    pair: LeafPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "workqueue")
        await apply(hub, platform_file(tmp_path, MANAGED, "mirror"))
        await publish(leaf, 0, 20)
        await arrived(pair, hub, 20)
        path = platform_file(tmp_path, EPHEMERAL, "mirror")
        with monkeypatch.context() as context:

            def die(*_: object) -> None:
                raise Dead

            context.setattr(mirrors, "restore", die)
            assert not await lived(hub.jetstream, pair, path)
        await apply(hub, path)  # somebody finds the stream missing
        await publish(leaf, 20, 5)
        with pytest.raises(MigrationRefused, match=r"what it held before is in '.*COPY\.snapshot'"):
            await migrated(hub.jetstream, pair, path)
        await hub.jetstream.delete_stream("COPY")
        await migrated(hub.jetstream, pair, path)
        data = await asyncio.to_thread(stream_data, pair.hub.settings, "COPY")
        assert data[:20] == [b"%d" % number for number in range(20)]


async def test_a_mirror_that_was_restored_before_the_migration_died_is_recognised(
    pair: LeafPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(pair) as (hub, leaf):
        await origin(leaf, "workqueue")
        await apply(hub, platform_file(tmp_path, MANAGED, "mirror"))
        await publish(leaf, 0, 20)
        await arrived(pair, hub, 20)
        path = platform_file(tmp_path, EPHEMERAL, "mirror")
        with monkeypatch.context() as context:

            async def die(*_: object) -> int:
                raise Dead

            context.setattr(mirrors, "_finished", die)
            assert not await lived(hub.jetstream, pair, path)
        assert await migrated(hub.jetstream, pair, path) == [20]
        await publish(leaf, 20, 5)
        await arrived(pair, hub, 25)
        assert not list((tmp_path / "backup").glob("*"))


async def seen(hub: Broker, sign: str) -> bool:
    """Whether the migration has come so far: its note is there, or the mirror is gone."""
    try:
        return sign in ((await hub.jetstream.stream_info("COPY")).config.get("metadata") or {})
    except StreamNotFound:
        return True


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--start-time", "yesterday"], "--start-time 'yesterday' is not a time: write RFC 3339, such as"),
        (["--start-time", "2026-01-01T00:00:00"], "--start-time '2026-01-01T00:00:00' has no time zone"),
        (["--filter", "a..b"], "--filter 'a..b': a subject cannot have an empty token"),
        (
            ["--start-sequence", "5", "--last-per-subject"],
            "--start-sequence and --last-per-subject are different starts",
        ),
    ],
)
def test_starts_and_filters_that_cannot_be_right_are_wrong_usage(tmp_path: Path, flags: list[str], words: str) -> None:
    done = here("sources", "create-consumer", platform_file(tmp_path, OWN), "COPY", "--print", *flags)
    assert (done.returncode, words in done.stderr) == (64, True), done
