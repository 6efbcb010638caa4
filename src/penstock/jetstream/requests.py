"""The pull requests that are open to one consumer: what was requested, and what the server says of it. Without I/O.

Whoever pulls has one of these: it builds each request, and counts how many messages are still to come. When to request,
and how many, is the caller's decision.
"""

from __future__ import annotations

from penstock.jetstream.api import JetStream
from penstock.jetstream.consumer import PullStatus, next_verb, pull_request, pull_status
from penstock.wire import frames


class PullRequests:
    """Builds requests to one consumer, and follows how much of them is still open."""

    def __init__(self, jetstream: JetStream, stream: str, consumer: str, reply: str = "") -> None:
        """`reply` is the subject to which the server sends messages and statuses."""
        self.subject = jetstream.subject(next_verb(stream, consumer))
        self.reply = reply
        self.asked = 0
        """Messages requested and not received yet."""

    def request(
        self,
        batch: int,
        *,
        max_bytes: int | None = None,
        expires: float | None = None,
        heartbeat: float | None = None,
        no_wait: bool = False,
    ) -> bytes:
        """Return the frame of a request for `batch` more messages. Times are in seconds."""
        body = pull_request(batch, max_bytes=max_bytes, expires=expires, heartbeat=heartbeat, no_wait=no_wait)
        self.asked += batch
        return frames.publish(self.subject, body, reply=self.reply)

    def received(self, messages: int) -> None:
        """Count messages that came. More than were requested come where an earlier owner's request is answered."""
        self.asked = max(self.asked - messages, 0)

    def status(self, frame: frames.Message) -> PullStatus | None:
        """Read a status and count what will not come; None for a message of the stream.

        A server that refuses a request does not say how many messages are left of it. Then no request counts as open:
        to request some messages twice is harmless, to wait for some that never come is not.
        """
        status = pull_status(frame)
        if status and status.is_over:
            self.asked = 0 if status.left is None else max(self.asked - status.left, 0)
        return status
