"""From one consumer a partition to a group while both work: each effect once, whoever is killed, and wherever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.workers.group_fleet import STREAM, Fleet, fleet

from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket
from penstock.server.embedded import EmbeddedServer
from penstock.workers.group.migration import Migration
from penstock.workers.options import overlap_bucket

PARTITIONS = [f"p{n}" for n in range(6)]
POINTS = ["begun", "effect", "done"]
ACK_WAIT = 3_000_000_000  # nanoseconds


async def old_consumers(group: Fleet) -> None:
    """One a partition, and one message of it out at a time: that is how they keep its order."""
    for partition in PARTITIONS:
        await group.control.jetstream.create_consumer(
            STREAM,
            {
                "name": f"old-{partition}",
                "durable_name": f"old-{partition}",
                "filter_subject": f"s.{partition}",
                "ack_policy": "explicit",
                "ack_wait": ACK_WAIT,
                "max_ack_pending": 1,
            },
        )


def start_old(group: Fleet, name: str, **more: Any) -> None:
    """`o1` pulls for one half of the partitions, `o2` for the other."""
    half = PARTITIONS[:3] if name == "o1" else PARTITIONS[3:]
    group.start(name, side="old", partitions=half, **more)


async def begun(group: Fleet, migration: Migration) -> None:
    """Wait until the overlap may begin, and begin it."""

    async def may_begin() -> bool:
        return await migration.overlap() == len(PARTITIONS)

    await group.eventually(may_begin, "the old consumers to have finished what they had at `shadow`")


async def compared(group: Fleet, migration: Migration) -> None:
    """The group misses nothing. Both sides go on, so that what was counted first may be done when it is compared."""

    async def nothing_missing() -> bool:
        return [one.missing for one in await migration.compare()] == [False] * len(PARTITIONS)

    await group.eventually(nothing_missing, "the group to have all that the old consumers have")


async def dead(group: Fleet, name: str) -> None:
    await group.eventually(lambda: group.processes[name].ended(), f"{name} to have killed itself")
    group.kill(name)


async def ended(group: Fleet, migration: Migration) -> None:
    """Drain, switch and clean up while the group works."""

    async def drained() -> bool:
        return await migration.drain() == 0

    async def cleaned() -> bool:
        return await migration.clean_up() == len(PARTITIONS)

    await group.eventually(drained, "nothing of the old consumers to be in flight")
    await migration.switch()
    for name in ("o1", "o2"):
        group.kill(name)
    await group.eventually(cleaned, "the group to have passed what the old side has done")


@pytest.mark.kills
@pytest.mark.parametrize(
    ("retention", "killed"),
    [
        ("limits", [(p, at) for p in ("o1", "n3") for at in POINTS]),
        pytest.param("interest", [("o1", "effect"), ("n3", "done")], marks=pytest.mark.short),
        ("interest", [(p, at) for p in ("o1", "n3") for at in POINTS]),
    ],
)
async def test_each_effect_happens_once_while_old_consumers_and_a_group_work_and_are_killed(
    nats_server: EmbeddedServer, tmp_path: Path, retention: str, killed: list[tuple[str, str]]
) -> None:
    """`o1` and `o2` are old, `n1` to `n3` are new; each of `killed` kills itself at that point of a message."""
    told = {"module": "tests.e2e.workers.overlap_side", "overlap": True}
    async with fleet(nats_server, tmp_path, retention, partitions=len(PARTITIONS), pause=0.1, **told) as group:
        migration = Migration(group.control, group.bucket, STREAM, "old-")
        await old_consumers(group)
        start_old(group, "o1")
        start_old(group, "o2")
        group.flood.start()
        await group.more_done(20)
        await migration.shadow()
        group.start("n1", "n2", side="new")
        await begun(group, migration)
        await group.settled(2)
        await group.more_done(30)

        for name, point in killed:
            if name == "o1":
                group.kill("o1")
                start_old(group, "o1", die=(point, 3))
                await dead(group, "o1")
                start_old(group, "o1")
            else:
                group.start(name, side="new", die=(point, 3))
                await dead(group, name)
            await group.more_done(20)
        group.kill("n1")
        group.start("n1", side="new")
        await group.settled(2)
        await compared(group, migration)

        await ended(group, migration)
        assert not await Bucket(group.control, overlap_bucket("g")).exists()
        await group.more_done(20)
        verdict = await group.finish()
        assert verdict.clean, f"{verdict}\n{await group.state()}"
        assert verdict.duplicates == 0
        by = {effect.worker for some in group.sink.effects.values() for effect in some}
        assert by >= {"o1", "o2", "n1", "n2"}, "all of them had their share"
        print(f"{retention}: {group.flood.total} messages")


@pytest.mark.kills
@pytest.mark.short
async def test_without_the_marks_messages_are_handled_twice(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    """The same with sides that know nothing of each other: it is refused, and would go wrong."""
    told = {"module": "tests.e2e.workers.overlap_side", "overlap": False}
    async with fleet(nats_server, tmp_path, "limits", partitions=len(PARTITIONS), pause=0.1, **told) as group:
        migration = Migration(group.control, group.bucket, STREAM, "old-")
        await old_consumers(group)
        start_old(group, "o1")
        start_old(group, "o2")
        group.flood.start()
        await migration.shadow()
        with pytest.raises(ConfigError, match="put `Overlap` around"):
            await migration.overlap()
        pretended = Bucket(group.control, overlap_bucket("g"))
        await pretended.ensure(max_age=3600)
        await pretended.put("s.p0.1", {"state": "done"})
        group.start("n1", side="new")
        await begun(group, migration)
        await group.settled(1)
        await group.more_done(30)
        verdict = await group.finish()
        assert verdict.duplicates > 0


async def test_an_overlap_is_refused_on_a_work_queue(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    async with fleet(nats_server, tmp_path, "workqueue", partitions=len(PARTITIONS)) as group:
        migration = Migration(group.control, group.bucket, STREAM, "old-")
        await old_consumers(group)
        await migration.shadow()
        with pytest.raises(ConfigError, match="is a work queue"):
            await migration.overlap()
