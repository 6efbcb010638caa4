"""What a receiver of a flow-control consumer must remember, and what it must answer. Pure.

The origin numbers its deliveries 1, 2, 3 … since the last reset of the consumer, whoever asked for that. A number that
is missing was lost on the way: only another reset brings it back in order. The origin asks from time to time how far
we are (a flow-control request); the answer acknowledges, and on WorkQueue and Interest streams deletes. So a request is
answered only once everything that was delivered before it is stored.
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
        """Whether the numbering is unknown: nothing counts until a delivery 1 comes."""
        self.acknowledged = 0
        """Stream sequence up to which the origin was told that everything is stored."""
        self.gaps = 0
        self._beats_while_lost = 0
        self._answered = 0
        """Delivery number of the last answer."""
        self._repeated = 0
        """Requests in a row that asked again for what was answered."""
        self.restarts = 0
        """Times that the numbering began anew without our asking."""
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
        """The origin counts from 1 again. What it asked before, it no longer wants to know."""
        self.delivery = self.sequence = self.acknowledged = 0
        self._answered = self._repeated = 0
        self._questions.clear()

    def gap(self) -> None:
        """A number is missing: nothing counts until the numbering begins anew."""
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
        """A flow-control request came. False: the origin does not hear our answers, and must be reset.

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
            # Somebody has reset the consumer, or we have, and there was nothing to deliver since.
            self.renumbered()
            self.lost = False
            return True
        if self.lost:
            # The first beat may be older than our reset; behind the second, delivery 1 should have come.
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
