"""What becomes of a message after its handler: acknowledged, delivered again later, or given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

BACKOFF = (2.0, 5.0, 15.0)
MAX_DELIVER = 3
UNANSWERED = 50
"""Deliveries beyond `max_deliver` that may end without an answer: a lost connection is not the message's fault, and one
crash of a broker in the middle of a rebalance was seen to cost 15."""


class Reject(Exception):
    """Raised by a handler for a message that no further try can save: it becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler that cannot handle the message now. It counts as a try.

    `after`: seconds until the next one; the backoff decides when it is not given.
    """

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason, after)
        self.reason = reason
        self.after = after

    def __str__(self) -> str:
        return self.reason or "the handler asked for another try"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a message is tried, and how long to wait in between."""

    max_deliver: int = MAX_DELIVER
    """Tries of one message, at most."""
    backoff: tuple[float, ...] = BACKOFF
    """Seconds after the first failed try, after the second, and so on; the last one holds for all that follow."""

    def __post_init__(self) -> None:
        if self.max_deliver < 1:
            raise ConfigError(f"max_deliver must be at least 1, got {self.max_deliver}")
        if not self.backoff or min(self.backoff) <= 0:
            raise ConfigError("backoff needs at least one delay, and all above 0 seconds: a bare nak burns every try")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after that many tries."""
        return self.backoff[min(max(attempt, 1), len(self.backoff)) - 1]


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Try again after so many seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Give up, and keep the message with the reason."""

    reason: str


def after_failure(error: BaseException, attempt: int, retries: Retries) -> Redeliver | DeadLetter:
    """What to do with a message whose try number `attempt` raised this."""
    if isinstance(error, Reject):
        return DeadLetter(f"rejected by the handler: {error}")
    if attempt >= retries.max_deliver:
        return DeadLetter(f"gave up after {attempt} {'try' if attempt == 1 else 'tries'}: {described(error)}")
    if isinstance(error, RetryLater) and error.after is not None:
        return Redeliver(max(error.after, 0.001))
    return Redeliver(retries.delay(attempt))


def before_try(attempt: int, retries: Retries) -> DeadLetter | None:
    """Give up a message that was delivered again and again, and whose tries never ended."""
    if attempt > retries.max_deliver + UNANSWERED:
        return DeadLetter(f"delivered {attempt} times, and no try ended: does it kill its worker?")
    return None


def described(error: BaseException) -> str:
    """An error in one line; one that cannot even be printed, by its type."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 -- an error of the user's own: what it does must not end the worker
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
