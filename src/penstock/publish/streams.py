"""What a publisher knows of the streams it publishes to. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.jetstream.model import StreamInfo
from penstock.publish import errors
from penstock.publish.model import BatchAck

FRESH = 5.0
"""Seconds for which a known last sequence counts as recent: it bounds what `resolve` must look at."""


@dataclass(slots=True)
class KnownStream:
    """A stream that takes atomic batches."""

    subjects: tuple[str, ...]
    last_sequence: int
    """A sequence that the stream has reached."""
    known_at: float


class KnownStreams:
    """The streams of one publisher, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, KnownStream] = {}

    def recent(self, name: str, now: float) -> KnownStream | None:
        """The stream, unless what is known of it is old."""
        found = self._streams.get(name)
        return found if found and now - found.known_at <= FRESH else None

    def learn(self, info: StreamInfo, batch_id: str, now: float) -> KnownStream:
        """Remember a stream. Raises why it cannot take an atomic batch; a server that is too old is such a reason.

        Without this check an old server would store the members of a batch one by one.
        """
        if not info.config.get("allow_atomic"):
            raise errors.NotEnabled(info.name, batch_id, 400, errors.DISABLED, "atomic publish is disabled")
        if info.config.get("no_ack"):
            raise ConfigError(f"stream {info.name!r} has no_ack set: nobody would learn whether a batch is stored")
        subjects = tuple(info.config.get("subjects") or ())
        made = self._streams[info.name] = KnownStream(subjects, info.state.last_seq, now)
        return made

    def note(self, ack: BatchAck, now: float) -> None:
        """Remember how far the stream has come."""
        if (known := self._streams.get(ack.stream)) and ack.sequence > known.last_sequence:
            known.last_sequence, known.known_at = ack.sequence, now
