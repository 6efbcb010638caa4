"""Bounds on what a caller sends, checked before it costs anything. Pure, apart from the codec that applies them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.codec import Codec, proto_binary_codec, proto_json_codec
from connectrpc.errors import ConnectError

from penstock.errors import ConfigError
from penstock.gateway.v1 import facts_pb as pb

MAX_JSON_DEPTH = 64
"""Nested arrays and objects of a request. The protobuf decoder recurses for each, without a limit of its own."""
MAX_SUBJECT_BYTES = 1_024
"""Bytes of a subject. The server closes a connection, which all callers share, at a control line of 4,096 bytes."""
MAX_NAME_BYTES = 255
"""Bytes of the name of a stream or a consumer; the server allows no more."""
MAX_HEADERS = 256
"""Values of all headers of one fact."""
MAX_HEADER_BYTES = 32 * 1024
"""Bytes of the names and values of all headers of one fact."""
MAX_APPENDED = 1_000
"""Facts of one call of `AppendFacts`."""
RESERVED_HEADERS = "penstock-"
"""Headers that steer workers and replays: `Penstock-Dlq-Only` makes a worker acknowledge without handling."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_OPENING, _CLOSING = b"[{", b"]}"
_OTHER_BYTES = bytes(set(range(256)) - set(_OPENING + _CLOSING))

M = TypeVar("M")


def json_depth(text: bytes) -> int:
    """How deep arrays and objects are nested; at least as deep as a decoder gets before it finds a mistake."""
    if text.count(b"[") + text.count(b"{") <= MAX_JSON_DEPTH:
        return min(MAX_JSON_DEPTH, text.count(b"[") + text.count(b"{"))
    brackets = _STRING.sub(b"", text).translate(None, _OTHER_BYTES)
    return max(accumulate(1 if one in _OPENING else -1 for one in brackets), default=0)


def check_name(kind: str, name: str) -> None:
    """Refuse the name of a consumer or stream that cannot exist, before it is repeated in an error."""
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"the name of a {kind} has at most {MAX_NAME_BYTES} bytes")


def check_subject_size(subject: str) -> None:
    if len(subject.encode()) > MAX_SUBJECT_BYTES:
        raise ConfigError(f"a subject has at most {MAX_SUBJECT_BYTES} bytes, not {len(subject.encode())}")


def check_count(facts: Sequence[pb.NewFact]) -> None:
    if len(facts) > MAX_APPENDED:
        raise ConfigError(f"one call appends at most {MAX_APPENDED} facts, not {len(facts)}")


def checked_headers(given: Sequence[pb.Header]) -> dict[str, tuple[str, ...]]:
    """The headers of a fact, if they are few, small, named once each, and not reserved."""
    values = size = 0
    headers: dict[str, tuple[str, ...]] = {}
    for header in given:
        values += max(1, len(header.values))
        size += len(header.name.encode()) + sum(len(value.encode()) for value in header.values)
        if values > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise ConfigError(f"a fact has at most {MAX_HEADERS} headers, of {MAX_HEADER_BYTES} bytes together")
        if header.name.lower().startswith(RESERVED_HEADERS):
            raise ConfigError(f"a caller cannot set the header {header.name!r}: `Penstock-` headers are reserved")
        if header.name in headers:
            raise ConfigError("a header is given twice: write its values below one name")
        headers[header.name] = tuple(header.values)
    return headers


class BoundedJson(Codec[Any, Any]):
    """The JSON form of messages, of bounded depth."""

    def __init__(self) -> None:
        self._codec = proto_json_codec()

    def name(self) -> str:
        return self._codec.name()

    def encode(self, message: Any) -> bytes:
        return self._codec.encode(message)

    def decode(self, data: bytes | bytearray, message_class: type[M]) -> M:
        if json_depth(bytes(data)) > MAX_JSON_DEPTH:
            raise ConnectError(Code.INVALID_ARGUMENT, f"JSON is nested deeper than {MAX_JSON_DEPTH} arrays and objects")
        decoded: M = self._codec.decode(data, message_class)
        return decoded


def codecs() -> list[Codec]:
    """What a request may be encoded in. (The decoder of the binary form has a limit of its own, 100.)"""
    return [proto_binary_codec(), BoundedJson()]
