"""The headers of a dead letter: where the message came from, and why it is here. Its body and own headers are kept."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "Penstock-Dlq-"
STREAM: Final = "Penstock-Dlq-Stream"
SUBJECT: Final = "Penstock-Dlq-Subject"
SEQUENCE: Final = "Penstock-Dlq-Sequence"
STORED: Final = "Penstock-Dlq-Stored"
"""When the message was stored in its stream: together with the sequence it names the message for good."""
REASON: Final = "Penstock-Dlq-Reason"
"""The error's message, in one line."""
CONSUMER: Final = "Penstock-Dlq-Consumer"
PIPELINE: Final = "Penstock-Dlq-Pipeline"
DELIVERIES: Final = "Penstock-Dlq-Deliveries"
ERROR: Final = "Penstock-Dlq-Error"
"""The error's type."""
STACK: Final = "Penstock-Dlq-Stack"
"""The stack trace; `\\n` stands for a line break and `\\\\` for a backslash."""
FINGERPRINT: Final = "Penstock-Dlq-Fingerprint"
"""What letters of the same cause have in common."""
FIRST_FAILURE: Final = "Penstock-Dlq-First-Failure"
LAST_FAILURE: Final = "Penstock-Dlq-Last-Failure"
EVENT_ID: Final = "Penstock-Dlq-Event-Id"
CAPTURED_BY: Final = "Penstock-Dlq-Captured-By"
BODY: Final = "Penstock-Dlq-Body"
"""`gone` when the message was no longer in its stream at the time of capture."""
OWN: Final = "Penstock-Dlq-Own-"
"""Before the name of a header of the message that would mean something to the server, such as `Nats-Msg-Id`."""

# A message that was replayed carries these, and so does the letter that it may become again.
LETTER: Final = "Penstock-Dlq-Letter"
"""The id of the letter."""
REPLAYS: Final = "Penstock-Dlq-Replays"
"""How often the event was replayed."""
ONLY: Final = "Penstock-Dlq-Only"
"""The one consumer for which a replayed message is meant, as `STREAM/CONSUMER`; the others pass over it."""
