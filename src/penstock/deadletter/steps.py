"""The steps of a replay, at which tests stop a process (`penstock.holds`)."""

from __future__ import annotations

from penstock.holds import reached

__all__ = ["reached"]

REPLAY_BEGUN = "replay-begun"
"""The audit knows what is about to be published."""
MESSAGE_SENT = "message-sent"
"""One message was handed to the publisher; the others of its chunk are next."""
REPLAY_PUBLISHED = "replay-published"
"""All messages of the chunk are stored; the audit does not know it yet."""
REPLAY_NOTED = "replay-noted"
"""The audit knows where the messages lie; the letters are still there."""
LETTERS_REMOVED = "letters-removed"
"""The letters are gone; the audit does not know that the chunk is done."""
