"""Receipts: opaque, signed, bound to one page of one consumer. Pure.

The text is `pr2.` and three parts in URL-safe base64: the id of the key that signed it, the body, and its signature
(HMAC-SHA-256, cut to 16 bytes). Receipts of version `pr1`, without a key id, are accepted as well. A receipt carries
no state that matters beyond names: what became of its page is looked up on the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.facts.errors import ForeignReceipt, ForgedReceipt

VERSION = "pr2"
WITHOUT_KEY_ID = "pr1"
"""The version before receipts named their key."""
KEY_ID_BYTES = 6
SIGNATURE_BYTES = 16
ID_BYTES = 9
MOST_CHARACTERS = 2048
"""Longer than any receipt with names that a server takes."""
_NUMBERS = struct.Struct(">qQQ")
_BASE64 = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The content of a receipt with a valid signature."""

    stream: str
    consumer: str
    made: int
    """Creation time of the consumer, in microseconds: one recreated under the same name is another."""
    page: str
    """The page's id."""
    first: int
    last: int
    """The lowest and highest stream sequence of the page."""

    def signed(self, key: bytes) -> str:
        """The text that a reader gets."""
        head, body = f"{VERSION}.{key_id(key)}.", self._body()
        return f"{head}{_text(body)}.{_text(_signature(key, head, body))}"

    def _body(self) -> bytes:
        names = f"{self.stream}\0{self.consumer}".encode()
        return base64.urlsafe_b64decode(self.page) + _NUMBERS.pack(self.made, self.first, self.last) + names

    @classmethod
    def _parsed(cls, body: bytes) -> Self:
        at = ID_BYTES + _NUMBERS.size
        made, first, last = _NUMBERS.unpack(body[ID_BYTES:at])
        stream, _, consumer = body[at:].decode().partition("\0")
        return cls(stream, consumer, made, _text(body[:ID_BYTES]), first, last)


def key_id(key: bytes) -> str:
    """Return the id of the key that signed a receipt; reveals nothing about the key itself."""
    return _text(hashlib.sha256(b"penstock receipt key\0" + key).digest()[:KEY_ID_BYTES])


def verified(text: str | None, keys: Sequence[bytes], stream: str, consumer: str) -> Receipt:
    """The receipt in `text`, if it was signed with one of the `keys` for this consumer of this stream.

    Raises `ForgedReceipt` or `ForeignReceipt`. The signature is checked before anything else is looked at.
    """
    if not text:
        raise ForgedReceipt(consumer, "an empty page has none, and there is nothing to confirm")
    head, body, signature = _parts(text, consumer)
    if not any(hmac.compare_digest(_signature(key, head, body), signature) for key in keys):
        raise ForgedReceipt(
            consumer, f"its signature is wrong: it was changed, or made somewhere else{_unknown(head, keys)}"
        )
    receipt = Receipt._parsed(body)
    if (receipt.stream, receipt.consumer) != (stream, consumer):
        raise ForeignReceipt(consumer, f"it belongs to consumer {receipt.consumer!r} of stream {receipt.stream!r}")
    return receipt


def _unknown(head: str, keys: Sequence[bytes]) -> str:
    """Describe an unknown key."""
    version, named, _ = f"{head}.".split(".", 2)
    if version == WITHOUT_KEY_ID or named in map(key_id, keys):
        return ""
    return f" (it names key {named}, and those of this installation are {', '.join(map(key_id, keys))})"


def _parts(text: str, consumer: str) -> tuple[str, bytes, bytes]:
    """What is signed before the body, the body, and the signature."""
    parts = text.split(".") if len(text) <= MOST_CHARACTERS else []
    if not 3 <= len(parts) <= 4 or not all(_BASE64.fullmatch(part) for part in parts):
        raise ForgedReceipt(consumer, "it is no receipt; pass on the text that came with the page, all of it")
    version, *named, body, signature = parts
    if (version, len(named)) not in ((VERSION, 1), (WITHOUT_KEY_ID, 0)):
        raise ForgedReceipt(
            consumer, f"it is no receipt of version {VERSION} or {WITHOUT_KEY_ID}, the only ones that are known here"
        )
    try:
        return ".".join([version, *named, ""]), _bytes(body), _bytes(signature)
    except binascii.Error as exc:
        raise ForgedReceipt(consumer, "it is no receipt: part of it is missing") from exc


def _signature(key: bytes, head: str, body: bytes) -> bytes:
    return hmac.new(key, head.encode() + body, hashlib.sha256).digest()[:SIGNATURE_BYTES]


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    """The bytes of a text; a second text for the same bytes, which differs in bits that mean nothing, is refused."""
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(raw) != text:
        raise binascii.Error("not as it was written")
    return raw
