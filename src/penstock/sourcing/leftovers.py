"""What is left for a bridge at its origin, as the origin's server sees it.

A killed nats-server can restart with messages of a WorkQueue stream that it had deleted already, while the consumer
remembers that they were acknowledged: they would never be delivered again, nor deleted. Where the destination holds
their copies, the consumer is reset to the first of them, so that they are delivered, recognised and acknowledged again.
Where it does not, the consumer was moved by another client, and an operator must decide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.errors import MessageNotFound, PenstockError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StreamInfo
from penstock.settings import Settings
from penstock.sourcing import copies
from penstock.wire import blocking


class LeftBehind(PenstockError):
    """A WorkQueue origin holds messages that the bridge's consumer has skipped, and the destination does not have.

    It happens when the consumer is reset forward.
    """

    def __init__(self, stream: str, consumer: str) -> None:
        super().__init__(stream, consumer)
        self.stream = stream
        self.consumer = consumer

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} holds messages that consumer {self.consumer!r} has passed over, and nobody else "
            f"will take: look at them, then remove them or `penstock consumer reset {self.stream} {self.consumer}` "
            "to their sequence"
        )


@dataclass(frozen=True, slots=True)
class Left:
    """Counts of what is left at an origin. False when there is nothing."""

    undelivered: int
    unacknowledged: int
    kept: bool = False
    """Whether a WorkQueue origin still holds a message that it has delivered and knows to be stored."""

    @property
    def kept_alone(self) -> bool:
        """Whether only messages are left that the consumer counts as acknowledged."""
        return self.kept and not self.undelivered and not self.unacknowledged

    def __bool__(self) -> bool:
        return bool(self.undelivered or self.unacknowledged or self.kept)

    def __str__(self) -> str:
        kept = ", and some that it was told are stored" if self.kept else ""
        return f"{self.undelivered} undelivered and {self.unacknowledged} unacknowledged messages{kept}"


class Leftovers:
    """Queries the origin of one bridge for what is left. Each query uses its own connection."""

    def __init__(
        self, settings: Settings, stream: str, consumer: str, filters: tuple[str, ...], destination: str
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._consumer = consumer
        self._filters = filters or (">",)
        self._destination = destination
        self._taken_back = 0
        """The sequence to which the consumer was reset last; the same one again would not help either."""

    def ask(self) -> Left:
        """Return what is left to copy."""
        with self._origin() as jetstream:
            info = blocking.run(jetstream.consumer_info(self._stream, self._consumer))
            stream = blocking.run(jetstream.stream_info(self._stream))
            settled = not info.unprocessed and stream.config.get("retention") == "workqueue"
            return Left(info.pending, info.ack_pending, settled and any(self._kept(jetstream, stream)))

    def take_back(self, destination: JetStream) -> None:
        """Reset the consumer to the first message that it counts as acknowledged and the stream still holds.

        Raises `LeftBehind` when the destination does not hold all of these messages, or when it did not help before.
        """
        with self._origin() as jetstream:
            kept = sorted(set(self._kept(jetstream, blocking.run(jetstream.stream_info(self._stream)))))
            if not kept:
                return
            if kept[0] == self._taken_back or not _holds_copies(destination, self._destination, kept):
                raise LeftBehind(self._stream, self._consumer)
            self._taken_back = kept[0]
            blocking.run(jetstream.reset_consumer(self._stream, self._consumer, kept[0]))

    @contextmanager
    def _origin(self) -> Iterator[JetStream]:
        with blocking.connect(self._settings, name="penstock bridge") as connection:
            yield JetStream(connection.requester(), self._settings.domain, self._settings.timeout)

    def _kept(self, jetstream: JetStream, stream: StreamInfo) -> Iterator[int]:
        """Sequences of the bridge's messages that the stream held when it was looked at, by filter."""
        for filter_ in self._filters:
            sequence = 0
            while True:
                try:
                    found = blocking.run(jetstream.get_message(stream.name, sequence + 1, next_of=filter_))
                except MessageNotFound:
                    break
                if found.sequence > stream.state.last_seq:
                    break
                yield (sequence := found.sequence)


def _holds_copies(jetstream: JetStream, stream: str, wanted: list[int]) -> bool:
    """Whether the stream holds a copy of each of these messages; their origin's sequences, in order."""

    def origin_sequence(sequence: int) -> int:
        try:
            mark = copies.mark_of(blocking.run(jetstream.get_message(stream, sequence, next_of=">")).headers)
        except MessageNotFound:
            return wanted[-1] + 1
        return mark.sequence if mark else 0

    state = blocking.run(jetstream.stream_info(stream)).state
    place = state.first_seq
    for one in wanted:
        if origin_sequence(place) != one:  # copies of neighbours are neighbours; else search, as copies are in order
            place = bisect_left(range(state.last_seq + 1), one, lo=place, key=origin_sequence)
            if origin_sequence(place) != one:
                return False
        place += 1
    return True
