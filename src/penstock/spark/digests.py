"""The identity of a row that is written. Pure, and without Arrow: checks of a write need it too."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 12


def row_digest(subject: str, headers: bytes, body: bytes) -> bytes:
    """The identity of one row: its subject, its own header lines and its body."""
    return ended(begun(subject, headers), body)


def begun(subject: str, headers: bytes) -> hashlib.blake2b:
    """What rows with the same subject and headers have in common."""
    name = subject.encode()
    return hashlib.blake2b(b"%d %d %b%b" % (len(name), len(headers), name, headers), digest_size=DIGEST_BYTES)


def ended(start: hashlib.blake2b, body: bytes) -> bytes:
    """The identity of the row with this body."""
    digest = start.copy()
    digest.update(body)
    return digest.digest()
