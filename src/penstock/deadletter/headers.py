"""The headers of a dead letter: where the message came from, and why it is here. Its body and own headers are kept."""

from __future__ import annotations

from typing import Final

STREAM: Final = "Penstock-Dlq-Stream"
SUBJECT: Final = "Penstock-Dlq-Subject"
SEQUENCE: Final = "Penstock-Dlq-Sequence"
REASON: Final = "Penstock-Dlq-Reason"
CONSUMER: Final = "Penstock-Dlq-Consumer"
PIPELINE: Final = "Penstock-Dlq-Pipeline"
