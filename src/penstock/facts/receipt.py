"""Receipts: opaque, signed, bound to one page of one consumer. Pure.

The text is `pr1.` and two parts in URL-safe base64: the body, and its signature (HMAC-SHA-256, cut to 16 bytes). A
receipt carries no state that matters beyond names: what became of its page is looked up on the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from dataclasses import dataclass
from typing import Self

from penstock.facts.errors import ForeignReceipt, ForgedReceipt

VERSION = "pr1"
SIGNATURE_BYTES = 16
ID_BYTES = 9
MOST_CHARACTERS = 2048
"""Longer than any receipt with names that a server takes."""
_NUMBERS = struct.Struct(">qQQ")
_BASE64 = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a receipt says once its signature was checked."""

    stream: str
    consumer: str
    made: int
    """When the consumer was made, in microseconds: one made anew under the same name is another."""
    page: str
    """The page's id."""
    first: int
    last: int
    """The lowest and highest stream sequence of the page."""

    def signed(self, key: bytes) -> str:
        """The text that a reader gets."""
        body = self._body()
        return f"{VERSION}.{_text(body)}.{_text(_signature(key, body))}"

    def _body(self) -> bytes:
        names = f"{self.stream}\0{self.consumer}".encode()
        return base64.urlsafe_b64decode(self.page) + _NUMBERS.pack(self.made, self.first, self.last) + names

    @classmethod
    def _parsed(cls, body: bytes) -> Self:
        at = ID_BYTES + _NUMBERS.size
        made, first, last = _NUMBERS.unpack(body[ID_BYTES:at])
        stream, _, consumer = body[at:].decode().partition("\0")
        return cls(stream, consumer, made, _text(body[:ID_BYTES]), first, last)


def verified(text: str | None, key: bytes, stream: str, consumer: str) -> Receipt:
    """The receipt in `text`, if it was signed with `key` for this consumer of this stream.

    Raises `ForgedReceipt` or `ForeignReceipt`. The signature is checked before anything else is looked at.
    """
    if not text:
        raise ForgedReceipt(consumer, "an empty page has none, and there is nothing to confirm")
    version, body, signature = _parts(text, consumer)
    if version != VERSION:
        raise ForgedReceipt(consumer, f"it is no receipt of version {VERSION}, the only one that is known here")
    if not hmac.compare_digest(_signature(key, body), signature):
        raise ForgedReceipt(consumer, "its signature is wrong: it was changed, or made somewhere else")
    receipt = Receipt._parsed(body)
    if (receipt.stream, receipt.consumer) != (stream, consumer):
        raise ForeignReceipt(consumer, f"it belongs to consumer {receipt.consumer!r} of stream {receipt.stream!r}")
    return receipt


def _parts(text: str, consumer: str) -> tuple[str, bytes, bytes]:
    parts = text.split(".") if len(text) <= MOST_CHARACTERS else []
    if len(parts) != 3 or not all(_BASE64.fullmatch(part) for part in parts):
        raise ForgedReceipt(consumer, "it is no receipt; pass on the text that came with the page, all of it")
    try:
        return parts[0], _bytes(parts[1]), _bytes(parts[2])
    except binascii.Error as exc:
        raise ForgedReceipt(consumer, "it is no receipt: part of it is missing") from exc


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, f"{VERSION}.".encode() + body, hashlib.sha256).digest()[:SIGNATURE_BYTES]


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    """The bytes of a text; a second text for the same bytes, which differs in bits that mean nothing, is refused."""
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(raw) != text:
        raise binascii.Error("not as it was written")
    return raw
