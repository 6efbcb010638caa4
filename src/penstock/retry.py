"""Backoff with jitter: the one way this package waits between tries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Exponential delays with full jitter, so that many clients do not return in step."""

    first: float = 0.05
    """Seconds; the first delay is drawn from 0 to this."""
    factor: float = 2.0
    most: float = 2.0
    """Seconds; no delay is longer."""

    def delays(self, rng: random.Random | None = None) -> Iterator[float]:
        """An endless series of delays in seconds."""
        draw = (rng or random).uniform
        ceiling = self.first
        while True:
            yield draw(0, ceiling)
            ceiling = min(ceiling * self.factor, self.most)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later without a change by the caller."""
    return isinstance(error, PenstockError) and error.retryable


async def retrying(
    call: Callable[[], Awaitable[T]],
    within: float,
    backoff: Backoff | None = None,
    retry_on: Callable[[BaseException], bool] = is_retryable,
) -> T:
    """Await `call` until it succeeds, fails for good, or `within` seconds have passed (then its last error is raised).

    Only for calls that may be repeated: an answer that was lost counts as a failure here.
    """
    deadline = time.monotonic() + within
    for delay in (backoff or Backoff()).delays():
        try:
            return await call()
        except PenstockError as exc:
            if not retry_on(exc) or time.monotonic() + delay >= deadline:
                raise
            await asyncio.sleep(delay)
    raise AssertionError("delays() never ends")


def retrying_blocking(
    call: Callable[[], T],
    within: float,
    backoff: Backoff | None = None,
    retry_on: Callable[[BaseException], bool] = is_retryable,
) -> T:
    """`retrying` for blocking code."""
    deadline = time.monotonic() + within
    for delay in (backoff or Backoff()).delays():
        try:
            return call()
        except PenstockError as exc:
            if not retry_on(exc) or time.monotonic() + delay >= deadline:
                raise
            time.sleep(delay)
    raise AssertionError("delays() never ends")
