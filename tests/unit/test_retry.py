"""Waiting between tries: longer each time, up to a deadline, and from the start again after a success."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import AccessDenied, PenstockError, Unavailable
from penstock.retry import Backoff, Tries, retrying, retrying_blocking

DOWN = Unavailable("down")


def test_pauses_grow_until_a_success() -> None:
    tries = Tries(backoff=Backoff(first=1.0, factor=10.0, most=1000.0))
    grown = [tries.pause(DOWN) for _ in range(50)]
    assert max(grown) > 10
    tries.succeeded()
    assert tries.pause(DOWN) <= 1.0


def test_what_no_retry_heals_is_raised_at_once_and_not_told() -> None:
    told: list[PenstockError] = []
    tries = Tries(tell=told.append)
    tries.pause(DOWN)
    with pytest.raises(AccessDenied):
        tries.pause(AccessDenied("no"))
    assert told == [DOWN]


def test_the_last_error_is_raised_when_the_deadline_would_pass() -> None:
    with pytest.raises(Unavailable, match="down"):
        Tries(within=0).pause(DOWN)


async def test_a_stop_ends_the_pause() -> None:
    stop = asyncio.Event()
    stop.set()
    tries = Tries(backoff=Backoff(first=1e6, most=1e6))
    async with asyncio.timeout(30):
        await tries.failed(DOWN, stop)


async def test_a_call_is_repeated_until_it_succeeds() -> None:
    outcomes = [DOWN, DOWN, None]

    def call() -> str:
        if error := outcomes.pop(0):
            raise error
        return "done"

    async def call_async() -> str:
        return call()

    assert retrying_blocking(call, 60) == "done"
    outcomes[:] = [DOWN, None]
    assert await retrying(call_async, None) == "done"
