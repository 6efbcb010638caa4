"""Reserved subjects: dead letters, and their audit. No I/O."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.subjects import is_dead_letter


class LetterSubject(str):
    """A dead-letter subject that internal code may publish to.

    Penstock's replay and audit create them, and `penstock.testing.letter_subject` does for tests. The permission lies
    in the value, not in a publisher, so that the same publisher still refuses every plain string.
    """

    __slots__ = ()


class ReservedSubject(ConfigError):
    """A plain string was used to publish to a dead-letter subject."""

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
