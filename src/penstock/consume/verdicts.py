"""What becomes of a message after its handler: acknowledged, delivered again later, or given up. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from penstock.errors import ConfigError
from penstock.units import parse_duration

BACKOFF = (2.0, 5.0, 15.0)
MAX_DELIVER = 3


class Reject(Exception):
    """Raised by a handler for a message that no further try can save: it becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler that cannot handle the message now. It counts as a try.

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
    """How often a message is tried, and how long to wait in between."""

    max_deliver: int = MAX_DELIVER
    """Tries of one message, at most."""
    backoff: tuple[float, ...] = BACKOFF
    """Seconds after the first failed try, after the second, and so on; the last one holds for all that follow."""
    by_exception: tuple[tuple[type[BaseException], Retries | None], ...] = ()
    """For exceptions of these types, the first that fits: other retries, or None, to give up at once."""

    def __post_init__(self) -> None:
        if self.max_deliver < 1:
            raise ConfigError(f"max_deliver must be at least 1, got {self.max_deliver}")
        if not self.backoff or min(self.backoff) <= 0:
            raise ConfigError("backoff needs at least one delay, and all above 0 seconds: a bare nak burns every try")

    def of(self, error: BaseException) -> Retries | None:
        """The retries for this error; None when it is not worth another try."""
        return next((one for type_, one in self.by_exception if isinstance(error, type_)), self)

    @property
    def most(self) -> int:
        """Tries of one message, whatever its errors."""
        return max([self.max_deliver, *(one.most for _, one in self.by_exception if one)])

    def delay(self, attempt: int) -> float:
        """Seconds to wait after that many tries."""
        return self.backoff[min(max(attempt, 1), len(self.backoff)) - 1]


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Try again after so many seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give up, and keep the message with the reason."""

    reason: str


def after_failure(error: BaseException, attempt: int, retries: Retries) -> Redeliver | GiveUp:
    """What to do with a message whose try number `attempt` raised this. The error decides, by its type, which retries
    count; the tries are counted together."""
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
    """Give up a message whose worker died with every try."""
    if attempt > retries.most:
        return GiveUp(f"its worker died {attempt - 1} times while it was handled: does it kill its worker?")
    return None


def described(error: BaseException) -> str:
    """An error in one line; one that cannot even be printed, by its type."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- an error of the user's own: what it does must not end the worker
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
