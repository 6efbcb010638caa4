"""The state of a receiver of a flow-control consumer, and its answers. Pure.

The origin numbers its deliveries 1, 2, 3 … since the last reset of the consumer, by any client. A missing number was
lost in transit: only another reset delivers it again in order. The origin periodically sends a flow-control request;
the answer acknowledges, and on WorkQueue and Interest streams deletes. So a request is answered only once everything
that was delivered before it is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.wire import frames, headers

LAST_STREAM = "Nats-Last-Stream"
LAST_CONSUMER = "Nats-Last-Consumer"
STALLED = "Nats-Consumer-Stalled"
PATIENT_BEATS = 3
DEAF_AFTER = 2


class Question(NamedTuple):
    """A flow-control request that waits for its answer."""

    reply: str
    delivery: int
    sequence: int


class KeptRows(NamedTuple):
    """Which of some rows belong to the current numbering."""

    first: int
    stop: int
    gap: bool
    """Whether a number is missing behind `stop`."""


class Flow:
    """Position and numbering of one receiver, over all of its connections."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        """Stream sequence of the last message that was handed on."""
        self.stored = position
        """Stream sequence up to which the sink has stored everything."""
        self.delivery = 0
        """Delivery number of the last message seen since the reset."""
        self.sequence = 0
        """Its stream sequence."""
        self.lost = True
        """Whether the numbering is unknown: deliveries are ignored until number 1 arrives."""
        self.acknowledged = 0
        """Stream sequence up to which the origin was told that everything is stored."""
        self.gaps = 0
        self._beats_while_lost = 0
        self._answered = 0
        """Delivery number of the last answer."""
        self._repeated = 0
        """Requests in a row that asked again for what was answered."""
        self.restarts = 0
        """How often the numbering restarted without a reset of ours."""
        self._questions: deque[Question] = deque()

    # -- messages --------------------------------------------------------------------------------------------------

    def advance(self, count: int, sequence: int) -> None:
        """That many deliveries came in order, the last with this stream sequence."""
        self.delivery += count
        self.sequence = sequence

    def resynchronized(self, deliveries: Sequence[int], asked: bool) -> KeptRows:
        """Find the newest numbering in deliveries of any order; without one, nothing is kept."""
        start = next((i for i in range(len(deliveries) - 1, -1, -1) if deliveries[i] == 1), None)
        if start is None:
            return KeptRows(0, 0, False)
        self.renumbered()
        self.lost = False
        self._beats_while_lost = 0
        self.restarts += not asked
        stop = start
        while stop < len(deliveries) and deliveries[stop] == stop - start + 1:
            stop += 1
        return KeptRows(start, stop, stop < len(deliveries))

    def renumbered(self) -> None:
        """Restart the numbering at 1. Earlier requests of the origin are obsolete."""
        self.delivery = self.sequence = self.acknowledged = 0
        self._answered = self._repeated = 0
        self._questions.clear()

    def gap(self) -> None:
        """Note a missing number: deliveries are ignored until the numbering restarts."""
        self.gaps += 1
        self.lost = True
        self._beats_while_lost = 0
        self.renumbered()

    @property
    def is_asked(self) -> bool:
        """Whether the origin waits for an answer."""
        return bool(self._questions)

    @property
    def settled(self) -> bool:
        """Whether the origin knows that everything it has delivered is stored."""
        return not self.lost and self.acknowledged >= self.sequence

    # -- control messages ------------------------------------------------------------------------------------------

    def asked(self, reply: str) -> bool:
        """Record a flow-control request. False: the origin ignores our answers, and must be reset.

        That happens when an answer crosses a reset: the origin takes the old delivery number in it for a new one, and
        every answer below it for an old one (nats-server 2.15).
        """
        if self.lost:
            return True
        again = self.delivery > 0 and self.delivery == self._answered
        self._repeated = self._repeated + 1 if again else 0
        self._questions.append(Question(reply, self.delivery, self.sequence))
        return self._repeated < DEAF_AFTER

    def heartbeat(self, message: frames.Message) -> bool:
        """Take a heartbeat. False: messages before it did not arrive."""
        values = message.header_values()
        last = int(values.get(LAST_CONSUMER, ["0"])[0])
        if last == 0 and (self.lost or self.delivery):
            # The consumer was reset, by us or another client, and there was nothing to deliver since.
            self.renumbered()
            self.lost = False
            return True
        if self.lost:
            # The first heartbeat may be older than our reset; after the second, delivery 1 should have arrived.
            self._beats_while_lost += 1
            return self._beats_while_lost < PATIENT_BEATS
        if last != self.delivery:
            return False
        if (stalled := values.get(STALLED)) and not self._questions:
            self.asked(stalled[0])  # our answer was lost
        return True

    # -- answers ---------------------------------------------------------------------------------------------------

    def due(self) -> list[bytes]:
        """The answers that may be sent now, as bytes of the wire."""
        answers = []
        while self._questions and self._questions[0].sequence <= self.stored:
            question = self._questions.popleft()
            self.acknowledged, self._answered = question.sequence, question.delivery
            answers.append(answer(question))
        return answers


def answer(question: Question) -> bytes:
    """The message that acknowledges everything up to the delivery that the question followed."""
    known = {LAST_CONSUMER: str(question.delivery), LAST_STREAM: str(question.sequence)} if question.sequence else None
    return frames.publish(question.reply, b"", headers=headers.encode(known))
