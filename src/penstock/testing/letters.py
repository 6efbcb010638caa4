"""Dead letters by hand, which no program but a test may make."""

from __future__ import annotations

from penstock.publish.reserved import LetterSubject


def letter_subject(subject: str) -> LetterSubject:
    """A subject below `dlq.` or `dlq_audit.` that publishers take: they refuse it as plain text, outside tests."""
    return LetterSubject(subject)
