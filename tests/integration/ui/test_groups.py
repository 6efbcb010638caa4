"""What the page of a group knows of its partitions."""

from __future__ import annotations

from dataclasses import replace

from tests.integration.workers.test_group import World, world

from penstock.consume.metrics import Lag
from penstock.ui.pages import _cells
from penstock.ui.watch import Watch
from penstock.workers.group.overview import PartitionOverview

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


def test_lag_that_a_stream_cannot_count_is_not_shown_as_a_number() -> None:
    """A stream without `allow_direct` says that something waits, and not how much: that is -1."""
    one = PartitionOverview("p", ("s.p",), "w", "w", 0, 1, None)
    shown = {count: _cells([one], 1, {"p": Lag(count, 1.0)})[0] for count in (-1, 0, 3)}
    assert {count: (cell.lag, cell.uncounted) for count, cell in shown.items()} == {
        -1: (None, True), 0: (0, False), 3: (3, False),
    }  # fmt: skip
    assert _cells([one], 1, {})[0].lag is None
