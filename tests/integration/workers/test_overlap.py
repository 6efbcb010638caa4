"""Marks on a real server: one side handles, the other waits or passes over, and takes over from the dead."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.workers.group.migration import MIGRATION_KEY, UNIFIED
from penstock.workers.group.overlap import Overlap, TurnLost, WindowPassed
from penstock.workers.options import bucket_name, overlap_bucket

NOW = datetime.now(UTC)


async def test_who_comes_second_waits_and_passes_over(nats_server: EmbeddedServer) -> None:
    async with (
        Overlap.open(nats_server.settings, "g", name="old") as old,
        Overlap.open(nats_server.settings, "g", name="new") as new,
    ):
        async with old.turn("s.a", 1, NOW) as turn:
            assert turn
            assert (turn.key, turn.tries) == ("s.a.1", 0)
            second = asyncio.create_task(_handled(new))
            async with new.turn("s.b", 1, NOW) as other:
                assert other, "another message need not wait"
            assert not second.done()
        assert await second == []
        assert (old.counts.handled, new.counts.handled, new.counts.left) == (1, 1, 1)


async def _handled(overlap: Overlap) -> list[int]:
    """The tries before, if the message was ours."""
    async with overlap.turn("s.a", 1, NOW) as turn:
        return [turn.tries] if turn else []


async def test_a_try_that_fails_opens_the_message_for_the_other_side(nats_server: EmbeddedServer) -> None:
    async with (
        Overlap.open(nats_server.settings, "g", lease=60) as old,
        Overlap.open(nats_server.settings, "g", lease=60) as new,
    ):
        with pytest.raises(ConnectionError):
            async with old.turn("s.a", 1, NOW):
                raise ConnectionError("the database is away")
        assert await asyncio.wait_for(_handled(new), 30) == [1], "long before the lease is over, and told of the try"
        assert new.counts.taken_over == 1


async def test_who_handles_for_long_keeps_its_turn(nats_server: EmbeddedServer) -> None:
    async with (
        Overlap.open(nats_server.settings, "g", lease=1.0) as slow,
        Overlap.open(nats_server.settings, "g", lease=1.0) as other,
        slow.turn("s.a", 1, NOW),
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_handled(other), 2.5)  # some leases, and the key is written all the time


async def test_who_was_cut_off_while_the_other_side_took_over_is_told(nats_server: EmbeddedServer) -> None:
    control = await Control.connect(nats_server.settings)

    async def cut_off(overlap: Overlap) -> None:
        async with overlap.turn("s.a", 1, NOW):
            await Bucket(control, overlap_bucket("g")).put("s.a.1", {"state": "done", "id": "another's", "tries": 2})

    async with Overlap.open(nats_server.settings, "g") as overlap:
        with pytest.raises(TurnLost):
            await cut_off(overlap)
        assert await _handled(overlap) == [], "the other side has done it"
    await control.close()


async def test_a_message_whose_mark_may_be_forgotten_is_refused(nats_server: EmbeddedServer) -> None:
    async with Overlap.open(nats_server.settings, "g", window=0.5) as overlap:

        async def refused() -> bool:
            try:
                async with overlap.turn("s.a", 1, NOW - timedelta(hours=1)):
                    raise AssertionError("handled")
            except WindowPassed as exc:
                return "0.5 s" in str(exc)
            except AssertionError:
                return False

        await eventually_async(refused, what="the window to pass")


async def test_once_the_migration_is_cleaned_up_everything_is_handled_without_marks(
    nats_server: EmbeddedServer,
) -> None:
    control = await Control.connect(nats_server.settings)
    group = Bucket(control, bucket_name("g"))
    async with Overlap.open(nats_server.settings, "g") as overlap:
        await group.ensure()
        await group.put(MIGRATION_KEY, {"phase": UNIFIED})
        await control.jetstream.delete_stream(Bucket(control, overlap_bucket("g")).stream)
        assert await _handled(overlap) == [0]
        assert await _handled(overlap) == [0]
    async with Overlap.open(nats_server.settings, "g") as overlap:
        assert await _handled(overlap) == [0]
    assert not await Bucket(control, overlap_bucket("g")).exists()
    await control.close()
