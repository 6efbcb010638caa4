"""Subjects that nobody publishes to by hand: dead letters, and the audit of them. No I/O."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.subjects import is_dead_letter


class LetterSubject(str):
    """A subject among the dead letters, in the hands of one who may publish there.

    Penstock's own replay and audit make them, and `penstock.testing.letter_subject` does for tests. The right lies in
    the value, not in a publisher, so that the same publisher still refuses everything else.
    """

    __slots__ = ()


class ReservedSubject(ConfigError):
    """A message was to be published among the dead letters by hand."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def __str__(self) -> str:
        return (
            f"subject {self.subject!r} belongs to dead letters, which carry what replaying them needs: publish to the "
            "subject of the event, `penstock dlq replay` brings a letter back, and a handler that fails makes one; "
            "a test may, with penstock.testing.letter_subject()"
        )


def check_unreserved(subject: str) -> None:
    """Raise when only Penstock itself, or a test, publishes to this subject."""
    if is_dead_letter(subject) and not isinstance(subject, LetterSubject):
        raise ReservedSubject(str(subject))
