"""What the page of a group knows of its partitions."""

from __future__ import annotations

from dataclasses import replace

from tests.integration.workers.test_group import World, world

from penstock.ui.watch import Watch

__all__ = ["world"]


async def test_lag_that_was_measured_stays_while_the_server_is_away(world: World) -> None:
    await world.prepare()
    group = await world.join()
    await world.shared(6)
    await group.stop()
    await world.publish("p3", 2)
    watch = Watch(replace(world.server.settings, timeout=0.2))
    found = (await watch.snapshot()).group("g")
    assert found
    before = await watch.lags(found)
    assert before["p3"].messages == 2
    world.server.kill()
    watch._number += 1  # as after another look
    assert await watch.lags(found) == before
    world.server.start()
    await watch.close()
