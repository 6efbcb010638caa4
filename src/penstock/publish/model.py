"""What a published batch is called and where it ended up, as values."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGES = 1000
"""Messages in one atomic batch, unless the server is configured otherwise."""
MAX_BATCH_ID = 64
"""Characters of a batch id."""
NO_RESPONDERS_TIMEOUT = 2.0
"""Seconds for which a message that no stream takes is tried again, unless the caller says otherwise: a cluster needs a
moment until every server knows a new stream."""


def publisher_of(batch_id: str) -> str | None:
    """The publisher that a batch id names, as `PUBLISHER.ID`."""
    return batch_id.rpartition(".")[0] or None


@dataclass(frozen=True, slots=True)
class BatchAck:
    """A batch that is stored: all of its messages, next to each other, in their order."""

    stream: str
    sequence: int
    """Sequence of the last message."""
    batch_id: str
    count: int

    @property
    def first_sequence(self) -> int:
        return self.sequence - self.count + 1

    @property
    def sequences(self) -> range:
        """The sequences of all members, in the order they were added."""
        return range(self.first_sequence, self.sequence + 1)

    def sequence_of(self, index: int) -> int:
        """The sequence of the member that was added as number `index`, counted from 0."""
        return self.sequences[index]


@dataclass(frozen=True, slots=True)
class BatchRef:
    """All that is needed to find out whether a batch was stored, also after its publisher is gone."""

    stream: str
    batch_id: str
    count: int
    subject: str
    """A subject of the batch."""
    after: int
    """A sequence the stream had reached before the batch was sent."""
