"""Retrying what no stream took: on a cluster a new stream is not known to every server at once.

A server answers "no responders" (503) when it knows of no subscription for a subject. Right after a stream was created,
and while it elects a leader, that is also the answer of a server that has not heard of the subscription yet. Nothing of
the message was delivered then, so sending it again stores nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.publish.errors import NobodyListens
from penstock.retry import Backoff, retrying, retrying_blocking

T = TypeVar("T")
BACKOFF = Backoff(most=0.2)


async def until_heard(call: Callable[[], Awaitable[T]], within: float) -> T:
    """Repeat a batch that no stream took, for `within` seconds; then its `NobodyListens` says for how long."""
    began = time.monotonic()
    try:
        return await retrying(call, within, BACKOFF, retry_on=is_unheard)
    except NobodyListens as exc:
        raise exc.after(time.monotonic() - began) from None


def until_heard_blocking(call: Callable[[], T], within: float) -> T:
    """`until_heard` for blocking code."""
    began = time.monotonic()
    try:
        return retrying_blocking(call, within, BACKOFF, retry_on=is_unheard)
    except NobodyListens as exc:
        raise exc.after(time.monotonic() - began) from None


def is_unheard(error: BaseException) -> bool:
    """Whether the server knew of nobody who takes the subject."""
    return isinstance(error, NobodyListens)
