"""Backoff with jitter: the one way this package waits between tries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock.coroutines import sleep
from penstock.errors import PenstockError, Unavailable

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


def is_away(error: BaseException) -> bool:
    """Whether no server could be asked, for whatever reason."""
    return isinstance(error, Unavailable)


def always(error: BaseException) -> bool:
    """For loops that go on for as long as their program runs, whatever a server says."""
    return True


class Tries:
    """One series of tries at the same thing: each failure is followed by a longer pause, up to a deadline.

    Every loop that connects again, or asks again, waits by this class: jitter, growth, start-over and deadline are
    the same everywhere.
    """

    def __init__(
        self,
        within: float | None = None,
        backoff: Backoff | None = None,
        retry_on: Callable[[BaseException], bool] = is_retryable,
        tell: Callable[[PenstockError], None] | None = None,
    ) -> None:
        """`within`: seconds after which it gives up; None: never. `tell` hears of each failure that is retried."""
        self._backoff = backoff or Backoff()
        self._retry_on = retry_on
        self._tell = tell
        self._until = None if within is None else time.monotonic() + within
        self._delays = self._backoff.delays()

    def succeeded(self) -> None:
        """Begin with short pauses again; the deadline stays."""
        self._delays = self._backoff.delays()

    def pause(self, error: PenstockError) -> float:
        """Seconds to wait after a failure. Raises `error` when it is final, or when the deadline would pass."""
        delay = next(self._delays)
        if not self._retry_on(error) or (self._until is not None and time.monotonic() + delay >= self._until):
            raise error
        if self._tell:
            self._tell(error)
        return delay

    async def failed(self, error: PenstockError, stop: asyncio.Event | None = None) -> None:
        """Wait before the next try, at most until `stop` is set. Raises `error` as `pause` does."""
        delay = self.pause(error)
        if stop is None:
            await sleep(delay)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop.wait()

    def failed_blocking(self, error: PenstockError) -> None:
        """`failed` for blocking code."""
        time.sleep(self.pause(error))


async def retrying(
    call: Callable[[], Awaitable[T]],
    within: float | None,
    backoff: Backoff | None = None,
    retry_on: Callable[[BaseException], bool] = is_retryable,
) -> T:
    """Await `call` until it succeeds, fails for good, or `within` seconds have passed (then its last error is raised).

    Only for calls that may be repeated: an answer that was lost counts as a failure here.
    """
    tries = Tries(within, backoff, retry_on)
    while True:
        try:
            return await call()
        except PenstockError as exc:
            await tries.failed(exc)


def retrying_blocking(
    call: Callable[[], T],
    within: float | None,
    backoff: Backoff | None = None,
    retry_on: Callable[[BaseException], bool] = is_retryable,
) -> T:
    """`retrying` for blocking code."""
    tries = Tries(within, backoff, retry_on)
    while True:
        try:
            return call()
        except PenstockError as exc:
            tries.failed_blocking(exc)
