"""A long series of messages as several batches. No I/O."""

from __future__ import annotations

from penstock.publish.batch import Batch, new_id
from penstock.publish.model import MAX_MESSAGES, BatchAck


class Chunks:
    """The chunks of one series: full ones are stored, one is being filled."""

    def __init__(self, stream: str, batch_id: str | None = None, end_of_batch: bool = False) -> None:
        self.batch_id = new_id() if batch_id is None else batch_id
        """What the ids of the chunks start with."""
        self.acks: list[BatchAck] = []
        """Where the chunks are stored that are committed, in order."""
        self._stream = stream
        self._end_of_batch = end_of_batch
        Batch(stream, f"{self.batch_id}-{10**6}")  # an id that is too long is told now, not at the tenth chunk

    def next_chunk(self) -> Batch:
        return Batch(self._stream, f"{self.batch_id}-{len(self.acks)}", self._end_of_batch)

    def number(self, in_chunk: int) -> int:
        """The number of a message over all chunks."""
        return len(self.acks) * MAX_MESSAGES + in_chunk

    def sequence_of(self, index: int) -> int:
        """The sequence of message number `index`, counted from 0 over all chunks."""
        return self.acks[index // MAX_MESSAGES].sequence_of(index % MAX_MESSAGES)
