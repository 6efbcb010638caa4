"""Decides the outcome of a message after its handler: acknowledged, retried later, or given up. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from penstock.errors import ConfigError
from penstock.units import parse_duration

BACKOFF = (2.0, 5.0, 15.0)
MAX_DELIVER = 3


class Reject(Exception):
    """Raised by a handler for a message that no retry can save: it becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler that cannot handle the message now. It counts as an attempt.

    `after`: seconds until the next one, or a duration such as "5m"; the backoff decides when it is not given.
    """

    def __init__(self, reason: str = "", after: float | str | timedelta | None = None) -> None:
        super().__init__(reason, after)
        self.reason = reason
        self.after = None if after is None else _seconds(after)

    def __str__(self) -> str:
        return self.reason or "the handler asked for another try"


def _seconds(after: float | str | timedelta) -> float:
    span = parse_duration(after) if isinstance(after, str) else after
    found = span.total_seconds() if isinstance(span, timedelta) else float(span)
    if not math.isfinite(found):
        raise ValueError(f"RetryLater: after is {after}, not a time that one can wait")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a message is attempted, and the delays in between."""

    max_deliver: int = MAX_DELIVER
    """Maximum number of attempts of one message."""
    backoff: tuple[float, ...] = BACKOFF
    """Seconds after the first failed attempt, after the second, and so on; the last one repeats."""
    by_exception: tuple[tuple[type[BaseException], Retries | None], ...] = ()
    """For exceptions of these types, the first match: other retries, or None, to give up at once."""

    def __post_init__(self) -> None:
        if self.max_deliver < 1:
            raise ConfigError(f"max_deliver must be at least 1, got {self.max_deliver}")
        if not self.backoff or min(self.backoff) <= 0:
            raise ConfigError(
                "backoff needs at least one delay, each above 0 s: without one all tries are used up at once"
            )

    def of(self, error: BaseException) -> Retries | None:
        """Return the retries for this error; None when it must not be retried."""
        return next((one for type_, one in self.by_exception if isinstance(error, type_)), self)

    @property
    def most(self) -> int:
        """Maximum number of attempts of one message, whatever its errors."""
        return max([self.max_deliver, *(one.most for _, one in self.by_exception if one)])

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after that many attempts."""
        return self.backoff[min(max(attempt, 1), len(self.backoff)) - 1]


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Retry after a delay in seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give up, and store the message with the reason."""

    reason: str


def after_failure(error: BaseException, attempt: int, retries: Retries) -> Redeliver | GiveUp:
    """Decide what to do after attempt number `attempt` raised this error. The error's type decides which retries apply;
    attempts are counted together."""
    if isinstance(error, Reject):
        return GiveUp(f"rejected by the handler: {error}")
    rules = retries.of(error)
    if rules is None:
        return GiveUp(f"not tried again after {described(error)}")
    if attempt >= rules.max_deliver:
        return GiveUp(f"gave up after {attempt} {'try' if attempt == 1 else 'tries'}: {described(error)}")
    if isinstance(error, RetryLater) and error.after is not None:
        return Redeliver(max(error.after, 0.001))
    return Redeliver(rules.delay(attempt))


def before_try(attempt: int, retries: Retries) -> GiveUp | None:
    """Give up a message whose worker died at every attempt."""
    if attempt > retries.most:
        return GiveUp(f"its worker died {attempt - 1} times while it was handled: does it kill its worker?")
    return None


def described(error: BaseException) -> str:
    """Describe an error in one line; one that cannot be printed, by its type."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- a user's exception class: it must not end the worker
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
