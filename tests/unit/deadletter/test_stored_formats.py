"""Dead letters are read as they were written by earlier versions: a sample of the headers."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.deadletter.letters import DeadLetter, Failure, read
from penstock.jetstream.model import StoredMessage

STORED = datetime(2026, 11, 16, 10, 0, 0, 123456, UTC)
FAILED = datetime(2026, 11, 16, 10, 0, 5, tzinfo=UTC)
LETTER = DeadLetter(
    subject="orders.placed",
    stream="ORDERS",
    sequence=42,
    stored=STORED,
    consumer="billing",
    body=b'{"id":"o-1"}',
    headers={"Trace": ("abc",), "Nats-TTL": ("1h",)},
    deliveries=3,
    failure=Failure("ValueError", "no such order", "Traceback\n  line"),
    first_failure=STORED,
    last_failure=FAILED,
    event_id="o-1",
    replays=1,
    worker="worker-1",
)
HEADERS = {
    "Trace": ["abc"],
    "Penstock-Dlq-Own-Nats-TTL": ["1h"],
    "Penstock-Dlq-Letter": ["776ca60b9d1349fc.1794823200123456"],
    "Penstock-Dlq-Stream": ["ORDERS"],
    "Penstock-Dlq-Subject": ["orders.placed"],
    "Penstock-Dlq-Sequence": ["42"],
    "Penstock-Dlq-Stored": ["2026-11-16T10:00:00.123456+00:00"],
    "Penstock-Dlq-Consumer": ["billing"],
    "Penstock-Dlq-Worker": ["worker-1"],
    "Penstock-Dlq-Deliveries": ["3"],
    "Penstock-Dlq-Error": ["ValueError"],
    "Penstock-Dlq-Reason": ["no such order"],
    "Penstock-Dlq-Stack": ["Traceback\\n  line"],
    "Penstock-Dlq-Fingerprint": ["b4a4c0bf"],
    "Penstock-Dlq-First-Failure": ["2026-11-16T10:00:00.123456+00:00"],
    "Penstock-Dlq-Last-Failure": ["2026-11-16T10:00:05+00:00"],
    "Penstock-Dlq-Event-Id": ["o-1"],
    "Penstock-Dlq-Replays": ["1"],
    "Penstock-Dlq-Captured-By": ["worker"],
}


def stored(headers: dict[str, list[str]]) -> StoredMessage:
    return StoredMessage("DLQ", f"dlq.orders.placed.{LETTER.id}", 7, FAILED, LETTER.body, headers)


def test_a_letter() -> None:
    found = read(stored(HEADERS))
    assert found.letter == LETTER
    assert found.id == HEADERS["Penstock-Dlq-Letter"][0]
    assert LETTER.message_headers() == HEADERS
