"""Logs failed attempts: enough to see why, and not a line for every message."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import GiveUp, Retries, described
from penstock.deadletter.letters import Failure, one_line

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two warnings about failures of the same kind."""
KINDS = 20
"""Maximum number of kinds of failures that are warned about in that time."""
LENGTH = 500
"""Maximum number of characters of an error's message in one line."""

AGAIN, BURIED = "further tries that failed", "further messages that were given up"
Kind = tuple[str, str]
"""The kind of event, and the error without the parts that vary between events."""
OTHERS: Kind = (AGAIN, "errors of many kinds")


class FailureLog:
    """Warns of the first failure of a kind at once, and of similar ones periodically, with their number.

    Failures without a warning are still logged as information.
    """

    def __init__(self, retries: Retries, now: Callable[[], float] = time.monotonic) -> None:
        self._retries = retries
        self._now = now
        self._since: dict[Kind, float] = {}
        """When the last recent warning of each kind was logged."""
        self._withheld: Counter[Kind] = Counter()

    def again(self, message: Message, context: MessageContext, error: BaseException, after: float) -> None:
        """Log a failed attempt; the retry comes after `after` seconds."""
        rules = self._retries.of(error) or self._retries
        tried = f"try {context.delivery_count} of {rules.max_deliver} failed, again in {after:g} s"
        self._tell(AGAIN, message, error, f"{tried}: {described(error)}")

    def buried(self, message: Message, letter: GiveUp, error: BaseException) -> None:
        """Log a message that was given up and stored as a dead letter."""
        self._tell(BURIED, message, error, f"kept as a dead letter: {letter.reason}")

    def close(self) -> None:
        """Log the number of failures not reported yet."""
        for kind in list(self._withheld):
            self._sum_up(kind)

    def _tell(self, what: str, message: Message, error: BaseException, text: str) -> None:
        kind = (what, Failure(message=one_line(described(error), LENGTH)).template)
        shown = self._may_warn(kind)
        more = self._withheld.pop(kind, 0) if shown else 0
        like_it = f" (and {more:,} more like it since the last line)" if more else ""
        level = logging.WARNING if shown else logging.INFO
        log.log(level, "%s #%d: %s%s", message.subject, message.sequence, one_line(text, LENGTH), like_it)

    def _may_warn(self, kind: Kind) -> bool:
        now = self._now()
        for past in [one for one, at in self._since.items() if now - at >= EVERY]:
            del self._since[past]
            if past != kind:
                self._sum_up(past)
            self._sum_up(OTHERS)
        if kind in self._since:
            self._withheld[kind] += 1
            return False
        if len(self._since) >= KINDS:
            self._withheld[OTHERS] += 1
            return False
        self._since[kind] = now
        return True

    def _sum_up(self, kind: Kind) -> None:
        if count := self._withheld.pop(kind, 0):
            what, error = kind
            log.warning("%s: %d, with %s", what, count, error)
