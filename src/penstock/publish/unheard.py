"""Retries messages that no stream stored: on a cluster a new stream is not known to every server at once.

A server answers "no responders" (503) when it knows of no subscription for a subject. Right after a stream was created,
and while it elects a leader, a server that does not know the subscription yet answers the same. The message was not
delivered then, so resending it stores nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.publish.errors import NobodyListens
from penstock.retry import Backoff, retrying

T = TypeVar("T")
BACKOFF = Backoff(most=0.2)


async def until_heard(call: Callable[[], Awaitable[T]], within: float) -> T:
    """Retry a batch that no stream stored, for `within` seconds; then its `NobodyListens` says for how long."""
    began = time.monotonic()
    try:
        return await retrying(call, within, BACKOFF, retry_on=is_unheard)
    except NobodyListens as exc:
        raise exc.after(time.monotonic() - began) from None


def is_unheard(error: BaseException) -> bool:
    """Whether the server answered "no responders"."""
    return isinstance(error, NobodyListens)
