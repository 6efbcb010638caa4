"""What is asked of one consumer, and how much of it has come."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from penstock.consume.messages import Message
from penstock.jetstream.model import NANOSECONDS
from penstock.wire import frames

EXPIRES = 30.0  # seconds
HEARTBEAT = 5.0  # seconds


@dataclass(slots=True)
class Pull:
    """What was asked of one consumer."""

    name: str
    inbox: str
    sid: int = 0
    asked: int = 0
    """Messages asked for and not come yet."""
    heard: float = 0.0
    """When something last came."""
    delivery: int = 0
    """The number of the last delivery."""
    opening: list[Message] | None = field(default_factory=list)
    """What came before it was known that the consumer counts from 1; None once that is known."""

    def request(self, subject: str, count: int, max_bytes: int) -> bytes:
        """Ask for so many messages more, and for no more bytes than that."""
        ask = {
            "batch": count,
            "max_bytes": max_bytes,
            "expires": int(EXPIRES * NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT * NANOSECONDS),
        }
        return frames.publish(subject, json.dumps(ask).encode(), reply=self.inbox)
