"""Which batches go with which commit, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from penstock.app.commits import UNDER_WAY, Commits, PendingCommit
from penstock.publish.atomic import Publisher


class Gated(Commits):
    """Commits that all end in the same moment, when the gate opens."""

    def __init__(self) -> None:
        super().__init__(cast(Publisher, None), "OUT")
        self.gate = asyncio.Event()
        self.sizes: list[int] = []

    async def _send(self, group: Sequence[PendingCommit]) -> None:
        self.sizes.append(len(group))
        await self.gate.wait()
        for one in group:
            one.settle(True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_comes_in_the_moment_in_which_all_commits_end_is_stored_too() -> None:
    commits = Gated()
    running: list[asyncio.Task[Any]] = []
    for name in range(UNDER_WAY):
        running.append(asyncio.create_task(commits.store(PendingCommit(str(name)))))
        await settle()
    assert commits.sizes == [1] * UNDER_WAY, "all of them are under way"

    async def late() -> bool:
        await commits.gate.wait()  # is woken right behind them
        return await commits.store(PendingCommit("late"))

    running.append(asyncio.create_task(late()))
    await settle()
    commits.gate.set()
    async with asyncio.timeout(5):
        assert all(await asyncio.gather(*running))


async def test_what_comes_meanwhile_goes_with_the_next_commit() -> None:
    commits = Gated()
    first = [asyncio.create_task(commits.store(PendingCommit(str(name)))) for name in range(2)]
    await settle()
    more = [asyncio.create_task(commits.store(PendingCommit(f"m{name}"))) for name in range(50)]
    await settle()
    commits.gate.set()
    assert await asyncio.gather(*first, *more) == [True] * 52
    assert sum(commits.sizes) == 52
    assert len(commits.sizes) <= 4


async def test_a_handler_that_was_cancelled_meanwhile_does_not_concern_the_others() -> None:
    commits = Gated()
    commits.gate.set()
    tasks = [asyncio.create_task(commits.store(PendingCommit(str(name)))) for name in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [True, True]
