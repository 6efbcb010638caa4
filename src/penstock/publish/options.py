"""Options and results of a fast ingest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from penstock.errors import ConfigError
from penstock.publish.model import NO_RESPONDERS_TIMEOUT

OnGap = Literal["fail", "continue", "resend"]
OnDoubt = Literal["resend", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestOptions:
    """How a fast ingest behaves.

    What is in flight, and so in doubt after a crash of the server, is bounded by `flow` × `max_outstanding_acks`.
    """

    flow: int = 500
    """Number of messages per ack. The server allows 500, and less while others ingest into the stream."""
    max_outstanding_acks: int = 4
    """How many acks may be outstanding before the publisher waits."""
    max_outstanding_bytes: int = 16 * 1024 * 1024
    """Bytes in flight, about; the server drops what it cannot buffer (128 MiB a stream by default)."""
    on_gap: OnGap = "fail"
    """When messages never reached the stream: raise `IngestGap`; tell the callback and go on without them; or send
    them again, before anything that came later."""
    on_doubt: OnDoubt = "resend"
    """When the server forgot the batch before it said how much of it is stored: send the unacknowledged messages again
    (those without a message id may then be stored twice), or raise `IngestInterrupted`."""
    ack_timeout: float = 2.0
    """Seconds without an awaited answer after which a ping asks for it."""
    idle_after: float = 2.0
    """Seconds without new messages after which what was sent is settled. Far below the server's 10 s."""
    patience: float = 30.0
    """Seconds to retry while the server is unavailable or busy."""
    no_responders_timeout: float = NO_RESPONDERS_TIMEOUT
    """Seconds to retry while no stream stores a subject that the stream has not stored before; then `WrongStream`.
    Never longer than `patience`. With `on_gap="continue"` only the first message of a server batch is retried: any
    other is lost, and reported."""

    def __post_init__(self) -> None:
        if not 1 <= self.flow <= 65_535:
            raise ConfigError(f"flow must be between 1 and 65535 messages, got {self.flow}")
        if self.max_outstanding_acks < 1:
            raise ConfigError(f"max_outstanding_acks must be at least 1, got {self.max_outstanding_acks}")
        if self.on_gap not in ("fail", "continue", "resend"):
            raise ConfigError(f"on_gap must be 'fail', 'continue' or 'resend', got {self.on_gap!r}")
        if self.on_doubt not in ("resend", "fail"):
            raise ConfigError(f"on_doubt must be 'resend' or 'fail', got {self.on_doubt!r}")


class IngestChoices(TypedDict, total=False):
    """The fields of `IngestOptions`, for calls that take them by name."""

    flow: int
    max_outstanding_acks: int
    max_outstanding_bytes: int
    on_gap: OnGap
    on_doubt: OnDoubt
    ack_timeout: float
    idle_after: float
    patience: float
    no_responders_timeout: float


@dataclass(frozen=True, slots=True)
class FastAck:
    """The end of a fast ingest: everything that was added is settled."""

    stream: str
    sequence: int
    """Stream sequence of the last message stored; 0 when none was."""
    batch_id: str
    count: int
    """Messages stored by this ingest or, being duplicates by message id, before it."""
    lost: int = 0
    """Messages known to be lost; only with `on_gap="continue"`, where it is a lower bound: the server reports a gap
    once, and the report can be lost too, such as with the connection."""
    maybe_twice: int = 0
    """Messages sent again while in doubt, without a message id: at most so many are stored twice."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Positions that are not in the stream (`last` is included), and the server's reason."""

    first: int
    last: int
    reason: str

    @property
    def count(self) -> int:
        return self.last - self.first + 1
