"""Errors of facts: receipts that are refused, and facts that contradict each other."""

from __future__ import annotations

from penstock.errors import PenstockError


class ReceiptRefused(PenstockError):
    """A receipt confirms nothing, and nothing was confirmed; `reason` says why."""

    def __init__(self, consumer: str, reason: str) -> None:
        super().__init__(consumer, reason)
        self.consumer = consumer
        self.reason = reason

    def __str__(self) -> str:
        return f"the receipt is refused for consumer {self.consumer!r}: {self.reason}"


class ForgedReceipt(ReceiptRefused):
    """It was not made by this installation, or was changed since."""


class ForeignReceipt(ReceiptRefused):
    """It belongs to a page of another consumer or stream."""


class StaleReceipt(ReceiptRefused):
    """The reader may no longer confirm its page: the facts were redelivered, or the consumer was moved."""


class FactConflict(PenstockError):
    """A fact with this id is stored, with other content. The one that is stored stays as it is."""

    def __init__(self, fact_id: str, subject: str, stream: str, sequence: int) -> None:
        super().__init__(fact_id, subject, stream, sequence)
        self.fact_id = fact_id
        self.subject = subject
        self.stream = stream
        self.sequence = sequence

    def __str__(self) -> str:
        return (
            f"fact {self.fact_id!r} of {self.subject!r} is stored with other content, as message {self.sequence} of "
            f"stream {self.stream!r}; a fact never changes: give the new content an id of its own"
        )
