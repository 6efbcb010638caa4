"""Blocking facades of asyncio classes."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from penstock.coroutines import blocked, finished, passed, sleep


class Inner:
    def __init__(self) -> None:
        self.size = 1

    async def grow(self, by: int, *, pause: float = 0.0) -> int:
        """Make it larger."""
        await sleep(pause)
        self.size += by
        return self.size

    async def wait_for_the_loop(self) -> None:
        await asyncio.sleep(0)


class Larger(Inner):
    async def grow(self, by: int, *, pause: float = 0.0) -> int:
        return await super().grow(2 * by, pause=pause)


class Facade:
    def __init__(self, inner: Inner) -> None:
        self.inner = inner

    size = passed[int]()
    grow = blocked(Inner.grow)
    wait_for_the_loop = blocked(Inner.wait_for_the_loop)


def test_a_blocked_method_returns_what_the_async_one_does() -> None:
    facade = Facade(Inner())
    assert facade.grow(2, pause=0.001) == 3
    facade.size = 10
    assert (facade.size, facade.inner.size) == (10, 10)


def test_a_blocked_method_is_the_one_that_the_inner_class_overrides() -> None:
    assert Facade(Larger()).grow(2) == 5


async def test_blocking_code_works_where_an_event_loop_runs() -> None:
    assert Facade(Inner()).grow(1, pause=0.001) == 2


async def test_sleep_waits_in_the_event_loop_also_after_blocking_code() -> None:
    finished(Inner().grow(1))
    other = asyncio.create_task(sleep(0))
    await sleep(0.001)
    assert other.done()


def test_a_coroutine_that_needs_an_event_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="waits for an event loop"):
        Facade(Inner()).wait_for_the_loop()


def test_the_class_can_be_looked_at() -> None:
    assert "Make it larger." in (inspect.getdoc(Facade.grow) or "")
    assert dict(inspect.getmembers(Facade))["size"] is not None
