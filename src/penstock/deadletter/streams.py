"""The streams that dead letters need beside their own: the advisories of the server, and the audit. No I/O."""

from __future__ import annotations

from typing import Final

from penstock.jetstream.model import Json
from penstock.subjects import DLQ_AUDIT
from penstock.units import nanoseconds, parse_duration

MAX_DELIVERIES: Final = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
TERMINATED: Final = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"
ADVISORY_SUBJECTS: Final = (f"{MAX_DELIVERIES}.>", f"{TERMINATED}.>")

ADVISORIES: Final = "DLQ_ADVISORIES"
AUDIT: Final = "DLQ_AUDIT"
AUDIT_SUBJECTS: Final = (f"{DLQ_AUDIT}.>",)

KEEP_ADVISORIES: Final = "30d"
KEEP_AUDIT: Final = "365d"


def advisories_config(replicas: int = 1) -> Json:
    """Keeps what the server says once and never again: that a consumer gave up on a message."""
    return {
        "name": ADVISORIES,
        "description": "What consumers gave up on, as the server says it; dead letters are made of it",
        "subjects": list(ADVISORY_SUBJECTS),
        "retention": "limits",
        "storage": "file",
        "max_age": nanoseconds(parse_duration(KEEP_ADVISORIES)),
        "num_replicas": replicas,
    }


def audit_config(replicas: int = 1) -> Json:
    """Keeps what was done to dead letters, and by whom."""
    return {
        "name": AUDIT,
        "description": "What was done to dead letters, when, why and by whom",
        "subjects": list(AUDIT_SUBJECTS),
        "retention": "limits",
        "storage": "file",
        "max_age": nanoseconds(parse_duration(KEEP_AUDIT)),
        "num_replicas": replicas,
        "allow_direct": True,
        "deny_delete": True,
    }


def settled_subject(letter_id: str) -> str:
    """Where the audit says that a letter was replayed or discarded."""
    return f"{DLQ_AUDIT}.letters.{letter_id}"


def action_subject(id_: str) -> str:
    """Where the audit tells of something else that an operator did, such as a reset of a consumer."""
    return f"{DLQ_AUDIT}.actions.{id_}"


def run_subject(run: str) -> str:
    """Where the audit tells of one replay or discard of many letters."""
    return f"{DLQ_AUDIT}.runs.{run}"
