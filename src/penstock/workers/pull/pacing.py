"""How much to ask the server for: batch sizes that follow the handlers, and a bound on what waits here. Pure."""

from __future__ import annotations

FULL = 0.8
"""Share of `max_ack_pending` that may wait here before pulling stops."""
HORIZON = 0.5
"""Seconds of work that one batch should be."""
FIRST = 50
LEAST = 4
HEADROOM = 65_536
"""Bytes that a server counts besides a message's data: its subject, and where to acknowledge it."""
MEMORY = 0.7
"""Share of the old value that a new observation leaves in the average."""


class BatchSize:
    """Messages to ask for at once: as many as the handlers finish in `HORIZON` seconds."""

    def __init__(self, most: int, first: int = FIRST) -> None:
        self.most = max(most, 1)
        self.size = min(max(first, 1), self.most)
        self._rate: float | None = None

    def observe(self, handled: int, seconds: float, idle: bool) -> None:
        """So many were handled in so long. `idle`: there was nothing left to handle, so it could have been more."""
        if seconds <= 0 or (idle and not handled):
            return
        rate = handled / max(seconds, 0.001)
        if idle:  # a lull says nothing about how fast the handlers are
            rate = max(rate, self._rate or 0.0)
        self._rate = rate if self._rate is None else MEMORY * self._rate + (1 - MEMORY) * rate
        wanted = int(self._rate * HORIZON)
        # At most doubled at a time: one lucky moment must not flood a slow handler.
        self.size = min(max(wanted, LEAST), 2 * self.size, self.most)
        self.size = max(self.size, min(LEAST, self.most))


def capacity(max_ack_pending: int) -> int:
    """Messages that may wait here or be under way to here."""
    return max(1, int(max_ack_pending * FULL))


def bounded(most: int, max_bytes: int, size: float) -> int:
    """Messages of about that size that may wait here or be under way to here, so that they stay within `max_bytes`."""
    return max(1, min(most, int(max_bytes / size))) if size else most


def request_bytes(max_bytes: int, max_payload: int) -> int:
    """Bytes that one request may bring: two of them may be open before it is known how large the messages are.

    One message has room in any case, or the server would refuse every request.
    """
    return max(max_bytes // 4, max_payload + HEADROOM)


def next_pull(size: int, asked: int, held: int, room: int) -> int:
    """How many messages to ask for now: 0 while enough are under way, or too many wait here.

    `asked`: asked for and not come yet. `held`: here and not finished. `room`: the most of both together.
    """
    if asked > size // 2:
        return 0
    return max(0, min(size - asked, room - held - asked))


def pending_needed(parked: int, max_ack_pending: int, most: int) -> int:
    """`max_ack_pending` for the server while `parked` messages wait there: they must not use up the others' budget.

    In powers of two, so that the consumer is seldom changed.
    """
    if parked * 2 <= max_ack_pending:
        return max_ack_pending
    extra = 1 << (2 * parked - 1).bit_length()
    return min(max_ack_pending + extra, max(most, max_ack_pending))
